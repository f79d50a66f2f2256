"""DataLoadFlowRead: a flow that can be read (thesis, section 3.3.2)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.flows.flow import DataLoadFlow
from torch_dpflow.flows.mapped import MappedDataset, Skips
from torch_dpflow.flows.stage import Stage
from torch_dpflow.flows.staged import StagedDataset
from torch_dpflow.flows.transforms import SampleTransform

if TYPE_CHECKING:
    from torch_dpflow.loader.loader import DPFlowDataLoader

T = TypeVar("T")


class DataLoadFlowRead:
    """A flow that was built and can be read, as a whole or a subset, by torch's loaders.

    A reader makes it. Methods that change how it is read return another read; all reads share the
    samples, and so a cache.

    Args:
        flow: the flow that was built.
        samples: the output of the flow's stages.
    """

    def __init__(self, flow: DataLoadFlow, samples: StagedDataset) -> None:
        self.flow = flow
        self._samples = samples
        self._indices: np.ndarray[Any, np.dtype[np.int64]] | None = None
        self._local: tuple[Stage, ...] = ()
        self._skips = self._new_skips()

    def __len__(self) -> int:
        return len(self._samples) if self._indices is None else len(self._indices)

    def to_mapped(self) -> MappedDataset:
        """A map-style dataset for any DataLoader, or to index by hand."""
        return MappedDataset(
            self._samples,
            indices=self._indices,
            local=self._local,
            flow=f"{self.flow.name}:{self.flow.version}",
            skips=self._skips,
        )

    def to_shuffled(
        self,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        prefetch: int | None = None,
        **options: Any,
    ) -> DPFlowDataLoader[Any]:
        """A DPFlowDataLoader whose batches have another random order in each epoch.

        Args:
            batch_size: samples in a batch.
            collate_fn: makes a batch of a list of samples; None: torch's default.
            prefetch: batches that each worker loads ahead; None: torch's default.
            options: further arguments of the loader, such as `num_workers`, `generator` or `sampler`.
        """
        from torch_dpflow.loader.loader import DPFlowDataLoader  # here, because it imports torch's DataLoader

        if options.get("sampler") is None and options.get("batch_sampler") is None:
            options.setdefault("shuffle", True)
        return DPFlowDataLoader(
            self.to_mapped(), batch_size, collate_fn=collate_fn, prefetch_factor=prefetch, **options
        )

    def local_map(self, function: Callable[[Any], Any], name: str = "local_map") -> DataLoadFlowRead:
        """A read that also applies `function` to its samples, in the process that uses them, outside the flow.

        It runs after all stages and earlier local functions; its output is never kept.
        """
        read = copy.copy(self)
        read._local = (*self._local, Stage(name, function, SampleTransform(), "never"))
        read._skips = read._new_skips()
        return read

    def subset(self, indices: Iterable[int]) -> DataLoadFlowRead:
        """A read of some of the samples, in the order given. Indices may repeat; negative ones count from the end.

        Raises:
            OptionError: an index is out of range. OptionTypeError: one is no whole number.
        """
        chosen = _whole_numbers(indices)
        size = len(self)
        outside = chosen[(chosen < -size) | (chosen >= size)]
        if len(outside):
            raise OptionError(
                f"indices: {outside[0]} is out of range; {self.flow.name} has {size} samples here, from 0"
            )
        # Converted only after the check of the bounds.
        chosen = chosen.astype(np.int64) % max(size, 1)
        read = copy.copy(self)
        read._indices = chosen if self._indices is None else self._indices[chosen]
        read._skips = read._new_skips()
        return read

    def indices(self) -> Sequence[int]:
        """Which of the flow's samples are read, in order."""
        return range(len(self)) if self._indices is None else self._indices.tolist()

    def skipped(self) -> dict[str, int]:
        """How many samples were left out because of errors, by stage; "read" is the dataset itself.

        Stages and local functions of one name are counted together. Counts samples loaded through datasets and loaders
        of this read, in this process and the workers of its loaders.
        """
        return {} if self._skips is None else self._skips.counts()

    def _new_skips(self) -> Skips | None:
        if self.flow.on_error == "raise":
            return None
        return Skips([stage.name for stage in (*self.flow.stages, *self._local)])

    def __str__(self) -> str:
        return " -> ".join([str(self.flow), *(f"LocalMap({stage.name})" for stage in self._local)])

    def __repr__(self) -> str:
        return f"DataLoadFlowRead({self}, {len(self)} samples)"


def _whole_numbers(indices: Iterable[int]) -> np.ndarray[Any, np.dtype[Any]]:
    """The indices as an array of integers, or of objects if no integer type is wide enough."""
    refusal = f"indices={indices!s:.80} are no whole numbers in a row; give a list of ints"
    try:
        found = np.asarray(indices if isinstance(indices, np.ndarray) else list(indices))
    except (TypeError, ValueError) as error:  # no iterable; rows of several lengths
        raise OptionTypeError(refusal) from error
    if found.size == 0:
        return np.zeros(0, np.int64)
    is_long = found.dtype == object and all(isinstance(index, int) for index in found)
    if found.ndim != 1 or not (is_long or np.issubdtype(found.dtype, np.integer)):
        raise OptionTypeError(refusal)
    return found
