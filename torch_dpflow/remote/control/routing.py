"""Which shard owns which keys: a pure state machine (thesis 4.3.3: routing generations).

The keys 0 to size-1 are dealt to the shards in ranges of equal length. Every change of who is there begins a
new generation; whoever has an older table is told so, and asks for the new one. So shards may come and go while
jobs read: one that is not expected any more owns nothing from the next generation on, and lives on until its
jobs have heard of it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch_dpflow.errors import OptionError
from torch_dpflow.remote.wire.router import RangeAssignment, Route, RoutingTable


@dataclass(slots=True)
class _Shard:
    address: str
    #: When it is taken for lost unless it is heard of, seconds.
    until: float


class Routing:
    """Owns the routing table of one flow. Not thread-safe.

    Args:
        size: number of keys.
        expected: the shards that are to own keys. No table is given out before all of them are there.
        lease_s: how long a shard may be silent before its keys are given to others.

    Raises:
        OptionError: there are no keys, or no shard is expected.
    """

    def __init__(self, *, size: int, expected: Collection[str], lease_s: float) -> None:
        if size < 1 or not expected:
            raise OptionError(f"size={size}, expected={[*expected]}: at least one of each is needed")
        self._size = size
        self._expected = frozenset(expected)
        self._lease_s = lease_s
        self._shards: dict[str, _Shard] = {}
        #: The highest incarnation of every shard that has been there.
        self._incarnations: dict[str, int] = {}
        #: The shards that own keys and where they listen, in the order of their ranges.
        self._owners: list[tuple[str, str]] = []
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
                Route(bounds[place], bounds[place + 1], shard, address)
                for place, (shard, address) in enumerate(self._owners)
            ],
        )

    def expect(self, shards: Collection[str]) -> None:
        """From now on these shards are to own keys, as soon as they are there, and no others.

        Raises:
            OptionError: there are none.
        """
        if not shards:
            raise OptionError("no shard is expected: somebody has to own the keys")
        self._expected = frozenset(shards)
        self._shards = {name: shard for name, shard in self._shards.items() if name in self._expected}
        self._deal()

    def enlist(
        self, shard: str, incarnation: int, address: str, now: float, *, known: int = 0
    ) -> RangeAssignment | None:
        """A shard says that it serves; its range, empty until the table is complete.

        None: another process has taken its place.
        known: the newest generation that the shard has heard of, from this table or an earlier router's. Shards
            and jobs go by what is newest, so those of this table come after it.
        """
        if incarnation < self._incarnations.get(shard, 0):
            return None
        self._newest = max(self._newest, known)
        if shard not in self._expected:
            return RangeAssignment(self.generation, 0, 0, True)
        self._incarnations[shard] = incarnation
        self._shards[shard] = _Shard(address, now + self._lease_s)
        self._deal()
        if (shard, address) not in self._owners:
            return RangeAssignment(self.generation, 0, 0)
        place = self._owners.index((shard, address))
        bounds = self._bounds()
        return RangeAssignment(self.generation, bounds[place], bounds[place + 1])

    def tick(self, now: float) -> list[str]:
        """Time has passed; the shards that are lost, whose keys others own from now on."""
        lost = [name for name, shard in self._shards.items() if shard.until <= now]
        for name in lost:
            del self._shards[name]
        self._deal()
        return lost

    def _deal(self) -> None:
        """Begin a new generation where other shards are there, or elsewhere, than the table says."""
        if not self.complete and not self._shards.keys() >= self._expected:
            return
        owners = sorted((name, shard.address) for name, shard in self._shards.items())[: self._size]
        if owners != self._owners or self._newest > self.generation:
            self._owners = owners
            self._newest += 1
            self.generation = self._newest

    def _bounds(self) -> list[int]:
        shards = max(1, len(self._owners))
        return [place * self._size // shards for place in range(shards + 1)]
