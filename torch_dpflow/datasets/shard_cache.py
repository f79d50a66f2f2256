"""Metadata shards in memory, as many as a budget of bytes allows."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError

from torch_dpflow._core.single_flight import Flight, Flights, fail
from torch_dpflow.datasets.spec import DatasetShardMeta, Variant
from torch_dpflow.errors import DPFlowError

#: Bytes of a decoded sample, besides the shard's bytes, to which it refers.
_BYTES_PER_SAMPLE = 256

LoadedShard = DatasetShardMeta | DPFlowError


def shard_cost(variant: Variant, number: int) -> int:
    """Estimated bytes of a shard in memory."""
    return variant.shards[number].bytes + _BYTES_PER_SAMPLE * variant.shard_samples(number)


class ShardCache:
    """Keeps the shards that were used last, and loads missing ones, each once at a time.

    Thread-safe: a thread that needs a shard that another thread is loading waits for that load, and for no other. An
    error is raised in all threads that wait for it and is not kept.

    Args:
        load: reads shards by number; returns an error for each that it cannot read. Called without the lock.
        cost: bytes of a shard.
        capacity: bytes of all kept shards; one shard is always kept, however large.
    """

    def __init__(
        self,
        load: Callable[[Sequence[int]], Sequence[LoadedShard]],
        cost: Callable[[int], int],
        capacity: int,
    ) -> None:
        self._load = load
        self._cost = cost
        self._capacity = capacity
        self._lock = threading.Lock()
        self._shards: OrderedDict[int, DatasetShardMeta] = OrderedDict()
        self._loading = Flights()
        #: Bytes that the kept shards take; guarded by the lock.
        self._used = 0

    def __contains__(self, number: int) -> bool:
        return number in self._shards

    def portions(self, numbers: Sequence[int]) -> Iterator[Mapping[int, LoadedShard]]:
        """The shards `numbers`, in portions that fit the capacity.

        A caller that drops each portion before the next one holds at most twice the capacity.
        """
        if len(numbers) == 1:
            yield self._get(numbers)
            return
        portion: list[int] = []
        taken = 0
        for number in numbers:
            cost = self._cost(number)
            if portion and taken + cost > self._capacity:
                yield self._get(portion)
                portion, taken = [], 0
            portion.append(number)
            taken += cost
        if portion:
            yield self._get(portion)

    def _get(self, numbers: Sequence[int]) -> Mapping[int, LoadedShard]:
        found: dict[int, LoadedShard] = {}
        ours: dict[int, Flight] = {}
        others: dict[int, Flight] = {}
        with self._lock:
            for number in numbers:
                if number in self._shards:
                    self._shards.move_to_end(number)
                    found[number] = self._shards[number]
                else:
                    flight, joined = self._loading.board(number)
                    (others if joined else ours)[number] = flight
        if ours:
            found.update(self._load_ours(ours))
        for number, flight in others.items():
            try:
                found[number] = flight.result()
            except CancelledError:
                found.update(self._get([number]))
        return found

    def _load_ours(self, ours: Mapping[int, Flight]) -> dict[int, LoadedShard]:
        """Load shards that no other thread is loading, for all threads that wait for them."""
        try:
            loaded = dict(zip(ours, self._load(list(ours)), strict=True))
        except BaseException as error:
            with self._lock:
                for number, flight in ours.items():
                    self._loading.land(number, flight)
            fail(ours.values(), error)
            raise
        with self._lock:
            for number, shard in loaded.items():
                self._loading.land(number, ours[number])
                if isinstance(shard, DatasetShardMeta):
                    self._keep(number, shard)
        for number, flight in ours.items():
            flight.set_result(loaded[number])
        return loaded

    def _keep(self, number: int, shard: DatasetShardMeta) -> None:
        self._shards[number] = shard
        self._used += self._cost(number)
        while self._used > self._capacity and len(self._shards) > 1:
            oldest, _ = self._shards.popitem(last=False)
            self._used -= self._cost(oldest)
