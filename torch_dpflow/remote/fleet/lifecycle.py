"""Life cycle of the workers of one fleet: a pure state machine without a socket, thread, clock or random numbers.

::

    StartWorker ──> REQUESTED ──Accepted──> STARTING ──arrived, fit──> ON_DECK ──ready, number free──> WORKING
                     │ Refused: removed                                                                  │
                     │ Answerless: STARTING, and the platform may not have it                            │
                     └ no handshake in time ──> LEAVING        target lowered, warned, lifetime ──> DRAINING
    unfit, goodbye ──> LEAVING ──not Ended in time──> STOPPING; after Ended, or a timeout in STOPPING: removed
    silent, condemned ──> STOPPING

A fleet has `target` places, numbered from 0, each for one worker. Each new worker at a place has a higher incarnation.
Before a worker's lifetime ends, a successor is started for its place. The successor waits on deck until the worker has
finished its tasks, and then takes over its number, with its part of an iterable dataset. For this, at most a tenth of
the target, or one worker, is started in addition.

A connected worker is ended when its lease expires, because it was silent for `LEASE_S`. Every state has a time limit
too, except WORKING, and ON_DECK once the worker is ready. A worker is condemned when it must be ended, for example
because a message was lost. The handshake of an unknown worker is rejected.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from torch_dpflow._core import clocks
from torch_dpflow.errors import RejectedError, UnavailableError
from torch_dpflow.remote.fleet.worker_states import (
    AdmitWorker,
    CheckWorker,
    DrainWorker,
    Fail,
    FleetInstruction,
    FleetWorker,
    RejectWorker,
    Report,
    StartLimits,
    StartWorker,
    StopWorker,
    WorkerState,
)
from torch_dpflow.remote.launchers.contract import Accepted, Answerless, Ended, Outcome, Refused, Warned
from torch_dpflow.workers.platform import FALSE_STARTS, Limits

#: Default of `drain_s`, and time limit for a worker to leave by itself, in seconds.
DRAIN_S, LEAVE_S = 30.0, 5.0
#: Silence of a connected worker after which the platform is queried, and after which the worker is ended, in seconds.
SUSPECT_S, LEASE_S = clocks.LEASE_S / 2, 2 * clocks.LEASE_S
#: How long the platform may take to end a worker by force, in seconds; twice `Limits.grace_s` if that is longer.
STOP_S = 10.0
#: How long a connected worker may need until it is ready, after its latest request for content, in seconds. It
#: unpickles the dataset and imports the modules that this needs.
READY_S = 600.0
#: Range of the fraction of a lifetime after which a successor is started, drawn for each worker so that not all end
#: together; fraction after which a worker is drained even without a successor.
ROTATE, LAST = (0.80, 0.95), 0.97
#: Maximum fraction of a lifetime by which successors are started earlier, so that few workers are replaced at once.
MAX_LEAD = 0.6
#: The fleet fails if this many workers did not connect or were unusable before any was usable, or if this many were
#: unusable for the same reason. At most `MAX_REASONS` reasons are counted.
MAX_FALSE_STARTS = 1 + FALSE_STARTS
MAX_REASONS = 64


class Fleet:
    """State machine for starts and ends of remote workers, whose number follows a target. Not thread-safe.

    The fleet fails, and starts no more workers until `retry`, if the platform rejects a start for good, if it keeps
    refusing starts while no worker is connected, or if workers repeatedly do not connect or are unusable.

    Args:
        prefix: prefix of the workers' names, see `remote.launchers.contract.prefix_of`.
        limits: the limits of the platform.
        draw: returns random numbers in [0, 1), for jitter.
        drain_s: time limit for a draining worker to finish its tasks, in seconds.
    """

    def __init__(
        self,
        prefix: str,
        limits: Limits,
        *,
        draw: Callable[[], float],
        drain_s: float = DRAIN_S,
    ) -> None:
        self._prefix = prefix
        self._drain_s = drain_s
        self._grace_s = limits.grace_s
        self._draw = draw
        self._lifetime_s = limits.max_lifetime_s
        self._limits = StartLimits(limits, draw)
        self._incarnation = 0
        self._target = 0
        self._workers: dict[str, FleetWorker] = {}
        self._has_arrived = self._has_been_ready = False
        self._unfit: Counter[str] = Counter()
        self._out: list[FleetInstruction] = []
        #: Total running time of the workers that have ended, in seconds.
        self._gone_s = 0.0
        #: Why there are fewer workers than the target; empty if nothing limits them.
        self.limited_by = ""
        #: Why the fleet no longer starts workers; empty while it does.
        self.failure = ""

    def retry(self) -> None:
        """Allow starts again after a failure."""
        self.failure = ""
        self._has_arrived = False
        self._unfit.clear()
        self._limits.retry()

    # -- what has happened: `tick` says what follows -------------------------------------------------------

    def target(self, workers: int) -> None:
        """Set the target: how many workers the fleet should have."""
        self._target = workers

    def handle(self, outcome: Outcome, now: float) -> None:
        worker = self._workers.get(outcome.name)
        if worker is None:
            return
        match outcome:
            case Accepted() | Answerless():
                self._on_started(worker, outcome, now)
            case Refused(_, error) if not worker.arrived:
                del self._workers[worker.name]
                self._limit(self._limits.note_refused(error, len(self._workers), now), str(error))
                if isinstance(error, RejectedError) or (
                    not any(one.arrived for one in self.workers) and self._limits.gives_up(now)
                ):
                    self._fail(str(error))
            case Warned(_, until_s):
                # As the end of a lifetime: half of the time is for starting a successor, half for tasks.
                worker.ends = min(worker.ends, now + until_s)
                worker.rotates = min(worker.rotates, now)
                worker.drains = min(worker.drains, now + until_s / 2)
            case Ended(_, end):
                self._remove(worker, now, end.ran_s)
                if not worker.arrived and worker.state is not WorkerState.STOPPING:
                    self._note_false_start(f"{worker.name} {end}", now)

    def arrived(self, name: str, unfit: str, now: float) -> None:
        """Handle a worker's handshake. unfit: why the worker cannot be used; empty if it can."""
        worker = self._workers.get(name)
        if worker is None or not (worker.state.is_expected or worker.arrived):
            self._out.append(RejectWorker(name, "it is not expected any more"))
        elif not worker.arrived:
            worker.arrived, worker.since = True, now
            if unfit:
                self._note_unfit(worker, unfit, now)
            else:
                self._has_arrived = True
                self._limits.note_arrived(worker.begun, now)
                worker.state, worker.due = WorkerState.ON_DECK, now + READY_S
        elif not worker.state.holds_place and worker.state is not WorkerState.DRAINING:
            self._out.append(RejectWorker(name, unfit or "it is to leave"))

    def unfit(self, name: str, reason: str, now: float) -> None:
        """Reject a connected worker that turns out to be unusable. reason: text that is sent to the worker."""
        worker = self._workers.get(name)
        if worker is not None and worker.state is WorkerState.ON_DECK:
            self._note_unfit(worker, reason, now)
        else:
            self._out.append(RejectWorker(name, reason))

    def progressed(self, name: str, now: float) -> None:
        """Extend the time limit of a worker that is fetching its content."""
        worker = self._workers.get(name)
        if worker is not None and worker.state is WorkerState.ON_DECK and not worker.ready:
            worker.due = now + READY_S

    def ready(self, name: str) -> None:
        """Handle a worker that has loaded its content and can work."""
        worker = self._workers.get(name)
        if worker is not None:
            worker.ready = self._has_been_ready = True
            if worker.state is WorkerState.ON_DECK:
                worker.due = math.inf

    def goodbye(self, name: str, now: float) -> None:
        """Handle the goodbye of a worker that leaves, or has left."""
        worker = self._workers.get(name)
        if worker is not None:
            worker.until = now if worker.until is None else worker.until
            if worker.state in (WorkerState.ON_DECK, WorkerState.WORKING, WorkerState.DRAINING):
                self._leave(worker, now)

    def tick(self, now: float) -> list[FleetInstruction]:
        """Return the instructions to carry out, in order. Call this after events, and at least once a second."""
        self._end_silent(now)
        self._expire(now)
        self._vacate(now)
        self._drain_old(now)
        self._admit()
        self._fill(now)
        out, self._out = self._out, []
        return out

    @property
    def workers(self) -> list[FleetWorker]:
        """All workers that were requested and not removed, in the order of their starts."""
        return [*self._workers.values()]

    @property
    def connected(self) -> list[FleetWorker]:
        """All workers that have connected and whose messages are still accepted."""
        return [one for one in self._workers.values() if one.nonce and not one.is_lost]

    def get(self, name: str) -> FleetWorker | None:
        """Return the worker of this name; None if it is unknown, or its messages are no longer accepted."""
        worker = self._workers.get(name)
        return None if worker is None or worker.is_lost else worker

    def by_user(self, user: str) -> FleetWorker | None:
        """Return the worker whose key has the user name "NUMBER/INCARNATION"; None as in `get`."""
        return self.get(self._prefix + user.replace("/", "-"))

    def worker_s(self, now: float) -> float:
        """Return the total running time of all workers so far, in seconds.

        A worker's time is counted from its handshake until its goodbye or latest message. Once it has ended, the time
        that the platform reports, if any, counts instead.
        """
        return self._gone_s + sum(one.ran_s(now) for one in self.workers)

    def end(self, now: float) -> None:
        """Remove all workers, so that their running time stops counting. Issues no instructions to end them."""
        for worker in self.workers:
            self._remove(worker, now)

    # -- single events ---------------------------------------------------------------------------------------

    def _on_started(self, worker: FleetWorker, outcome: Accepted | Answerless, now: float) -> None:
        if isinstance(outcome, Accepted):
            worker.accepted = True
            self._limits.note_accepted(worker.begun)
        if worker.state is WorkerState.REQUESTED:
            worker.state, worker.due = WorkerState.STARTING, now + self._limits.timeout_s
            if isinstance(outcome, Answerless):
                self._limit("starts without an answer", outcome.text)

    def _note_unfit(self, worker: FleetWorker, reason: str, now: float) -> None:
        self._out.append(RejectWorker(worker.name, reason))
        self._leave(worker, now)
        self._limits.note_false_start(now)
        # Not the traceback before it, which is reported with the worker's end.
        self._limit("unfit workers", reason.rpartition("\n")[2])
        if len(self._unfit) >= MAX_REASONS and reason not in self._unfit:
            self._unfit.clear()
        self._unfit[reason] += 1
        if self._unfit[reason] >= MAX_FALSE_STARTS:
            self._fail(reason)

    def _note_missing(self, worker: FleetWorker, now: float) -> None:
        text = f"{worker.name} has not connected within {now - worker.begun:.0f} s"
        others = sum(one.state.holds_place for one in self.workers)
        if worker.accepted:
            # The platform may be full without reporting it. A worker that it accepted and that never connects shows it.
            self._limits.lower(others, now, accepts=True)
            self._note_false_start(text, now)
        else:
            away = UnavailableError(f"{text}, and the platform has not answered for its start")
            self._limit(self._limits.note_refused(away, others, now), str(away))

    def _note_false_start(self, text: str, now: float) -> None:
        self._limits.note_false_start(now)
        self._limit("workers that do not connect", text)
        if not self._has_arrived and self._limits.false_starts >= MAX_FALSE_STARTS:
            count = self._limits.false_starts
            self._fail(f"{count} workers were started and none could be used; the last one: {text}")

    # -- what follows from the state and the time ------------------------------------------------------------

    def _end_silent(self, now: float) -> None:
        """End workers that are condemned or whose lease has expired, and query the platform about silent workers."""
        for worker in self.connected:
            silent_s = now - worker.last_seen
            if worker.refused_at is not None and now - worker.refused_at >= SUSPECT_S:
                worker.condemn("a message to it was refused, as its connection was broken", may_blame=False)
            if silent_s >= LEASE_S:
                worker.condemn(f"no heartbeat for {LEASE_S:g} s")
            elif silent_s >= SUSPECT_S and worker.suspected_at < worker.last_seen:
                worker.suspected_at = now
                self._out.append(CheckWorker(worker.name))
            if worker.condemned:
                self._stop(worker, worker.condemned, now)

    def _expire(self, now: float) -> None:
        for worker in self.workers:
            if worker.state is not WorkerState.STOPPING and now >= worker.ends + self._grace_s:
                self._stop(worker, "its lifetime has ended", now)
            if now < worker.due:
                continue
            if worker.state.is_expected:
                self._leave(worker, now)  # the platform may report its end
            elif worker.state is WorkerState.ON_DECK:
                imports = f"; {worker.importing}" if worker.importing else ""
                reason = f"it has not become ready within {READY_S:g} s{imports}"
                self._note_unfit(worker, reason, now)
                if imports and not self._has_been_ready:  # the next one would hang too, for as long
                    self._fail(reason)
            elif worker.state is WorkerState.STOPPING:
                self._remove(worker, now)
            else:
                if not worker.arrived:
                    self._note_missing(worker, now)
                self._stop(worker, "it has not ended in time", now)

    def _vacate(self, now: float) -> None:
        """Scale down: stop workers that never connected first, then those that expire soonest."""
        places: dict[int, list[FleetWorker]] = {}
        for worker in self.workers:
            if worker.state.holds_place:
                places.setdefault(worker.number, []).append(worker)
        excess = len(places) - self._target
        if excess <= 0:
            return

        def order(number: int) -> tuple[bool, float, int]:
            ends = min((one.ends for one in places[number] if one.arrived), default=math.inf)
            return any(one.arrived for one in places[number]), ends, -number

        for number in sorted(places, key=order)[:excess]:
            for worker in places[number]:
                if worker.arrived:
                    self._drain(worker, now)
                else:
                    self._stop(worker, "it is not needed any more", now)

    def _drain_old(self, now: float) -> None:
        lead_s = self._lead_s
        waiting = {one.number for one in self.workers if one.state is WorkerState.ON_DECK and one.ready}
        for worker in self.workers:
            if worker.state is WorkerState.WORKING and (
                (now >= worker.rotates - lead_s and worker.number in waiting) or now >= worker.drains
            ):
                self._drain(worker, now)

    def _admit(self) -> None:
        busy = {one.number for one in self.workers if one.state in (WorkerState.WORKING, WorkerState.DRAINING)}
        for worker in self.workers:
            if worker.state is WorkerState.ON_DECK and worker.ready and worker.number not in busy:
                worker.state = WorkerState.WORKING
                busy.add(worker.number)
                self._out.append(AdmitWorker(worker.name))

    def _fill(self, now: float) -> None:
        most = min(self._target + self._spare, self._limits.ceiling(now))
        requested = any(one.state is WorkerState.REQUESTED for one in self.workers)
        for number in self._next_places(now):
            if len(self._workers) >= most or not self._limits.may_start(now, requested=requested):
                break
            self._start(number, now)
            requested = True
        usable = sum(one.arrived and one.state.holds_place for one in self.workers)
        if self.limited_by and usable >= self._target:
            self._limit("", "")

    @property
    def _spare(self) -> int:
        """Number of workers that may exist beyond the target while others leave."""
        return max(1, self._target // 10) if self._target else 0

    @property
    def _lead_s(self) -> float:
        """Time before a lifetime's end at which the successor is started, in seconds. Few starts run at once."""
        if self._lifetime_s is None:
            return 0.0
        rounds = math.ceil(self._target / max(1, self._spare))
        # The same time again passes from its handshake until it can work and its predecessor has ended.
        return min(2 * rounds * self._limits.usual_s, MAX_LEAD * self._lifetime_s)

    def _next_places(self, now: float) -> list[int]:
        """Return the places of the next workers to start: free ones first, then those that need a successor."""
        if self.failure:
            return []
        # A worker that never connected may still run: the next in its place would be one too many.
        held = Counter(
            one.number
            for one in self.workers
            if one.state.holds_place or (one.state is WorkerState.LEAVING and not one.arrived)
        )
        free = [number for number in range(self._target) if number not in held]
        lead_s = self._lead_s
        old = [
            one
            for one in self.workers
            if one.state is WorkerState.WORKING and now >= one.rotates - lead_s and held[one.number] == 1
        ]
        free = free[: max(0, self._target - len(held))]
        return free + [one.number for one in sorted(old, key=lambda one: one.ends)]

    # -- changes of state ------------------------------------------------------------------------------------

    def _start(self, number: int, now: float) -> None:
        self._incarnation += 1
        name = f"{self._prefix}{number}-{self._incarnation}"
        worker = FleetWorker(name, number, self._incarnation, now, now + self._limits.timeout_s)
        if self._lifetime_s is not None:
            # From here on, though it begins later: the platform may count so.
            first, last = ROTATE
            worker.ends = now + self._lifetime_s
            worker.rotates = now + self._lifetime_s * (first + (last - first) * self._draw())
            worker.drains = now + self._lifetime_s * LAST
        self._workers[name] = worker
        self._limits.note_start(now)
        self._out.append(StartWorker(name, number, self._incarnation, self._lifetime_s))

    def _remove(self, worker: FleetWorker, now: float, ran_s: float | None = None) -> None:
        del self._workers[worker.name]
        self._gone_s += worker.ran_s(now) if ran_s is None else ran_s

    def _drain(self, worker: FleetWorker, now: float) -> None:
        worker.is_sent_away = True
        waited = worker.state is WorkerState.ON_DECK  # and so has no tasks
        ends = worker.ends if worker.ends > now else math.inf
        worker.state, worker.due = WorkerState.DRAINING, min(now + self._drain_s, ends)
        self._out.append(DrainWorker(worker.name))
        if waited:
            self._leave(worker, now)

    def _leave(self, worker: FleetWorker, now: float) -> None:
        worker.state, worker.due = WorkerState.LEAVING, now + LEAVE_S
        self._out.append(CheckWorker(worker.name))

    def _stop(self, worker: FleetWorker, why: str, now: float) -> None:
        worker.state, worker.due = WorkerState.STOPPING, now + max(STOP_S, 2 * self._grace_s)
        self._out.append(StopWorker(worker.name, why))

    def _limit(self, by: str, text: str) -> None:
        if by != self.limited_by:
            self.limited_by = by
            self._out.append(Report(by, text))

    def _fail(self, text: str) -> None:
        if not self.failure:
            self.failure = text
            self._out.append(Fail(text))
