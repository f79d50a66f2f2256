"""Runs the reads of a batch in several threads at once, if that is faster."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

#: A read that takes longer waits for a device; a shorter one ends before a thread starts.
WORTH_A_THREAD_S = 0.0002
#: Weight of the last batch in the mean time of a read.
_LATEST_WEIGHT = 0.3
#: Most seconds of a read that count: one that was interrupted by other work must not start threads.
_LONGEST_COUNTED_S = 0.0005


class Overlap:
    """Threads for one process's reads, started when they first pay. Thread-safe.

    Several callers share them; each caller also runs tasks itself, so a batch proceeds even if all threads are busy.

    Args:
        concurrency: how many reads run at once, including the caller's.
        clock: seconds.
    """

    def __init__(self, concurrency: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._helpers = concurrency - 1
        self._pool: ThreadPoolExecutor | None = None
        #: Mean seconds of recent reads of local files.
        self._pace_s = WORTH_A_THREAD_S

    def run(self, tasks: Sequence[Callable[[], None]], *, is_remote: bool) -> None:
        """Start all of `tasks` in their order, and return when all have ended.

        A task should raise nothing: one of the errors is raised here, and the others are lost.
        """
        if len(tasks) < 2:
            for task in tasks:
                task()
            return
        waiting = deque(tasks)  # popping from it is atomic

        def work() -> None:
            while waiting:
                try:
                    next_task = waiting.popleft()
                except IndexError:
                    return  # another thread took the last task
                next_task()

        if not is_remote:
            begun = self._clock()
            waiting.popleft()()
            self._note_pace(self._clock() - begun)
        is_worth = is_remote or self._pace_s > WORTH_A_THREAD_S
        helpers = min(self._helpers, len(tasks) - 1) if is_worth else 0
        started = [self._threads().submit(work) for _ in range(helpers)]
        try:
            work()
        finally:
            waiting.clear()  # after an interrupt the helpers finish their current read only
            taken = [future for future in started if not future.cancel()]
            wait(taken)
        for future in taken:
            future.result()  # raises errors of the tasks, which should raise none

    def _note_pace(self, taken_s: float) -> None:
        self._pace_s += _LATEST_WEIGHT * (min(taken_s, _LONGEST_COUNTED_S) - self._pace_s)

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            # Two threads may both make a pool here; the one that is not kept has started no thread.
            pool = ThreadPoolExecutor(max(1, self._helpers), thread_name_prefix="dpflow-read")
            self._pool = self._pool or pool
        return self._pool

    def close(self) -> None:
        """End the threads; a read that hangs ends at its deadline."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
