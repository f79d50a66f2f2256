"""What limits a loader, and what to change: a decision from its figures. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from torch_dpflow.cluster.monitoring.limits import limit_of

if TYPE_CHECKING:
    from torch_dpflow.metrics import LoaderStats

#: Nothing is said before so many batches have come beside the first ones of epochs, and so many seconds have passed.
LEAST_BATCHES, LEAST_S = 10, 0.2
#: Who waits for a smaller share of the time is not limited by loading.
KEPT_UP = 0.05
#: Which share of the time goes to the start and end of epochs where these are what limits.
TURNS = 0.5
#: One start that takes so much of these says nothing of the others.
ONE_START = 0.75
#: Workers that want a processor for a smaller share of the time wait for storage.
READING = 0.5
#: Processors are the limit where workers want such a part of them, or wait for one so long for each second on it.
FULL, TAKEN = 0.8, 0.5
#: Most read threads that are recommended.
MOST_THREADS = 16


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What is known of a loader."""

    stats: LoaderStats
    #: Seconds from `iter` to the latest batch, all epochs together; of these until first batches came and while workers
    #: were ended; and how much of the stall that was.
    iterating_s: float
    turns_s: float
    turn_stall_s: float
    #: The longest time until a first batch came.
    longest_start_s: float = 0.0
    num_workers: int
    persistent: bool = False
    read_threads: int = 1
    #: Of this host, those that this process may use.
    processors: int
    #: For so long the workers of this host were watched; what they ran on a processor, and waited for one, all of them
    #: together. Seconds.
    watched_s: float = 0.0
    cpu_s: float = 0.0
    queued_s: float = 0.0
    flow: str = ""
    #: Where workers run, if not on this host; how many of them work, and why there are no more.
    platform: str = ""
    working: int = 0
    refused: str = ""

    @property
    def wait_s(self) -> float:
        """Seconds that the training loop waited for batches other than the first ones."""
        return max(0.0, self.stats.stall_s - self.turn_stall_s)

    @property
    def steady_s(self) -> float:
        """Seconds from first batches to last ones."""
        return max(0.0, self.iterating_s - self.turns_s)

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.stats.samples / self.iterating_s if self.iterating_s else 0.0


@dataclass(frozen=True, repr=False)
class Explanation:
    """What limits a loader: what `DPFlowDataLoader.explain` returns. Printed, it is three lines."""

    #: "workers" (too few), "processors", "storage", "start" (of epochs), "job" (the training itself), "cold start",
    #: "network", "budget", or what a platform says, as "quota"; empty where too little was read to tell.
    limited_by: str
    #: What was measured, what that means, what to change.
    measured: str
    meaning: str
    change: str

    def __str__(self) -> str:
        return f"{self.measured}\n{self.meaning}\n{self.change}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from html import escape

        return "<br>".join(escape(line) for line in str(self).split("\n"))


#: `Explanation` but for what was measured.
_Verdict: TypeAlias = tuple[str, str, str]


def explain(seen: Observed) -> Explanation:
    """What limits a loader of which this is known."""
    stats = seen.stats
    measured = (
        f"Measured: {stats.batches:,} batches in {_time(seen.iterating_s)}, {seen.rate:,.0f} samples/s; the training "
        f"loop waited {_time(stats.stall_s)} ({stats.stall_share:.0%}), {_time(seen.turn_stall_s)} of it where "
        f"{_counted(stats.epochs, 'epoch')} began and ended."
    )
    verdict = _too_little(seen) or _from_waits(seen)
    if verdict is None:
        is_elsewhere = seen.platform and seen.num_workers
        verdict = _of_flow(seen) if seen.flow else _elsewhere(seen) if is_elsewhere else _here(seen)
    limited_by, meaning, change = verdict
    return Explanation(limited_by, measured, meaning, change)


def _too_little(seen: Observed) -> _Verdict | None:
    left = LEAST_BATCHES - (seen.stats.batches - seen.stats.epochs)
    if left <= 0 and seen.iterating_s >= LEAST_S:
        return None
    needed = (
        f"{LEAST_BATCHES} batches beside the first of each epoch, and {LEAST_S:g} s of reading, say something"
    )
    return (
        "",
        f"Limit: not known, too little was read; {needed}.",
        "Change: nothing yet; read on and ask again.",
    )


def _from_waits(seen: Observed) -> _Verdict | None:
    """Where the waits themselves tell it."""
    if seen.stats.epochs > 1 and seen.turns_s >= TURNS * seen.iterating_s:
        stays = bool(seen.persistent or seen.flow or not seen.num_workers)
        if stays and seen.longest_start_s >= ONE_START * seen.turns_s > 0:
            rest = _time(max(0.0, seen.turns_s - seen.longest_start_s))
            meaning = (
                f"Limit: one epoch's start, {_time(seen.longest_start_s)}; the others took {rest} in all."
            )
            return "start", meaning, "Change: nothing where a run is long; workers were waited for once."
        each = _time(seen.turns_s / seen.stats.epochs)
        meaning = f"Limit: the start and end of epochs, {each} each; what lies between takes less."
        if stays:
            return "start", meaning, "Change: longer epochs, or first samples that load faster."
        return (
            "start",
            meaning,
            "Change: persistent_workers=True, which keeps the workers from epoch to epoch.",
        )
    if seen.wait_s <= KEPT_UP * seen.steady_s:
        share = seen.wait_s / seen.steady_s if seen.steady_s else 0.0
        meaning = f"Limit: the training itself; between first batches and last ones {share:.1%} of the time was waited."
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


def _elsewhere(seen: Observed) -> _Verdict:
    working = f"{seen.working} of {seen.num_workers} workers work"
    if seen.working < seen.num_workers:
        if seen.refused:
            change = "Change: have the platform give more, or be content with those that run (num_workers)."
            return seen.refused, f"Limit: what platform {seen.platform!r} gives; {working}.", change
        return (
            "cold start",
            f"Limit: {working}; the others start or are replaced.",
            "Change: nothing yet; with persistent_workers=True they stay from epoch to epoch.",
        )
    each, flow = seen.rate / seen.num_workers, seen.stats.bytes / seen.iterating_s / 1e6
    return (
        "workers",
        f"Limit: {_counted(seen.num_workers, 'worker')} load {each:,.1f} samples/s each; {flow:,.1f} MB/s come here.",
        "Change: a higher num_workers. Where that brings nothing, the network or the storage is the limit: smaller "
        "samples (images as uint8), read_threads.",
    )


def _here(seen: Observed) -> _Verdict:
    if not seen.num_workers:
        return (
            "workers",
            "Limit: no workers; the training loop loads each batch itself and stands still meanwhile.",
            f"Change: num_workers={max(1, seen.processors)}, one for each processor.",
        )
    workers = _counted(seen.num_workers, "worker")
    if not seen.watched_s or not seen.cpu_s:
        return (
            "",
            f"Limit: loading, by {workers}; what they wait for was not measured, as no epoch was read to its end.",
            "Change: ask while an iteration goes on, or after a whole one.",
        )
    used, wanted = seen.cpu_s / seen.watched_s, (seen.cpu_s + seen.queued_s) / seen.watched_s
    has = f"{workers} used {used:.1f} of {_counted(seen.processors, 'processor')}"
    share, is_full = wanted / seen.num_workers, wanted >= FULL * seen.processors
    if share < READING and not is_full:
        return _waiting_for_storage(seen, f"{has}; {1 - share:.0%} of their time they waited, as for reads")
    if is_full or seen.queued_s > TAKEN * seen.cpu_s:
        if seen.queued_s > TAKEN * seen.cpu_s:
            has += f" and waited for one {seen.queued_s / seen.cpu_s:.1f} s for each second on it"
        return (
            "processors",
            f"Limit: processors; {has}.",
            "Change: decode faster (images: torch_dpflow.vision), share one loading among jobs (flow=), or use other "
            "hosts' processors (platform=).",
        )
    more = min(4 * seen.num_workers, max(seen.num_workers + 1, math.ceil(seen.processors / share)))
    return "workers", f"Limit: too few workers; {has}.", f"Change: num_workers={more}."


def _waiting_for_storage(seen: Observed, has: str) -> _Verdict:
    if seen.read_threads < MOST_THREADS:
        threads = min(MOST_THREADS, 4 * seen.read_threads)
        change = (
            f"LoaderOptions(read_threads={threads}), where __getitem__ is thread-safe; or num_workers="
            f"{2 * seen.num_workers}"
        )
    else:
        change = f"num_workers={2 * seen.num_workers}; or data that is nearer, as on this host"
    return "storage", f"Limit: storage; {has}.", f"Change: {change}."


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:,.1f} s"
