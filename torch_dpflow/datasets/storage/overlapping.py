"""Runs the reads of a batch in several threads at once, where waiting for one at a time would take longer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

#: A read that takes longer waits for a device; a shorter one is over before a thread starts.
WORTH_A_THREAD_S = 0.0002
#: How much the last batch counts in the mean pace.
_LATEST_WEIGHT = 0.3
#: Seconds of a read that count at most: one that was interrupted by other work starts no threads.
_LONGEST_COUNTED_S = 0.0005


class Overlap:
    """Threads for one process's reads, made when they are first worth it. Thread-safe.

    Several callers share them; each also works itself, so a batch goes on even when every thread is taken.

    Args:
        concurrency: how many reads run at once, the caller's included.
        clock: tells the time in seconds.
    """

    def __init__(self, concurrency: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._helpers = concurrency - 1
        self._pool: ThreadPoolExecutor | None = None
        #: Seconds that a read of a local file has taken lately.
        self._pace_s = WORTH_A_THREAD_S

    def run(self, tasks: Sequence[Callable[[], None]], *, is_remote: bool) -> None:
        """Run all of `tasks`, in their order as far as threads allow, and return when all have ended.

        A task should keep its errors to itself: what it raises, the caller gets, and others are lost.
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
            waiting.clear()  # after an interrupt the helpers end with the read that they are at
            taken = [future for future in started if not future.cancel()]
            wait(taken)
        for future in taken:
            future.result()  # raises errors of the tasks, which should raise none

    def _note_pace(self, taken_s: float) -> None:
        self._pace_s += _LATEST_WEIGHT * (min(taken_s, _LONGEST_COUNTED_S) - self._pace_s)

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            # Two threads that both come first make two pools; the one that is not kept has started no thread.
            pool = ThreadPoolExecutor(max(1, self._helpers), thread_name_prefix="dpflow-read")
            self._pool = self._pool or pool
        return self._pool

    def close(self) -> None:
        """End the threads; a read that hangs ends at its deadline."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
