"""Metadata shards in memory, as many as a budget of bytes allows."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future

from torch_dpflow.datasets.spec import DatasetShardMeta, Variant
from torch_dpflow.errors import DPFlowError

#: Bytes that a decoded sample takes beside the shard's own, which it refers to.
_BYTES_PER_SAMPLE = 256

Loaded = DatasetShardMeta | DPFlowError


def shard_cost(variant: Variant, number: int) -> int:
    """Bytes that a shard takes in memory, as far as is known before it is read."""
    return variant.shards[number].bytes + _BYTES_PER_SAMPLE * variant.shard_samples(number)


class ShardCache:
    """Keeps the shards that were used last, and loads those that are missing, each once at a time.

    Thread-safe: who needs a shard that another thread loads waits for it; nobody waits for other shards. An
    error goes to all who wait for it and is not kept.

    Args:
        load: reads shards by number, an error in the place of those that it cannot read. Called unlocked.
        cost: bytes that a shard takes.
        capacity: bytes for all that is kept; one shard is always kept, however large.
    """

    def __init__(
        self,
        load: Callable[[Sequence[int]], Sequence[Loaded]],
        cost: Callable[[int], int],
        capacity: int,
    ) -> None:
        self._load = load
        self._cost = cost
        self._capacity = capacity
        self._lock = threading.Lock()
        self._shards: OrderedDict[int, DatasetShardMeta] = OrderedDict()
        self._loading: dict[int, Future[Loaded]] = {}
        #: Bytes that the kept shards take; guarded by the lock.
        self._used = 0
        #: Shards read so far.
        self.loads = 0

    def __contains__(self, number: int) -> bool:
        return number in self._shards

    def portions(self, numbers: Sequence[int]) -> Iterator[Mapping[int, Loaded]]:
        """The shards `numbers`, in portions that take no more than the capacity together.

        Whoever lets go of one portion before taking the next holds twice the capacity at most.
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

    def _get(self, numbers: Sequence[int]) -> Mapping[int, Loaded]:
        found: dict[int, Loaded] = {}
        ours: dict[int, Future[Loaded]] = {}
        others: dict[int, Future[Loaded]] = {}
        with self._lock:
            for number in numbers:
                if number in self._shards:
                    self._shards.move_to_end(number)
                    found[number] = self._shards[number]
                elif number in self._loading:
                    others[number] = self._loading[number]
                else:
                    ours[number] = self._loading[number] = Future()
        if ours:
            found.update(self._load_ours(ours))
        for number, future in others.items():
            try:
                found[number] = future.result()
            except CancelledError:
                found.update(self._get([number]))
        return found

    def _load_ours(self, ours: Mapping[int, Future[Loaded]]) -> dict[int, Loaded]:
        """Load what nobody else loads, and tell who has come to wait for it meanwhile."""
        try:
            loaded = dict(zip(ours, self._load(list(ours)), strict=True))
        except BaseException as error:
            with self._lock:
                for number in ours:
                    del self._loading[number]
            for future in ours.values():
                if isinstance(error, Exception):
                    future.set_exception(error)
                else:
                    future.cancel()  # an interrupt is meant for one thread: the others start over
            raise
        with self._lock:
            for number, shard in loaded.items():
                del self._loading[number]
                if isinstance(shard, DatasetShardMeta):
                    self._keep(number, shard)
        for number, future in ours.items():
            future.set_result(loaded[number])
        return loaded

    def _keep(self, number: int, shard: DatasetShardMeta) -> None:
        self._shards[number] = shard
        self._used += self._cost(number)
        self.loads += 1
        while self._used > self._capacity and len(self._shards) > 1:
            oldest, _ = self._shards.popitem(last=False)
            self._used -= self._cost(oldest)
