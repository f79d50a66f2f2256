"""Telling a loader's dataset the order of the epoch that begins: as a whole where it is fixed, else as it is drawn."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_dpflow._core.checks import working
from torch_dpflow._core.torch_private import DatasetKind
from torch_dpflow.announcing import announce_order, takes_orders
from torch_dpflow.epoch.plan import Plan, settled_length

#: Samples that a batch is taken to have where nothing says how many.
_SAMPLES = 1024


class EpochAnnouncement:
    """Tells the dataset what is left of the epoch, if it wants to know; the plan gives out the same batches as without.

    batches: most that are in flight.
    """

    def __init__(self, loader: Any, plan: Plan, batches: int) -> None:
        self._dataset = loader.dataset
        samples = loader.batch_size or _batch_size(loader.batch_sampler)
        if samples is None:
            samples = _SAMPLES if loader._auto_collation else 1
        self._spread = batches * samples
        #: Batches before this one were announced at the beginning.
        self._settled = 0
        self._tells = loader._dataset_kind == DatasetKind.Map and takes_orders(loader.dataset)
        if self._tells:
            # Lengths are asked for by who needs the order only: a user's may be slow, or raise.
            announce_order(loader.dataset, lambda: self._settle(loader, plan), self._spread)

    def drawn(self, position: int, index: Any) -> None:
        """This batch was drawn, and will be loaded: tell what of it the sampler had not fixed before."""
        if not self._tells or position < self._settled:
            return
        # Anything else may be an iterator, or no number.
        keys = index if type(index) in (list, tuple) else [index]
        if all(type(key) is int for key in keys):
            announce_order(self._dataset, lambda: np.array(keys, dtype=np.int64), self._spread, extends=True)

    def _settle(self, loader: Any, plan: Plan) -> npt.NDArray[np.int64]:
        settled = plan.settle(settled_length(loader._index_sampler))
        self._settled = plan.drawn + len(settled)
        return flat_keys(settled)


def flat_keys(batches: list[Any]) -> npt.NDArray[np.int64]:
    """The samples of batches, in order; batches may be samples themselves, as of a loader with `batch_size=None`."""
    is_flat = bool(batches) and not isinstance(batches[0], Iterable)
    return np.fromiter(batches if is_flat else chain.from_iterable(batches), dtype=np.int64)


def _batch_size(batch_sampler: Any) -> int | None:
    """How many samples its batches have, as far as it says so by a number."""
    size = working(batch_sampler, "batch_size")
    return size if type(size) is int and size > 0 else None
