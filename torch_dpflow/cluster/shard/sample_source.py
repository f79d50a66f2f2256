"""Loading of single samples in a worker of a shared flow. A separate random seed is set for each sample."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from torch_dpflow._core.torch_private import set_worker_info
from torch_dpflow.cluster.messages.shard import FAILED, SAMPLE, key_to_load, unpack_task
from torch_dpflow.epoch.rng import seed_batch
from torch_dpflow.errors import MessageError
from torch_dpflow.ipc.serialization.codec import decode
from torch_dpflow.ipc.serialization.pickling import explain_loading
from torch_dpflow.log import SERVICE
from torch_dpflow.lookahead import announce_order, takes_orders
from torch_dpflow.remote.shipping.content_pack import pack, unpack
from torch_dpflow.remote.shipping.own_check import Beginning, guard_script
from torch_dpflow.remote.shipping.own_state import OwnState
from torch_dpflow.workers.batches import wrapped_failure
from torch_dpflow.workers.process_control import keep_freed_memory
from torch_dpflow.workers.script_settings import ScriptSettings

#: By how many samples a worker's reads may deviate from their announced order: other workers take over some tasks.
STOLEN = 16


@dataclass(frozen=True)
class TwoStageDataset(Dataset[Any]):
    """Dataset with a cacheable stage, whose output the sample cache keeps for all jobs, and a per-draw stage.

    Indexing runs both stages and returns a sample.
    """

    #: The cacheable stage, deterministic: a map-style dataset.
    cacheable: Any
    #: The per-draw stage, run for each job and epoch: makes a sample from the output of `cacheable` and the sample's
    #: number. None: the output is the sample.
    per_draw: Callable[[Any, int], Any] | None = None
    #: Returns the placeholder of a sample that fails, from the sample's number and the error. A placeholder is never
    #: cached. None: the job raises the error in place of the batch.
    stand_in: Callable[[int, Exception], Any] | None = None

    def __len__(self) -> int:
        return len(self.cacheable)

    def __getitem__(self, index: int) -> Any:
        sample = self.cacheable[index]
        return sample if self.per_draw is None else self.per_draw(sample, index)


@dataclass(frozen=True)
class KeylessTransform:
    """Per-draw stage (`TwoStageDataset.per_draw`) that ignores the sample's number."""

    transform: Callable[[Any], Any]

    def __call__(self, sample: Any, index: int) -> Any:
        return self.transform(sample)


@dataclass(frozen=True, kw_only=True)
class SampleAssignment:
    """Load spec of a flow: what its workers unpickle and load. It is the same for all workers and all jobs."""

    dataset: TwoStageDataset
    worker_init_fn: Callable[[int], Any] | None
    #: Whether images are sent with channels last, as they were decoded, because the job that started the flow collates
    #: by `collate_channels_last`. Other jobs get the same batches, at more processor time.
    keeps_layout: bool = False
    #: Settings of the script that started the flow.
    settings: ScriptSettings = field(default_factory=ScriptSettings)
    #: Attributes that the script has set in the user's own modules.
    own_state: OwnState = field(default_factory=OwnState)

    def __reduce__(self) -> Any:
        beginning = Beginning(self.settings, self.own_state)
        return _assignment, (beginning, self.dataset, self.worker_init_fn, self.keeps_layout)

    def pack(self, sent_arguments: Collection[str] | None = None) -> bytes:
        """Pickle the assignment, with all code that a worker cannot import, such as functions of a script.

        sent_arguments: names of the attributes of `argparse.Namespace` that are sent; None: all.

        Raises NotPicklableError, which names the part that cannot be pickled.
        """
        try:
            return pack(self, sent_arguments=sent_arguments, replaced=self.own_state.replaced())
        except Exception as error:
            dataset = self.dataset
            loads = {"dataset": dataset.cacheable, "transform": dataset.per_draw, "stand_in": dataset.stand_in}
            loads["worker_init_fn"] = self.worker_init_fn
            raise explain_loading(loads, error, dump=pack, workers="a shared flow") from error


def _assignment(
    beginning: Beginning, dataset: TwoStageDataset, worker_init_fn: Callable[[int], Any] | None, keeps_layout: bool
) -> SampleAssignment:
    return SampleAssignment(
        dataset=dataset,
        worker_init_fn=worker_init_fn,
        keeps_layout=keeps_layout,
        settings=beginning.settings or ScriptSettings(),
        own_state=beginning.state,
    )


class SampleSource:
    """Loader of samples that makes its process a DataLoader worker: one torch thread, `get_worker_info()`.

    Errors of unpickling and of `worker_init_fn` are not raised: `load` returns them for each task, so that the job gets
    the traceback of the user's code.

    Args:
        packed: file with a packed `SampleAssignment`.
        worker: number of this worker in its shard.
        workers: how many workers the shard has.
    """

    def __init__(self, packed: IO[bytes], worker: int, workers: int) -> None:
        self._worker = worker
        self._broken: Any = None
        #: As in `SampleAssignment`.
        self.keeps_layout = False
        self._dataset = TwoStageDataset(None)
        self._tells = False
        try:
            assignment = _unpack(packed)
            _become_worker(assignment, worker, workers)
            if assignment.worker_init_fn is not None:
                assignment.worker_init_fn(worker)
            self._dataset, self.keeps_layout = assignment.dataset, assignment.keeps_layout
            self._tells = takes_orders(self._dataset.cacheable)
        except Exception:
            self._broken = wrapped_failure(worker)

    def announce(self, payloads: Sequence[memoryview]) -> None:
        """Announce to the dataset, if it accepts this, which samples new tasks load. payloads: from `pack_task`."""
        keys = [key for key in map(key_to_load, payloads) if key is not None] if self._tells else []
        if not keys:
            return
        try:
            announce_order(self._dataset.cacheable, lambda: np.array(keys), STOLEN, extends=True)
        except Exception:  # the user's own: logged once, and samples are read without it
            self._tells = False
            SERVICE.exception("the dataset rejected the announcement of the samples that come next")

    def load(self, payload: memoryview) -> tuple[int, Any]:
        """Run the stage of a packed task; return (SAMPLE, output) or (FAILED, placeholder or ExceptionWrapper).

        An exception of the stage is not raised. Raises MessageError if `payload` is not a valid task.
        """
        if self._broken is not None:
            return FAILED, self._broken
        dataset, task = self._dataset, unpack_task(payload)
        seed_batch(task.draw & (1 << 63) - 1, 0, task.key)
        try:
            if task.input is None:
                return SAMPLE, dataset.cacheable[task.key]
            if dataset.per_draw is None:
                raise MessageError("a task has an input, but the flow has no per-draw stage")
            return SAMPLE, dataset.per_draw(decode(*task.input), task.key)
        except Exception as error:
            if dataset.stand_in is not None:
                return FAILED, dataset.stand_in(task.key, error)
            return FAILED, wrapped_failure(self._worker, dataset=dataset.cacheable)


def _unpack(packed: IO[bytes]) -> SampleAssignment:
    try:
        assignment: SampleAssignment = unpack(packed)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error}: what the script and the modules next to it define is sent to a flow's workers; install the rest "
            "where the cluster runs",
            name=error.name,
        ) from error
    return assignment


def _become_worker(assignment: SampleAssignment, worker: int, workers: int) -> None:
    torch.set_num_threads(1)
    guard_script(assignment.own_state)
    keep_freed_memory()
    # Every sample has a separate seed; this one is for `worker_init_fn`.
    random.seed(worker)
    torch.manual_seed(worker)
    np.random.seed(worker)
    set_worker_info(worker=worker, workers=workers, seed=worker, dataset=assignment.dataset.cacheable)
