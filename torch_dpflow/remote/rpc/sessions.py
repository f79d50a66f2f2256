"""The clients of a server: who they are, what each has open, and which to forget. No socket, no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch_dpflow.errors import DPFlowError, PeerLostError
from torch_dpflow.remote.messages import Header, Item, Ping, Reply, StreamReport, encode
from torch_dpflow.remote.rpc.incoming import IncomingStream
from torch_dpflow.remote.rpc.payload import Carrier
from torch_dpflow.remote.transport.base import Frame

#: Sends a message to a client; False where it is gone or its queue is full.
Send: TypeAlias = Callable[[bytes, Sequence[Frame]], bool]


@dataclass(kw_only=True)
class ServerStats:
    """What a server has seen since it was made."""

    messages: int = 0
    #: Messages that were no valid headers, that no client sends, or whose payload did not fit them.
    malformed: int = 0
    #: Messages of peers that had not said Hello, or were forgotten.
    strangers: int = 0
    #: Calls executed.
    calls: int = 0
    #: Calls that came again and were not executed again.
    repeats: int = 0
    #: Calls answered with an error.
    failures: int = 0
    #: Messages that could not be sent: the client was gone, or did not read.
    undeliverable: int = 0
    #: Clients and streams known now, and bytes of replies remembered for repeated calls.
    clients: int = 0
    streams: int = 0
    reply_bytes: int = 0


class Session:
    """One client, from its Hello until it is gone, silent for too long, or crowded out."""

    def __init__(self, client: bytes, carrier: Carrier, send: Send, stats: ServerStats) -> None:
        self.client = client
        self.carrier = carrier
        self.streams: dict[int, IncomingStream] = {}
        #: When it last said something; the server's clock, seconds.
        self.heard = 0.0
        #: Pings since then.
        self.pings = 0
        self._send = send
        self._stats = stats

    def send(self, header: Header) -> None:
        """Send a message without payload. A client that cannot be reached loses its streams."""
        self._post([encode(header)])

    def send_payload(self, header: Reply | Item, frames: Sequence[Frame]) -> None:
        """Send a message with payload. Raises MessageError where it exceeds a limit."""
        if frames:
            frames, header.packing = self.carrier.pack(frames)
        self._post([encode(header), *frames])

    def forget(self, stream: IncomingStream) -> None:
        """A stream is over."""
        self.streams.pop(stream.id, None)

    def lose_streams(self, error: DPFlowError) -> None:
        """Break all streams on this side and tell their handlers."""
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.lose(error)

    def reports(self) -> list[StreamReport]:
        """Where this side stands on each stream."""
        return [StreamReport(stream.id, *stream.state.report()) for stream in self.streams.values()]

    def meet_again(self, carrier: Carrier) -> None:
        """The client has said Hello once more: it did not get our answer."""
        self.carrier.close()
        self.carrier = carrier

    def close(self) -> None:
        """The client is forgotten."""
        self.lose_streams(PeerLostError("the client is gone, or has been silent for too long"))
        self.carrier.close()

    def _post(self, frames: Sequence[Frame]) -> None:
        if not self._send(self.client, frames):
            self._stats.undeliverable += 1
            self.lose_streams(PeerLostError("the client is gone, or does not read what it is sent"))


class SessionTable:
    """The sessions, least recently heard first.

    Args:
        most: most sessions; the one that has been silent longest makes room for a new one.
        idle_s: a session without streams that has been silent for so long is dropped.
        ping_s: a client with streams that has been silent for so long is pinged, which shows whether it is
        gone.
            Then after twice as long, and so on: a client that lives but does not read gets few of them.
        drop: called with each session that leaves.
    """

    def __init__(self, *, most: int, idle_s: float, ping_s: float, drop: Callable[[Session], None]) -> None:
        self._most = most
        self._idle_s = idle_s
        self._ping_s = ping_s
        self._drop = drop
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def streams(self) -> int:
        """Open streams of all sessions."""
        return sum(len(session.streams) for session in self._sessions.values())

    def get(self, client: bytes) -> Session | None:
        """The session of a client."""
        return self._sessions.get(client)

    def heard(self, client: bytes, now: float) -> Session | None:
        """The session of a client that has just said something, if it has one."""
        session = self._sessions.get(client)
        if session is not None:
            self._sessions.move_to_end(client)
            session.heard, session.pings = now, 0
        return session

    def add(self, session: Session, now: float) -> None:
        """Admit a client."""
        while len(self._sessions) >= self._most:
            self.drop(next(iter(self._sessions.values())))
        session.heard = now
        self._sessions[session.client] = session

    def drop(self, session: Session) -> None:
        """Forget a client."""
        if self._sessions.pop(session.client, None) is not None:
            self._drop(session)

    def tick(self, now: float) -> None:
        """Drop who is idle, ping who is silent. Costs a walk over all sessions: for every few seconds."""
        for session in list(self._sessions.values()):
            silence = now - session.heard
            if session.streams:
                if silence >= self._ping_s * 2**session.pings:
                    session.pings += 1
                    session.send(Ping())
            elif silence >= self._idle_s:
                self.drop(session)

    def clear(self) -> None:
        """Forget everyone."""
        for session in list(self._sessions.values()):
            self.drop(session)
