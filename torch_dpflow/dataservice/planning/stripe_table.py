"""What the keeper of a pool tells of one set. Pure."""

from __future__ import annotations

import msgspec

from torch_dpflow.dataservice.planning.placement import NOBODY


class StripeTable(msgspec.Struct, frozen=True):
    """Who owns each stripe: places in `servers`, or `NOBODY`. A later table has a higher generation."""

    generation: int
    servers: list[str]
    owners: list[int]

    def owned(self) -> dict[str, list[int]]:
        """The stripes of each server."""
        of_each = [list[int]() for _ in self.servers]
        for stripe, owner in enumerate(self.owners):
            if owner != NOBODY:
                of_each[owner].append(stripe)
        return dict(zip(self.servers, of_each))


class SetSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One set, as people are told of it.

    placed: stripes that have an owner, and their bytes.
    is_settled: whether what has no owner waits for no server to come back with it.
    """

    identity: bytes
    is_explicit: bool
    readers: int
    placed: int
    placed_bytes: int
    is_settled: bool
