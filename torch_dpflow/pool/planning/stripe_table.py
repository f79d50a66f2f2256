"""What the keeper of a pool knows of one set, and tells. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from torch_dpflow.pool.planning.placement import NOBODY


@dataclass(eq=False)
class KeptSet:
    """A set of the keeper; it reserves the room."""

    sizes: npt.NDArray[np.int64]
    is_explicit: bool
    #: The name of each stripe's owner; None: nobody has room.
    owners: list[str | None]
    generation: int = 1
    #: Stripes that a server holds beside their owners.
    copies: dict[str, set[int]] = field(default_factory=dict)
    #: How many processes read it at each server.
    readers: dict[str, int] = field(default_factory=dict)
    #: Since when nobody reads it; seconds.
    idle_since: float = 0.0
    #: Until when servers may come back with what they hold of it, before that is given to others; None: it is over.
    returns_until: float | None = None
    #: The only server that may have it; None: any.
    only: str | None = None
    #: The set whose memory it shares; empty: none.
    base: bytes = b""

    def owned_by(self, server: str | None) -> list[int]:
        """The stripes of a server; None: those of nobody."""
        return [stripe for stripe, owner in enumerate(self.owners) if owner == server]

    def copied_bytes(self, server: str) -> int:
        """What a server holds beside its own."""
        return int(self.sizes[[*self.copies.get(server, ())]].sum())

    def own_copies(self) -> None:
        """Give stripes that nobody owns any more to servers that have copies."""
        for server, copied in self.copies.items():
            for stripe in [one for one in copied if self.owners[one] is None]:
                copied.remove(stripe)
                self.owners[stripe] = server
                self.generation += 1

    def without_owner(self) -> npt.NDArray[np.int64]:
        """The stripes of nobody."""
        return np.array(self.owned_by(None), dtype=np.int64)


class StripeTable(msgspec.Struct, frozen=True, kw_only=True):
    """Who owns each stripe: places in `servers`, or `NOBODY`. A later table has a higher generation."""

    generation: int
    servers: list[str]
    owners: list[int]
    #: Stripes that servers hold beside their owners.
    copies: dict[str, list[int]]
    #: Bytes of the stripes that have an owner.
    placed_bytes: int
    #: Processes that read the set.
    readers: int
    #: Whether what has no owner waits for no server to come back with it.
    is_settled: bool

    def owned(self) -> dict[str, list[int]]:
        """The stripes of each server."""
        of_each = [list[int]() for _ in self.servers]
        for stripe, owner in enumerate(self.owners):
            if owner != NOBODY:
                of_each[owner].append(stripe)
        return dict(zip(self.servers, of_each))
