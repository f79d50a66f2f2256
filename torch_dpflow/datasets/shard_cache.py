"""Metadata shards in memory: recent ones decoded, all of them compressed and shared with forked children."""

from __future__ import annotations

import mmap
import multiprocessing
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError

import msgspec
import numpy as np

from torch_dpflow._core.threads import RunningLoad, RunningLoads, fail
from torch_dpflow.datasets.spec import DatasetShardMeta, SampleMeta, Variant
from torch_dpflow.errors import DPFlowError

#: Bytes of a decoded sample, besides the shard's bytes, to which it refers.
_BYTES_PER_SAMPLE = 256
#: Samples that are compressed together. A random read has to decompress all of them.
_BLOCK = 32
#: The fastest level takes a third of the time of the usual one, for a tenth more bytes.
_LEVEL = 1
_BLOCKS = msgspec.msgpack.Decoder(list[bytes])
_SAMPLES = msgspec.json.Decoder(list[msgspec.Raw])
_SAMPLE = msgspec.json.Decoder(SampleMeta)

LoadedShard = DatasetShardMeta | DPFlowError


def shard_cost(variant: Variant, number: int) -> int:
    """Estimate the bytes of a decoded shard in memory."""
    return variant.shards[number].bytes + _BYTES_PER_SAMPLE * variant.shard_samples(number)


class ShardCache:
    """LRU cache of decoded shards. Loads missing ones, each once at a time.

    Thread-safe: a thread that needs a shard that another thread is loading waits for that load, and for no other. An
    error is raised in all threads that wait for it and is not kept.

    Args:
        load: reads shards by number; returns an error for each that it cannot read. Called without the lock.
        cost: bytes of a shard.
        capacity: bytes of all kept shards. One shard is always kept, however large.
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
        self._loading = RunningLoads()
        #: Bytes of the kept shards; guarded by the lock.
        self._used = 0

    def __contains__(self, number: int) -> bool:
        return number in self._shards

    def kept(self, number: int) -> DatasetShardMeta | None:
        """Return a shard that is decoded, without what loading several of them takes."""
        with self._lock:
            shard = self._shards.get(number)
            if shard is not None:
                self._shards.move_to_end(number)
            return shard

    def portions(self, numbers: Sequence[int]) -> Iterator[Mapping[int, LoadedShard]]:
        """Yield the shards `numbers` in portions that fit the capacity.

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
        ours: dict[int, RunningLoad] = {}
        others: dict[int, RunningLoad] = {}
        with self._lock:
            for number in numbers:
                if number in self._shards:
                    self._shards.move_to_end(number)
                    found[number] = self._shards[number]
                else:
                    running, joined = self._loading.start_or_join(number)
                    (others if joined else ours)[number] = running
        if ours:
            found.update(self._load_ours(ours))
        for number, running in others.items():
            try:
                found[number] = running.result()
            except CancelledError:
                found.update(self._get([number]))
        return found

    def _load_ours(self, ours: Mapping[int, RunningLoad]) -> dict[int, LoadedShard]:
        """Load the shards that no other thread is loading, also for threads that wait for them."""
        try:
            loaded = dict(zip(ours, self._load(list(ours)), strict=True))
        except BaseException as error:
            with self._lock:
                for number, running in ours.items():
                    self._loading.finish(number, running)
            fail(ours.values(), error)
            raise
        with self._lock:
            for number, shard in loaded.items():
                self._loading.finish(number, ours[number])
                if isinstance(shard, DatasetShardMeta):
                    self._keep(number, shard)
        for number, running in ours.items():
            running.set_result(loaded[number])
        return loaded

    def _keep(self, number: int, shard: DatasetShardMeta) -> None:
        self._shards[number] = shard
        self._used += self._cost(number)
        while self._used > self._capacity and len(self._shards) > 1:
            oldest, _ = self._shards.popitem(last=False)
            self._used -= self._cost(oldest)


class CompactShards:
    """Compressed shards in memory that is shared with forked children, so that one process reads a shard for all.

    A million samples with labels and checksums take 24 MiB. In random batches of 64 a sample costs 0.80 metadata
    requests and 1.7 ms of processor time with the LRU of shards alone, and 66 µs once one of the processes has read
    each shard. Processes that were not forked (spawn, workers of a cluster) have a mapping each: to share one they
    would need a named file, which has to be protected, bounded and removed, and a lock that survives a killed writer.

    For threads, and for processes forked from the one that made it. No call waits: a shard is kept only if the lock is
    free. If a process is killed while it holds the lock, no more shards are kept, but those that are can be read.

    Args:
        shards: their number.
        capacity: bytes for all of them.
    """

    def __init__(self, shards: int, capacity: int) -> None:
        self._capacity = capacity
        # Unwritten pages take no memory.
        self._memory = mmap.mmap(-1, 8 * (2 * shards + 1) + max(1, capacity))
        words = np.frombuffer(self._memory, np.int64, 2 * shards + 1)
        #: Bytes in use; and of each shard its start and its length, which is 0 until the shard is complete.
        self._taken, self._starts, self._lengths = words[:1], words[1 : shards + 1], words[shards + 1 :]
        self._content = memoryview(self._memory)[words.nbytes :]
        self._lock = multiprocessing.get_context("fork").Lock()

    @property
    def taken(self) -> int:
        """Bytes that the shards take."""
        return int(self._taken[0])

    def put(self, number: int, samples: Sequence[SampleMeta]) -> None:
        """Keep a shard if it fits and no other is being written."""
        if self._lengths[number] or self.taken >= self._capacity:
            return
        blocks = [samples[first : first + _BLOCK] for first in range(0, len(samples), _BLOCK)]
        packed = msgspec.msgpack.encode([zlib.compress(msgspec.json.encode(block), _LEVEL) for block in blocks])
        if not self._lock.acquire(block=False):
            return
        try:
            start = self.taken
            if not self._lengths[number] and start + len(packed) <= self._capacity:
                self._content[start : start + len(packed)] = packed
                self._taken[0] = start + len(packed)
                self._starts[number] = start
                self._lengths[number] = len(packed)
        finally:
            self._lock.release()

    def get(self, number: int, offsets: Sequence[int]) -> list[SampleMeta] | None:
        """Return these samples of a shard, or None if it is not kept."""
        length = int(self._lengths[number])
        if not length:
            return None
        start = int(self._starts[number])
        try:
            blocks = _BLOCKS.decode(self._content[start : start + length])
            return [self._sample(blocks[offset // _BLOCK], offset % _BLOCK) for offset in offsets]
        except (msgspec.MsgspecError, zlib.error):
            return None  # another processor's writes are not all visible yet

    @staticmethod
    def _sample(block: bytes, offset: int) -> SampleMeta:
        return _SAMPLE.decode(_SAMPLES.decode(zlib.decompress(block))[offset])
