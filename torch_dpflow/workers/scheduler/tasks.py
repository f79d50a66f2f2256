"""Tasks, and the backlog that they wait in until a worker takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch_dpflow._core.lazy_heap import LazyHeap
from torch_dpflow.workers.scheduler.events import TaskId, WorkerId

if TYPE_CHECKING:
    from torch_dpflow.workers.scheduler.windows import Mirror

#: How many gaps beyond half of its length a backlog tolerates before it is compacted.
_MAX_GAPS = 64


class Task:
    """One task from its submission until it is delivered, cancelled or poisoned."""

    __slots__ = ("backlog", "holders", "id", "late", "losses", "order", "pinned_to")

    def __init__(self, task_id: TaskId, order: int, pinned_to: WorkerId | None) -> None:
        self.id = task_id
        #: Position in the order of submission. Smaller is older.
        self.order = order
        self.pinned_to = pinned_to
        #: Where it waits for a worker; None while workers hold it.
        self.backlog: Backlog | None = None
        #: The mirrors that hold it: one, or two if it was copied.
        self.holders: tuple[Mirror, ...] = ()
        #: The workers that were lost while they ran it. Where there are any, the task is a suspect and runs alone.
        self.losses: tuple[WorkerId, ...] = ()
        #: How many of them were killed because it took too long.
        self.late = 0

    def is_movable(self) -> bool:
        """Whether another worker may take it over: it is not pinned, and one worker has it."""
        return self.pinned_to is None and len(self.holders) == 1


class Backlog:
    """Tasks that no worker holds, oldest first.

    Appending a new task and taking the oldest are O(1), returning one is O(log r) with r returned tasks. Tasks leave in
    order, so every returned task is older than every new one: a heap of the returned and a queue of the new ones
    suffice. Discarding a task from the middle of the queue leaves a gap, which is skipped later.
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

    def __iter__(self) -> Iterator[Task]:
        """Yield the tasks, oldest first; O(n log n), for validation."""
        yield from sorted(self._returned, key=lambda task: task.order)
        for task in self._fresh:
            if task.backlog is self:
                yield task

    def append(self, task: Task) -> None:
        """Add a task that is newer than all others."""
        task.backlog = self
        self._fresh.append(task)
        self._length += 1

    def give_back(self, task: Task) -> None:
        """Return a task that was taken."""
        task.backlog = self
        self._returned.push(task, task.order)
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
        """The task that `take` would return. The backlog must not be empty."""
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
