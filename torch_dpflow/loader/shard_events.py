"""Events that a private shard's thread passes to the training thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_dpflow.epoch.state import StreamState
from torch_dpflow.platforms.base import Handle
from torch_dpflow.remote.worker.batches import Begun


@dataclass(frozen=True)
class Arrived:
    """The first result of a task has arrived, opened and pinned."""

    task: int
    worker: int
    kind: int
    value: Any
    stream: StreamState | None
    size: int


@dataclass(frozen=True)
class Poisoned:
    """These workers died over a task, one after the other."""

    task: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Started:
    """A worker with a stream of its own has begun an epoch."""

    worker: int
    begun: Begun


@dataclass(frozen=True)
class Starved:
    """A worker has nothing to do."""


@dataclass(frozen=True)
class Died:
    """A worker has ended; its tasks are queued again for its replacement or other workers."""

    worker: int
    handle: Handle


@dataclass(frozen=True)
class Broken:
    """The shard's thread has failed; this is the last event."""

    error: BaseException


Event = Arrived | Poisoned | Started | Starved | Died | Broken


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What the shard's scheduler has counted."""

    duplicates: int
    steals: int
