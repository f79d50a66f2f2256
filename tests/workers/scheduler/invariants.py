"""Checks of every invariant of a scheduler; O(everything)."""

from __future__ import annotations

from torch_dpflow.workers.scheduler.machine import Scheduler
from torch_dpflow.workers.scheduler.views import Backlog, Task, WorkerViews


def validate(scheduler: Scheduler) -> None:
    """Raise AssertionError if an invariant does not hold."""
    _validate_views(scheduler._views)
    assert not scheduler._assigned
    assert not scheduler._revoked
    queued = _in_order(scheduler._queue)
    backlogs = [queued, *map(_in_order, scheduler._reserved.values())]
    assert [len(scheduler._queue), *map(len, scheduler._reserved.values())] == [len(tasks) for tasks in backlogs]
    assert all(sorted(tasks, key=lambda task: task.id) == tasks for tasks in backlogs)
    for task_id, task in scheduler._tasks.items():
        assert task_id == task.id
        assert (task.backlog is None) == bool(task.holders), "a task is lost, or waits while it is held"
        assert len(task.holders) <= 2
        assert all(task_id in holder.held for holder in task.holders)
        assert len(task.losses) < scheduler._poison_limit
    waiting = {task.id for tasks in backlogs for task in tasks}
    held = {task_id for view in scheduler._views.views.values() for task_id in view.held}
    assert waiting | held == scheduler._tasks.keys()
    assert scheduler._views.suspects == sum(bool(task.losses) for task in scheduler._tasks.values())
    emptiest = scheduler._views.emptiest() if queued else None
    assert emptiest is None or (emptiest.level and queued[0].losses), "a task waits beside room"


def _in_order(backlog: Backlog) -> list[Task]:
    """The tasks of a backlog, oldest first."""
    fresh = [task for task in backlog._fresh if task.backlog is backlog]
    return [*sorted(backlog._returned, key=lambda task: task.id), *fresh]


def _validate_views(views: WorkerViews) -> None:
    assert sum(map(len, views.levels)) == len(views.views)
    assert all(views.levels[index] == {} for index in range(views._lowest))
    assert not views.freed
    for worker, view in views.views.items():
        assert worker == view.worker
        assert views.levels[view.level][worker] is view
        closed = view.load() > 0 and views._is_closed(view)
        load, own = view.load(), view.window
        open_level = load if load < own else views.window + (load > own)
        assert 1 <= own <= views.window
        assert view.level == (views.window + 1 if closed else open_level)
        assert len(view.held) <= views.window
        assert view.running is not None or not view.held
        assert view.starved or view.level, "an idle worker has not been reported"
        assert not (view.starved and view.held)
        assert not view.reserved or not views.has_room(view), "a pinned task waits beside room"
        assert all(view in task.holders for task in view.held.values())
        assert all(task.pinned_to in (None, worker) for task in view.held.values())
    assert not views.levels[0] or views.steal_candidate() is None, "a worker is idle that could steal"
