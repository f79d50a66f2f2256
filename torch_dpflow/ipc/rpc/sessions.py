"""The sessions of a server's clients, and which of them to drop. No socket, no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch_dpflow.ipc.messages.headers import Header, Reply, encode
from torch_dpflow.ipc.messages.payload_table import Frame
from torch_dpflow.ipc.rpc.payload import Carrier

#: Sends a message to a client; False where it is gone or its queue is full. That may be ignored: the client inquires.
Send: TypeAlias = Callable[[bytes, Sequence[Frame]], bool]


@dataclass(kw_only=True)
class ServerStats:
    """Counters of a server."""

    messages: int = 0
    #: Messages without a valid header, that no client sends, or whose payload did not fit their header.
    malformed: int = 0
    #: Messages of peers without a session: they had not sent a Handshake, or their session was dropped.
    strangers: int = 0
    #: Calls executed.
    calls: int = 0
    #: Repeated calls that were not executed again.
    repeats: int = 0
    #: Calls answered with an error.
    failures: int = 0
    #: Clients with a session now, and bytes of replies kept for repeated calls.
    clients: int = 0
    reply_bytes: int = 0


class Session:
    """One client, from its Handshake until its session is dropped."""

    def __init__(self, client: bytes, carrier: Carrier, send: Send) -> None:
        self.client = client
        self.carrier = carrier
        #: When its latest message came; the server's clock, seconds.
        self.received_at = 0.0
        self._send = send

    def send(self, header: Header) -> None:
        """Send a message without payload."""
        self._send(self.client, [encode(header)])

    def send_payload(self, header: Reply, frames: Sequence[Frame]) -> None:
        """Send a message with payload. Raises MessageError where it exceeds a limit."""
        if frames:
            frames, header.packing = self.carrier.pack(frames)
        self._send(self.client, [encode(header), *frames])

    def replace_carrier(self, carrier: Carrier) -> None:
        """The client has repeated its Handshake, as it did not receive the Welcome."""
        self.carrier.close()
        self.carrier = carrier

    def close(self) -> None:
        """Release what the session holds."""
        self.carrier.close()


class SessionTable:
    """The sessions, least recently active first.

    Args:
        most: most sessions; a new one replaces the one idle longest.
        idle_s: how long a session may be idle before it is dropped, seconds.
        drop: called with each session that is dropped.
    """

    def __init__(self, *, most: int, idle_s: float, drop: Callable[[Session], None]) -> None:
        self._most = most
        self._idle_s = idle_s
        self._drop = drop
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, client: bytes) -> Session | None:
        """The session of a client."""
        return self._sessions.get(client)

    def on_message(self, client: bytes, now: float) -> Session | None:
        """A message has come from this client; returns its session, if it has one."""
        session = self._sessions.get(client)
        if session is not None:
            self._sessions.move_to_end(client)
            session.received_at = now
        return session

    def add(self, session: Session, now: float) -> None:
        """Admit a client."""
        while len(self._sessions) >= self._most:
            self.drop(next(iter(self._sessions.values())))
        session.received_at = now
        self._sessions[session.client] = session

    def drop(self, session: Session) -> None:
        """Drop a session."""
        if self._sessions.pop(session.client, None) is not None:
            self._drop(session)

    def tick(self, now: float) -> None:
        """Drop idle sessions."""
        while self._sessions:
            oldest = next(iter(self._sessions.values()))
            if now - oldest.received_at < self._idle_s:
                break
            self.drop(oldest)

    def clear(self) -> None:
        """Drop all sessions."""
        for session in list(self._sessions.values()):
            self.drop(session)
