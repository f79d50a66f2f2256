"""Which shard owns which keys: a pure state machine (thesis 4.3.3: routing generations).

The keys 0 to size-1 are dealt to the shards in ranges of equal length. Every change of who is there begins a
new generation; whoever has an older table is told so, and asks for the new one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torch_dpflow.errors import OptionError
from torch_dpflow.remote.membership import Heard, Leave, Lost, Membership, Stale, Tick
from torch_dpflow.remote.protocol import RangeAssignment, Route, RoutingTable
from torch_dpflow.samplers.indices import IndexArray


class Routing:
    """Owns the routing table of one flow. Not thread-safe.

    Args:
        size: number of keys.
        expected: no table is given out before so many shards are there.
        lease_s: how long a shard may be silent before its keys are given to others.
    """

    def __init__(self, *, size: int, expected: int, lease_s: float) -> None:
        if size < 1 or expected < 1:
            raise OptionError(f"size={size}, expected={expected}: both must be at least 1")
        self._size = size
        self._expected = expected
        self._membership = Membership(lease_s=lease_s)
        self._addresses: dict[str, str] = {}
        #: The shards that own keys, in the order of their ranges.
        self._owners: list[str] = []
        #: Shards that are to own nothing any more.
        self.dismissed: set[str] = set()
        #: Raised by every change; 0 while there is no table.
        self.generation = 0
        #: The newest generation that anybody has heard of.
        self._newest = 0

    @property
    def complete(self) -> bool:
        """Whether there is a table: every shard that was expected has been there."""
        return self.generation > 0

    @property
    def table(self) -> RoutingTable:
        """The table in force; it has no routes while no shard is there."""
        bounds = self._bounds()
        return RoutingTable(
            self.generation,
            [
                Route(bounds[place], bounds[place + 1], shard, self._addresses[shard])
                for place, shard in enumerate(self._owners)
            ],
        )

    def enlist(
        self, shard: str, incarnation: int, address: str, now: float, *, known: int = 0
    ) -> RangeAssignment | None:
        """A shard says that it serves; its range, empty until the table is complete.

        None: it is stale, or was dismissed.
        known: the newest generation that the shard has heard of, from this table or an earlier router's. Shards
            and jobs go by what is newest, so those of this table come after it.
        """
        if shard in self.dismissed:
            return None
        changes = self._membership.handle(Heard(shard, incarnation, now))
        if any(isinstance(change, Stale) for change in changes):
            return None
        moved = self._addresses.get(shard) != address
        self._addresses[shard] = address
        outdated = known > self._newest
        self._newest = max(self._newest, known)
        if shard not in self._owners or moved or outdated:
            self._deal()
        place = self._owners.index(shard) if shard in self._owners else None
        if place is None:
            return RangeAssignment(self.generation, 0, 0)
        bounds = self._bounds()
        return RangeAssignment(self.generation, bounds[place], bounds[place + 1])

    def dismiss(self, shard: str, now: float) -> None:
        """This shard is to own nothing any more; it may be ended once jobs have heard of it."""
        incarnation = self._membership.members.get(shard)
        if incarnation is not None:
            self.dismissed.add(shard)
            self._membership.handle(Leave(shard, incarnation, now))
            self._drop(shard)

    def tick(self, now: float) -> list[str]:
        """Time has passed; the shards that are lost, whose keys others own from now on."""
        lost = [change.peer for change in self._membership.handle(Tick(now)) if isinstance(change, Lost)]
        for shard in lost:
            self._drop(shard)
        return lost

    def _drop(self, shard: str) -> None:
        del self._addresses[shard]
        if shard in self._owners:
            self._deal()

    def _deal(self) -> None:
        if not self.generation and len(self._addresses) < self._expected:
            return
        self._owners = sorted(self._addresses)[: self._size]
        self._newest += 1
        self.generation = self._newest

    def _bounds(self) -> list[int]:
        shards = max(1, len(self._owners))
        return [place * self._size // shards for place in range(shards + 1)]


class RouteMap:
    """A job's copy of a routing table.

    Raises OptionError for a table that has no routes, or gaps in them.
    """

    def __init__(self, table: RoutingTable) -> None:
        self.generation = table.generation
        self.addresses = [route.address for route in table.routes]
        ends = [route.end for route in table.routes]
        if not ends or [0, *ends[:-1]] != [route.first for route in table.routes]:
            raise OptionError(f"a routing table without routes, or with gaps: {table.routes}")
        self._ends = np.array(ends)

    def places_of(self, keys: Sequence[int]) -> IndexArray:
        """The number of the route that owns each key, shape (n,)."""
        return np.searchsorted(self._ends, np.asarray(keys, np.int64), side="right")
