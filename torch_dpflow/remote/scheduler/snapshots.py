"""What a scheduler shows of itself: counters, and pictures of one moment."""

from collections.abc import Mapping

import msgspec

from torch_dpflow.remote.scheduler.events import TaskId, WorkerId


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
    #: Running tasks copied to another worker.
    speculated: int = 0
    #: Waiting tasks taken back from workers that were held up.
    overtaken: int = 0
    #: Tasks named in Revoke instructions.
    revoked: int = 0
    #: Workers that were to be killed over a task that took too long.
    timeouts: int = 0
    #: Tasks taken back from lost workers.
    requeues: int = 0
    #: Workers lost.
    losses: int = 0


class WorkerSnapshot(msgspec.Struct, frozen=True):
    """One mirror at one moment."""

    held: tuple[TaskId, ...]
    running: TaskId | None
    #: Tasks pinned to the worker and not assigned yet.
    reserved: int


class SchedulerSnapshot(msgspec.Struct, frozen=True):
    """A scheduler at one moment; shares nothing with it."""

    counters: Counters
    #: Tasks in the global queue.
    queued: int
    #: Tasks pinned to a worker, joined or not, and not assigned yet.
    reserved: int
    #: Tasks submitted and not yet delivered, cancelled or poisoned.
    unfinished: int
    workers: Mapping[WorkerId, WorkerSnapshot]
