"""What the head of a loader knows of one member of its fleet."""

from __future__ import annotations

from dataclasses import dataclass

from torch_dpflow.errors import MessageError

#: A member's two connections, by the ends of their identities: see `wire.headers`.
LINE, WORK = b"line", b"work"


@dataclass(eq=False)
class RemoteMember:
    """A member that was asked for and is not lost. Times are seconds on the clock of `RemoteWorkers`."""

    name: str
    number: int
    incarnation: int
    heard: float
    #: Drawn by its process, so that two with one order are told apart.
    nonce: bytes = b""
    #: Its greeting as a worker, until it is admitted.
    hello: list[memoryview] | None = None
    is_working: bool = False
    received: int = 0
    sent: int = 0
    #: Since when it has sent more than was received, as it says.
    short_since: float | None = None
    round_trip_s: float = 0.0
    has_called: bool = False
    #: When the platform was last asked about it.
    suspected_at: float = -1.0

    @property
    def user(self) -> str:
        """Whom its key is for."""
        return f"{self.number}/{self.incarnation}"

    def peer(self, kind: bytes) -> bytes:
        """The identity of one of its connections."""
        return b"/".join((self.user.encode(), self.nonce, kind))


def parts_of(peer: bytes) -> tuple[str, bytes, bytes]:
    """A connection's user, the nonce of its process, and which of its two connections it is."""
    parts = peer.split(b"/")
    if len(parts) != 4 or parts[3] not in (LINE, WORK) or not parts[2]:
        raise MessageError("no connection of a member has such an identity")
    return b"/".join(parts[:2]).decode(errors="replace"), parts[2], parts[3]
