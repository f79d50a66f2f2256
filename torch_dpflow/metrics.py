"""Counters of a loader, and `LoaderStats`, the snapshot of them that `stats()` returns to users."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING

from torch_dpflow._core.stage_times import StageTimes
from torch_dpflow.errors import OptionError, OptionTypeError

if TYPE_CHECKING:
    from torch_dpflow.loader.trace import LoaderTrace


@dataclass(frozen=True, kw_only=True, repr=False)
class LoaderStats:
    """Counters of a loader since it was made, over all its epochs. Prints as a table, in a notebook too.

    `stats()` of a loader returns one; `since` compares two.
    """

    #: Stall: seconds that the training loop waited in `next()`.
    stall_s: float
    #: The stall's share of the loop's time: `stall_s` / `iterating_s`, 0 to 1.
    stall_share: float
    #: Seconds from the latest `iter()` to its first batch; None until that batch arrives.
    time_to_first_batch_s: float | None
    #: Iterations begun.
    epochs: int
    #: Batches handed to the training loop.
    batches: int
    #: Samples in these batches; an unbatched item, or a batch of unknown size, counts one.
    samples: int
    #: Bytes of these batches, as workers sent them; 0 with num_workers=0 and for a shared flow.
    bytes: int
    #: Workers replaced after they ended; 0 for a shared flow.
    restarts: int
    #: Results dropped because another worker had delivered the batch.
    duplicates: int
    #: Batches moved from a busy worker to an idle one.
    steals: int
    #: Seconds that all remote workers together have run after their start, as cloud functions are billed. For a shared
    #: flow, `flow_worker_s` is this time for all jobs; `worker_s` is the job's part of it, by the samples that it read.
    worker_s: float = 0.0
    flow_worker_s: float = 0.0
    #: For a shared flow, over all jobs since its shards were started: samples delivered, and samples loaded for that.
    flow_served: int = 0
    flow_decodes: int = 0
    #: For a shared flow: the reason why jobs share few loads; empty if they share enough.
    sharing: str = ""
    #: For a shared flow or a loader with a platform, the limit of the jobs' speed: "workers" (too few), "cold start"
    #: (more are starting), "quota" or another reason of the platform, "storage", "network", "shard" (its thread), "job"
    #: (the training process), "budget" (as many workers as allowed); empty if unknown.
    limited_by: str = ""
    #: Seconds from the start of each iteration to the end of its latest `next()`, added up.
    iterating_s: float = 0.0
    #: Workers' loading time by stage, and the distribution of the time per sample, for the batches that have arrived.
    #: For a shared flow: for all samples that were loaded for any job since its shards were started.
    times: StageTimes = field(default_factory=StageTimes)

    def since(self, before: LoaderStats) -> LoaderStats:
        """Return the counters for the time between `before`, an earlier snapshot of the same loader, and this one.

        `stall_share` and `times` are for this time too. Other values, such as `limited_by`, are as in this snapshot.

        Raises:
            OptionError: `epochs`, `batches` or `iterating_s` of `before` is higher, so it is no earlier snapshot.
            OptionTypeError: `before` is not a `LoaderStats`.
        """
        if not isinstance(before, LoaderStats):
            raise OptionTypeError(f"before={before!r:.80}: give what an earlier call of stats() returned")
        passed = {name: getattr(self, name) - getattr(before, name) for name in _COUNTS}
        for name in ("epochs", "batches", "iterating_s"):
            if passed[name] < 0:
                raise OptionError(
                    f"before.{name}={getattr(before, name):g} is larger than {getattr(self, name):g} of this snapshot; "
                    "give an earlier one of the same loader"
                )
        share = passed["stall_s"] / passed["iterating_s"] if passed["iterating_s"] else 0.0
        # Figures that others report can begin again, as those of a flow whose shards were started again.
        counts = {name: max(value, type(value)()) for name, value in passed.items()}
        return replace(self, **counts, stall_share=min(1.0, share), times=self.times.since(before.times))

    def __str__(self) -> str:
        return "\n".join(f"{name:<12} {text}" for name, text in self._rows())

    __repr__ = __str__

    def _rows(self) -> list[tuple[str, str]]:
        first = self.time_to_first_batch_s
        latest = " of the latest epoch" if self.epochs > 1 else ""
        rows = [
            ("read", f"{self.samples:,} samples in {self.batches:,} batches, {self.epochs:,} epochs"),
            ("waited", f"{self.stall_s:.2f} s, {self.stall_share:.0%} of the time"),
            ("first batch", "has not come" if first is None else f"after {first:.2f} s{latest}"),
            (
                "workers",
                f"{self.restarts:,} replaced; {self.steals:,} batches moved, {self.duplicates:,} came twice",
            ),
        ]
        if self.bytes:
            rows.append(("bytes", f"{self.bytes / 1e6:,.1f} MB"))
        if self.flow_worker_s:
            own = f"{self.worker_s:,.1f} s, of {self.flow_worker_s:,.1f} s that the flow's workers have taken"
            rows.append(("worker time", own))
        elif self.worker_s:
            rows.append(("worker time", f"{self.worker_s:,.1f} s on the platform"))
        if self.flow_served:
            shared = f"{self.flow_served:,} samples given to all jobs, {self.flow_decodes:,} loaded for them"
            rows.append(("flow", shared))
        if self.sharing:
            rows.append(("shared", f"little: {self.sharing}"))
        sample, stages = self.times.shown()
        if sample:
            rows += [("a sample took", sample), ("stages", stages)]
        if self.limited_by:
            rows.append(("limited by", self.limited_by))
        return rows


#: The fields of `LoaderStats` that only grow.
_COUNTS = (
    *("stall_s", "iterating_s", "epochs", "batches", "samples", "bytes", "restarts", "duplicates", "steals"),
    *("worker_s", "flow_worker_s", "flow_served", "flow_decodes"),
)


class WorkerTime:
    """Total running time (seconds) of the remote workers of a loader or shard; the object that runs them updates it."""

    __slots__ = ("away_s", "is_over", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        #: Seconds that the workers were idle because of a slow network, as they report, added up.
        self.away_s = 0.0
        #: Whether all these workers have ended.
        self.is_over = False


class LoaderMeter:
    """Counters of one loader. Only the training thread changes them, except where another thread is named."""

    def __init__(self) -> None:
        self.stall_s = 0.0
        self.iterating_s = 0.0
        #: Seconds from each `iter()` to its first batch and in `ending`, added up; and the part of these that is stall.
        self.turns_s = self.turn_stall_s = 0.0
        #: The longest time from an `iter()` to its first batch, seconds.
        self.longest_start_s = 0.0
        self.time_to_first_batch_s: float | None = None
        self.epochs = 0
        self.batches = 0
        self.samples = 0
        self.bytes = 0
        self.restarts = 0
        self.duplicates = 0
        self.steals = 0
        self.times = StageTimes()
        #: Writes events to a file, if the environment requests it.
        self.trace: LoaderTrace | None = None
        #: See `LoaderStats.limited_by`; written by the thread that owns the workers.
        self.limited_by = ""
        self._fleets: list[WorkerTime] = []
        self._stall_before_s = 0.0
        self._last_seen_s = 0.0
        self._began_s = 0.0
        #: The time when the training loop began to wait in `next()`; 0.0 while it does not.
        self._entered_s = 0.0

    def begin_epoch(self) -> None:
        """Record the start of an iteration."""
        self._began_s = self._last_seen_s = time.perf_counter()
        self._stall_before_s = self.stall_s
        self.time_to_first_batch_s = None
        self.epochs += 1
        if self.trace is not None:
            self.trace.epoch(self.epochs, self._began_s)

    def waiting(self) -> _WaitingTime:
        """Return a context manager that measures one `next()` of the training loop."""
        return _WaitingTime(self)

    def waited(self, entered_s: float) -> None:
        """Record the end of a `next()` of the training loop. entered_s: when that began, by `time.perf_counter`."""
        left_s = time.perf_counter()
        self._entered_s = 0.0
        self.stall_s += left_s - entered_s
        self.iterating_s += left_s - self._last_seen_s
        self._last_seen_s = left_s
        if self.trace is not None:
            self.trace.waited(entered_s, left_s)

    def waiting_s(self) -> float:
        """Return the seconds since the training loop entered `next()`; 0.0 outside of it. Any thread may call this."""
        entered_s = self._entered_s
        return max(0.0, time.perf_counter() - entered_s) if entered_s else 0.0

    def delivered(self, samples: int, size: int) -> None:
        """Record a delivered batch. samples: number of samples in it. size: its bytes."""
        if self.time_to_first_batch_s is None:
            self.time_to_first_batch_s = time.perf_counter() - self._began_s
            self.turns_s += self.time_to_first_batch_s
            self.longest_start_s = max(self.longest_start_s, self.time_to_first_batch_s)
            self.turn_stall_s += self.stall_s + self.waiting_s() - self._stall_before_s
        # No calls below: Control-C finds all counted, or nothing.
        self.batches += 1
        self.samples += samples
        self.bytes += size

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Add to `turns_s` the time of the `with` block, which ends an iteration's workers inside `next()`."""
        began_s = time.perf_counter()
        yield
        took_s = time.perf_counter() - began_s
        self.turns_s += took_s
        self.turn_stall_s += took_s

    def count(self, duplicates: int, steals: int) -> None:
        """Add numbers of dropped results and moved batches to the counters."""
        self.duplicates += duplicates
        self.steals += steals

    def add_fleet(self, time: WorkerTime) -> None:
        over = WorkerTime()
        over.seconds = sum(one.seconds for one in self._fleets if one.is_over)
        over.is_over = True
        self._fleets = [over, *(one for one in self._fleets if not one.is_over), time]

    def snapshot(self) -> LoaderStats:
        share = self.stall_s / self.iterating_s if self.iterating_s else 0.0
        return LoaderStats(
            stall_s=self.stall_s,
            stall_share=min(1.0, share),
            time_to_first_batch_s=self.time_to_first_batch_s,
            epochs=self.epochs,
            batches=self.batches,
            samples=self.samples,
            bytes=self.bytes,
            restarts=self.restarts,
            duplicates=self.duplicates,
            steals=self.steals,
            worker_s=sum(one.seconds for one in self._fleets),
            limited_by=self.limited_by,
            iterating_s=self.iterating_s,
            times=self.times.copy(),
        )


class _WaitingTime:
    """Context manager of `waiting()`. A class, because `contextmanager` takes twice the time."""

    __slots__ = ("_entered_s", "_meter")

    def __init__(self, meter: LoaderMeter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        self._entered_s = self._meter._entered_s = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._meter.waited(self._entered_s)
