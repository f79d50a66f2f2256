"""Autoscaling of one flow: decides once a second how many workers it should have. A pure state machine.

::

    demand = samples that the jobs read, per second in which they did not wait for data
    need   = demand x loads per sample / loads per second of a busy worker / HEADROOM

**Up** when jobs wait for loads, or when workers are busy all the time. A step sets the number that is needed, but at
most `TIMES` times the present number plus `MORE`. Until its new workers have been measured, the step is corrected
upwards: for the first seconds by the latest need, then by the average need. Then the next step can follow. **Down** to
the highest average need of the last 20 s, or of the time that workers take to start (a cold start) if that is longer.
The length of queues plays no part: a queue is as long as jobs prefetch, however few workers there are.

**Saturation.** If added workers have increased the rate only little, something else is the limit, such as the storage.
The flow then gets only the workers that the measured rate needs. After several minutes a small step tests whether the
limit still holds.

**Pauses.** A job that is open but requests nothing, as during a validation, keeps its workers for a time. After that
time, or soon after the last job has left, the flow gets the minimum. When a job requests samples again, the former
number is restored at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from torch_dpflow._core.processor_time import are_processors_short
from torch_dpflow.cluster.messages.coordinator import AutoscaleLimits


class JobCounts(msgspec.Struct, frozen=True):
    """Counters of a job's reads since it was opened: see `JobFigures`."""

    samples: int
    stall_s: float
    reading_s: float


class FlowCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a flow at one moment: counters, which grow while the flow's services run, and present numbers."""

    #: The number of jobs that read, and the counts of each job; a job that has just joined has no counts.
    jobs: int
    readings: Mapping[str, JobCounts] = {}
    #: Samples that jobs have requested, and loads that these requests have caused or will cause.
    requested: float = 0
    due: float = 0
    #: Sums over workers: finished loads, seconds in which they had tasks, and seconds in which they existed.
    loads: float = 0
    busy_s: float = 0.0
    worker_s: float = 0.0
    #: The part of `busy_s` in which workers were idle while their results were in transit.
    away_s: float = 0.0
    #: Seconds in which jobs' requests waited for loads.
    late_s: float = 0.0
    #: Seconds in which samples were on their way from shards to jobs.
    link_s: float = 0.0
    #: Seconds that workers on nodes ran on a processor, and waited for one; and the number of processors of the nodes.
    cpu_s: float = 0.0
    queued_s: float = 0.0
    processors: int = 0
    #: Workers that are ready to work.
    working: float = 0
    #: Why the platform starts no more workers; empty if nothing limits it.
    refused: str = ""


#: The fields that are counters: they only grow, unless a service restarts.
_COUNTED = ("requested", "due", "loads", "busy_s", "worker_s", "away_s", "late_s", "link_s", "cpu_s", "queued_s")


def between(first: FlowCounts, last: FlowCounts) -> tuple[FlowCounts, float, float]:
    """Return the growth from `first` to `last`: (flow's counters, jobs' stall seconds, jobs' reading seconds)."""
    readings = [(one, first.readings.get(name, JobCounts(0, 0.0, 0.0))) for name, one in last.readings.items()]
    counted = {name: getattr(last, name) - getattr(first, name) for name in _COUNTED}
    grown = FlowCounts(jobs=last.jobs, **counted)
    stall_s = sum(max(0.0, one.stall_s - then.stall_s) for one, then in readings)
    return grown, stall_s, sum(max(0.0, one.reading_s - then.reading_s) for one, then in readings)


#: Length of the window over which rates are measured (seconds).
WINDOW_S = 5.0
#: The intended busy share of workers, and the share above which they count as busy all the time.
HEADROOM, BUSY = 0.92, 0.95
#: Jobs stall if they wait for more than the share `STALLED` of their time. More workers help only if at least the share
#: `LATE` of the wait is for loads. A job's demand is computed as if it read for at least the share `MIN_SHARE` of time.
STALLED, LATE, MIN_SHARE = 0.02, 0.5, 0.25
#: No workers are added if workers wait for their links for more than this share of their busy time.
AWAY = 0.5
#: A step up goes to at most `TIMES` times the number of workers plus `MORE`; the latest need corrects it for
#: `CORRECT_S`.
TIMES, MORE, CORRECT_S = 2.0, 4, 6.0
#: How long a step is measured (seconds), once the share `THERE` of all workers works.
MEASURE_S, THERE = 4.0, 0.9
#: A step that adds at least the share `JUDGED` of workers should add the same share to the rate. The flow is saturated
#: if the step adds less than the share `BROUGHT` of that.
JUDGED, BROUGHT = 0.2, 0.4
#: How long a flow counts as saturated (seconds), and the factor of the step that tests whether it still is.
SATURATED_S, TRIAL = 300.0, 1.25
#: Scale down to the highest need of the last `DOWN_S` seconds, or of the time of `DOWN_STARTS` cold starts if longer,
#: but only if this need is below the share `DOWN` of the present number.
DOWN_S, DOWN_STARTS, DOWN = 20.0, 1.0, 0.95
#: Weight of the latest need in the moving average for scaling down; largest fraction of a worker that is rounded down.
SMOOTHING, NEGLIGIBLE = 0.3, 0.05
#: How long one worker stays after the last load of a cached flow, and all workers after the last job (seconds).
SELDOM_S, EMPTY_S = 60.0, 5.0
#: A job that pauses keeps its workers for at least the time of `HOLD_STARTS` cold starts; assumed time of a cold start
#: before one has been measured (seconds).
HOLD_STARTS, COLD_S = 6.0, 3.0


@dataclass(slots=True)
class _JobDemand:
    """Demand of a job, samples per second, and the time of its last request (seconds)."""

    requested_at: float
    demand: float = 0.0


@dataclass(slots=True)
class _Step:
    """Step up that is being measured."""

    began: float
    #: The number of workers before it, and their loads per second, `each` over all time and `rate` while busy.
    before: int
    each: float
    rate: float
    #: The largest number of workers it may reach.
    most: int
    #: When its workers were ready (seconds), and the counts at that time.
    there: tuple[float, FlowCounts] | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """Shares of time and rates of a flow, measured over a window."""

    #: Shares of the jobs' reading time: waits, waits for loads, transfer. Share of the workers' time: busy with tasks.
    stall: float = 0.0
    late: float = 0.0
    link: float = 0.0
    busy: float = 0.0
    #: Share of the busy time in which workers were idle because their results were in transit.
    away: float = 0.0
    #: Loads per second of a worker, while busy (nan if not known) and on average; loads per requested sample.
    rate: float = math.nan
    each: float = 0.0
    per_sample: float = 1.0
    #: Whether the workers use up the processors.
    processors: bool = False


def measure(first: FlowCounts, last: FlowCounts, passed_s: float, before: Figures) -> Figures:
    """Return the figures between two counts, `passed_s` seconds apart. before: earlier figures, for unknown rates."""
    grown, stall_s, reading_s = between(first, last)

    def share(part: float, whole: float) -> float:
        return part / whole if whole > 0 else 0.0

    return Figures(
        stall=min(1.0, share(stall_s, reading_s)),
        late=min(1.0, share(grown.late_s, reading_s)),
        link=share(grown.link_s, reading_s),
        busy=share(grown.busy_s, grown.worker_s),
        away=share(grown.away_s, grown.busy_s),
        rate=share(grown.loads, grown.busy_s) or before.rate,
        each=share(grown.loads, grown.worker_s),
        per_sample=max(0.0, grown.due / grown.requested) if grown.requested > 0 else before.per_sample,
        processors=are_processors_short(
            grown.cpu_s, grown.queued_s, passed_s, workers=int(last.working), processors=last.processors
        ),
    )


@dataclass(slots=True)
class _Saturation:
    """Limit of a saturated flow: loads per second, each worker's rate, and how long the limit is assumed."""

    load: float = math.inf
    rate: float = 0.0
    until: float = -math.inf
    #: Whether the next step tests if the limit still holds.
    tries: bool = False
    #: What is saturated: "storage" or "network".
    by: str = "storage"


class Autoscaler:
    """State machine that decides how many workers one flow should have. Not thread-safe; a step is O(jobs).

    Args:
        bounds: bounds of the number of workers.
        first: initial number of workers.
    """

    def __init__(self, bounds: AutoscaleLimits, first: int) -> None:
        self._bounds = bounds
        #: The number of workers that the flow should have.
        self.target = self._within(first)
        #: Workers to restore when a job requests again; None while no job pauses.
        self._resume: int | None = None
        #: When a job was last open, and when one last requested samples (seconds).
        self._read_at = self._requested_at = -math.inf
        #: When jobs last caused a load (seconds).
        self._due_at = -math.inf
        self._history: deque[tuple[float, FlowCounts]] = deque()
        self._needs: deque[tuple[float, float]] = deque()
        self._usual_need = 0.0
        self._figures = Figures()
        #: Seconds of a cold start, and the demand of each job.
        self._cold_s, self._jobs = COLD_S, dict[str, _JobDemand]()
        self._saturation = _Saturation()
        self._step: _Step | None = None

    def bound(self, bounds: AutoscaleLimits) -> None:
        self._bounds = bounds
        self.target = self._within(self.target)

    def begin(self, now: float) -> None:
        """Record that a job is about to read the flow."""
        self._read_at = self._requested_at = max(now, self._read_at)
        self._wake(now)

    def forget_limit(self) -> None:
        """Discard the step that is being measured, and the saturation. Call this when the number of shards changes."""
        self._step, self._saturation = None, _Saturation()

    def step(self, counts: FlowCounts, now: float) -> str:
        """Process the present counts: set `target`, and return the limit that keeps jobs from reading faster.

        The limit is "workers", "processors", "cold start", "storage", "network", "job", "budget", or `counts.refused`,
        such as "quota". The result is empty if no job reads, or if the limit is not known yet.
        """
        if not self._history:
            self._read_at = self._requested_at = max(now, self._read_at)
        self._note(counts, now)
        if counts.jobs:
            self._read_at = now
        hold_s = max(self._bounds.hold_s, HOLD_STARTS * self._cold_s)
        if now - self._read_at >= EMPTY_S or now - self._requested_at >= hold_s:
            self._rest()
            return ""
        self._wake(now)
        if counts.jobs:
            self._adjust(counts, self._demand(now, hold_s), now)
        return self._limited_by(counts) if counts.jobs else ""

    def _note(self, counts: FlowCounts, now: float) -> None:
        """Record these counts, and measure their growth over the window."""
        history = self._history
        if history and (counts.loads < history[-1][1].loads or counts.requested < history[-1][1].requested):
            history.clear()  # a service has restarted, and counts from 0
        before = history[-1][1] if history else None
        if before is None or counts.due > before.due:
            self._due_at = now
        history.append((now, counts))
        while len(history) > 2 and history[1][0] <= now - WINDOW_S:
            history.popleft()
        self._note_jobs(before, counts, now)
        began, first = history[0]
        self._figures = measure(first, counts, now - began, self._figures)

    def _note_jobs(self, before: FlowCounts | None, counts: FlowCounts, now: float) -> None:
        jobs, base = self._jobs, self._history[0][1]
        for name in jobs.keys() - counts.readings.keys():
            del jobs[name]
        late = before is not None and counts.late_s > before.late_s
        for name, reading in counts.readings.items():
            job = jobs.setdefault(name, _JobDemand(now))
            last = before.readings.get(name) if before is not None else None
            if last is None or reading != last or late:
                job.requested_at = self._requested_at = now
            # A job that was not there then counts with all that it has read: it has just begun.
            first = base.readings.get(name, JobCounts(0, 0.0, 0.0))
            taken, stall_s = reading.samples - first.samples, reading.stall_s - first.stall_s
            passed_s = reading.reading_s - first.reading_s
            if taken > 0 and passed_s > 0:
                job.demand = taken / max(passed_s - stall_s, MIN_SHARE * passed_s)
        if late or (counts.jobs and not counts.readings):
            self._requested_at = now

    def _demand(self, now: float, hold_s: float) -> float:
        """Return the demand of all jobs at time `now`, samples per second.

        A job that has requested nothing for less than `hold_s` seconds counts with its last demand, others with 0.
        """
        return sum(job.demand for job in self._jobs.values() if now - job.requested_at < hold_s)

    def _within(self, workers: int) -> int:
        return max(self._bounds.least, min(workers, self._bounds.most))

    def _rest(self) -> None:
        if self._resume is None:
            self._resume = self.target
        self.target = self._within(0)
        self._step = None
        self._needs.clear()

    def _wake(self, now: float) -> None:
        if self._resume is not None:
            self.target, self._resume = self._within(max(1, self._resume)), None
            self._begin_needs(now)

    def _begin_needs(self, now: float) -> None:
        """Keep the present number of workers for a time, until the need can be measured."""
        self._needs.clear()
        self._needs.append((now, self.target))
        self._usual_need = self.target

    def _adjust(self, counts: FlowCounts, demand: float, now: float) -> None:
        if not self._needs:
            self._begin_needs(now)
        need = self._need(demand, now)
        waits = self._figures.late > 0
        if need is None:
            if waits and not self.target:
                self.target = self._within(1)
            return
        need = self._within(max(need, 1) if waits else need)
        self._usual_need += SMOOTHING * (need - self._usual_need)
        self._needs.append((now, self._usual_need))
        oldest = now - max(DOWN_S, DOWN_STARTS * self._cold_s)
        while self._needs[0][0] < oldest:
            self._needs.popleft()
        self._settle(counts, need, now)
        has_room = not counts.refused and self._figures.away <= AWAY
        if need > self.target and (self._is_short() or not self.target) and has_room:
            self._raise(counts, need, now)
        elif self._step is None:
            highest = math.ceil(max(one for _, one in self._needs) - NEGLIGIBLE)
            if highest < DOWN * self.target:
                self.target = highest

    def _need(self, demand: float, now: float) -> int | None:
        """Return how many workers the demand needs; None if unknown."""
        figures, saturation = self._figures, self._saturation
        load, rate = figures.per_sample * demand, figures.rate
        if load == 0 and demand > 0:
            return int(now - self._due_at < SELDOM_S)
        if not demand or math.isnan(rate):
            return None
        if now < saturation.until:
            load, rate = min(load, saturation.load), max(rate, saturation.rate)
        return math.ceil(load / rate / HEADROOM)

    def _is_short(self) -> bool:
        figures = self._figures
        stalls = figures.stall > STALLED and figures.late >= LATE * figures.stall
        return stalls or figures.busy > BUSY

    def _raise(self, counts: FlowCounts, need: int, now: float) -> None:
        step, figures = self._step, self._figures
        if step is None:
            before = self.target
            most = math.ceil(TRIAL * before) + 1 if self._saturation.tries else int(TIMES * before) + MORE
            step = self._step = _Step(now, before, figures.each, figures.rate, most)
        elif now - step.began > CORRECT_S:
            need = min(need, math.ceil(self._usual_need))
        self.target = self._within(max(self.target, min(need, step.most)))

    def _settle(self, counts: FlowCounts, need: int, now: float) -> None:
        """End the latest step up once its workers are measured; detect saturation if the rate has hardly risen."""
        step = self._step
        if step is None:
            return
        if step.there is None:
            # If the step is small, the share `THERE` may be at work from the start.
            if now > step.began and counts.working >= max(THERE * self.target, min(step.before + 1, self.target)):
                step.there = now, counts
                self._cold_s += 0.5 * (now - step.began - self._cold_s)
            return
        ready_at, ready = step.there
        if now - ready_at < MEASURE_S:
            return
        self._step = None
        passed, _, _ = between(ready, counts)
        if (
            not step.before
            or self.target < (1 + JUDGED) * step.before
            or not step.each > 0  # not known, or nothing was loaded: there is nothing to compare with
            or not passed.worker_s
        ):
            return
        each, share = passed.loads / passed.worker_s, self.target / step.before - 1
        brought = each / step.each * (1 + share) - 1
        if passed.busy_s > BUSY * passed.worker_s and self._is_short() and brought < BROUGHT * share:
            self._saturate(step, each, now)
        else:
            self._saturation.tries = False

    def _saturate(self, step: _Step, each: float, now: float) -> None:
        load, rate = each * self.target, step.rate
        if self._saturation.tries:
            rate = max(rate, self._saturation.rate)  # there were too many before this step already
        # If a link carries fewer workers, some of them always wait for it; a storage makes them work for longer.
        by = "network" if self._figures.away > AWAY / 2 else "storage"
        self._saturation = _Saturation(load, rate, now + SATURATED_S, tries=True, by=by)
        self.target = self._within(min(self.target, max(step.before, math.ceil(load / rate / HEADROOM))))
        self._begin_needs(now)

    def _limited_by(self, counts: FlowCounts) -> str:
        figures = self._figures
        if figures.stall <= STALLED and not (figures.late > 0 and not counts.working):
            return "job" if any(job.demand for job in self._jobs.values()) else ""
        if figures.away > AWAY:
            return "network"
        if figures.late < LATE * figures.stall:
            # Neither for loads nor for a link: the job's own process, or the processor that it shares with others.
            return "network" if figures.link >= LATE * figures.stall else "job"
        if counts.refused:
            return counts.refused
        if figures.processors:
            return "processors"
        if self._history[-1][0] < self._saturation.until:
            return self._saturation.by
        if counts.working < THERE * self.target:
            return "cold start"
        return "budget" if self.target >= self._bounds.most else "workers"
