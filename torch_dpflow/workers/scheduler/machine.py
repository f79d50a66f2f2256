"""The scheduler: one method for each event; after each of them it fills the windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from torch_dpflow._core.checks import check_int, check_seconds
from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.workers.scheduler.events import (
    AddWorker,
    Assign,
    CancelTasks,
    Deliver,
    Discard,
    Exchanged,
    IdleWorkers,
    KillWorker,
    Lose,
    Poison,
    Revoke,
    SchedulerEvent,
    SchedulerInstruction,
    SetWindow,
    Submit,
    TaskId,
    Tick,
    WorkerId,
)
from torch_dpflow.workers.scheduler.pace import Pace
from torch_dpflow.workers.scheduler.tasks import Backlog, Task
from torch_dpflow.workers.scheduler.windows import Mirror, Windows


class Counters(msgspec.Struct):
    """What has happened since the scheduler was made; each counter only grows."""

    submitted: int = 0
    delivered: int = 0
    poisoned: int = 0
    #: Results that were discarded: of tasks that another worker had finished, or that were forgotten.
    duplicates: int = 0
    #: Waiting tasks that an idle worker took from another.
    steals: int = 0
    #: Running tasks that a second worker got, because the first was overtaken.
    copies: int = 0
    #: Workers that were killed because a task took too long.
    timeouts: int = 0


class Scheduler:
    """Decides which worker loads which task, and whose result counts, as the package's docstring describes.

    A task is delivered at most once; as long as workers exchange, every task is delivered, cancelled or poisoned; while
    a worker is idle, no task is queued and none waits that it could steal.

    Not thread-safe. An event costs O(tasks that it names), amortised; stealing adds a look at each worker. Input is
    checked before anything changes, so a rejected event has no effect.

    window: most tasks that a worker holds (K of the thesis), at least 1, until `SetWindow`.
    most_window: most that `SetWindow` can give; None: `window`.
    poison_limit: how many workers a task may cost before it is given up, at least 1.
    overtake_after_s: least seconds after which others, busy or not, take over the tasks of a worker that has run one
        task for much longer than usual; None: never.
    task_timeout_s: seconds after which a worker that still runs one task is killed; None: never.
    Raises OptionError or OptionTypeError.
    """

    def __init__(
        self,
        *,
        window: int,
        most_window: int | None = None,
        poison_limit: int = 3,
        overtake_after_s: float | None = None,
        task_timeout_s: float | None = None,
    ) -> None:
        check_int("window", window, minimum=1)
        self._windows = Windows(max(window, check_int("most_window", most_window or window, minimum=1)))
        self._first_window = window
        self._poison_limit = check_int("poison_limit", poison_limit, minimum=1)
        for name, seconds in (("overtake_after_s", overtake_after_s), ("task_timeout_s", task_timeout_s)):
            if seconds is not None:
                check_seconds(name, seconds, zero=True)
        self._task_timeout_s = task_timeout_s
        self._pace = None if overtake_after_s is None else Pace(overtake_after_s)
        self.counters = Counters()
        #: Every task that was submitted and is not delivered, cancelled or poisoned.
        self._tasks: dict[TaskId, Task] = {}
        self._queue = Backlog()
        #: Pinned, unassigned tasks of each worker id, also of workers that are not there yet.
        self._reserved: dict[WorkerId, Backlog] = {}
        #: Instructions of the present event, collected by worker.
        self._assigned: dict[WorkerId, list[TaskId]] = {}
        self._revoked: dict[WorkerId, list[TaskId]] = {}
        self._handlers: dict[type, Callable[[Any, list[SchedulerInstruction]], None]] = {
            Submit: self._submit,
            CancelTasks: self._cancel,
            AddWorker: self._add_worker,
            SetWindow: self._set_window,
            Exchanged: self._exchange,
            Lose: self._lose,
            Tick: self._tick,
        }

    @property
    def workers(self) -> tuple[int, int]:
        """How many workers there are, and how many of them have tasks."""
        return len(self._windows.mirrors), len(self._windows.mirrors) - len(self._windows.levels[0])

    def handle(self, event: SchedulerEvent) -> list[SchedulerInstruction]:
        """Handle one event; returns the instructions, in order. Raises OptionError, OptionTypeError."""
        handler = self._handlers.get(type(event))
        if handler is None:
            allowed = ", ".join(kind.__name__ for kind in self._handlers)
            raise OptionTypeError(f"a scheduler handles {allowed}; got {type(event).__name__}: {event!r}")
        out: list[SchedulerInstruction] = []
        handler(event, out)
        starved = self._fill_windows(event.now)
        if self._revoked:
            out.extend(Revoke(worker, tasks) for worker, tasks in self._revoked.items())
            self._revoked = {}
        if self._assigned:
            out.extend(Assign(worker, tasks) for worker, tasks in self._assigned.items())
            self._assigned = {}
        if starved:
            out.append(IdleWorkers(starved))
        return out

    # -- events ------------------------------------------------------------------------------------------

    def _submit(self, event: Submit, out: list[SchedulerInstruction]) -> None:
        tasks = self._tasks
        if len(set(event.tasks)) != len(event.tasks):
            raise OptionError(f"a task is submitted once; got one twice in {list(event.tasks)!r}")
        for task_id in event.tasks:
            if task_id in tasks:
                raise OptionError(f"task {task_id!r} is submitted and unfinished; give each task a new id")
        backlog = self._queue if event.pinned_to is None else self._reserved_for(event.pinned_to)
        for order, task_id in enumerate(event.tasks, self.counters.submitted):
            task = tasks[task_id] = Task(task_id, order, event.pinned_to)
            backlog.append(task)
        self.counters.submitted += len(event.tasks)
        if event.pinned_to is not None and event.pinned_to in self._windows.mirrors:
            self._windows.freed.append(self._windows.mirrors[event.pinned_to])

    def _cancel(self, event: CancelTasks, out: list[SchedulerInstruction]) -> None:
        for task_id in event.tasks:
            task = self._tasks.get(task_id)
            if task is not None:
                self._forget(task, None)

    def _add_worker(self, event: AddWorker, out: list[SchedulerInstruction]) -> None:
        if event.worker in self._windows.mirrors:
            self._lose(Lose(event.worker, event.now), out)
        reserved = self._reserved_for(event.worker)
        self._windows.add(Mirror(event.worker, reserved, event.now, self._first_window))

    def _set_window(self, event: SetWindow, out: list[SchedulerInstruction]) -> None:
        mirror = self._windows.mirrors.get(event.worker)
        if mirror is not None:
            mirror.window = min(check_int("window", event.window, minimum=1), self._windows.window)
            self._windows.place(mirror)

    def _exchange(self, event: Exchanged, out: list[SchedulerInstruction]) -> None:
        mirror = self._windows.mirrors.get(event.worker)
        for task_id in event.finished:
            task = self._tasks.get(task_id)
            if task is None:
                self.counters.duplicates += 1
                out.append(Discard(task_id, event.worker))
            else:
                self.counters.delivered += 1
                out.append(Deliver(task_id, event.worker))
                self._forget(task, mirror)
        if mirror is None:
            return
        if self._pace is not None and event.finished:
            self._pace.took((event.now - mirror.since) / len(event.finished))
        mirror.overtaken = mirror.condemned = False
        running = event.started
        if running is None or running in event.finished:
            running = next(iter(mirror.held), None)
        mirror.note_running(running, event.now)
        self._windows.place(mirror)
        self._windows.offer(mirror)

    def _lose(self, event: Lose, out: list[SchedulerInstruction]) -> None:
        mirror = self._windows.mirrors.get(event.worker)
        if mirror is None:
            return
        self._windows.remove(mirror)
        for task in mirror.held.values():
            task.holders = tuple(holder for holder in task.holders if holder is not mirror)
        for task_id in (mirror.running,) if event.at is None else event.at:
            running = None if task_id is None else self._tasks.get(task_id)
            if running is not None and running.pinned_to in (None, event.worker):
                running.late += mirror.condemned
                self._suspect(running, event.worker, out)
        for task in mirror.held.values():
            if not task.holders and task.id in self._tasks:
                origin = self._queue if task.pinned_to is None else mirror.reserved
                origin.give_back(task)
            for holder in task.holders:
                self._windows.offer(holder)

    def _tick(self, event: Tick, out: list[SchedulerInstruction]) -> None:
        if self._pace is not None:
            for mirror in self._windows.stuck(event.now - self._pace.patience_s):
                self._overtake(mirror, event.now)
        if self._task_timeout_s is not None:
            for mirror in self._windows.stuck(event.now - self._task_timeout_s):
                if not mirror.condemned:
                    mirror.condemned = True
                    self.counters.timeouts += 1
                    out.append(KillWorker(mirror.worker))

    def _overtake(self, mirror: Mirror, now: float) -> None:
        """Let others take over the tasks of a worker that seems to be stuck; may be called again."""
        mirror.overtaken = True
        while (waiting := mirror.last_movable()) is not None:
            del mirror.held[waiting.id]
            waiting.holders = ()
            self._revoke(waiting, mirror)
            self._queue.give_back(waiting)
        self._windows.place(mirror)
        running = mirror.running_task()
        other = self._windows.emptiest()
        if running is not None and running.is_movable() and not running.losses and other is not None:
            self.counters.copies += 1
            self._give(other, running, now)

    # -- tasks -------------------------------------------------------------------------------------------

    def _reserved_for(self, worker: WorkerId) -> Backlog:
        reserved = self._reserved.get(worker)
        if reserved is None:
            reserved = self._reserved[worker] = Backlog()
        return reserved

    def _suspect(self, task: Task, worker: WorkerId, out: list[SchedulerInstruction]) -> None:
        """Count a lost worker against the task that it ran."""
        self._windows.suspects += not task.losses
        task.losses += (worker,)
        if len(task.losses) >= self._poison_limit:
            self.counters.poisoned += 1
            out.append(Poison(task.id, task.losses, task.late))
            self._forget(task, None)
            return
        for holder in task.holders:
            self._windows.place(holder)

    def _forget(self, task: Task, finisher: Mirror | None) -> None:
        """Forget a task that is over, and revoke it from its holders, except the one that finished it."""
        del self._tasks[task.id]
        self._windows.suspects -= bool(task.losses)
        if task.backlog is not None:
            task.backlog.discard(task)
            if task.pinned_to is not None and task.pinned_to in self._windows.mirrors:
                self._windows.place(self._windows.mirrors[task.pinned_to])
        for holder in task.holders:
            del holder.held[task.id]
            if holder is not finisher:
                self._revoke(task, holder)
                self._windows.offer(holder)

    def _give(self, mirror: Mirror, task: Task, now: float) -> None:
        mirror.held[task.id] = task
        task.holders += (mirror,)
        if mirror.running is None:
            mirror.note_running(task.id, now)
        mirror.starved = False
        self._assigned.setdefault(mirror.worker, []).append(task.id)
        self._windows.place(mirror)

    def _revoke(self, task: Task, mirror: Mirror) -> None:
        self._revoked.setdefault(mirror.worker, []).append(task.id)
        self._windows.place(mirror)

    # -- windows -----------------------------------------------------------------------------------------

    def _fill_windows(self, now: float) -> list[WorkerId]:
        """Fill every window that has room; returns the workers that have become idle."""
        freed = self._windows.freed
        for mirror in freed:
            self._fill_from_reserved(mirror, now)
        self._fill_from_queue(now)
        starved = []
        found = True
        for mirror in freed:
            if mirror.level == 0:
                found = found and self._steal(mirror, now)
                if not found and not mirror.starved:
                    mirror.starved = True
                    starved.append(mirror.worker)
        freed.clear()
        return starved

    def _fill_from_reserved(self, mirror: Mirror, now: float) -> None:
        while mirror.reserved and self._windows.has_room(mirror):
            self._give(mirror, mirror.reserved.take(), now)

    def _fill_from_queue(self, now: float) -> None:
        while self._queue:
            mirror = self._windows.emptiest()
            if mirror is None or (mirror.level and self._queue.oldest().losses):
                return
            self._give(mirror, self._queue.take(), now)

    def _steal(self, thief: Mirror, now: float) -> bool:
        task = self._windows.steal_candidate()
        if task is None:
            return False
        self.counters.steals += 1
        (victim,) = task.holders
        del victim.held[task.id]
        task.holders = ()
        self._revoke(task, victim)
        self._fill_from_reserved(victim, now)
        self._give(thief, task, now)
        return True

    # -- inspection --------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check every invariant; O(everything), for tests. Raises AssertionError."""
        self._windows.validate()
        assert not self._assigned
        assert not self._revoked
        queued = list(self._queue)
        backlogs = [queued, *map(list, self._reserved.values())]
        assert [len(self._queue), *map(len, self._reserved.values())] == [len(tasks) for tasks in backlogs]
        assert all(sorted(tasks, key=lambda task: task.order) == tasks for tasks in backlogs)
        for task_id, task in self._tasks.items():
            assert task_id == task.id
            assert (task.backlog is None) == bool(task.holders), "a task is lost, or waits while it is held"
            assert len(task.holders) <= 2
            assert all(task_id in holder.held for holder in task.holders)
            assert len(task.losses) < self._poison_limit
        waiting = {task.id for tasks in backlogs for task in tasks}
        held = {task_id for mirror in self._windows.mirrors.values() for task_id in mirror.held}
        assert waiting | held == self._tasks.keys()
        assert self._windows.suspects == sum(bool(task.losses) for task in self._tasks.values())
        emptiest = self._windows.emptiest() if queued else None
        assert emptiest is None or (emptiest.level and queued[0].losses), "a task waits beside room"
