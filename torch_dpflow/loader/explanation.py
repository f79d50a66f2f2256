"""Diagnosis of a loader from its figures: what limits its speed, and what to change."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from torch_dpflow._core.checks import counted
from torch_dpflow._core.processor_time import MIN_PROCESSOR_SHARE, QUEUED_SHARE, are_processors_short
from torch_dpflow.cluster.monitoring.page_figures import limit_of

if TYPE_CHECKING:
    from torch_dpflow.metrics import LoaderStats

#: An explanation needs this many batches, not counting the first of each epoch, and this many seconds of iterating.
MIN_BATCHES, MIN_S = 10, 0.2
#: A training loop that waits for a smaller share of the time is not limited by loading.
MAX_WAIT_SHARE = 0.05
#: The starts and ends of epochs are the limit if they take at least this share of the time.
TURN_SHARE = 0.5
#: One epoch's start alone is the limit if it takes at least this share of the time of all starts and ends.
ONE_START_SHARE = 0.75
#: Maximum of `read_threads` that is recommended.
MAX_THREADS = 16


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Figures of a loader, from which `explain` decides."""

    stats: LoaderStats
    #: Seconds from `iter` to the latest batch, summed over all epochs.
    iterating_s: float
    #: Of these, seconds in turns of epochs: from `iter` to the first batch, and while workers ended.
    turns_s: float
    #: Seconds of `turns_s` for which the training loop waited.
    turn_stall_s: float
    #: The longest time from `iter` to a first batch, seconds.
    longest_start_s: float = 0.0
    num_workers: int
    persistent: bool = False
    read_threads: int = 1
    #: Processors of this host that this process may use.
    processors: int
    #: Seconds for which this host's workers were watched; in this time, seconds for which workers ran on a processor,
    #: and seconds for which they waited for one, summed over workers.
    watched_s: float = 0.0
    cpu_s: float = 0.0
    queued_s: float = 0.0
    flow: str = ""
    #: The platform of remote workers; how many of them work; and why there are no more. Empty without remote workers.
    platform: str = ""
    working: int = 0
    refused: str = ""

    @property
    def wait_s(self) -> float:
        """Time that the training loop waited, except for first batches and for ends of epochs, seconds."""
        return max(0.0, self.stats.stall_s - self.turn_stall_s)

    @property
    def steady_s(self) -> float:
        """Time from the first to the last batch of an epoch, summed over all epochs, seconds."""
        return max(0.0, self.iterating_s - self.turns_s)

    @property
    def rate(self) -> float:
        """Samples per second of `iterating_s`; 0.0 while that is 0."""
        return self.stats.samples / self.iterating_s if self.iterating_s else 0.0


@dataclass(frozen=True, repr=False)
class Explanation:
    """Result of `DPFlowDataLoader.explain`: what limits the loader's speed. `print` shows it as three lines."""

    #: "workers" (too few), "processors", "storage", "start" (of epochs), "job" (the training itself), "cold start",
    #: "network", "shard", "budget", or a platform's reason, as "quota"; empty if not known.
    limited_by: str
    #: The measurements, what they mean, and what to change.
    measured: str
    meaning: str
    change: str

    def __str__(self) -> str:
        return f"{self.measured}\n{self.meaning}\n{self.change}"

    __repr__ = __str__


#: The fields of `Explanation` except `measured`.
_Verdict: TypeAlias = tuple[str, str, str]


def explain(seen: Observed) -> Explanation:
    """Return the limit of a loader with these figures, and a change that helps."""
    stats = seen.stats
    measured = (
        f"Measured: {stats.batches:,} batches in {_time(seen.iterating_s)}, {seen.rate:,.0f} samples/s; the training "
        f"loop waited {_time(stats.stall_s)} ({stats.stall_share:.0%}), {_time(seen.turn_stall_s)} of it at the start "
        f"and end of {counted(stats.epochs, 'epoch')}."
    )
    sample, stages = stats.times.shown()
    if sample:
        measured += f" A sample took {sample} to load; of the workers' time: {stages}."
    verdict = _if_too_little(seen) or _by_waits(seen)
    if verdict is None:
        is_elsewhere = seen.platform and seen.num_workers
        verdict = _of_flow(seen) if seen.flow else _of_remote_workers(seen) if is_elsewhere else _of_local_workers(seen)
    limited_by, meaning, change = verdict
    return Explanation(limited_by, measured, meaning, change)


def _if_too_little(seen: Observed) -> _Verdict | None:
    left = MIN_BATCHES - (seen.stats.batches - seen.stats.epochs)
    if left <= 0 and seen.iterating_s >= MIN_S:
        return None
    needed = f"{MIN_BATCHES} batches without the first of each epoch, and {MIN_S:g} s of reading, are needed"
    return (
        "",
        f"Limit: not known, too little was read: {needed}.",
        "Change: nothing yet; read on and explain again.",
    )


def _by_waits(seen: Observed) -> _Verdict | None:
    if seen.stats.epochs > 1 and seen.turns_s >= TURN_SHARE * seen.iterating_s:
        stays = bool(seen.persistent or seen.flow or not seen.num_workers)
        if stays and seen.longest_start_s >= ONE_START_SHARE * seen.turns_s > 0:
            rest = _time(max(0.0, seen.turns_s - seen.longest_start_s))
            meaning = f"Limit: one epoch's start, {_time(seen.longest_start_s)}; the others took {rest} in all."
            return "start", meaning, "Change: nothing if the run is long; it waited for workers once."
        each = _time(seen.turns_s / seen.stats.epochs)
        meaning = f"Limit: the start and end of epochs, {each} each; what lies between takes less."
        if stays:
            return "start", meaning, "Change: longer epochs, or first samples that load faster."
        return (
            "start",
            meaning,
            "Change: persistent_workers=True, which keeps the workers from epoch to epoch.",
        )
    if seen.wait_s <= MAX_WAIT_SHARE * seen.steady_s:
        share = seen.wait_s / seen.steady_s if seen.steady_s else 0.0
        meaning = f"Limit: the training itself; it waited {share:.1%} of the time between first and last batches."
        return "job", meaning, "Change: nothing; loading keeps up."
    return None


def _of_flow(seen: Observed) -> _Verdict:
    by = seen.stats.limited_by
    name = seen.flow.partition(":")[0]
    limit = limit_of(by)
    change = f"{limit.change}; else {limit.otherwise}" if limit.otherwise else limit.change
    if seen.stats.sharing and by not in ("", "job", "cold start"):
        change = f"{seen.stats.sharing}. Else {change}"
    shared = f"jobs were given {seen.stats.flow_served:,} samples, for which {seen.stats.flow_decodes:,} were loaded"
    return by, f"Limit: {limit.meaning}; {shared}.", f"Change: {change.replace('NAME', name)}."


def _of_remote_workers(seen: Observed) -> _Verdict:
    working = f"{seen.working} of {seen.num_workers} workers work"
    if seen.working < seen.num_workers:
        if seen.refused:
            change = "Change: raise the platform's limit, or lower num_workers to those that run."
            return (
                seen.refused,
                f"Limit: the workers that platform {seen.platform!r} provides; {working}.",
                change,
            )
        return (
            "cold start",
            f"Limit: {working}; the others start or are replaced.",
            "Change: nothing yet; with persistent_workers=True they stay from epoch to epoch.",
        )
    each, flow = seen.rate / seen.num_workers, seen.stats.bytes / seen.iterating_s / 1e6
    return (
        "workers",
        f"Limit: {counted(seen.num_workers, 'worker')} load {each:,.1f} samples/s each; {flow:,.1f} MB/s come here.",
        "Change: a higher num_workers. If that does not help, the network or the storage is the limit: smaller "
        "samples (images as uint8), read_threads.",
    )


def _of_local_workers(seen: Observed) -> _Verdict:
    if not seen.num_workers:
        return (
            "workers",
            "Limit: no workers; the training loop stops while it loads each batch itself.",
            f"Change: num_workers={max(1, seen.processors)}, one for each processor.",
        )
    workers = counted(seen.num_workers, "worker")
    if not seen.watched_s or not seen.cpu_s:
        return (
            "",
            f"Limit: loading, by {workers}; the cause was not measured, as no epoch was read to its end.",
            "Change: explain during an iteration, or after a whole one.",
        )
    used, wanted = seen.cpu_s / seen.watched_s, (seen.cpu_s + seen.queued_s) / seen.watched_s
    has = f"{workers} used {used:.1f} of {counted(seen.processors, 'processor')}"
    share, processors = wanted / seen.num_workers, seen.processors
    if are_processors_short(seen.cpu_s, seen.queued_s, seen.watched_s, workers=seen.num_workers, processors=processors):
        if seen.queued_s > QUEUED_SHARE * seen.cpu_s:
            has += f" and waited for one {seen.queued_s / seen.cpu_s:.1f} s for each second on it"
        return (
            "processors",
            f"Limit: processors; {has}.",
            "Change: decode faster (images: torch_dpflow.vision), or use other hosts' processors (platform=); if "
            "several jobs read this data, share one loading among them (flow=).",
        )
    if share < MIN_PROCESSOR_SHARE:
        return _of_storage(seen, f"{has}; they waited {1 - share:.0%} of their time, for reads for example")
    more = min(4 * seen.num_workers, max(seen.num_workers + 1, math.ceil(seen.processors / share)))
    return "workers", f"Limit: too few workers; {has}.", f"Change: num_workers={more}."


def _of_storage(seen: Observed, has: str) -> _Verdict:
    if seen.read_threads < MAX_THREADS:
        threads = min(MAX_THREADS, 4 * seen.read_threads)
        change = (
            f"LoaderOptions(read_threads={threads}), where __getitem__ is thread-safe; or num_workers="
            f"{2 * seen.num_workers}"
        )
    else:
        change = f"num_workers={2 * seen.num_workers}; or data that is nearer, as on this host"
    return "storage", f"Limit: storage; {has}.", f"Change: {change}."


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:,.1f} s"
