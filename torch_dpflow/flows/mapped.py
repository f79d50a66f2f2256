"""A read as a map-style dataset, with the flow's policy for errors."""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from torch_dpflow._core.checks import MAX_INT64, MIN_INT64, check_int
from torch_dpflow._core.processes import PerProcess
from torch_dpflow.announcing import Order
from torch_dpflow.errors import StageError
from torch_dpflow.flows.stage import Stage
from torch_dpflow.flows.staged import Failed, StagedDataset
from torch_dpflow.log import FLOWS

#: Workers with counts of their own; further ones share them, and may lose an increment.
_SLOTS = 257
_READ = "read"


class Skips:
    """Counts samples that were left out, in a process and its workers, by the stage that failed.

    Stages of one name are counted together. If the dataset is itself the read of a flow, failures in it count as
    read, unless a stage here has the name of the failed one.

    The counts are in shared memory, in one row per worker, so no lock crosses processes.
    """

    def __init__(self, stages: Sequence[str]) -> None:
        self._columns = {name: column for column, name in enumerate(dict.fromkeys((_READ, *stages)))}
        counts: Any = torch.zeros(_SLOTS, len(self._columns), dtype=torch.int64)
        self._counts = counts.share_memory_()
        self._lock = PerProcess(threading.Lock)

    def add(self, error: Exception) -> None:
        """Count a sample that is skipped because of this error."""
        name = error.stage if isinstance(error, StageError) else _READ
        info = get_worker_info()
        slot = 0 if info is None else 1 + info.id % (_SLOTS - 1)
        with self._lock.get():
            self._counts[slot, self._columns.get(name, self._columns[_READ])] += 1

    def counts(self) -> dict[str, int]:
        """The counts above zero."""
        totals = self._counts.sum(0).tolist()
        return {name: totals[column] for name, column in self._columns.items() if totals[column]}

    def __getstate__(self) -> dict[str, Any]:
        return {"columns": self._columns, "counts": self._counts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._columns = state["columns"]
        self._counts = state["counts"]
        self._lock = PerProcess(threading.Lock)


class MappedDataset(Dataset[Any]):
    """The samples of a read, by number. Made by `DataLoadFlowRead.to_mapped()`.

    If the flow skips samples that cannot be loaded, batches may have fewer samples: loaders read all samples of a batch
    together, and failed ones are left out. A batch without any sample left raises the last error, as does a
    failed sample that is read by itself. The errors are logged (`torch_dpflow.flows`) and counted.
    """

    def __init__(
        self,
        samples: StagedDataset,
        *,
        indices: np.ndarray[Any, np.dtype[np.int64]] | None,
        local: Sequence[Stage],
        flow: str,
        skips: Skips | None,
    ) -> None:
        self._samples = StagedDataset(samples, local, flow) if local else samples
        self._epochs = samples.epochs
        self._indices = indices
        self._flow = flow
        self._skips = skips

    def __len__(self) -> int:
        return len(self._samples) if self._indices is None else len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._samples[self._place(index)]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        places = [self._place(index) for index in indices]
        if self._skips is not None:
            return self._without_failed(places, self._skips)
        return list(self._samples.__getitems__(places))

    def announce_order(self, order: Order, spread: int, extends: bool = False) -> None:
        """Tell the flow's dataset the order of an epoch; see `announcing`."""
        indices = self._indices
        places = order if indices is None else lambda: indices[order()]
        self._samples.announce_order(places, spread, extends)

    def set_epoch(self, epoch: int) -> None:
        """Have random stages draw for this epoch until another one is set, if the reader has a seed.

        By default they use the epochs that a DPFlowDataLoader counts, resumed ones too; under
        another loader the passes over the samples, in this process and its workers, from 0. So under another loader
        call it if a pass leaves samples out, as that of a rank does, or if another process resumes. Call it before the
        epoch's first batch; persistent workers see it too.

        Raises OptionTypeError or OptionError unless `epoch` is a whole number of 64 bits.
        """
        epoch = check_int("epoch", epoch, minimum=MIN_INT64, maximum=MAX_INT64)
        if self._epochs is not None:
            self._epochs.set(epoch)

    def _without_failed(self, places: list[int], skips: Skips) -> list[Any]:
        loaded = self._samples.load_each(places)
        for place, sample in zip(places, loaded):
            if isinstance(sample, Failed):
                skips.add(sample.error)
                # As text: a handler that keeps records would keep the frames of the error alive.
                what = f"{type(sample.error).__name__}: {sample.error}"
                FLOWS.warning("%s, sample %d is left out: %s", self._flow, place, what)
        found = [sample for sample in loaded if not isinstance(sample, Failed)]
        if loaded and not found:
            raise loaded[-1].error
        return found

    def _place(self, index: int) -> int:
        place = operator.index(index)
        size = len(self)
        if not -size <= place < size:
            raise IndexError(f"sample {place} is out of range; {self._flow} has {size} samples here, from 0")
        place %= size
        return place if self._indices is None else int(self._indices[place])
