"""Announce the order of an epoch to a dataset before it is read, as a whole or in pieces.

A dataset that uses it has a method `announce_order(order, spread, extends)`. A dataset that reads another one forwards
the call, with the keys that it will read there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

#: Returns the keys of an epoch that will be read from now on, in the loader's order; none if the order may change.
#: Called only if the dataset uses it.
Order: TypeAlias = Callable[[], npt.NDArray[np.integer[Any]]]


def takes_orders(dataset: Any) -> bool:
    """Return whether `announce_order` has an effect for this dataset."""
    data = sys.modules.get("torch.utils.data")
    while data is not None and type(dataset) is data.Subset:
        dataset = dataset.dataset
    return callable(getattr(type(dataset), "announce_order", None))


def announce_order(dataset: Any, order: Order, spread: int, extends: bool = False) -> None:
    """Announce to a dataset, or to the one inside torch's Subset, how it will be read.

    Args:
        order: returns the keys, in order.
        spread: how many samples may be requested before an earlier one: a loader's samples in flight.
        extends: whether these keys follow those announced before; else they replace them.
    """
    data = sys.modules.get("torch.utils.data")
    if data is not None and type(dataset) is data.Subset:
        indices = dataset.indices
        announce_order(dataset.dataset, lambda: np.asarray(indices)[order()], spread, extends)
        return
    # Of the class: a user's dataset may have a `__getattr__` that runs code, or passes it to a dataset inside.
    own = getattr(type(dataset), "announce_order", None)
    if callable(own):
        own(dataset, order, spread, extends)
