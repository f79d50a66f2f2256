"""Private shard for a stream of items that workers map with a function. Quick items are sent in groups.

Each item is a separate task: it can be stolen, and is repeated after a worker's death. A message costs the time of
several quick items. A worker therefore holds the number of items that it maps within `WINDOW_S`, and sends the results
of half of them together. Slow items are sent one by one.
"""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

from torch_dpflow._core.stage_times import StageTimes
from torch_dpflow.ipc.messages.headers import WorkerHandshake
from torch_dpflow.loader.batch_planner import GROWTH_BYTES
from torch_dpflow.loader.private_shard import WINDOW, PrivateShard
from torch_dpflow.loader.shard_events import Event
from torch_dpflow.workers.stream_items import StreamItem

#: A worker holds the number of items that it maps within `WINDOW_S` seconds, at most `MAX_WINDOW`.
MAX_WINDOW, WINDOW_S = 64, 0.03
#: The weight of an item in the moving averages.
WEIGHT = 0.1


class ItemPace:
    """Limit of the items in flight, from moving averages of their times.

    The training thread calls `read`, the shard's thread calls `mapped`.

    Args:
        fixed: maximum number of items in flight; None: computed from the averages.
    """

    def __init__(self, workers: int, fixed: int | None) -> None:
        self._workers = workers
        self._is_fixed = fixed is not None
        self._max_window = MAX_WINDOW if fixed is None else max(WINDOW, fixed // (2 * workers))
        #: Seconds; None before the first item.
        self._map_s: float | None = None
        self._read_s: float | None = None
        #: Bytes of the largest item that was sent.
        self._largest = 1

    def read(self, seconds: float, nbytes: int) -> None:
        self._read_s = _averaged(self._read_s, seconds, 1)
        self._largest = max(self._largest, nbytes)

    def mapped(self, seconds: float, count: int) -> None:
        """Record how long a worker took to map `count` items."""
        self._map_s = _averaged(self._map_s, seconds / count, count)

    @property
    def window(self) -> int:
        """Number of items that a worker should hold."""
        if self._map_s is None or self._read_s is None:
            return WINDOW
        # A slow source is not read ahead: items of a live one would wait.
        each_s = max(self._map_s, self._workers * self._read_s)
        return max(WINDOW, min(self._max_window, int(WINDOW_S / max(each_s, 1e-9))))

    def ahead(self, largest: int) -> int | None:
        """Return the maximum number of items in flight, if the largest has `largest` bytes; None if it is `fixed`."""
        if self._is_fixed:
            return None
        return min(2 * self.window * self._workers, GROWTH_BYTES // max(largest, self._largest))


def _averaged(before: float | None, seconds: float, count: int) -> float:
    return seconds if before is None else before + (1 - (1 - WEIGHT) ** count) * (seconds - before)


class StreamShard(PrivateShard):
    """Private shard whose tasks are items of a stream.

    Args:
        pace: decides how many items workers hold.
    """

    max_window = MAX_WINDOW

    def __init__(self, *arguments: Any, pace: ItemPace, **options: Any) -> None:
        self._pace = pace
        #: Items that the shard's thread does not have yet.
        self._unsent: list[tuple[int, bytes]] = []
        self._windows: dict[int, int] = {}
        super().__init__(*arguments, **options)

    # -- for the training thread -------------------------------------------------------------------------

    def submit(self, task: int, index: StreamItem, *, pinned_to: int | None = None) -> None:
        """Submit an item as a task. It is sent at the latest in the next call of `wait`. See `PrivateShard.submit`."""
        payload = pickle.dumps(index, pickle.HIGHEST_PROTOCOL)
        self._pace.read(index.read_s, len(payload))
        self._unsent.append((task, payload))
        if 2 * len(self._unsent) >= self._pace.window:
            self._flush()

    def ahead(self, largest: int) -> int | None:
        return self._pace.ahead(largest)

    def wait(self, timeout_s: float | None) -> Event | None:
        self._flush()
        return super().wait(timeout_s)

    def begin_epoch(self, *arguments: Any) -> None:
        self._flush()  # what it submits is cancelled at once
        super().begin_epoch(*arguments)

    def _flush(self) -> None:
        if self._unsent:
            # In this order: what Control-C leaves is submitted again, which is ignored.
            self._command(partial(self._submit, tuple(self._unsent)))
            self._unsent = []

    # -- callbacks of the shard (`Requester`) ------------------------------------------------------------

    def admitted(self, handshake: WorkerHandshake, *, shares_memory: bool) -> None:
        self._windows[handshake.worker] = WINDOW

    def timed(self, worker: int, times: StageTimes) -> None:
        super().timed(worker, times)
        if count := times.samples:
            self._pace.mapped(sum(times.stages.values()), count)
        window, before = self._pace.window, self._windows[worker]
        if 4 * abs(window - before) > before:  # a smaller difference is worth no event
            self._windows[worker] = window
            self._commands.append(partial(self._shard.set_window, worker, window))
