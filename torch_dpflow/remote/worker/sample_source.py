"""What a worker of a shared flow does with its dataset: one sample at a time, seeded by its draw and key."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from torch_dpflow.epoch.rng import seed_batch
from torch_dpflow.errors import MessageError
from torch_dpflow.remote.parcel.codec import decode
from torch_dpflow.remote.parcel.explain import explain_loading
from torch_dpflow.remote.parcel.script import pack, unpack
from torch_dpflow.remote.wire.sample_task import unpack_task
from torch_dpflow.remote.wire.shard import FAILED, SAMPLE
from torch_dpflow.remote.worker.fetching import failure
from torch_dpflow.torch_private import set_worker_info


@dataclass(frozen=True)
class Parts(Dataset[Any]):
    """A dataset in two parts, for flows that keep what the first gives and draw the rest for each job and epoch.

    Indexed, it gives samples.
    """

    #: The deterministic part: map-style.
    first: Any
    #: What makes a sample of what `first` gives and its number; None: nothing is left to do.
    rest: Callable[[Any, int], Any] | None = None
    #: What stands in for a sample that fails, of its number and its error; it is never kept. None: the error is
    #: raised where the sample is used.
    stand_in: Callable[[int, Exception], Any] | None = None

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, index: int) -> Any:
        sample = self.first[index]
        return sample if self.rest is None else self.rest(sample, index)


@dataclass(frozen=True)
class Transformed:
    """A `Parts.rest` that takes no notice of a sample's number."""

    transform: Callable[[Any], Any]

    def __call__(self, sample: Any, index: int) -> Any:
        return self.transform(sample)


@dataclass(frozen=True, kw_only=True)
class SampleAssignment:
    """What the workers of a flow load; the same for all of them, and in every job."""

    parts: Parts
    worker_init_fn: Callable[[int], Any] | None

    def pack(self) -> bytes:
        """As bytes that carry what is not importable in a worker, such as functions of a script.

        Raises NotPicklableError, which names what cannot travel.
        """
        try:
            return pack(self)
        except Exception as error:
            parts = self.parts
            loads = {"dataset": parts.first, "transform": parts.rest, "stand_in": parts.stand_in}
            loads["worker_init_fn"] = self.worker_init_fn
            raise explain_loading(loads, error, dump=pack) from error


class SampleSource:
    """Loads samples in a worker process. Makes it a DataLoader worker: one torch thread, `get_worker_info()`.

    What fails here, in unpacking or in `worker_init_fn` too, is told in answer to every task.

    Args:
        packed: a `SampleAssignment`, in a file.
        worker: its number among the `workers` of its shard.
    """

    def __init__(self, packed: IO[bytes], worker: int, workers: int) -> None:
        self._worker = worker
        self._broken: Any = None
        self._parts = Parts(None)
        try:
            assignment = _unpack(packed)
            _become_worker(assignment, worker, workers)
            if assignment.worker_init_fn is not None:
                assignment.worker_init_fn(worker)
            self._parts = assignment.parts
        except Exception:
            self._broken = failure(worker)

    def load(self, payload: memoryview) -> tuple[int, Any]:
        """The kind of a task's outcome, and the sample, what stands in for it, or an ExceptionWrapper.

        Never raises an Exception.
        """
        if self._broken is not None:
            return FAILED, self._broken
        parts, task = self._parts, unpack_task(payload)
        seed_batch(task.draw & (1 << 63) - 1, 0, task.key)
        try:
            if task.input is None:
                return SAMPLE, parts.first[task.key]
            if parts.rest is None:
                raise MessageError("an input came to a flow that has no second part")
            return SAMPLE, parts.rest(decode(*task.input), task.key)
        except Exception as error:
            if parts.stand_in is not None:
                return FAILED, parts.stand_in(task.key, error)
            return FAILED, failure(self._worker, dataset=parts.first)


def _unpack(packed: IO[bytes]) -> SampleAssignment:
    try:
        assignment: SampleAssignment = unpack(packed)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error}: only what the script itself defines travels to a flow's workers; install the rest where the "
            "cluster runs, or start `dpflow up` with its folder in PYTHONPATH",
            name=error.name,
        ) from error
    return assignment


def _become_worker(assignment: SampleAssignment, worker: int, workers: int) -> None:
    torch.set_num_threads(1)
    # Every sample is seeded by itself; this is for `worker_init_fn`.
    random.seed(worker)
    torch.manual_seed(worker)
    np.random.seed(worker)
    set_worker_info(worker=worker, workers=workers, seed=worker, dataset=assignment.parts.first)
