"""Tasks, the backlog that they wait in, the scheduler's views of the workers' queues, and the usual time of a task."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from typing import TypeAlias

from torch_dpflow._core.lazy_heap import LazyHeap

#: Number of one load. Callers never reuse a number, because a worker may still send a result for it.
TaskId: TypeAlias = int
#: Number of a worker. A worker that replaces another has the same number.
WorkerId: TypeAlias = int
#: A backlog is compacted when its gaps exceed half of its length and this number.
_MAX_GAPS = 64


class Task:
    """One task from its submission until it is delivered, cancelled or poisoned."""

    __slots__ = ("backlog", "holders", "id", "late", "losses", "pinned_to")

    def __init__(self, task_id: TaskId, pinned_to: WorkerId | None) -> None:
        #: Number of the task; smaller numbers are older.
        self.id = task_id
        self.pinned_to = pinned_to
        #: The backlog in which the task waits for a worker; None while workers hold the task.
        self.backlog: Backlog | None = None
        #: The views that hold the task: one, or two if the task was copied.
        self.holders: tuple[WorkerView, ...] = ()
        #: The workers that were lost while they ran the task. If there are any, the task is a suspect and runs alone.
        self.losses: tuple[WorkerId, ...] = ()
        #: How many of the lost workers were killed because the task took too long.
        self.late = 0

    def is_movable(self) -> bool:
        """Return whether another worker may take the task over: it is not pinned, and exactly one worker holds it."""
        return self.pinned_to is None and len(self.holders) == 1


class Backlog:
    """Tasks that no worker holds, oldest first.

    Tasks leave in order, so every returned task is older than every appended one: a queue of appended tasks and a heap
    of returned tasks suffice. Appended tasks cost O(1) each, returned tasks O(log r) with r returned tasks.
    """

    __slots__ = ("_fresh", "_gaps", "_length", "_returned")

    def __init__(self) -> None:
        self._fresh: deque[Task] = deque()
        #: How many of `_fresh` have left.
        self._gaps = 0
        self._returned: LazyHeap[Task] = LazyHeap()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, task: Task) -> None:
        """Add a task that is newer than all others."""
        task.backlog = self
        self._fresh.append(task)
        self._length += 1

    def give_back(self, task: Task) -> None:
        task.backlog = self
        self._returned.push(task, task.id)
        self._length += 1

    def discard(self, task: Task) -> None:
        """Remove a task from anywhere; amortised O(1)."""
        task.backlog = None
        self._length -= 1
        if self._returned.discard(task):
            return
        self._gaps += 1
        if 2 * self._gaps > len(self._fresh) + _MAX_GAPS:
            self._fresh = deque(task for task in self._fresh if task.backlog is self)
            self._gaps = 0

    def oldest(self) -> Task:
        """Return the task that `take` would return. The backlog must not be empty."""
        if self._returned:
            return self._returned.first()
        while self._fresh[0].backlog is not self:
            self._fresh.popleft()
            self._gaps -= 1
        return self._fresh[0]

    def take(self) -> Task:
        """Remove and return the oldest task. The backlog must not be empty."""
        task = self.oldest()
        if self._returned:
            self._returned.discard(task)
        else:
            self._fresh.popleft()
        task.backlog = None
        self._length -= 1
        return task

    def take_many(self, count: int) -> list[Task]:
        """Remove and return the oldest `count` tasks. The backlog must contain at least `count`."""
        if self._returned:
            return [self.take() for _ in range(count)]
        tasks: list[Task] = []
        while len(tasks) < count:
            task = self._fresh.popleft()
            if task.backlog is self:
                task.backlog = None
                tasks.append(task)
            else:
                self._gaps -= 1
        self._length -= count
        return tasks


#: Maximum messages to a worker between two of its exchanges, beyond one for each task of its window. A worker reads no
#: message while it loads a sample, and its connection queues a limited number.
MAX_UNANSWERED = 64
#: The level of a view whose worker is lost.
GONE = -1


class WorkerView:
    """The scheduler's view of one worker's local queue of tasks: the mirror queue of the thesis.

    `held` are the tasks sent to the worker, `reserved` the tasks pinned to it and not sent yet.
    """

    __slots__ = (
        "condemned",
        "held",
        "level",
        "overtaken",
        "reserved",
        "running",
        "since",
        "starved",
        "unanswered",
        "window",
        "worker",
    )

    def __init__(self, worker: WorkerId, reserved: Backlog, now: float, window: int) -> None:
        self.worker = worker
        #: Maximum number of tasks that the worker holds, at most `WorkerViews.window`.
        self.window = window
        #: Assigned, unfinished tasks in the order of the worker's local queue; more than `window` if that was reduced.
        self.held: dict[TaskId, Task] = {}
        #: Tasks pinned to this worker that are not assigned yet. Outlives the worker.
        self.reserved = reserved
        #: The task that the worker is believed to run. It may not be in `held`: a task that was cancelled, delivered
        #: by another worker, or stolen too late occupies its worker until the worker exchanges.
        self.running: TaskId | None = None
        #: When `running` is believed to have started, seconds.
        self.since = now
        #: Whether the worker was reported as idle, and has got no task since.
        self.starved = False
        #: Whether the worker gets no task until it exchanges: others took over its tasks, or it answers no messages.
        self.overtaken = False
        #: How many messages were sent to the worker since it last exchanged.
        self.unanswered = 0
        #: Whether the worker is to be killed, because it has run one task for too long.
        self.condemned = False
        #: Index into `WorkerViews.levels`, or GONE.
        self.level = GONE

    def load(self) -> int:
        """Return how many tasks the worker runs before it is idle, including a running one that is no longer needed."""
        if self.running is None or self.running in self.held:
            return len(self.held)
        return len(self.held) + 1

    def running_task(self) -> Task | None:
        """Return the task believed to run on this worker; None if its result is no longer needed."""
        return None if self.running is None else self.held.get(self.running)

    def last_movable(self) -> Task | None:
        """Return the last task behind the running task that another worker may take over, or None."""
        for task in reversed(self.held.values()):
            if task.id == self.running:
                return None
            if task.is_movable():
                return task
        return None

    def note_running(self, running: TaskId | None, now: float) -> None:
        """Record which task the worker runs; a task that was not recorded before starts at `now`."""
        if running != self.running:
            self.running = running
            self.since = now


class WorkerViews:
    """Views of all workers, in levels by their load (`WorkerView.load`), so that the emptiest is found quickly.

    The last level is window + 1: a full window behind a task that is no longer needed. A view whose own, smaller window
    is full has level `window`, or the last level if it holds more. The last level also has the views that must get no
    tasks, because they were overtaken, or a suspect must run alone.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.views: dict[WorkerId, WorkerView] = {}
        self.levels: list[dict[WorkerId, WorkerView]] = [{} for _ in range(window + 2)]
        #: How many unfinished tasks are suspects. While there are none, no view is searched for them.
        self.suspects = 0
        #: Views to fill at the end of the present event: new views, views whose level fell, and idle views if there may
        #: be tasks to steal. Can contain a view twice, and views of lost workers.
        self.freed: list[WorkerView] = []
        #: All levels below this one are empty.
        self._lowest = 0

    def add(self, view: WorkerView) -> None:
        self.views[view.worker] = self.levels[0][view.worker] = view
        view.level = self._lowest = 0
        self.freed.append(view)

    def remove(self, view: WorkerView) -> None:
        del self.views[view.worker]
        del self.levels[view.level][view.worker]
        view.level = GONE

    def place(self, view: WorkerView) -> None:
        """Update the view's level; call this after each change of the tasks that it holds or runs."""
        level = view.load()
        if level >= view.window:
            level = self.window + (level > view.window)
        if level and (view.overtaken or self.suspects) and self._is_closed(view):
            level = self.window + 1
        before = view.level
        if level == before:
            return
        del self.levels[before][view.worker]
        self.levels[level][view.worker] = view
        view.level = level
        if level < before:
            self.freed.append(view)
            if level < self._lowest:
                self._lowest = level

    def _is_closed(self, view: WorkerView) -> bool:
        """Return whether a busy worker must get no tasks: it was overtaken, or runs or awaits a suspect."""
        if view.overtaken:
            return True
        running = view.running_task()
        if running is not None and running.losses:
            return True
        return len(view.reserved) > 0 and bool(view.reserved.oldest().losses)

    def note_messages(self, workers: Iterable[WorkerId]) -> None:
        """Count a message to each of these workers. A worker that answers none of many messages gets no more tasks.

        Otherwise idle workers would steal its tasks, and it would get new ones, without end.
        """
        for worker in workers:
            view = self.views.get(worker)
            if view is not None:
                view.unanswered += 1
                if view.unanswered >= MAX_UNANSWERED + view.window and not view.overtaken:
                    view.overtaken = True
                    self.place(view)

    def has_room(self, view: WorkerView) -> bool:
        return GONE < view.level < self.window

    def emptiest(self) -> WorkerView | None:
        """Return the least loaded view with room; among equals, the one unchanged for longest. None: all are full."""
        while self._lowest < self.window:
            if self.levels[self._lowest]:
                return next(iter(self.levels[self._lowest].values()))
            self._lowest += 1
        return None

    def turns(self, tasks: int) -> tuple[list[WorkerView], int]:
        """Return the emptiest views, and how many of `tasks` to deal to them before another view is as empty.

        There must be a view with room, and no suspect.
        """
        level = self.levels[self._lowest]
        views = [*itertools.islice(level.values(), tasks)]
        if tasks <= len(level):
            return views, tasks
        most = min([self.window, *[view.window for view in views]]) - self._lowest
        rounds = next((count for count in range(1, most) if self.levels[self._lowest + count]), max(1, most))
        return views, min(tasks, rounds * len(views))

    def offer(self, view: WorkerView) -> None:
        """Let idle workers try to steal again if this view, after a change, contains a task that can be stolen."""
        if self.levels[0] and view.level > 1 and view.last_movable() is not None:
            self.freed.extend(self.levels[0].values())

    def steal_candidate(self) -> Task | None:
        """Return the task to steal: the last of the longest queue; of several, the one whose running task is oldest."""
        # Consumers in order need the oldest first, but its holder starts that one next: stealing it loads several
        # times as many tasks twice and gains less than 1% of time.
        for level in reversed(self.levels[2:]):
            movable = [
                (view.since, task.id, task) for view in level.values() if (task := view.last_movable()) is not None
            ]
            if movable:
                return min(movable)[2]
        return None

    def stuck(self, latest: float) -> list[WorkerView]:
        """Return the busy views whose workers have run one task since `latest` or before."""
        return [view for view in self.views.values() if view.running is not None and view.since <= latest]


#: Weight of the latest task in the moving average.
_WEIGHT = 0.1
#: A worker counts as stuck at a task that takes this many times the average.
_STUCK_FACTOR = 4.0


class Pace:
    """Moving average of the duration of a task.

    Args:
        min_s: shortest time at one task after which a worker can count as stuck, seconds.
    """

    def __init__(self, min_s: float) -> None:
        self._min_s = min_s
        #: The moving average, seconds.
        self.usual_s = 0.0

    @property
    def stuck_after_s(self) -> float:
        """Time at one task after which a worker counts as stuck, seconds."""
        return max(self._min_s, _STUCK_FACTOR * self.usual_s)

    def took(self, seconds: float) -> None:
        """Add the duration of one task to the average.

        A duration above `stuck_after_s` counts as that limit, because one stuck task would otherwise raise it.
        """
        self.usual_s += _WEIGHT * (min(seconds, self.stuck_after_s) - self.usual_s)
