"""What a worker of a shared flow does with its dataset: one sample at a time, seeded by its draw and key."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch.utils.data import _utils

from torch_dpflow.remote.fetching import failure
from torch_dpflow.remote.protocol import FAILED, SAMPLE
from torch_dpflow.rng import seed_batch

#: A task: the sample's key, and what decides what is drawn by chance.
TASK = struct.Struct("<QQ")


@dataclass(frozen=True, kw_only=True)
class SampleAssignment:
    """What the workers of a flow load; the same for all of them, and in every job."""

    dataset: Any
    worker_init_fn: Callable[[int], Any] | None

    def pack(self) -> bytes:
        """As bytes that carry what is not importable in a worker, such as functions of a script."""
        packed: bytes = cloudpickle.dumps(self, protocol=5)
        return packed


class SampleSource:
    """Loads samples in a worker process. Makes it a DataLoader worker: one torch thread, `get_worker_info()`.

    What fails here, in unpacking or in `worker_init_fn` too, is told in answer to every task.

    Args:
        packed: a `SampleAssignment`.
        worker: its number among the `workers` of its shard.
    """

    def __init__(self, packed: bytes, worker: int, workers: int) -> None:
        self._worker = worker
        self._broken: Any = None
        self._dataset: Any = None
        try:
            assignment: SampleAssignment = cloudpickle.loads(packed)
            _become_worker(assignment, worker, workers)
            if assignment.worker_init_fn is not None:
                assignment.worker_init_fn(worker)
            self._dataset = assignment.dataset
        except Exception:
            self._broken = failure(worker)

    def load(self, task: bytes) -> tuple[int, Any]:
        """The kind of a task's outcome, and the sample or an ExceptionWrapper. Never raises an Exception."""
        if self._broken is not None:
            return FAILED, self._broken
        key, draw = TASK.unpack(task)
        seed_batch(draw & (1 << 63) - 1, 0, key)
        try:
            return SAMPLE, self._dataset[key]
        except Exception:
            return FAILED, failure(self._worker, dataset=self._dataset)


def _become_worker(assignment: SampleAssignment, worker: int, workers: int) -> None:
    torch.set_num_threads(1)
    # Every sample is seeded by itself; this is for `worker_init_fn`.
    random.seed(worker)
    torch.manual_seed(worker)
    np.random.seed(worker)
    _utils.worker._worker_info = _utils.worker.WorkerInfo(
        id=worker, num_workers=workers, seed=worker, dataset=assignment.dataset
    )
