"""RPC server: one thread reads the socket and runs the handlers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch_dpflow._core.checks import check_fields, check_int, check_seconds
from torch_dpflow._core.descriptors import is_exhausted
from torch_dpflow.errors import MessageError, OptionError, TransportError
from torch_dpflow.ipc.messages import headers as messages
from torch_dpflow.ipc.messages.fields import MAX_NAME
from torch_dpflow.ipc.messages.headers import decode, encode
from torch_dpflow.ipc.rpc.call_service import CallService, Handler, ServerStats, Session, SessionTable
from torch_dpflow.ipc.rpc.carrier import Carrier
from torch_dpflow.ipc.transport import Listener
from torch_dpflow.log import TRANSPORT


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Limits that a server imposes on its clients. Raises OptionError or OptionTypeError like `ClientOptions`."""

    max_clients: int = 4096
    #: Maximum calls of one client that run at once.
    max_open_calls: int = 1024
    #: Maximum shared memory lent to each client at an ipc address, bytes; 0 sends everything through the socket.
    shared_bytes: int = 1 << 28
    #: A client's session is dropped after this time without messages, seconds.
    idle_s: float = 120.0

    def __post_init__(self) -> None:
        check_fields(self, check_int, "max_clients", "max_open_calls", minimum=1)
        check_fields(self, check_int, "shared_bytes", minimum=0)
        check_fields(self, check_seconds, "idle_s")


class RpcServer:
    """Server of calls, which owns its listener.

    The thread that calls `step` or `serve` is the server's: handlers run in it and must not block. Any thread may call
    `post` and `stop`.

    Malformed messages are counted and dropped, or answered with an error if their call is known. Calls beyond the
    limits are rejected.
    """

    def __init__(
        self,
        listener: Listener,
        *,
        options: ServerOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._options = options = options or ServerOptions()
        self._clock = clock
        self._posted: deque[Callable[[], None]] = deque()
        #: The server's thread, once it runs; no thread has the number 0.
        self._thread = 0
        self._stopped = False
        self._tick_at = 0.0
        self._stats = ServerStats()
        self._sessions = SessionTable(most=options.max_clients, idle_s=options.idle_s)
        self._calls = CallService(self._sessions, self._stats, max_open=options.max_open_calls, post=self.post)
        self._actions: dict[type, Callable[[Session, Any, list[memoryview]], None]] = {
            messages.Reading: self._on_reading,
            messages.Request: self._calls.on_request,
            messages.Inquiry: self._calls.on_inquiry,
        }

    @property
    def address(self) -> str:
        """Address to which clients connect."""
        return self._listener.address

    def register(self, method: str, handler: Handler, *, body_type: Any = Any) -> None:
        """Serve calls of `method`. A call may be executed twice, so the second execution must change nothing.

        Args:
            body_type: the type of the arguments, e.g. a msgspec struct; anything else is answered with an error.

        Raises OptionError if `method` is empty or longer than `MAX_NAME`.
        """
        if not 1 <= len(method) <= MAX_NAME:
            raise OptionError(f"method={method!r}: must be 1 to {MAX_NAME} characters")
        self._calls.register(method, handler, body_type=body_type)

    def step(self, timeout_s: float | None) -> bool:
        """Run posted actions, drop idle sessions, and handle one message; return whether a message arrived.

        timeout_s: how long to wait for the message at most, seconds; None: until sessions must be checked again.
        """
        self._thread = threading.get_ident()
        self._run_posted()
        now = self._clock()
        if now >= self._tick_at:
            self._tick_at = now + self._options.idle_s / 16
            self._sessions.tick(now)
        until_tick = self._tick_at - now
        message = self._listener.receive(until_tick if timeout_s is None else min(timeout_s, until_tick))
        if message is not None:
            self._on_message(*message)
        self._run_posted()
        return message is not None

    def serve(self) -> None:
        while not self._stopped:
            self.step(None)

    def post(self, action: Callable[[], None]) -> None:
        """Call `action` in the server's thread: at once if that thread calls this, else soon. Any thread may call."""
        if threading.get_ident() == self._thread:
            action()
        else:
            self._posted.append(action)
            self._listener.wake()

    def stop(self) -> None:
        """Make `serve` return. Any thread may call."""
        self._stopped = True
        self._listener.wake()

    def stats(self) -> ServerStats:
        return replace(
            self._stats,
            clients=len(self._sessions),
            malformed=self._stats.malformed + self._listener.dropped,
        )

    def close(self) -> None:
        """Drop all sessions and stop listening. May be called twice."""
        self._sessions.clear()
        self._listener.close()

    def _run_posted(self) -> None:
        while self._posted:
            action = self._posted.popleft()
            try:
                action()
            except Exception:
                TRANSPORT.exception("an action posted to the server at %s failed", self.address)

    def _on_message(self, client: bytes, frames: list[memoryview]) -> None:
        self._stats.messages += 1
        now = self._clock()
        session = self._sessions.on_message(client, now)
        try:
            header = decode(frames[0])
            if isinstance(header, messages.Handshake):
                self._on_handshake(client, session, header, now)
            elif session is None:
                self._stats.without_session += 1
                self._listener.send(client, [encode(messages.NoSession())])
            elif (action := self._actions.get(type(header))) is not None:
                action(session, header, frames[1:])
            else:
                raise MessageError(f"a client does not send {type(header).__name__}")
        except TransportError:  # malformed, or it refers to the shared memory of a client that has died
            self._stats.malformed += 1
            if messages.version_of(frames[0]) != messages.PROTOCOL_VERSION:
                welcome = messages.Welcome(messages.PROTOCOL_VERSION, messages.PayloadOffer(0))
                self._listener.send(client, [encode(welcome)])  # the client reports our version
        except OSError as error:
            if not is_exhausted(error):
                raise
            TRANSPORT.error("a message at %s was dropped: %s", self.address, error)

    def _on_handshake(self, client: bytes, session: Session | None, header: messages.Handshake, now: float) -> None:
        shared_bytes = self._options.shared_bytes if self.address.startswith("ipc://") else 0
        # A client repeats its handshake until it has the Welcome, and may read shared memory since an earlier one.
        carrier = (
            Carrier(shared_bytes=shared_bytes, compress=header.offer.compress) if session is None else session.carrier
        )
        reads = carrier.accept(header.offer)
        welcome = messages.Welcome(messages.PROTOCOL_VERSION, carrier.offer())
        self._listener.send(client, [encode(welcome)])
        if header.version != messages.PROTOCOL_VERSION:
            carrier.close()  # the client sees our version in the Welcome, and reports it
            return
        if session is None:
            session = Session(client, carrier, self._listener.send)
            self._sessions.add(session, now)
        if reads:
            session.send(messages.Reading())

    def _on_reading(self, session: Session, *_: object) -> None:
        session.carrier.shares = True
