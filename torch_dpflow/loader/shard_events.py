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
    """The first result of a task has arrived, opened and pinned."""

    task: int
    #: The worker that loaded it; -1 if there were several.
    worker: int
    #: BATCH, FAILURE or END; with the batch, or the wrapped error.
    kind: int
    value: Any
    stream: StreamState | None
    size: int
    #: How long the worker has loaded, by stage, since its previous result; None if not known.
    times: StageTimes | None = None
    #: When it arrived, by `time.perf_counter`.
    at: float = 0.0


class RowsArrived(msgspec.Struct, frozen=True):
    """A worker has loaded rows of an opened batch, which several workers load. The fields are as in `Arrived`."""

    task: int
    worker: int
    times: StageTimes | None
    at: float


class Poisoned(msgspec.Struct, frozen=True):
    """These workers died while they ran the same task, one after the other."""

    task: int
    workers: tuple[int, ...]


class Started(msgspec.Struct, frozen=True):
    """A worker with a separate stream has begun an epoch."""

    worker: int
    begun: Begun


class WorkerIdle(msgspec.Struct, frozen=True):
    """A worker has no task."""


class Died(msgspec.Struct, frozen=True):
    """A worker has ended; its tasks are queued again for its replacement or other workers."""

    worker: int
    handle: Handle


class RemoteWorkerLost(msgspec.Struct, frozen=True):
    """A remote worker has ended; its platform replaces it. how: its end, for messages."""

    worker: int
    how: str


class ShardFailed(msgspec.Struct, frozen=True):
    """The shard's thread has failed; this is the last event."""

    error: BaseException


Event = Arrived | RowsArrived | Poisoned | Started | WorkerIdle | Died | RemoteWorkerLost | ShardFailed
