"""What happens in a private shard's thread, as it is told to the training thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_dpflow.epoch.state import StreamState
from torch_dpflow.platforms.base import Handle
from torch_dpflow.remote.worker.batches import Begun


@dataclass(frozen=True)
class Arrived:
    """A task's first result is here, opened and pinned."""

    task: int
    worker: int
    kind: int
    value: Any
    stream: StreamState | None
    size: int


@dataclass(frozen=True)
class Poisoned:
    """A task has taken down these workers one after the other."""

    task: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Started:
    """A worker whose stream is its own says how it began an epoch."""

    worker: int
    begun: Begun


@dataclass(frozen=True)
class Starved:
    """A worker has nothing to do."""


@dataclass(frozen=True)
class Died:
    """A worker has ended; its tasks are queued again and wait for its replacement or for others."""

    worker: int
    handle: Handle


@dataclass(frozen=True)
class Broken:
    """The shard's thread has failed; nothing will come any more."""

    error: BaseException


Event = Arrived | Poisoned | Started | Starved | Died | Broken


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What the shard's scheduler has counted."""

    duplicates: int
    steals: int
