"""What a scheduler remembers: tasks, the backlog they wait in, and the mirrors of the workers' queues."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping

import msgspec

from torch_dpflow.remote.scheduler_events import TaskId, WorkerId


class Task:
    """One task from its submission until it is delivered, cancelled or poisoned. Then it is forgotten."""

    __slots__ = ("backlog", "holders", "id", "losses", "order", "pinned_to")

    def __init__(self, task_id: TaskId, order: int, pinned_to: WorkerId | None) -> None:
        self.id = task_id
        #: Position in the order of submission. Smaller is older, and older is more urgent.
        self.order = order
        self.pinned_to = pinned_to
        #: Where it waits for a worker; None while workers hold it.
        self.backlog: Backlog | None = None
        #: The mirrors that hold it: at most two, and two only if it was copied.
        self.holders: tuple[Mirror, ...] = ()
        #: The workers that were lost while they ran it. Not empty: the task is a suspect, and runs alone.
        self.losses: tuple[WorkerId, ...] = ()


class Backlog:
    """Tasks that no worker holds, oldest first.

    Adding a new task and taking the oldest are O(1), giving back a task O(log r) with r tasks given back.
    Every task given back is older than every new one, because tasks leave in order: so two queues do, and
    a heap of everything need not. A task that is taken out of the middle leaves a gap that is skipped later.
    """

    __slots__ = ("_fresh", "_gaps", "_live", "_returned")

    def __init__(self) -> None:
        self._fresh: deque[Task] = deque()
        self._returned: list[tuple[int, Task]] = []
        self._live = 0
        self._gaps = 0

    def __len__(self) -> int:
        return self._live

    def __iter__(self) -> Iterator[Task]:
        """Yield the tasks, oldest first; O(n log n), for snapshots and validation."""
        for _, task in sorted(self._returned, key=lambda entry: entry[0]):
            if task.backlog is self:
                yield task
        for task in self._fresh:
            if task.backlog is self:
                yield task

    def append(self, task: Task) -> None:
        """Add a new task, younger than all before it."""
        task.backlog = self
        self._fresh.append(task)
        self._live += 1

    def give_back(self, task: Task) -> None:
        """Take in again a task that had been taken."""
        task.backlog = self
        heapq.heappush(self._returned, (task.order, task))
        self._live += 1

    def discard(self, task: Task) -> None:
        """Take out a task from anywhere; amortised O(1)."""
        task.backlog = None
        self._live -= 1
        self._gaps += 1
        if self._gaps > self._live + 64:
            self._close_gaps()

    def oldest(self) -> Task:
        """The task that `take` would return. The backlog must not be empty."""
        while self._returned:
            task = self._returned[0][1]
            if task.backlog is self:
                return task
            heapq.heappop(self._returned)
            self._gaps -= 1
        while self._fresh[0].backlog is not self:
            self._fresh.popleft()
            self._gaps -= 1
        return self._fresh[0]

    def take(self) -> Task:
        """Remove and return the oldest task. The backlog must not be empty."""
        task = self.oldest()
        if self._returned:
            heapq.heappop(self._returned)
        else:
            self._fresh.popleft()
        task.backlog = None
        self._live -= 1
        return task

    def _close_gaps(self) -> None:
        self._fresh = deque(task for task in self._fresh if task.backlog is self)
        self._returned = [entry for entry in self._returned if entry[1].backlog is self]
        heapq.heapify(self._returned)
        self._gaps = 0


class Mirror:
    """What a worker is believed to hold: the mirror of its local queue (thesis 3.4.1).

    The submitted part of the thesis's mirror queue is `held`; its unsubmitted part is `reserved`.
    """

    __slots__ = ("held", "level", "reserved", "running", "since", "starved", "worker")

    def __init__(self, worker: WorkerId, reserved: Backlog, now: float) -> None:
        self.worker = worker
        #: Assigned and unfinished, in the order of the worker's local queue.
        self.held: dict[TaskId, Task] = {}
        #: Tasks pinned to this worker that are not assigned yet. Outlives the worker.
        self.reserved = reserved
        #: What the worker is believed to run. It need not be in `held`: a task that was delivered by another
        #: worker, cancelled or stolen a moment too late still occupies the worker until it exchanges.
        self.running: TaskId | None = None
        #: When `running` was believed to start, seconds.
        self.since = now
        #: Reported as starved, and given nothing since.
        self.starved = False
        #: Index of the scheduler's list of mirrors that holds this one: see Scheduler. -1: lost.
        self.level = 0

    def load(self) -> int:
        """Tasks that the worker has to finish before it is idle, wanted or not."""
        held = self.held
        if self.running is None or self.running in held:
            return len(held)
        return len(held) + 1

    def waiting(self) -> Iterator[Task]:
        """Yield the held tasks behind the one that is believed running, in order."""
        tasks = iter(self.held.values())
        if self.running in self.held:
            for task in tasks:
                if task.id == self.running:
                    break
        return tasks

    def running_task(self) -> Task | None:
        """The task that is believed running, if it is still wanted of this worker."""
        return None if self.running is None else self.held.get(self.running)


class Counters(msgspec.Struct):
    """What has happened since the scheduler was made; each only grows."""

    submitted: int = 0
    delivered: int = 0
    cancelled: int = 0
    poisoned: int = 0
    #: Results not handed on: copies that came second, and results of tasks that nobody wants any more.
    duplicates: int = 0
    #: Waiting tasks moved from one worker to an idle one.
    steals: int = 0
    #: Running tasks copied to an idle worker.
    speculated: int = 0
    #: Tasks in Revoke instructions.
    revoked: int = 0
    #: Tasks taken back from lost workers.
    requeues: int = 0
    #: Workers lost.
    losses: int = 0


class WorkerSnapshot(msgspec.Struct, frozen=True):
    """One mirror at one moment."""

    held: tuple[TaskId, ...]
    running: TaskId | None
    reserved: int


class SchedulerSnapshot(msgspec.Struct, frozen=True):
    """The whole scheduler at one moment; shares nothing with it."""

    counters: Counters
    #: Tasks waiting in the global queue.
    queued: int
    #: Tasks pinned to a worker and not assigned, present or not.
    reserved: int
    #: Tasks submitted and not yet delivered, cancelled or poisoned.
    unfinished: int
    workers: Mapping[WorkerId, WorkerSnapshot]
