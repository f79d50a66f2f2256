"""Telling a dataset the order of an epoch before it is read, as a whole or in pieces, as it becomes known.

A dataset that can make use of it has a method `announce_order(order, spread, extends)`. A dataset that reads another
one passes it on to that, with the keys that it will read there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

#: Gives the keys of an epoch that will be read from now on, in the loader's order; none where that may change. It is
#: called by who needs it.
Order: TypeAlias = Callable[[], npt.NDArray[np.integer[Any]]]


def takes_orders(dataset: Any) -> bool:
    """Whether `announce_order` tells anybody."""
    data = sys.modules.get("torch.utils.data")
    while data is not None and type(dataset) is data.Subset:
        dataset = dataset.dataset
    return callable(getattr(type(dataset), "announce_order", None))


def announce_order(dataset: Any, order: Order, spread: int, extends: bool = False) -> None:
    """Tell a dataset, or what a subset of torch's is of, how it will be read.

    Args:
        order: gives the keys in it.
        spread: how many samples are asked for between an earlier one and its turn, at most: a loader's samples in
            flight.
        extends: these are read after those that were announced before; else instead of them.
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
