"""QMOWS: which worker loads which task (thesis 3.4.1: queue mirrors, over-allocation, work stealing).

A pure state machine: `handle(event)` returns what to do, in order, and there is no socket, thread or clock
inside. The life of a task::

    Submit ──> global queue ──> a worker's window ──> Exchange ──> Deliver
       │        ▲  (or the worker's reserved     │
       └─pinned─┘   tasks, if pinned)            └─ Lose: back to where it came from, in its old place

**Windows.** A worker holds up to `window` tasks, running and waiting, so that it never idles for a round
trip. The scheduler keeps a mirror of each worker's local queue and refills windows whenever one has room, on
any event: first with tasks pinned to that worker, then from the global queue, oldest task to emptiest window.

**Stealing.** Only an idle worker steals, when nothing is queued. A busy one would only move the choice of
worker forward, and two half-full workers would pass the same task to and fro.

**Over-allocation.** The victim is told at once (the thesis tells it at its next exchange), but may have
started the task meanwhile. Then it runs twice and the first result wins. With `speculate_after_s`, a task
that has been running for so long is copied to an idle worker that finds nothing else.

**Loss.** The window of a lost worker goes back in its old order, before everything newer. The task that it
ran is a suspect from then on and runs alone: it is given to an empty worker only, and nothing joins it.
Otherwise, where workers hand in results N at a time and the scheduler is mistaken about what ran, a task that
kills workers could see its neighbours condemned for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.remote.scheduler_events import (
    Assign,
    Cancel,
    Deliver,
    Discard,
    Event,
    Exchange,
    Instruction,
    Join,
    Lose,
    Poison,
    Revoke,
    Starved,
    Submit,
    TaskId,
    Tick,
    WorkerId,
)
from torch_dpflow.remote.scheduler_state import (
    Backlog,
    Counters,
    Mirror,
    SchedulerSnapshot,
    Task,
    WorkerSnapshot,
)

__all__ = [
    "Assign",
    "Cancel",
    "Counters",
    "Deliver",
    "Discard",
    "Event",
    "Exchange",
    "Instruction",
    "Join",
    "Lose",
    "Poison",
    "Revoke",
    "Scheduler",
    "SchedulerSnapshot",
    "Starved",
    "Submit",
    "TaskId",
    "Tick",
    "WorkerId",
    "WorkerSnapshot",
]


class Scheduler:
    """Decides which worker loads which task, and whose result counts.

    Not thread-safe: one thread owns it. Every event is O(tasks named in it), amortised; stealing adds one
    look at each worker. Input is checked before anything changes, so a refused event leaves no trace. What it
    promises: a task is delivered at most once, and as long as workers exchange, every task is delivered,
    cancelled or poisoned; an idle worker implies that no task is queued and none waits that it could steal.

    window: the tasks a worker holds at most (K of the thesis), at least 1.
    poison_limit: how many workers a task may take down before it is given up, at least 1.
    speculate_after_s: seconds after which a running task may be copied to an idle worker; None: never.
    Raises OptionError or OptionTypeError.
    """

    def __init__(self, *, window: int, poison_limit: int = 3, speculate_after_s: float | None = None) -> None:
        self._window = _at_least_one("window", window)
        self._poison_limit = _at_least_one("poison_limit", poison_limit)
        self._speculate_after_s = _seconds("speculate_after_s", speculate_after_s)
        self.counters = Counters()
        #: Every task that is submitted and not delivered, cancelled or poisoned.
        self._tasks: dict[TaskId, Task] = {}
        self._submissions = 0
        self._queue = Backlog()
        #: Pinned, unassigned tasks of each worker id, whether or not it has joined.
        self._reserved: dict[WorkerId, Backlog] = {}
        self._mirrors: dict[WorkerId, Mirror] = {}
        #: Mirrors by load, 0 to window + 1; the last also holds those that take nothing because of a suspect.
        self._levels: list[dict[WorkerId, Mirror]] = [{} for _ in range(self._window + 2)]
        #: No level below this one has a mirror in it.
        self._lowest = 0
        #: Unfinished tasks with losses. While there is none, nothing need be asked about suspects.
        self._suspects = 0
        #: Mirrors that joined or whose level fell during this event.
        self._freed: list[Mirror] = []
        self._assigned: dict[WorkerId, list[TaskId]] = {}
        self._revoked: dict[WorkerId, list[TaskId]] = {}
        self._handlers: dict[type, Callable[[Any, list[Instruction]], None]] = {
            Submit: self._submit,
            Cancel: self._cancel,
            Join: self._join,
            Exchange: self._exchange,
            Lose: self._lose,
            Tick: self._tick,
        }

    def handle(self, event: Event) -> list[Instruction]:
        """Take in one event; return what to do about it, in order. Raises OptionError, OptionTypeError."""
        handler = self._handlers.get(type(event))
        if handler is None:
            allowed = ", ".join(kind.__name__ for kind in self._handlers)
            raise OptionTypeError(f"a scheduler handles {allowed}; got {type(event).__name__}: {event!r}")
        out: list[Instruction] = []
        handler(event, out)
        self._distribute(event.now, out)
        return out

    # -- events ------------------------------------------------------------------------------------------

    def _submit(self, event: Submit, out: list[Instruction]) -> None:
        tasks = self._tasks
        if len(set(event.tasks)) != len(event.tasks):
            raise OptionError(f"each task is submitted once; got {list(event.tasks)!r}")
        for task_id in event.tasks:
            if task_id in tasks:
                raise OptionError(f"task {task_id!r} is submitted and unfinished; give every task a new id")
        backlog = self._queue if event.pinned_to is None else self._reserved_for(event.pinned_to)
        for order, task_id in enumerate(event.tasks, self._submissions):
            task = tasks[task_id] = Task(task_id, order, event.pinned_to)
            backlog.append(task)
        self._submissions += len(event.tasks)
        self.counters.submitted += len(event.tasks)
        if event.pinned_to is not None and event.pinned_to in self._mirrors:
            self._freed.append(self._mirrors[event.pinned_to])

    def _cancel(self, event: Cancel, out: list[Instruction]) -> None:
        for task_id in event.tasks:
            task = self._tasks.get(task_id)
            if task is not None:
                self._forget(task, None)
                self.counters.cancelled += 1

    def _join(self, event: Join, out: list[Instruction]) -> None:
        if event.worker in self._mirrors:
            self._lose(Lose(event.worker, event.now), out)
        mirror = Mirror(event.worker, self._reserved_for(event.worker), event.now)
        self._mirrors[event.worker] = self._levels[0][event.worker] = mirror
        self._lowest = 0
        self._freed.append(mirror)

    def _exchange(self, event: Exchange, out: list[Instruction]) -> None:
        worker = event.worker
        mirror = self._mirrors.get(worker)
        for task_id in event.finished:
            task = self._tasks.get(task_id)
            if task is None:
                self.counters.duplicates += 1
                out.append(Discard(task_id, worker))
            else:
                self.counters.delivered += 1
                out.append(Deliver(task_id, worker))
                self._forget(task, mirror)
        if mirror is not None:
            running = event.started
            if running is None or running in event.finished:
                running = next(iter(mirror.held), None)
            if running != mirror.running:
                mirror.running = running
                mirror.since = event.now
            self._place(mirror)
            if mirror.level > 1:
                self._wake_idle()

    def _lose(self, event: Lose, out: list[Instruction]) -> None:
        mirror = self._mirrors.pop(event.worker, None)
        if mirror is None:
            return
        self.counters.losses += 1
        del self._levels[mirror.level][event.worker]
        mirror.level = -1
        for task in mirror.held.values():
            task.holders = tuple(holder for holder in task.holders if holder is not mirror)
        if mirror.running is not None and mirror.running in self._tasks:
            self._suspect(self._tasks[mirror.running], event.worker, out)
        for task in mirror.held.values():
            if not task.holders and task.id in self._tasks:
                home = self._queue if task.pinned_to is None else mirror.reserved
                home.give_back(task)
                self.counters.requeues += 1
        self._wake_idle()

    def _tick(self, event: Tick, out: list[Instruction]) -> None:
        if self._speculate_after_s is not None:
            self._wake_idle()

    # -- tasks -------------------------------------------------------------------------------------------

    def _suspect(self, task: Task, worker: WorkerId, out: list[Instruction]) -> None:
        """Count a lost worker against the task that it ran."""
        self._suspects += not task.losses
        task.losses += (worker,)
        if len(task.losses) >= self._poison_limit:
            self.counters.poisoned += 1
            out.append(Poison(task.id, task.losses))
            self._forget(task, None)
            return
        for holder in task.holders:
            self._place(holder)
        self._place_pinned(task)

    def _forget(self, task: Task, finisher: Mirror | None) -> None:
        """Drop an ended task everywhere; holders other than the finisher are told."""
        del self._tasks[task.id]
        self._suspects -= bool(task.losses)
        if task.backlog is not None:
            task.backlog.discard(task)
            self._place_pinned(task)
        for holder in task.holders:
            del holder.held[task.id]
            if holder is not finisher:
                self._revoke(task, holder)
                self._place(holder)
                self._wake_idle()
        task.holders = ()

    def _give(self, mirror: Mirror, task: Task, now: float) -> None:
        mirror.held[task.id] = task
        task.holders += (mirror,)
        if mirror.running is None:
            mirror.running = task.id
            mirror.since = now
        mirror.starved = False
        self._assigned.setdefault(mirror.worker, []).append(task.id)
        self._place(mirror)

    def _revoke(self, task: Task, mirror: Mirror) -> None:
        self.counters.revoked += 1
        self._revoked.setdefault(mirror.worker, []).append(task.id)

    # -- windows -----------------------------------------------------------------------------------------

    def _reserved_for(self, worker: WorkerId) -> Backlog:
        reserved = self._reserved.get(worker)
        if reserved is None:
            reserved = self._reserved[worker] = Backlog()
        return reserved

    def _place(self, mirror: Mirror) -> None:
        """Put the mirror on the level of its load."""
        level = mirror.load()
        if self._suspects and level and self._takes_nothing(mirror):
            level = self._window + 1
        before = mirror.level
        if level == before:
            return
        del self._levels[before][mirror.worker]
        self._levels[level][mirror.worker] = mirror
        mirror.level = level
        if level < before:
            self._freed.append(mirror)
            if level < self._lowest:
                self._lowest = level

    def _place_pinned(self, task: Task) -> None:
        """Place the mirror that the task is reserved for, if there is one: it may wait for a suspect."""
        if task.pinned_to is not None and task.pinned_to in self._mirrors:
            self._place(self._mirrors[task.pinned_to])

    def _takes_nothing(self, mirror: Mirror) -> bool:
        """Whether a busy worker runs a suspect, or must run empty because one is pinned to it."""
        running = mirror.running_task()
        if running is not None and running.losses:
            return True
        return len(mirror.reserved) > 0 and bool(mirror.reserved.oldest().losses)

    def _wake_idle(self) -> None:
        """Have idle workers look again: what waits at another may be something else than before."""
        self._freed.extend(self._levels[0].values())

    def _emptiest(self) -> Mirror | None:
        """The mirror with the lowest load that has room; among equals, the one that had it first."""
        levels, window = self._levels, self._window
        while self._lowest < window:
            if levels[self._lowest]:
                return next(iter(levels[self._lowest].values()))
            self._lowest += 1
        return None

    def _distribute(self, now: float, out: list[Instruction]) -> None:
        """Fill every window that has room, then write down what has been decided."""
        if self._freed:
            for mirror in self._freed:
                if mirror.reserved:
                    self._fill_reserved(mirror, now)
        if self._queue:
            self._fill_from_queue(now)
        if self._freed:
            starved = self._serve_idle(now)
            self._freed.clear()
            if starved:
                out.append(Starved(starved))
        if self._revoked:
            out.extend(Revoke(worker, tasks) for worker, tasks in self._revoked.items())
            self._revoked = {}
        if self._assigned:
            out.extend(Assign(worker, tasks) for worker, tasks in self._assigned.items())
            self._assigned = {}

    def _fill_reserved(self, mirror: Mirror, now: float) -> None:
        while mirror.reserved and 0 <= mirror.level < self._window:
            self._give(mirror, mirror.reserved.take(), now)

    def _fill_from_queue(self, now: float) -> None:
        queue = self._queue
        while queue:
            mirror = self._emptiest()
            if mirror is None or (mirror.level and queue.oldest().losses):
                return
            self._give(mirror, queue.take(), now)

    def _serve_idle(self, now: float) -> list[WorkerId]:
        """Let every worker that has just become idle steal or copy a task; return those that found none."""
        starved = []
        found = True
        for mirror in self._freed:
            if mirror.level == 0:
                found = found and (self._steal(mirror, now) or self._copy(mirror, now))
                if not found and not mirror.starved:
                    mirror.starved = True
                    starved.append(mirror.worker)
        return starved

    def _steal(self, thief: Mirror, now: float) -> bool:
        oldest: Task | None = None
        for level in self._levels[2:]:
            for mirror in level.values():
                for task in mirror.waiting():
                    if _stealable(task):
                        if oldest is None or task.order < oldest.order:
                            oldest = task
                        break
        if oldest is None:
            return False
        (victim,) = oldest.holders
        del victim.held[oldest.id]
        oldest.holders = ()
        self.counters.steals += 1
        self._revoke(oldest, victim)
        self._place(victim)
        self._fill_reserved(victim, now)
        self._give(thief, oldest, now)
        return True

    def _copy(self, thief: Mirror, now: float) -> bool:
        if self._speculate_after_s is None:
            return False
        latest = now - self._speculate_after_s
        overdue = [
            task
            for mirror in self._mirrors.values()
            if mirror.since <= latest and (task := mirror.running_task()) is not None
            if task.pinned_to is None and not task.losses and len(task.holders) == 1
        ]
        if not overdue:
            return False
        self.counters.speculated += 1
        self._give(thief, min(overdue, key=lambda task: task.order), now)
        return True

    # -- inspection --------------------------------------------------------------------------------------

    def snapshot(self) -> SchedulerSnapshot:
        """Counters, queue depths and mirrors as they are now; O(unfinished tasks)."""
        return SchedulerSnapshot(
            counters=Counters(**{name: getattr(self.counters, name) for name in Counters.__struct_fields__}),
            queued=len(self._queue),
            reserved=sum(len(backlog) for backlog in self._reserved.values()),
            unfinished=len(self._tasks),
            workers={
                worker: WorkerSnapshot(tuple(mirror.held), mirror.running, len(mirror.reserved))
                for worker, mirror in self._mirrors.items()
            },
        )

    def validate(self) -> None:
        """Check every invariant; O(everything), for tests. Raises AssertionError."""
        held: dict[TaskId, list[WorkerId]] = {}
        for worker, mirror in self._mirrors.items():
            blocked = self._takes_nothing(mirror) and mirror.load() > 0
            assert mirror.level == (self._window + 1 if blocked else mirror.load())
            assert [worker in level for level in self._levels].index(True) == mirror.level
            assert len(mirror.held) <= self._window
            assert mirror.running is not None or not mirror.held
            assert mirror.level >= min(self._window, 1) or mirror.starved
            assert not mirror.reserved or mirror.level >= self._window, "a pinned task waits beside room"
            for task_id, task in mirror.held.items():
                assert task is self._tasks[task_id]
                assert task.pinned_to in (None, worker)
                held.setdefault(task_id, []).append(worker)
            if self._levels[0]:
                assert not any(_stealable(task) for task in mirror.waiting()), "an idle worker could steal"
        assert sum(map(len, self._levels)) == len(self._mirrors)
        self._validate_tasks(held)

    def _validate_tasks(self, held: dict[TaskId, list[WorkerId]]) -> None:
        queued = list(self._queue)
        reserved = {worker: list(backlog) for worker, backlog in self._reserved.items()}
        assert len(queued) == len(self._queue)
        for waiting in (queued, *reserved.values()):
            assert [task.order for task in waiting] == sorted(task.order for task in waiting)
        for task_id, task in self._tasks.items():
            assert task_id == task.id
            assert sorted(holder.worker for holder in task.holders) == sorted(held.get(task_id, []))
            assert len(task.holders) <= 2
            assert len(task.losses) < self._poison_limit
            home = queued if task.pinned_to is None else reserved[task.pinned_to]
            assert (task in home) == (not task.holders), "a task is lost, or waits while it is held"
        assert sum(map(len, (queued, *reserved.values()))) + len(held) == len(self._tasks)
        assert self._suspects == sum(bool(task.losses) for task in self._tasks.values())
        if queued:
            idlest = self._emptiest()
            assert idlest is None or (idlest.level and queued[0].losses), "a task waits beside room"
        assert not self._freed
        assert not self._assigned
        assert not self._revoked


def _stealable(task: Task) -> bool:
    """Whether a waiting task may move: not one that is pinned or that two workers have already."""
    return task.pinned_to is None and len(task.holders) == 1


def _at_least_one(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionTypeError(f"{name} must be an int, at least 1; got {value!r}")
    if value < 1:
        raise OptionError(f"{name} must be at least 1; got {value!r}")
    return value


def _seconds(name: str, value: float | None) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise OptionTypeError(f"{name} must be a number of seconds, at least 0, or None; got {value!r}")
    if not math.isfinite(value) or value < 0:
        raise OptionError(f"{name} must be a finite number of seconds, at least 0, or None; got {value!r}")
    return float(value)
