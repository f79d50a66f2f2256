"""Events that a private shard's thread passes to the training thread.

Structs, as they are defined and made in a fraction of the time of dataclasses.
"""

from __future__ import annotations

from typing import Any

import msgspec

from torch_dpflow.epoch.state import StreamState
from torch_dpflow.workers.batches import Begun
from torch_dpflow.workers.platform import Handle


class Arrived(msgspec.Struct, frozen=True):
    """The first result of a task has arrived, opened and pinned."""

    task: int
    worker: int
    kind: int
    value: Any
    stream: StreamState | None
    size: int


class Poisoned(msgspec.Struct, frozen=True):
    """These workers died over a task, one after the other."""

    task: int
    workers: tuple[int, ...]


class Started(msgspec.Struct, frozen=True):
    """A worker with a stream of its own has begun an epoch."""

    worker: int
    begun: Begun


class Starved(msgspec.Struct, frozen=True):
    """A worker has nothing to do."""


class Died(msgspec.Struct, frozen=True):
    """A worker has ended; its tasks are queued again for its replacement or other workers."""

    worker: int
    handle: Handle


class MemberLost(msgspec.Struct, frozen=True):
    """As `Died`, of a worker that a platform runs elsewhere and replaces by itself. how: it ended, for people."""

    worker: int
    how: str


class Broken(msgspec.Struct, frozen=True):
    """The shard's thread has failed; this is the last event."""

    error: BaseException


Event = Arrived | Poisoned | Started | Starved | Died | MemberLost | Broken


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """What the shard's scheduler has counted."""

    duplicates: int
    steals: int
