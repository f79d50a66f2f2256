"""What a scheduler is told, and what it tells its shell to do.

All of them are frozen structs: comparable, hashable where their fields are, and created in about 0.1 µs, a
fifth of a frozen dataclass. Times are seconds on any one monotonic clock of the shell's choice.
"""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

#: Names one loading of one thing. Any hashable but None will do. An id is free for reuse only when no worker
#: can still send a result for its earlier use, so shells count upwards and never reuse one.
TaskId: TypeAlias = int
#: Names a place in the fleet. A replacement takes over the id of the worker it replaces.
WorkerId: TypeAlias = int


class Submit(msgspec.Struct, frozen=True, gc=False):
    """Load these, first in, first out; pinned tasks run on that worker id only and are never stolen."""

    tasks: Sequence[TaskId]
    pinned_to: WorkerId | None
    now: float


class CancelTasks(msgspec.Struct, frozen=True, gc=False):
    """Forget these: nobody wants them any more. Unknown ones are ignored."""

    tasks: Sequence[TaskId]
    now: float


class AddWorker(msgspec.Struct, frozen=True, gc=False):
    """A worker with an empty local queue is ready. Under a live id: its forerunner was lost."""

    worker: WorkerId
    now: float


class Exchanged(msgspec.Struct, frozen=True, gc=False):
    """A worker hands in all results it has and asks for work.

    A worker exchanges after at most every N results, and whenever its local queue is empty, be it that a
    Revoke emptied it. `started` is what it runs from now on; None leaves the scheduler to believe that it is
    the head of its mirror.
    """

    worker: WorkerId
    finished: Sequence[TaskId]
    started: TaskId | None
    now: float


class Lose(msgspec.Struct, frozen=True, gc=False):
    """A worker died or fell silent. Unknown ones are ignored.

    `at` is what it was at, where that is known: one task or none. It may be any task; one that is over is not blamed.
    None leaves the scheduler to blame what it believes that the worker ran.
    """

    worker: WorkerId
    now: float
    at: tuple[TaskId, ...] | None = None


class Tick(msgspec.Struct, frozen=True, gc=False):
    """Time has passed; needed for overtaking and time limits only."""

    now: float


SchedulerEvent: TypeAlias = Submit | CancelTasks | AddWorker | Exchanged | Lose | Tick


class Assign(msgspec.Struct, frozen=True, gc=False):
    """Append these to the worker's local queue, in order."""

    worker: WorkerId
    tasks: list[TaskId]


class Revoke(msgspec.Struct, frozen=True, gc=False):
    """Drop these from the worker's local queue if they wait there.

    It speaks of earlier Assigns only: the same task may be assigned to the same worker again later. One that
    runs or has run is left alone; its result is judged when it comes.
    """

    worker: WorkerId
    tasks: list[TaskId]


class Deliver(msgspec.Struct, frozen=True, gc=False):
    """The first result of this task has come, from this worker: hand it on."""

    task: TaskId
    worker: WorkerId


class Discard(msgspec.Struct, frozen=True, gc=False):
    """Drop this result: a copy came first, or the task was cancelled, poisoned or never known."""

    task: TaskId
    worker: WorkerId


class Poison(msgspec.Struct, frozen=True, gc=False):
    """This task was running on each of these workers when they were lost: tell its requester and give up.

    `late` of them were lost because they took too long over it.
    """

    task: TaskId
    workers: tuple[WorkerId, ...]
    late: int = 0


class KillWorker(msgspec.Struct, frozen=True, gc=False):
    """This worker has been at one task for longer than it may: end it. `Lose` is to tell of its end.

    Said once, unless the worker exchanges again.
    """

    worker: WorkerId


class IdleWorkers(msgspec.Struct, frozen=True, gc=False):
    """These workers have just run out of work and there is none for them; said once until they get some."""

    workers: list[WorkerId]


SchedulerInstruction: TypeAlias = Assign | Revoke | Deliver | Discard | Poison | KillWorker | IdleWorkers
