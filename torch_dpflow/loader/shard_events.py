"""Events that a private shard's thread passes to the training thread.

Events are structs, which take a fraction of the time of dataclasses to define and to create.
"""

from __future__ import annotations

from typing import Any

import msgspec

from torch_dpflow._core.stage_times import StageTimes
from torch_dpflow.epoch.state import StreamState
from torch_dpflow.workers.batches import Begun
from torch_dpflow.workers.platform import Handle


class Arrived(msgspec.Struct, frozen=True):
    """Arrival of a task's first result, which is decoded, and pinned if the loader pins memory."""

    task: int
    #: The worker that loaded the task; -1 if several did.
    worker: int
    #: BATCH, with the batch as `value`; FAILURE, with the wrapped error; or END, at the end of the worker's stream.
    kind: int
    value: Any
    stream: StreamState | None
    #: Bytes of the result as it was sent.
    size: int
    #: Estimated bytes of memory that the result takes here.
    memory: int
    #: How long the worker has loaded, by stage, since its previous result; None if unknown.
    times: StageTimes | None = None
    #: The time of arrival, by `time.perf_counter`.
    at: float = 0.0


class RowsArrived(msgspec.Struct, frozen=True):
    """Arrival of some rows of a batch that several workers load together. The fields are as in `Arrived`."""

    task: int
    worker: int
    times: StageTimes | None
    at: float


class Poisoned(msgspec.Struct, frozen=True):
    """Failure of a task during which these workers died, one after the other."""

    task: int
    workers: tuple[int, ...]


class Started(msgspec.Struct, frozen=True):
    """Report that a worker with its own stream has begun an epoch."""

    worker: int
    begun: Begun


class WorkerIdle(msgspec.Struct, frozen=True):
    """Report that a worker has no task."""


class Died(msgspec.Struct, frozen=True):
    """End of a worker's process. Its tasks are queued again for its replacement or other workers."""

    worker: int
    handle: Handle


class RemoteWorkerLost(msgspec.Struct, frozen=True):
    """End of a remote worker. how: text on the cause; empty if its end was requested."""

    worker: int
    how: str


class ShardFailed(msgspec.Struct, frozen=True):
    """Failure of the shard's thread or of its remote workers, with which the iteration ends."""

    error: BaseException


Event = Arrived | RowsArrived | Poisoned | Started | WorkerIdle | Died | RemoteWorkerLost | ShardFailed
