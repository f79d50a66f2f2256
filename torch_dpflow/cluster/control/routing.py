"""Ownership of keys by shards: a pure state machine (thesis 4.3.3: routing generations).

The keys 0 to size-1 are divided about equally among the shards, in ranges. Every change of the shards begins a new
generation. A shard refuses a call with an older generation, and the caller fetches the new table. Shards can therefore
be added and removed while jobs read: a shard that is no longer expected owns no keys in the next generation, and runs
until its jobs have left.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import numpy as np

from torch_dpflow.cluster.messages.router import RangeAssignment, Route, RoutingTable
from torch_dpflow.errors import OptionError
from torch_dpflow.ipc.rpc.leases import Expiry
from torch_dpflow.samplers.indices import IndexArray


class Routing:
    """Owner of the routing table of one flow. Not thread-safe.

    Args:
        expected: ids of the shards that should own keys. There is no table before all of them have registered.
        lease_s: time without a registration after which a shard's keys are reassigned (seconds).
        first: first generation of this table, above those of all earlier routers of the flow, because shards and jobs
            use the newest generation.

    Raises OptionError: there are no keys, or no shard is expected.
    """

    def __init__(self, *, size: int, expected: Collection[str], lease_s: float, first: int = 1) -> None:
        if size < 1 or not expected:
            raise OptionError(f"size={size}, expected={[*expected]}: at least one of each is needed")
        self._size = size
        self._expected = frozenset(expected)
        self._leases: Expiry[str] = Expiry(lease_s)
        #: Addresses of the registered shards.
        self._shards: dict[str, str] = {}
        #: The highest incarnation of every shard that has registered.
        self._incarnations: dict[str, int] = {}
        #: The shards that own keys and where they listen, in the order of their ranges.
        self._owners: list[tuple[str, str]] = []
        #: By owner, its keys.
        self._ranges: dict[tuple[str, str], tuple[int, int]] = {}
        #: Whether shards have been added or have moved since the latest assignment.
        self._is_changed = False
        #: Incremented by every change; 0 while there is no table.
        self.generation = 0
        self._generations = itertools.count(first)

    @property
    def complete(self) -> bool:
        """Whether there is a table. The first is made once all expected shards have registered."""
        return self.generation > 0

    @property
    def table(self) -> RoutingTable:
        """The present table. It has no routes before all expected shards have registered, or after all were lost."""
        bounds = self._bounds()
        return RoutingTable(
            self.generation,
            [
                Route(bounds[place], bounds[place + 1], shard, address)
                for place, (shard, address) in enumerate(self._owners)
            ],
        )

    def expect(self, shards: Collection[str]) -> None:
        """Set the shards that should own keys once they have registered. Raises OptionError if `shards` is empty."""
        if not shards:
            raise OptionError("expected=[]: at least one shard has to own the keys")
        self._expected = frozenset(shards)
        for name in self._shards.keys() - self._expected:
            del self._shards[name]
            self._leases.drop(name)
        self._assign()

    def register(self, shard: str, incarnation: int, address: str, now: float) -> RangeAssignment | None:
        """Register a shard, or renew its lease.

        Returns the shard's range: empty until the table is complete, and marked `retired` if the shard is not expected.
        Returns None if a process with a higher incarnation has replaced this process.
        """
        if incarnation < self._incarnations.get(shard, 0):
            return None
        if shard not in self._expected:
            return RangeAssignment(self.generation, 0, 0, True)
        self._incarnations[shard] = incarnation
        self._leases.renew(shard, now)
        if self._shards.get(shard) != address:
            self._shards[shard] = address
            self._is_changed = True
        # Most calls change nothing; with a thousand shards an assignment at each took two thirds of a processor.
        if self._is_changed:
            self._assign()
        first, end = self._ranges.get((shard, address), (0, 0))
        return RangeAssignment(self.generation, first, end)

    def tick(self, now: float) -> list[str]:
        """Reassign the keys of shards whose leases have expired; return these shards."""
        lost = self._leases.expire(now)
        for name in lost:
            del self._shards[name]
        if lost:
            self._assign()
        return lost

    def _assign(self) -> None:
        """Begin a new generation if the registered shards or their addresses differ from the table."""
        if not self.complete and not self._shards.keys() >= self._expected:
            return
        self._is_changed = False
        owners = sorted(self._shards.items())[: self._size]
        if owners != self._owners:
            self._owners = owners
            bounds = self._bounds()
            self._ranges = {owner: (bounds[place], bounds[place + 1]) for place, owner in enumerate(owners)}
            self.generation = next(self._generations)

    def _bounds(self) -> list[int]:
        shards = max(1, len(self._owners))
        return [place * self._size // shards for place in range(shards + 1)]


class RouteMap:
    """Copy of a routing table in a job. Raises OptionError for a table without routes, or with gaps between them."""

    def __init__(self, table: RoutingTable) -> None:
        self.generation = table.generation
        self.addresses = [route.address for route in table.routes]
        ends = [route.end for route in table.routes]
        if not ends or [0, *ends[:-1]] != [route.first for route in table.routes]:
            raise OptionError(f"a routing table without routes, or with gaps: {table.routes}")
        self._ends = np.array(ends)

    def places_of(self, keys: Sequence[int]) -> IndexArray:
        """Return for each key the index of its owner in `addresses`, shape (n,)."""
        return np.searchsorted(self._ends, np.asarray(keys, np.int64), side="right")
