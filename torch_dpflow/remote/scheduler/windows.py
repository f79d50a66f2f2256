"""The mirrors of the workers' local queues, ordered by how much they hold."""

from __future__ import annotations

from torch_dpflow.remote.scheduler.events import TaskId, WorkerId
from torch_dpflow.remote.scheduler.tasks import Backlog, Task

#: The level of a mirror whose worker is lost.
GONE = -1


class Mirror:
    """What one worker is believed to hold.

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
        "worker",
    )

    def __init__(self, worker: WorkerId, reserved: Backlog, now: float) -> None:
        self.worker = worker
        #: Assigned and unfinished, in the order of the worker's local queue; at most `window`.
        self.held: dict[TaskId, Task] = {}
        #: Tasks pinned to this worker that are not assigned yet. Outlives the worker.
        self.reserved = reserved
        #: What the worker is believed to run. It need not be in `held`: a task that was cancelled, delivered
        #: by another worker or stolen a moment too late occupies its worker until the worker exchanges.
        self.running: TaskId | None = None
        #: When `running` is believed to have been started, seconds.
        self.since = now
        #: Reported as starved, and given nothing since.
        self.starved = False
        #: Others have taken over what it holds; it is given nothing until it exchanges.
        self.overtaken = False
        #: It is to be killed, because it has been at one task for too long.
        self.condemned = False
        #: Index into Windows.levels, or GONE.
        self.level = GONE

    def load(self) -> int:
        """Tasks that the worker has to finish before it is idle, wanted or not."""
        if self.running is None or self.running in self.held:
            return len(self.held)
        return len(self.held) + 1

    def running_task(self) -> Task | None:
        """The task that is believed running, if it is still wanted of this worker."""
        return None if self.running is None else self.held.get(self.running)

    def last_movable(self) -> Task | None:
        """The last task behind the running one that another worker may take over."""
        for task in reversed(self.held.values()):
            if task.id == self.running:
                return None
            if task.is_movable():
                return task
        return None

    def believe(self, running: TaskId | None, now: float) -> None:
        """The worker runs this task from now on, unless it is what it ran before."""
        if running != self.running:
            self.running = running
            self.since = now


class Windows:
    """All mirrors, by level.

    The level of a mirror is its load, 0 to window + 1 (a full window behind a task that is no longer wanted).
    One that may not take anything, because of a suspect or because it was overtaken, is on the last level,
    whatever its load.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.mirrors: dict[WorkerId, Mirror] = {}
        self.levels: list[dict[WorkerId, Mirror]] = [{} for _ in range(window + 2)]
        #: Unfinished tasks with losses. While there are none, no mirror is asked about suspects.
        self.suspects = 0
        #: Mirrors to look at before the present event is done: they joined, their level fell, or they are
        #: idle and what waits at others has changed. May name one twice, and ones that are gone.
        self.freed: list[Mirror] = []
        #: No level below this one has a mirror on it.
        self._lowest = 0

    def add(self, mirror: Mirror) -> None:
        """Take in the empty mirror of a new worker."""
        self.mirrors[mirror.worker] = self.levels[0][mirror.worker] = mirror
        mirror.level = self._lowest = 0
        self.freed.append(mirror)

    def remove(self, mirror: Mirror) -> None:
        """Take out the mirror of a lost worker."""
        del self.mirrors[mirror.worker]
        del self.levels[mirror.level][mirror.worker]
        mirror.level = GONE

    def place(self, mirror: Mirror) -> None:
        """Bring the mirror's level up to date, after each change of what it holds or runs."""
        level = mirror.load()
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
        """Whether a busy worker was overtaken, runs a suspect, or must run empty before it is given one."""
        if mirror.overtaken:
            return True
        running = mirror.running_task()
        if running is not None and running.losses:
            return True
        return len(mirror.reserved) > 0 and bool(mirror.reserved.oldest().losses)

    def has_room(self, mirror: Mirror) -> bool:
        """Whether the mirror may take one more task."""
        return GONE < mirror.level < self.window

    def emptiest(self) -> Mirror | None:
        """The mirror with room that has the lowest load; among equals, the one that has had it longest."""
        while self._lowest < self.window:
            if self.levels[self._lowest]:
                return next(iter(self.levels[self._lowest].values()))
            self._lowest += 1
        return None

    def offer(self, mirror: Mirror) -> None:
        """Have idle workers look again for work if this mirror, which has changed, has something to steal."""
        if self.levels[0] and mirror.level > 1 and mirror.last_movable() is not None:
            self.freed.extend(self.levels[0].values())

    def loot(self) -> Task | None:
        """The task to steal: the last of the longest mirror, among equals of the longest running task."""
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
            assert mirror.level == (self.window + 1 if closed else mirror.load())
            assert len(mirror.held) <= self.window
            assert mirror.running is not None or not mirror.held
            assert mirror.starved or mirror.level, "an idle worker has not been reported"
            assert not (mirror.starved and mirror.held)
            assert not mirror.reserved or not self.has_room(mirror), "a pinned task waits beside room"
            assert all(mirror in task.holders for task in mirror.held.values())
            assert all(task.pinned_to in (None, worker) for task in mirror.held.values())
        assert not self.levels[0] or self.loot() is None, "a worker is idle that could steal"
