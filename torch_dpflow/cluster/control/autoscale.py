"""How many workers a flow is to have: a law, once a second. Pure.

::

    demand = what the jobs would take if they never waited: samples per second that they did not wait
    need   = demand x loads per sample / loads per second of a busy worker / HEADROOM

**Up** when jobs wait and loading is why, or when workers are busy all the time: in one step to what is needed, at most
to twice as many and some, corrected upwards for some seconds while the cause comes into view. The next step is made
once this one's workers work and have been measured. **Down** to the highest need of the last 20 s, or of a
cold start. Demand and not queues decides: a queue is as long as jobs prefetch, however few workers there are.

**Saturation.** Workers that were added and brought little show that something else is the limit, as a storage that
gives no more. Then the flow gets as many as carry what was seen, by what a worker did before, and after some minutes a
small step tries whether there is more.

**Pauses.** A job that lives and requests nothing, as during a validation, keeps its workers for a time. Then, and soon
after the last job has left, there are no more than the minimum. A job that requests again has the former number at
once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec


class JobCounts(msgspec.Struct, frozen=True):
    """What a job has read since it was opened: see `JobFigures`."""

    samples: int
    stall_s: float
    reading_s: float


class FlowCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a flow: counts since any time, and what is so now."""

    #: The jobs that read, and what is known of them; of one that has just come nothing is.
    jobs: int
    readings: Mapping[str, JobCounts] = {}
    #: Samples that jobs have asked for, and loads that this caused or will cause.
    requested: int = 0
    due: int = 0
    #: Loads that have ended, seconds in which workers had tasks, and in which there were workers.
    loads: int = 0
    busy_s: float = 0.0
    worker_s: float = 0.0
    #: Of the seconds in which workers had tasks, those in which their results were on their way and they waited.
    away_s: float = 0.0
    #: Seconds in which jobs' requests waited for loads.
    late_s: float = 0.0
    #: Seconds in which samples were on their way from shards to jobs.
    link_s: float = 0.0
    #: Workers that can work; and those that have been started and cannot yet.
    working: int = 0
    coming: int = 0
    #: Why the platform starts no more workers; empty if nothing limits it.
    refused: str = ""


#: What of these only grows, as long as no service starts anew.
_COUNTED = ("requested", "due", "loads", "busy_s", "worker_s", "away_s", "late_s", "link_s")


def between(first: FlowCounts, last: FlowCounts) -> tuple[FlowCounts, float, float]:
    """What has happened between these; with the jobs' stall and reading time, seconds."""
    readings = [(one, first.readings.get(name, JobCounts(0, 0.0, 0.0))) for name, one in last.readings.items()]
    counted = {name: getattr(last, name) - getattr(first, name) for name in _COUNTED}
    passed = FlowCounts(jobs=last.jobs, **counted)
    stall_s = sum(max(0.0, one.stall_s - then.stall_s) for one, then in readings)
    return passed, stall_s, sum(max(0.0, one.reading_s - then.reading_s) for one, then in readings)


#: Figures cover so long, seconds.
WINDOW_S = 5.0
#: The share of the time that workers are to be busy, and from which they count as busy all the time.
HEADROOM, BUSY = 0.92, 0.95
#: Jobs that wait for a smaller share of their time do not stall. At least so much of what they wait has to be for
#: loads, or more workers would not help. So much of their time at least counts as not waited.
STALLED, LATE, MIN_SHARE = 0.02, 0.5, 0.25
#: Workers that wait for their links for such a part of the time in which their shard counts them as busy are enough.
AWAY = 0.5
#: A step goes to so many times as many workers and so many more; for so long it is corrected, seconds.
TIMES, MORE, CORRECT_S = 2.0, 4, 6.0
#: How long a step's workers are measured, seconds, once such a part of all works.
MEASURE_S, THERE = 4.0, 0.9
#: Steps by such a part show saturation if they bring less than such a part of what they should.
JUDGED, BROUGHT = 0.2, 0.4
#: How long what was seen of a saturated flow holds, seconds, and the step that tries whether it still does.
SATURATED_S, TRIAL = 300.0, 1.25
#: Down to the highest need of so long, or so many cold starts, if it is below such a part of the present number.
DOWN_S, DOWN_STARTS, DOWN = 20.0, 1.0, 0.95
#: Weight of the latest need among those by which the number falls; a part of a worker that is not one.
SMOOTHING, NEGLIGIBLE = 0.3, 0.05
#: One worker stays so long after the last load that jobs have caused, seconds: caches hold nearly all.
SELDOM_S = 60.0
#: Workers stay so long after the last job has left, seconds.
EMPTY_S = 5.0
#: A job that pauses keeps its workers for so many cold starts, if that is longer than it is said to; and how long one
#: takes before any was seen, seconds.
HOLD_STARTS, COLD_S = 6.0, 3.0


class Target(msgspec.Struct, frozen=True):
    """How many workers a flow is to have, and what keeps its jobs from reading faster."""

    workers: int
    #: "workers", "cold start", "storage", "network", "job", "budget", what a platform reports, as "quota"; empty if no
    #: job reads, or if that is not known yet.
    limited_by: str


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How many workers a flow may have, and for how long a job that pauses keeps them, seconds."""

    least: int = 0
    most: int
    hold_s: float = 120.0


@dataclass(slots=True)
class _JobDemand:
    """What is known of a job: what it would take a second, and when it last asked for anything, seconds."""

    requested_at: float
    demand: float = 0.0


@dataclass(slots=True)
class _Step:
    """A step up."""

    began: float
    #: How many workers there were, what each of them did a second on the whole, and while it worked.
    before: int
    each: float
    rate: float
    #: To how many it may go.
    most: int
    #: When its workers were there, seconds, and the counts then.
    there_at: float | None = None
    there: FlowCounts | None = None


@dataclass(slots=True)
class _Measured:
    """Figures of the latest seconds; nan where nothing is known."""

    stall: float = 0.0
    late: float = 0.0
    link: float = 0.0
    busy: float = 0.0
    #: Of the busy time, the part in which workers had nothing to do: their results were on their way.
    away: float = 0.0
    #: Loads of a worker a second, while it works, and on the whole.
    rate: float = math.nan
    each: float = math.nan
    per_sample: float = 1.0


@dataclass(slots=True)
class _Saturation:
    """What a flow gets, loads a second, of how fast workers, until when."""

    load: float = math.inf
    rate: float = 0.0
    until: float = -math.inf
    #: Whether the next step is a trial.
    tries: bool = False
    #: What gives no more: "storage" or "network".
    by: str = "storage"


@dataclass(slots=True)
class _Known:
    """What lasts longer than a window."""

    per_sample: float = 1.0
    rate: float = math.nan
    cold_s: float = COLD_S
    jobs: dict[str, _JobDemand] = field(default_factory=dict)


class Autoscaler:
    """The law for one flow. Not thread-safe; a step is O(jobs).

    Args:
        bounds: of the number of workers.
        first: with how many to begin.
    """

    def __init__(self, bounds: Bounds, first: int) -> None:
        self._bounds = bounds
        self._target = self._within(first)
        #: Workers to restore when a job requests again; None while no job pauses.
        self._resume: int | None = None
        #: When there was a job last, and when any has requested; None before the first step, seconds.
        self._read_at = self._requested_at = -math.inf
        #: When jobs last caused a load, seconds.
        self._due_at = -math.inf
        self._history: deque[tuple[float, FlowCounts]] = deque()
        self._needs: deque[tuple[float, float]] = deque()
        self._usual_need = 0.0
        self._measured = _Measured()
        self._known = _Known()
        self._saturation = _Saturation()
        self._step: _Step | None = None

    @property
    def target(self) -> int:
        """How many there are to be."""
        return self._target

    @property
    def cold_start_s(self) -> float:
        """How long workers take from their start until they work, seconds."""
        return self._known.cold_s

    def bound(self, bounds: Bounds) -> None:
        """Keep within these from now on."""
        self._bounds = bounds
        self._target = self._within(self._target)

    def begin(self, now: float) -> None:
        """A job is about to read."""
        self._read_at = self._requested_at = max(now, self._read_at)
        self._wake(now)

    def step(self, counts: FlowCounts, now: float) -> Target:
        """The number from now on."""
        if not self._history:
            self._read_at = self._requested_at = max(now, self._read_at)
        self._note(counts, now)
        if counts.jobs:
            self._read_at = now
        hold_s = max(self._bounds.hold_s, HOLD_STARTS * self._known.cold_s)
        if now - self._read_at >= EMPTY_S or now - self._requested_at >= hold_s:
            self._rest()
            return Target(self._target, "")
        self._wake(now)
        if counts.jobs:
            self._adjust(counts, self._demand(now, hold_s), now)
        return Target(self._target, self._limited_by(counts) if counts.jobs else "")

    # -- what is seen ----------------------------------------------------------------------------------------

    def _note(self, counts: FlowCounts, now: float) -> None:
        """Remember these counts, and measure what has happened since those of a window ago."""
        history = self._history
        if history and (counts.loads < history[-1][1].loads or counts.requested < history[-1][1].requested):
            history.clear()  # a service has restarted, and counts anew
        before = history[-1][1] if history else None
        if before is None or counts.due > before.due:
            self._due_at = now
        history.append((now, counts))
        while len(history) > 2 and history[1][0] <= now - WINDOW_S:
            history.popleft()
        self._note_jobs(before, counts, now)
        self._measure(*between(history[0][1], counts))

    def _note_jobs(self, before: FlowCounts | None, counts: FlowCounts, now: float) -> None:
        jobs, base = self._known.jobs, self._history[0][1]
        for name in jobs.keys() - counts.readings.keys():
            del jobs[name]
        late = before is not None and counts.late_s > before.late_s
        for name, reading in counts.readings.items():
            job = jobs.setdefault(name, _JobDemand(now))
            last = before.readings.get(name) if before is not None else None
            if last is None or reading != last or late:
                job.requested_at = self._requested_at = now
            # Of one that was not there then, all that it has read: it has just begun.
            first = base.readings.get(name, JobCounts(0, 0.0, 0.0))
            taken, stall_s = reading.samples - first.samples, reading.stall_s - first.stall_s
            passed_s = reading.reading_s - first.reading_s
            if taken > 0 and passed_s > 0:
                job.demand = taken / max(passed_s - stall_s, MIN_SHARE * passed_s)
        if late or (counts.jobs and not counts.readings):
            self._requested_at = now

    def _measure(self, passed: FlowCounts, stall_s: float, reading_s: float) -> None:
        known, measured = self._known, _Measured()
        if reading_s > 0:
            measured.stall = min(1.0, stall_s / reading_s)
            measured.late = min(1.0, passed.late_s / reading_s)
            measured.link = passed.link_s / reading_s
        if passed.worker_s > 0:
            measured.busy = passed.busy_s / passed.worker_s
            measured.each = passed.loads / passed.worker_s
        if passed.busy_s > 0:
            measured.away = passed.away_s / passed.busy_s
            known.rate = passed.loads / passed.busy_s if passed.loads > 0 else known.rate
        if passed.requested > 0:
            known.per_sample = max(0.0, passed.due / passed.requested)
        measured.rate, measured.per_sample = known.rate, known.per_sample
        self._measured = measured

    def _demand(self, now: float, hold_s: float) -> float:
        """What the jobs would take a second; of those that pause, what they took before."""
        return sum(job.demand for job in self._known.jobs.values() if now - job.requested_at < hold_s)

    # -- what follows ----------------------------------------------------------------------------------------

    def _within(self, workers: int) -> int:
        return max(self._bounds.least, min(workers, self._bounds.most))

    def _rest(self) -> None:
        if self._resume is None:
            self._resume = self._target
        self._target = self._within(0)
        self._step = None
        self._needs.clear()

    def _wake(self, now: float) -> None:
        if self._resume is not None:
            self._target, self._resume = self._within(max(1, self._resume)), None
            self._begin_needs(now)

    def _begin_needs(self, now: float) -> None:
        """Nothing is known of the need: the present number is kept for a time."""
        self._needs.clear()
        self._needs.append((now, self._target))
        self._usual_need = self._target

    def _adjust(self, counts: FlowCounts, demand: float, now: float) -> None:
        if not self._needs:
            self._begin_needs(now)
        need = self._need(demand, now)
        waits = self._measured.late > 0
        if need is None:
            if waits and not self._target:
                self._target = self._within(1)
            return
        need = self._within(max(need, 1) if waits else need)
        self._usual_need += SMOOTHING * (need - self._usual_need)
        self._needs.append((now, self._usual_need))
        oldest = now - max(DOWN_S, DOWN_STARTS * self._known.cold_s)
        while self._needs[0][0] < oldest:
            self._needs.popleft()
        self._settle(counts, need, now)
        has_room = not counts.refused and self._measured.away <= AWAY
        if need > self._target and (self._is_short() or not self._target) and has_room:
            self._raise(counts, need, now)
        elif self._step is None:
            highest = math.ceil(max(one for _, one in self._needs) - NEGLIGIBLE)
            if highest < DOWN * self._target:
                self._target = highest

    def _need(self, demand: float, now: float) -> int | None:
        """How many are needed; None if that is not known."""
        measured, saturation = self._measured, self._saturation
        load, rate = measured.per_sample * demand, measured.rate
        if load == 0 and demand > 0:
            return int(now - self._due_at < SELDOM_S)
        if not demand or math.isnan(rate):
            return None
        if now < saturation.until:
            load, rate = min(load, saturation.load), max(rate, saturation.rate)
        return math.ceil(load / rate / HEADROOM)

    def _is_short(self) -> bool:
        measured = self._measured
        stalls = measured.stall > STALLED and measured.late >= LATE * measured.stall
        return stalls or measured.busy > BUSY

    def _raise(self, counts: FlowCounts, need: int, now: float) -> None:
        step, measured = self._step, self._measured
        if step is None:
            before = self._target
            most = math.ceil(TRIAL * before) + 1 if self._saturation.tries else int(TIMES * before) + MORE
            step = self._step = _Step(now, before, measured.each, measured.rate, most)
        elif now - step.began > CORRECT_S:
            need = min(need, math.ceil(self._usual_need))
        self._target = self._within(max(self._target, min(need, step.most)))

    def _settle(self, counts: FlowCounts, need: int, now: float) -> None:
        """Look whether the latest step's workers are there, and what they have brought."""
        step = self._step
        if step is None:
            return
        if step.there is None or step.there_at is None:
            # As many as there were may be at work from the first moment on where a step is small.
            if now > step.began and counts.working >= max(THERE * self._target, min(step.before + 1, self._target)):
                step.there_at, step.there = now, counts
                self._known.cold_s += 0.5 * (now - step.began - self._known.cold_s)
            return
        if now - step.there_at < MEASURE_S:
            return
        self._step = None
        passed, _, _ = between(step.there, counts)
        if (
            not step.before
            or self._target < (1 + JUDGED) * step.before
            or not step.each > 0  # not known, or nothing was loaded: there is nothing to compare with
            or not passed.worker_s
        ):
            return
        each, share = passed.loads / passed.worker_s, self._target / step.before - 1
        brought = each / step.each * (1 + share) - 1
        if passed.busy_s > BUSY * passed.worker_s and self._is_short() and brought < BROUGHT * share:
            self._saturate(step, each, now)
        else:
            self._saturation.tries = False

    def _saturate(self, step: _Step, each: float, now: float) -> None:
        load, rate = each * self._target, step.rate
        if self._saturation.tries:
            rate = max(rate, self._saturation.rate)  # there were too many before this step already
        # Of more workers than a link carries some always wait for it; a storage makes them work for longer.
        by = "network" if self._measured.away > AWAY / 2 else "storage"
        self._saturation = _Saturation(load, rate, now + SATURATED_S, tries=True, by=by)
        self._target = self._within(min(self._target, max(step.before, math.ceil(load / rate / HEADROOM))))
        self._begin_needs(now)

    def _limited_by(self, counts: FlowCounts) -> str:
        measured = self._measured
        if measured.stall <= STALLED and not (measured.late > 0 and not counts.working):
            return "job" if self._known.jobs and any(job.demand for job in self._known.jobs.values()) else ""
        if measured.away > AWAY:
            return "network"
        if measured.late < LATE * measured.stall:
            # Neither for loads nor for a link: the job's own process, or the processor that it shares with others.
            return "network" if measured.link >= LATE * measured.stall else "job"
        if counts.refused:
            return counts.refused
        if self._history[-1][0] < self._saturation.until:
            return self._saturation.by
        if counts.working < THERE * self._target:
            return "cold start"
        return "budget" if self._target >= self._bounds.most else "workers"
