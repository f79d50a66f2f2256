"""Telling a loader's dataset the order of the epoch that begins, where that order is fixed."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_dpflow.announcing import announce_order
from torch_dpflow.epoch.plan import Plan, settled_length
from torch_dpflow.torch_private import DatasetKind

#: Samples that a batch is taken to have where nothing says how many.
_SAMPLES = 1024


def announce_epoch(loader: Any, plan: Plan, batches: int) -> None:
    """Tell the dataset what is left of the epoch, if it wants to know; the plan gives out the same batches as without.

    batches: most that are in flight.
    """
    if loader._dataset_kind != DatasetKind.Map:
        return
    samples = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if samples is None:
        samples = _SAMPLES if loader._auto_collation else 1
    # Lengths are asked for by who needs the order only: a user's may be slow, or raise.
    announce_order(
        loader.dataset,
        lambda: _keys(plan.settle(settled_length(loader._index_sampler))),
        batches * samples,
    )


def _keys(batches: list[Any]) -> npt.NDArray[np.int64]:
    is_flat = bool(batches) and not isinstance(batches[0], Iterable)
    return np.fromiter(batches if is_flat else chain.from_iterable(batches), dtype=np.int64)
