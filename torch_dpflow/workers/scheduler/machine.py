"""The scheduler: each method handles one event, then assigns tasks to workers with room."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from torch_dpflow._core.checks import check_int, check_seconds
from torch_dpflow.errors import OptionError
from torch_dpflow.workers.scheduler.views import (
    Backlog,
    Pace,
    Task,
    TaskId,
    WorkerId,
    WorkerView,
    WorkerViews,
)

# Instructions are frozen structs, created in a fifth of the time of a frozen dataclass, about 0.1 µs. Times are seconds
# of one monotonic clock, which the caller chooses.


class Assign(msgspec.Struct, frozen=True, gc=False):
    """Instruction: append these tasks to the worker's local queue, in order."""

    worker: WorkerId
    tasks: list[TaskId]


class Revoke(msgspec.Struct, frozen=True, gc=False):
    """Instruction: remove these tasks from the worker's local queue if they wait there.

    This cancels earlier Assigns only: the same task may be assigned to the same worker again later. A task that runs or
    has run is not affected; its result is delivered or discarded when it arrives.
    """

    worker: WorkerId
    tasks: list[TaskId]


class Deliver(msgspec.Struct, frozen=True, gc=False):
    """Instruction: deliver this worker's result, which is the first result of the task."""

    task: TaskId
    worker: WorkerId


class Discard(msgspec.Struct, frozen=True, gc=False):
    """Instruction: discard this result. Another result came first, or the task was cancelled, poisoned or unknown."""

    task: TaskId
    worker: WorkerId


class Poison(msgspec.Struct, frozen=True, gc=False):
    """Instruction: fail this task, because each of these workers was lost while it ran the task.

    `late` of the workers were killed because they exceeded `task_timeout_s`.
    """

    task: TaskId
    workers: tuple[WorkerId, ...]
    late: int = 0


class KillWorker(msgspec.Struct, frozen=True, gc=False):
    """Instruction: kill this worker, which exceeded `task_timeout_s` in one task, and report its end by `lose`.

    Not returned again before the worker exchanges.
    """

    worker: WorkerId


class IdleWorkers(msgspec.Struct, frozen=True, gc=False):
    """Notice that these workers have no task, and that none is left for them. Returned once for each idle period."""

    workers: list[WorkerId]


SchedulerInstruction: TypeAlias = Assign | Revoke | Deliver | Discard | Poison | KillWorker | IdleWorkers


class Counters(msgspec.Struct):
    """Counters since the scheduler was created."""

    submitted: int = 0
    delivered: int = 0
    poisoned: int = 0
    #: Discarded results; see `Discard`.
    duplicates: int = 0
    #: Waiting tasks that an idle worker took from another.
    steals: int = 0
    #: Running tasks that a second worker got, because the first was overtaken.
    copies: int = 0
    #: Workers that were killed because a task took too long.
    timeouts: int = 0


class Scheduler:
    """State machine that decides which worker loads which task, and which result counts; see the package's docstring.

    Invariants:

    - A task is delivered at most once.
    - As long as workers exchange, every task is delivered, cancelled or poisoned.
    - While a worker is idle, no task is queued, and none waits that this worker could steal.

    Not thread-safe. An event costs O(tasks that it names), amortised; stealing adds a look at each worker. Input is
    checked before anything changes, so a rejected event has no effect.

    Args:
        window: maximum number of tasks that a worker holds (K of the thesis) until `set_window`, at least 1.
        max_window: the upper limit of `set_window`; None: `window`.
        poison_limit: number of lost workers after which a task is poisoned, at least 1.
        overtake_after_s: seconds after which other workers, busy or not, may take over the tasks of a worker that has
            run one task for much longer than usual; None: never.
        task_timeout_s: seconds after which a worker that still runs one task is killed; None: never.

    Raises OptionError or OptionTypeError if an argument is not allowed.
    """

    def __init__(
        self,
        *,
        window: int,
        max_window: int | None = None,
        poison_limit: int = 3,
        overtake_after_s: float | None = None,
        task_timeout_s: float | None = None,
    ) -> None:
        check_int("window", window, minimum=1)
        self._views = WorkerViews(max(window, check_int("max_window", max_window or window, minimum=1)))
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
        #: The highest number of a task.
        self._newest = -1
        self._queue = Backlog()
        #: Pinned, unassigned tasks of each worker id, also of workers that are not there yet.
        self._reserved: dict[WorkerId, Backlog] = {}
        #: Instructions of the present event, the last two collected by worker.
        self._out: list[SchedulerInstruction] = []
        self._assigned: dict[WorkerId, list[TaskId]] = {}
        self._revoked: dict[WorkerId, list[TaskId]] = {}

    @property
    def workers(self) -> tuple[int, int]:
        """The pair (number of workers, number of workers that have tasks)."""
        return len(self._views.views), len(self._views.views) - len(self._views.levels[0])

    @property
    def usual_s(self) -> float:
        """Usual duration of a task, seconds; infinite before the first result, and without `overtake_after_s`."""
        return math.inf if self._pace is None or not self.counters.delivered else self._pace.usual_s

    # -- events: each returns the instructions that follow, in order -------------------------------------

    def submit(self, tasks: Sequence[TaskId], pinned_to: WorkerId | None, now: float) -> list[SchedulerInstruction]:
        """Queue these tasks, first in, first out. Pinned tasks run only on worker `pinned_to` and are never stolen.

        Task numbers must rise from call to call. Only parts of a batch that a worker has begun can have lower numbers;
        they are queued before all tasks with higher numbers.

        Raises OptionError for a task that is given twice, or that was submitted before and is unfinished.
        """
        known = self._tasks
        if len(set(tasks)) != len(tasks):
            raise OptionError(f"a task is submitted once; got one twice in {list(tasks)!r}")
        if not known.keys().isdisjoint(tasks):
            twice = next(task_id for task_id in tasks if task_id in known)
            raise OptionError(f"task {twice!r} is submitted and unfinished; give each task a new id")
        backlog = self._queue if pinned_to is None else self._reserved_for(pinned_to)
        for task_id in tasks:
            task = known[task_id] = Task(task_id, pinned_to)
            if task_id > self._newest:
                self._newest = task_id
                backlog.append(task)
            else:
                backlog.give_back(task)
        self.counters.submitted += len(tasks)
        if pinned_to is not None and pinned_to in self._views.views:
            self._views.freed.append(self._views.views[pinned_to])
        return self._settled(now)

    def cancel(self, tasks: Sequence[TaskId], now: float) -> list[SchedulerInstruction]:
        """Drop these tasks. Unknown tasks are ignored."""
        for task_id in tasks:
            task = self._tasks.get(task_id)
            if task is not None:
                self._forget(task, None)
        return self._settled(now)

    def add_worker(self, worker: WorkerId, now: float) -> list[SchedulerInstruction]:
        """Add a worker with an empty local queue. If the id is in use, its former worker counts as lost."""
        self._lose(worker, None)
        self._views.add(WorkerView(worker, self._reserved_for(worker), now, self._first_window))
        return self._settled(now)

    def set_window(self, worker: WorkerId, window: int, now: float) -> list[SchedulerInstruction]:
        """Set the maximum number of tasks that a worker holds, up to `max_window`. Unknown workers are ignored."""
        view = self._views.views.get(worker)
        if view is not None:
            view.window = min(check_int("window", window, minimum=1), self._views.window)
            self._views.place(view)
        return self._settled(now)

    def exchange(
        self, worker: WorkerId, finished: Sequence[TaskId], started: TaskId | None, now: float
    ) -> list[SchedulerInstruction]:
        """Process a worker's results, and assign more tasks to it.

        A worker must exchange whenever its local queue becomes empty, even by a Revoke.

        finished: the tasks whose results arrived; a task may be unknown.
        started: the task that the worker runs next; None: assume the first task of its view.
        """
        view = self._views.views.get(worker)
        for task_id in finished:
            task = self._tasks.get(task_id)
            if task is None:
                self.counters.duplicates += 1
                self._out.append(Discard(task_id, worker))
            else:
                self.counters.delivered += 1
                self._out.append(Deliver(task_id, worker))
                self._forget(task, view)
        if view is not None:
            if self._pace is not None and finished:
                self._pace.took((now - view.since) / len(finished))
            view.overtaken, view.condemned, view.unanswered = False, False, 0
            running = next(iter(view.held), None) if started is None or started in finished else started
            view.note_running(running, now)
            self._views.place(view)
            self._views.offer(view)
        return self._settled(now)

    def lose(self, worker: WorkerId, now: float, at: tuple[TaskId, ...] | None = None) -> list[SchedulerInstruction]:
        """Remove a worker that has died or does not answer. Unknown workers are ignored.

        at: the task that the worker ran, in a tuple; it becomes a suspect if it is unfinished. Empty: no task. None:
            the task that the scheduler believes was running.
        """
        self._lose(worker, at)
        return self._settled(now)

    def tick(self, now: float) -> list[SchedulerInstruction]:
        """Apply overtaking and time limits at the time `now`."""
        if self._pace is not None:
            for view in self._views.stuck(now - self._pace.stuck_after_s):
                self._overtake(view, now)
        if self._task_timeout_s is not None:
            for view in self._views.stuck(now - self._task_timeout_s):
                if not view.condemned:
                    view.condemned = True
                    self.counters.timeouts += 1
                    self._out.append(KillWorker(view.worker))
        return self._settled(now)

    def _settled(self, now: float) -> list[SchedulerInstruction]:
        """Fill the windows; return all instructions of the current event."""
        starved = self._fill_windows(now)
        out, self._out = self._out, []
        if self._revoked or self._assigned:
            self._views.note_messages(self._revoked.keys() | self._assigned.keys())
        if self._revoked:
            out.extend(Revoke(worker, tasks) for worker, tasks in self._revoked.items())
            self._revoked = {}
        if self._assigned:
            out.extend(Assign(worker, tasks) for worker, tasks in self._assigned.items())
            self._assigned = {}
        if starved:
            out.append(IdleWorkers(starved))
        return out

    # -- workers -----------------------------------------------------------------------------------------

    def _lose(self, worker: WorkerId, at: tuple[TaskId, ...] | None) -> None:
        view = self._views.views.get(worker)
        if view is None:
            return
        self._views.remove(view)
        for task in view.held.values():
            task.holders = tuple(holder for holder in task.holders if holder is not view)
        for task_id in (view.running,) if at is None else at:
            running = None if task_id is None else self._tasks.get(task_id)
            if running is not None and running.pinned_to in (None, worker):
                running.late += view.condemned
                self._suspect(running, worker)
        for task in view.held.values():
            if not task.holders and task.id in self._tasks:
                origin = self._queue if task.pinned_to is None else view.reserved
                origin.give_back(task)
            for holder in task.holders:
                self._views.offer(holder)

    def _overtake(self, view: WorkerView, now: float) -> None:
        """Let other workers take over the tasks of a worker that seems stuck. Idempotent."""
        view.overtaken = True
        while (waiting := view.last_movable()) is not None:
            del view.held[waiting.id]
            waiting.holders = ()
            self._revoke(waiting, view)
            self._queue.give_back(waiting)
        self._views.place(view)
        running = view.running_task()
        other = self._views.emptiest()
        if running is not None and running.is_movable() and not running.losses and other is not None:
            self.counters.copies += 1
            self._give(other, [running], now)

    # -- tasks -------------------------------------------------------------------------------------------

    def _reserved_for(self, worker: WorkerId) -> Backlog:
        return self._reserved.setdefault(worker, Backlog())

    def _suspect(self, task: Task, worker: WorkerId) -> None:
        """Count a lost worker against the task that it ran; fail the task if it has cost too many workers."""
        self._views.suspects += not task.losses
        task.losses += (worker,)
        if len(task.losses) >= self._poison_limit:
            self.counters.poisoned += 1
            self._out.append(Poison(task.id, task.losses, task.late))
            self._forget(task, None)
            return
        for holder in task.holders:
            self._views.place(holder)

    def _forget(self, task: Task, finisher: WorkerView | None) -> None:
        """Forget a finished task, and revoke it from every worker that holds it, except `finisher`."""
        del self._tasks[task.id]
        self._views.suspects -= bool(task.losses)
        if task.backlog is not None:
            task.backlog.discard(task)
            if task.pinned_to is not None and task.pinned_to in self._views.views:
                self._views.place(self._views.views[task.pinned_to])
        for holder in task.holders:
            del holder.held[task.id]
            if holder is not finisher:
                self._revoke(task, holder)
                self._views.offer(holder)

    def _give(self, view: WorkerView, tasks: Sequence[Task], now: float) -> None:
        assigned = self._assigned.setdefault(view.worker, [])
        for task in tasks:
            view.held[task.id] = task
            task.holders += (view,)
            assigned.append(task.id)
        if view.running is None:
            view.note_running(tasks[0].id, now)
        view.starved = False
        self._views.place(view)

    def _revoke(self, task: Task, view: WorkerView) -> None:
        self._revoked.setdefault(view.worker, []).append(task.id)
        self._views.place(view)

    # -- windows -----------------------------------------------------------------------------------------

    def _fill_windows(self, now: float) -> list[WorkerId]:
        """Fill every window that has room; return the workers that became idle."""
        freed = self._views.freed
        for view in freed:
            self._fill_from_reserved(view, now)
        self._fill_from_queue(now)
        starved = []
        found = True
        for view in freed:
            if view.level == 0:
                found = found and self._steal(view, now)
                if not found and not view.starved:
                    view.starved = True
                    starved.append(view.worker)
        freed.clear()
        return starved

    def _fill_from_reserved(self, view: WorkerView, now: float) -> None:
        while view.reserved and self._views.has_room(view):
            self._give(view, [view.reserved.take()], now)

    def _fill_from_queue(self, now: float) -> None:
        queue, views = self._queue, self._views
        while queue:
            view = views.emptiest()
            if view is None or (view.level and queue.oldest().losses):
                return
            emptiest, count = ([view], 1) if views.suspects else views.turns(len(queue))
            tasks = queue.take_many(count)
            for place, one in enumerate(emptiest):
                self._give(one, tasks[place :: len(emptiest)], now)

    def _steal(self, thief: WorkerView, now: float) -> bool:
        task = self._views.steal_candidate()
        if task is None:
            return False
        self.counters.steals += 1
        (victim,) = task.holders
        del victim.held[task.id]
        task.holders = ()
        self._revoke(task, victim)
        self._fill_from_reserved(victim, now)
        self._give(thief, [task], now)
        return True
