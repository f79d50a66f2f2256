"""The clients of a server: who they are, and which to forget. No socket, no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch_dpflow.remote.rpc.payload import Carrier
from torch_dpflow.remote.wire.headers import Header, Reply, encode
from torch_dpflow.remote.wire.parcel_table import Frame

#: Sends a message to a client; False where it is gone or its queue is full, of which nobody takes note: it asks again.
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
    #: Clients known now, and bytes of replies remembered for repeated calls.
    clients: int = 0
    reply_bytes: int = 0


class Session:
    """One client, from its Hello until it is gone, silent for too long, or crowded out."""

    def __init__(self, client: bytes, carrier: Carrier, send: Send) -> None:
        self.client = client
        self.carrier = carrier
        #: When it last said something; the server's clock, seconds.
        self.heard = 0.0
        self._send = send

    def send(self, header: Header) -> None:
        """Send a message without payload."""
        self._send(self.client, [encode(header)])

    def send_payload(self, header: Reply, frames: Sequence[Frame]) -> None:
        """Send a message with payload. Raises MessageError where it exceeds a limit."""
        if frames:
            frames, header.packing = self.carrier.pack(frames)
        self._send(self.client, [encode(header), *frames])

    def meet_again(self, carrier: Carrier) -> None:
        """The client has said Hello once more: it did not get our answer."""
        self.carrier.close()
        self.carrier = carrier

    def close(self) -> None:
        """The client is forgotten."""
        self.carrier.close()


class SessionTable:
    """The sessions, least recently heard first.

    Args:
        most: most sessions; the one that has been silent longest makes room for a new one.
        idle_s: a session that has been silent for so long is dropped.
        drop: called with each session that leaves.
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

    def heard(self, client: bytes, now: float) -> Session | None:
        """The session of a client that has just said something, if it has one."""
        session = self._sessions.get(client)
        if session is not None:
            self._sessions.move_to_end(client)
            session.heard = now
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
        """Drop who is idle."""
        while self._sessions:
            longest_silent = next(iter(self._sessions.values()))
            if now - longest_silent.heard < self._idle_s:
                break
            self.drop(longest_silent)

    def clear(self) -> None:
        """Forget everyone."""
        for session in list(self._sessions.values()):
            self.drop(session)
