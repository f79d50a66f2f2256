"""Counters of a loader and the frozen snapshot that a user sees."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType


@dataclass(frozen=True, kw_only=True)
class LoaderStats:
    """What a loader has done since it was made, over all its epochs. Printed, it is a table; in a notebook too.

    Stall is the time that the training loop waited in `next()`; its share is taken of the time from the
    beginning of each iteration to its latest batch.
    """

    #: Seconds that the training loop waited in `next()`.
    stall_s: float
    #: stall_s divided by the seconds that passed while iterating; 0 to 1.
    stall_share: float
    #: Seconds from the latest `iter()` to its first batch; None before it.
    time_to_first_batch_s: float | None
    #: Iterations begun.
    epochs: int
    #: Batches handed to the training loop.
    batches: int
    #: Samples in them, where the plan tells (an unbatched item counts one).
    samples: int
    #: Bytes in them, as they came from the workers; 0 with num_workers=0 and for a shared flow, whose services count.
    bytes: int
    #: Workers replaced after their death; a shared flow's are its services' affair.
    restarts: int
    #: Results dropped because the batch had already come from another worker.
    duplicates: int
    #: Batches moved from a busy worker to an idle one.
    steals: int
    #: Seconds for which workers on a platform beyond this host have run, all of them together, as functions are billed:
    #: not while they were waited for. Of a shared flow, this loader's part of what its workers have taken, wherever
    #: they run, by the samples that each job has read; and what they have taken for all jobs.
    worker_s: float = 0.0
    flow_worker_s: float = 0.0
    #: Of a shared flow, samples that its jobs have been given and those that were loaded for them, all jobs together,
    #: since its shards were started; and why little is shared, empty where much is or nothing can be said yet.
    flow_served: int = 0
    flow_decodes: int = 0
    sharing: str = ""
    #: Of a shared flow and of a loader with a platform, what keeps jobs from reading faster: "workers" (too few), "cold
    #: start" (more are coming), "quota" or what else their platform says, "storage", "network", "job" (it is the
    #: training's own process), "budget" (as many work as may); empty where that is not known.
    limited_by: str = ""

    def __str__(self) -> str:
        return "\n".join(f"{name:<12} {text}" for name, text in self._rows())

    def _repr_html_(self) -> str:
        from html import escape

        rows = (
            f'<tr><th style="text-align:left">{name}</th><td style="text-align:left">{escape(text)}</td></tr>'
            for name, text in self._rows()
        )
        return f"<table>{''.join(rows)}</table>"

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
        if self.limited_by:
            rows.append(("limited by", self.limited_by))
        return rows


class WorkerTime:
    """For how long the workers of one fleet have run; written by whoever has it."""

    __slots__ = ("away_s", "is_over", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        #: For how long those that could work waited for their links, as they say, all of them together.
        self.away_s = 0.0
        #: Whether none of them runs any more.
        self.is_over = False


class LoaderMeter:
    """Counts for one loader. Used by the training thread only."""

    def __init__(self) -> None:
        self.stall_s = 0.0
        self.iterating_s = 0.0
        #: Seconds of all iterations from `iter()` to the first batch and while workers were ended; and of the stall.
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
        #: As of `LoaderStats`; the thread that has its workers writes it.
        self.limited_by = ""
        self._fleets: list[WorkerTime] = []
        self._stall_before_s = 0.0
        self._last_seen_s = 0.0
        self._began_s = 0.0
        #: Since when the training loop waits in `next()`; 0.0 while it does not.
        self._entered_s = 0.0

    def begin_epoch(self) -> None:
        """An iteration begins now."""
        self._began_s = self._last_seen_s = time.perf_counter()
        self._stall_before_s = self.stall_s
        self.time_to_first_batch_s = None
        self.epochs += 1

    def waiting(self) -> "_WaitingTime":
        """A context manager whose body is one `next()` of the training loop."""
        return _WaitingTime(self)

    def waited(self, entered_s: float) -> None:
        """A `next()` that began at this time, by `time.perf_counter`, is over."""
        left_s = time.perf_counter()
        self._entered_s = 0.0
        self.stall_s += left_s - entered_s
        self.iterating_s += left_s - self._last_seen_s
        self._last_seen_s = left_s

    def waiting_s(self) -> float:
        """For how long the training loop has been waiting, seconds. Any thread may call."""
        entered_s = self._entered_s
        return max(0.0, time.perf_counter() - entered_s) if entered_s else 0.0

    def delivered(self, samples: int, size: int) -> None:
        """A batch of so many samples and bytes goes to the training loop."""
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
        """Within a `next()`, an iteration's workers are ended meanwhile."""
        began_s = time.perf_counter()
        yield
        took_s = time.perf_counter() - began_s
        self.turns_s += took_s
        self.turn_stall_s += took_s

    def count(self, duplicates: int, steals: int) -> None:
        """So many more results were dropped, and batches moved."""
        self.duplicates += duplicates
        self.steals += steals

    def add_fleet(self, time: WorkerTime) -> None:
        """Count the time of these workers too."""
        over = WorkerTime()
        over.seconds = sum(one.seconds for one in self._fleets if one.is_over)
        over.is_over = True
        self._fleets = [over, *(one for one in self._fleets if not one.is_over), time]

    def snapshot(self) -> LoaderStats:
        """The counts as they are now."""
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
        )


class _WaitingTime:
    """A context manager by hand: `contextmanager` takes twice the time."""

    __slots__ = ("_entered_s", "_meter")

    def __init__(self, meter: LoaderMeter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        self._entered_s = self._meter._entered_s = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._meter.waited(self._entered_s)
