"""Planning and running the reads of a batch: merge neighbouring ranges and overlap requests.

A request reads from one object. Requests alternate between storage nodes, so that all nodes work at once and none gets
a burst.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypeVar

from torch_dpflow.datasets.storage.base import ByteRange

T = TypeVar("T")

#: Maximum bytes of ranges that are merged without overlapping. All are read again after a lost connection.
MAX_MERGED = 8 << 20
#: Maximum bytes of a merged range of a local file. To cut samples out of a larger range takes longer than to read each:
#: with this limit, samples of 100 kB in random batches of 64 take 30 µs each instead of 40.
MAX_MERGED_LOCALLY = 64 << 10
#: The same limit if samples are views of the bytes read, and not copies. This many bytes fit a processor's cache.
MAX_VIEWED_LOCALLY = 256 << 10
#: Ranges of a local file with at most this many bytes between them are read as one.
LOCAL_MERGE_GAP = 4 << 10
#: Mean duration of local reads, seconds, above which they run in threads. Shorter reads end before a thread starts.
WORTH_A_THREAD_S = 0.0002
#: Weight of the last batch in the mean time of a read.
_LATEST_WEIGHT = 0.3
#: Maximum seconds of a read that count: one that was interrupted by other work must not start threads.
_MAX_COUNTED_S = 0.0005


@dataclass(frozen=True)
class Read:
    """One request to a storage, and the positions in the batch of the ranges that it covers."""

    span: ByteRange
    positions: list[int] = field(default_factory=list)

    def cut(self, wanted: ByteRange, data: bytes | memoryview) -> bytes | memoryview:
        """Return the bytes of the range `wanted`, cut out of `data`, the bytes of this read."""
        if wanted == self.span or wanted.stop is None:
            return data
        begin = wanted.start - self.span.start
        return data[begin : begin + wanted.stop - wanted.start]


def plan_reads(
    wanted: Mapping[int, ByteRange],
    *,
    node: Callable[[str], str],
    merge_gap: int,
    max_merged: int = MAX_MERGED,
) -> list[Read]:
    """Return the requests that cover all of `wanted`, in the order in which to start them.

    Ranges of one object that are at most `merge_gap` bytes apart are merged into a request of up to `max_merged` bytes.
    Overlapping ranges are merged at any length. Ranges that expect different sizes or states of the object
    (`ByteRange.size`, `state`) are not merged, and ranges without a stop only if they are equal.

    Args:
        wanted: ranges by their position in the batch.
        node: returns the node of a URL, see `Storage.node`. Requests alternate between nodes.
    """
    by_object: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for position, span in wanted.items():
        by_object[span.url].append((span.start, position))
    by_node: dict[str, list[Read]] = defaultdict(list)
    for url, places in by_object.items():
        by_node[node(url)] += _reads_of_object(wanted, places, merge_gap, max_merged)
    return [read for turn in zip_longest(*by_node.values()) for read in turn if read is not None]


def _reads_of_object(
    wanted: Mapping[int, ByteRange], places: list[tuple[int, int]], merge_gap: int, max_merged: int
) -> list[Read]:
    to_end: dict[ByteRange, Read] = {}
    bounded: list[Read] = []
    for _, position in sorted(places):
        span = wanted[position]
        if span.stop is None:
            to_end.setdefault(span, Read(span)).positions.append(position)
            continue
        merged = _joined(bounded[-1].span, span, merge_gap, max_merged) if bounded else None
        if merged is None:
            bounded.append(Read(span, [position]))
        else:
            bounded[-1].positions.append(position)
            bounded[-1] = Read(merged, bounded[-1].positions)
    return [*to_end.values(), *bounded]


def _joined(one: ByteRange, other: ByteRange, merge_gap: int, max_merged: int) -> ByteRange | None:
    """Return one range that covers both if they are close, else None. `other` does not begin before `one`."""
    assert one.stop is not None
    assert other.stop is not None
    stop = max(one.stop, other.stop)
    if other.start > one.stop + merge_gap or (stop - one.start > max_merged and other.start >= one.stop):
        return None
    if (one.size, one.state) != (other.size, other.state):
        return None
    return ByteRange(one.url, one.start, stop, one.size, one.state)


class Overlap:
    """Thread pool for the reads of one process. Fast local reads run in the caller's thread. Thread-safe.

    Several callers share the threads. Each caller also runs tasks itself, so a batch proceeds even if all threads are
    busy.

    Args:
        concurrency: maximum tasks of one caller that run at once: one in the caller's thread, the others in the pool.
        clock: returns a time in seconds.
    """

    def __init__(self, concurrency: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._helpers = concurrency - 1
        self._pool: ThreadPoolExecutor | None = None
        #: Mean seconds of recent reads of local files.
        self._pace_s = WORTH_A_THREAD_S

    def run(self, task: Callable[[T], None], items: Sequence[T], *, is_remote: bool) -> None:
        """Call `task` with each item, and return when all calls have ended. They start in order, and may overlap.

        `task` should not raise: only one of several errors is raised here, and some items may then get no call.

        is_remote: whether tasks wait for a network. If so, several tasks use threads, however short they are.
        """
        waiting = deque(items)  # popping from it is atomic
        if not is_remote and len(waiting) > 1:
            begun = self._clock()
            task(waiting.popleft())
            taken_s = min(self._clock() - begun, _MAX_COUNTED_S)
            self._pace_s += _LATEST_WEIGHT * (taken_s - self._pace_s)
        pays = is_remote or self._pace_s > WORTH_A_THREAD_S
        helpers = min(self._helpers, len(items) - 1) if pays else 0
        if helpers < 1:
            for item in waiting:
                task(item)
            return

        def work() -> None:
            while waiting:
                try:
                    item = waiting.popleft()
                except IndexError:
                    return  # another thread took the last item
                task(item)

        started = [self._threads().submit(work) for _ in range(helpers)]
        try:
            work()
        finally:
            waiting.clear()  # after an interrupt the helpers finish their current read only
            running = [future for future in started if not future.cancel()]
            wait(running)
        for future in running:
            future.result()

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            # Two threads may both make a pool here; the one that is not kept has started no thread.
            pool = ThreadPoolExecutor(max(1, self._helpers), thread_name_prefix="dpflow-read")
            self._pool = self._pool or pool
        return self._pool

    def close(self) -> None:
        """End the threads, and wait for their running tasks. A later `run` starts new threads."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
