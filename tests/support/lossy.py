"""Doubles of the seams that all messages cross, which a test lets deliver, lose, repeat or refuse each message.

A network of listeners and connections, and a platform of remote workers: without a socket, a thread or a clock, so that
hypothesis chooses the interleavings. `Link` has the faults that a transport may have, by its contract
(`ipc.transport.base`): messages of a connection keep their order, and a broken connection loses what was on its way.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch_dpflow._core.decoding import msgpack_decoder
from torch_dpflow.errors import PeerLostError
from torch_dpflow.ipc.messages.headers import Frame, encode_body
from torch_dpflow.ipc.rpc import Answer, RpcServer
from torch_dpflow.ipc.rpc.carrier import Carrier
from torch_dpflow.ipc.rpc.client_session import ClientSession
from torch_dpflow.remote.launchers.contract import Accepted, Answerless, Ended, Outcome, Refused
from torch_dpflow.workers.platform import End, Limits

Message = list[memoryview]


def sent(frames: Sequence[Frame]) -> Message:
    """Return a copy of the frames, as a receiver gets them."""
    return [memoryview(bytearray(frame)) for frame in frames]


class Link:
    """One connection and what is on its way: `up` to the listener, `down` to the connection.

    queue_messages: how many messages wait before the listener's `send` is refused.
    """

    def __init__(self, identity: bytes, queue_messages: int) -> None:
        self.identity = identity
        self.queue_messages = queue_messages
        self.up: deque[Message] = deque()
        self.down: deque[Message] = deque()
        #: Messages that the connection will receive next.
        self.arrived: deque[Message] = deque()
        #: Whether messages can be delivered; a DEALER queues its own meanwhile.
        self.is_open = True
        self.is_closed = False

    def reset(self) -> None:
        """Break the connection: all messages on their way are lost, and the listener's `send` is refused."""
        self.up.clear()
        self.down.clear()
        self.is_open = False

    def reconnect(self) -> None:
        self.is_open = not self.is_closed

    def deliver_down(self, count: int = 1) -> int:
        """Deliver messages to the connection; return how many."""
        count = min(count, len(self.down)) if self.is_open else 0
        self.arrived.extend(self.down.popleft() for _ in range(count))
        return count


class LossyListener:
    """A `Listener` whose messages wait in its links until the test delivers them."""

    address: str = "lossy://listener"
    dropped = 0
    descriptors: tuple[int, ...] = ()

    def __init__(self, queue_messages: int = 1000) -> None:
        self._queue_messages = queue_messages
        self.links: dict[bytes, Link] = {}
        self.inbound: deque[tuple[bytes, Message]] = deque()
        #: Connections that have ended.
        self.losses = 0
        #: How many messages were refused.
        self.refused = 0

    def connect(self, identity: bytes) -> LossyConnection:
        """Return a connection with this identity, which replaces an earlier one."""
        link = self.links[identity] = Link(identity, self._queue_messages)
        return LossyConnection(link)

    def reset(self, identity: bytes) -> None:
        self.links[identity].reset()
        self.losses += 1

    def deliver_up(self, identity: bytes, count: int = 1) -> int:
        """Deliver messages of one connection to `receive`; return how many."""
        link = self.links[identity]
        count = min(count, len(link.up)) if link.is_open or link.is_closed else 0
        self.inbound.extend((identity, link.up.popleft()) for _ in range(count))
        return count

    def receive(self, timeout_s: float | None) -> tuple[bytes, Message] | None:
        return self.inbound.popleft() if self.inbound else None

    def send(self, peer: bytes, frames: Sequence[Frame]) -> bool:
        link = self.links.get(peer)
        if link is None or not link.is_open or len(link.down) + len(link.arrived) >= link.queue_messages:
            self.refused += 1
            return False
        link.down.append(sent(frames))
        return True

    def watch(self, source: Any) -> None:
        pass

    def wake(self) -> None:
        pass

    def close(self, *, linger_s: float = 0.0) -> None:
        self.links.clear()


class LossyConnection:
    """A `Connection` that never waits: it returns None where no message has been delivered."""

    dropped = 0

    def __init__(self, link: Link) -> None:
        self.link = link
        self.identity = link.identity

    def receive(self, timeout_s: float | None) -> Message | None:
        return self.link.arrived.popleft() if self.link.arrived else None

    def send(self, frames: Sequence[Frame]) -> None:
        if self.link.is_closed:
            raise PeerLostError("the connection is closed")
        self.link.up.append(sent(frames))

    def wake(self) -> None:
        pass

    def close(self, *, linger_s: float = 0.0) -> None:
        """Close as the end of its process does: what it has sent may still arrive, what it was sent does not."""
        self.link.down.clear()
        self.link.arrived.clear()
        self.link.is_open, self.link.is_closed = False, True


class LossyPlatform:
    """A `RemotePlatform` whose outcomes the test makes; also its own `PlatformSource`. No outcome comes by itself."""

    name = "lossy"
    wakeup_fd = -1

    def __init__(self, **limits: Any) -> None:
        self.limits = Limits(**limits)
        #: Launch specs by name, of starts that were not answered, and of workers that run.
        self.requested: dict[str, bytes] = {}
        self.running: dict[str, bytes] = {}
        #: Workers whose end was requested, and workers about which the platform was queried.
        self.stopped: dict[str, str] = {}
        self.suspected: set[str] = set()
        self._outcomes: deque[Outcome] = deque()

    def open(self) -> LossyPlatform:
        return self

    def listen_at(self) -> str:
        return LossyListener.address

    def check_listen(self, address: str) -> None:
        pass

    def start(self, name: str, launch_spec: bytes) -> None:
        self.requested[name] = launch_spec

    def stop(self, name: str, why: str = "") -> None:
        self.stopped[name] = why

    def suspect(self, name: str) -> None:
        self.suspected.add(name)

    def take(self) -> Sequence[Outcome]:
        outcomes = [*self._outcomes]
        self._outcomes.clear()
        return outcomes

    def close(self, *, grace_s: float = 0.0) -> None:
        self.running.clear()

    # -- what the test does ------------------------------------------------------------------------------

    def accept(self, name: str, *, answers: bool = True, repeats: bool = False) -> bytes:
        """Run a requested worker; return its launch spec. answers: whether its shard learns of that."""
        spec = self.running[name] = self.requested.pop(name)
        answer: Outcome = Accepted(name, None) if answers else Answerless(name, "the answer was lost")
        self._outcomes.extend([answer] * (1 + repeats))
        return spec

    def refuse(self, name: str, error: Exception) -> None:
        del self.requested[name]
        self._outcomes.append(Refused(name, error))

    def end(self, name: str, *, code: int = 1, reports: bool = True) -> None:
        """End a worker. reports: whether its shard learns of that, before it asks."""
        self.running.pop(name, None)
        if reports:
            self._outcomes.append(Ended(name, End(code=code)))


class LossyNetwork:
    """Servers by address, and clients whose exchanges a test delays, loses or repeats; its time passes by them.

    fates: of the exchanges, in turn; what follows them is delivered.
    """

    def __init__(self, fates: Sequence[str] = ()) -> None:
        self.now = 0.0
        self.fates = deque(fates)
        self.servers: dict[str, RpcServer] = {}
        #: Called with the fate of each exchange, which may be another one, such as the restart of a server.
        self.on_fate: Callable[[str], None] = lambda fate: None

    def clock(self) -> float:
        return self.now

    def listen(self, address: str) -> RpcServer:
        """Return a server at this address, in the place of an earlier one, whose sessions and calls are lost."""
        listener = LossyListener()
        listener.address = address
        server = self.servers[address] = RpcServer(listener, clock=self.clock)
        return server

    def connect(self, address: str, *, timeout_s: float = 60.0, shared_bytes: int = 0) -> LossyClient:
        return LossyClient(self, address, timeout_s)


class LossyClient:
    """An `RpcClient` without a socket: each exchange is what a server reads and answers at a time."""

    _identities = itertools.count(1)

    def __init__(self, network: LossyNetwork, address: str, timeout_s: float) -> None:
        self.address, self._network, self._timeout_s = address, network, timeout_s
        self._identity = b"%d" % next(self._identities)
        self._session = ClientSession(address, lambda: Carrier(shared_bytes=0, compress=False))
        #: Answers that are on their way.
        self._delayed: deque[Message] = deque()
        self._is_closed = False

    def call(
        self,
        method: str,
        body: Any = None,
        frames: Sequence[Frame] = (),
        *,
        reply_type: Any = Any,
        timeout_s: float | None = None,
    ) -> Answer:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        if self._is_closed:
            raise PeerLostError("closed")
        now, decoder = self._network.now, msgpack_decoder(reply_type)
        call = self._session.begin_call(method, encode_body(body), frames, decoder, now=now, timeout_s=timeout_s)
        while not call.is_over:
            if self._network.now >= call.deadline:
                self._session.abandon(call, self._session.late(call))
            else:
                self._exchange(self._network.fates.popleft() if self._network.fates else "delivered")
        return call.outcome()

    def _exchange(self, fate: str) -> None:
        network = self._network
        network.on_fate(fate)
        server = network.servers[self.address]
        listener = server._listener
        assert isinstance(listener, LossyListener)
        listener.links.setdefault(self._identity, Link(self._identity, 1000))
        outbox, self._session.outbox = [sent(message) for message in self._session.outbox], []
        if fate != "request lost":
            for message in outbox * (2 if fate == "request repeated" else 1):
                listener.inbound.append((self._identity, sent(message)))
            while server.step(0.0):
                pass
        down = listener.links[self._identity].down
        answers, self._delayed = [*self._delayed, *down], deque()
        down.clear()
        if fate == "answer delayed":
            self._delayed.extend(answers)
        elif fate != "answer lost":
            for message in answers:
                self._session.on_message(message, network.now)
        network.now += 0.01 if fate == "delivered" and answers else 1.0
        self._session.inquire(network.now, 0.5)

    def close(self) -> None:
        self._session.fail_all(PeerLostError("closed"))
        self._is_closed = True

    def __enter__(self) -> LossyClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
