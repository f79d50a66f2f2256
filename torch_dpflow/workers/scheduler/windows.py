"""The mirrors of the workers' local queues, by load."""

from __future__ import annotations

from torch_dpflow.workers.scheduler.events import TaskId, WorkerId
from torch_dpflow.workers.scheduler.tasks import Backlog, Task

#: The level of a mirror whose worker is lost.
GONE = -1


class Mirror:
    """The scheduler's copy of one worker's local queue.

    `held` is the submitted part of the thesis's mirror queue, `reserved` its unsubmitted part.
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
        "window",
        "worker",
    )

    def __init__(self, worker: WorkerId, reserved: Backlog, now: float, window: int) -> None:
        self.worker = worker
        #: Most tasks that it is to hold, at most that of all.
        self.window = window
        #: Assigned and unfinished, in the order of the worker's local queue; more than `window` where that fell.
        self.held: dict[TaskId, Task] = {}
        #: Tasks pinned to this worker that are not assigned yet. Outlives the worker.
        self.reserved = reserved
        #: The task that the worker is believed to run. It need not be in `held`: a task that was cancelled, delivered
        #: by another worker or stolen too late occupies its worker until that exchanges.
        self.running: TaskId | None = None
        #: When `running` is believed to have started, seconds.
        self.since = now
        #: It was reported as idle, and has got nothing since.
        self.starved = False
        #: Others have taken over its tasks; it gets nothing until it exchanges.
        self.overtaken = False
        #: It is to be killed, because it has run one task for too long.
        self.condemned = False
        #: Index into Windows.levels, or GONE.
        self.level = GONE

    def load(self) -> int:
        """How many tasks the worker has to finish before it is idle, including one that is not needed any more."""
        if self.running is None or self.running in self.held:
            return len(self.held)
        return len(self.held) + 1

    def running_task(self) -> Task | None:
        """The task that is believed to run, if its result is still needed from this worker."""
        return None if self.running is None else self.held.get(self.running)

    def last_movable(self) -> Task | None:
        """The last task behind the running one that another worker may take over."""
        for task in reversed(self.held.values()):
            if task.id == self.running:
                return None
            if task.is_movable():
                return task
        return None

    def note_running(self, running: TaskId | None, now: float) -> None:
        """Note that the worker runs this task, from now on unless it did before."""
        if running != self.running:
            self.running = running
            self.since = now


class Windows:
    """All mirrors, by level.

    The level of a mirror is its load, 0 to window + 1 (a full window behind a task that is no longer needed); from its
    own window on, where that is smaller, it is as if that were `window`. A mirror that must not get anything, because
    of a suspect or because it was overtaken, is on the last level, whatever its load.

    Args:
        window: the largest of any worker.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.mirrors: dict[WorkerId, Mirror] = {}
        self.levels: list[dict[WorkerId, Mirror]] = [{} for _ in range(window + 2)]
        #: How many unfinished tasks are suspects. While there are none, no mirror is searched for them.
        self.suspects = 0
        #: Mirrors to fill at the end of the present event: they are new, their level fell, or they are idle and others
        #: have other tasks to steal. May contain a mirror twice, and mirrors of lost workers.
        self.freed: list[Mirror] = []
        #: All levels below this one are empty.
        self._lowest = 0

    def add(self, mirror: Mirror) -> None:
        """Add the empty mirror of a new worker."""
        self.mirrors[mirror.worker] = self.levels[0][mirror.worker] = mirror
        mirror.level = self._lowest = 0
        self.freed.append(mirror)

    def remove(self, mirror: Mirror) -> None:
        """Remove the mirror of a lost worker."""
        del self.mirrors[mirror.worker]
        del self.levels[mirror.level][mirror.worker]
        mirror.level = GONE

    def place(self, mirror: Mirror) -> None:
        """Update the mirror's level; call after each change of what it holds or runs."""
        level = mirror.load()
        if level >= mirror.window:
            level = self.window + (level > mirror.window)
        if level and (mirror.overtaken or self.suspects) and self._is_closed(mirror):
            level = self.window + 1
        before = mirror.level
        if level == before:
            return
        del self.levels[before][mirror.worker]
        self.levels[level][mirror.worker] = mirror
        mirror.level = level
        if level < before:
            self.freed.append(mirror)
            if level < self._lowest:
                self._lowest = level

    def _is_closed(self, mirror: Mirror) -> bool:
        """Whether a busy worker must not get tasks: it was overtaken, runs a suspect, or has to be empty for one."""
        if mirror.overtaken:
            return True
        running = mirror.running_task()
        if running is not None and running.losses:
            return True
        return len(mirror.reserved) > 0 and bool(mirror.reserved.oldest().losses)

    def has_room(self, mirror: Mirror) -> bool:
        """Whether the mirror may get one more task."""
        return GONE < mirror.level < self.window

    def emptiest(self) -> Mirror | None:
        """The mirror with room that has the lowest load; among equals, the one that has had it longest."""
        while self._lowest < self.window:
            if self.levels[self._lowest]:
                return next(iter(self.levels[self._lowest].values()))
            self._lowest += 1
        return None

    def offer(self, mirror: Mirror) -> None:
        """Let idle workers try to steal again if this mirror, which has changed, has something to steal."""
        if self.levels[0] and mirror.level > 1 and mirror.last_movable() is not None:
            self.freed.extend(self.levels[0].values())

    def steal_candidate(self) -> Task | None:
        """The task to steal: the last of the longest mirror; of several, the one whose running task is oldest."""
        # Consumers in order need the oldest first, but its holder starts that one next: stealing it loads several
        # times as many tasks twice and gains less than 1% of time (benchmarks.scheduler).
        for level in reversed(self.levels[2:]):
            movable = [
                (mirror.since, task.order, task)
                for mirror in level.values()
                if (task := mirror.last_movable()) is not None
            ]
            if movable:
                return min(movable)[2]
        return None

    def stuck(self, latest: float) -> list[Mirror]:
        """The busy mirrors whose workers have been at one task since `latest` or before."""
        return [
            mirror
            for mirror in self.mirrors.values()
            if mirror.running is not None and mirror.since <= latest
        ]

    def validate(self) -> None:
        """Check every invariant; O(everything). Raises AssertionError."""
        assert sum(map(len, self.levels)) == len(self.mirrors)
        assert all(self.levels[index] == {} for index in range(self._lowest))
        assert not self.freed
        for worker, mirror in self.mirrors.items():
            assert worker == mirror.worker
            assert self.levels[mirror.level][worker] is mirror
            closed = mirror.load() > 0 and self._is_closed(mirror)
            load, own = mirror.load(), mirror.window
            open_level = load if load < own else self.window + (load > own)
            assert 1 <= own <= self.window
            assert mirror.level == (self.window + 1 if closed else open_level)
            assert len(mirror.held) <= self.window
            assert mirror.running is not None or not mirror.held
            assert mirror.starved or mirror.level, "an idle worker has not been reported"
            assert not (mirror.starved and mirror.held)
            assert not mirror.reserved or not self.has_room(mirror), "a pinned task waits beside room"
            assert all(mirror in task.holders for task in mirror.held.values())
            assert all(task.pinned_to in (None, worker) for task in mirror.held.values())
        assert not self.levels[0] or self.steal_candidate() is None, "a worker is idle that could steal"
