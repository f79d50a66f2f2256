"""Ordered lists of what is to be read, one for each storage node: pure.

The patent on prefetch caches ([0007] to [0009], claims 1 to 3): the order of an epoch is known when it begins, so it
is split by where each sample lies. Within a node's list the order of the epoch stays, and one request takes several
samples of a list at once. Readers use it for storage nodes and for servers of the pool alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_dpflow.checks import check_int
from torch_dpflow.errors import OptionError, UsageError

Keys = npt.NDArray[np.int64]
#: The node of each key, from 0.
NodeOf = Callable[[Keys], npt.NDArray[np.integer[Any]]]


def by_modulo(nodes: int) -> NodeOf:
    """The patent's mapping ([0008]): key i lies at node i mod N. Raises OptionError for less than one node."""
    check_int("nodes", nodes, minimum=1)
    return lambda keys: keys % nodes


class NodeLists:
    """One epoch's order, split by node; positions are taken from each list in order, each position once.

    Making it costs a stable sort. `following` and `left_before` look at each position up to their last one that was not
    taken; in reading ahead those are few.

    Args:
        order: the keys in the order in which they are read.
        node_of: the node of each of them.

    Raises:
        OptionError: the order has more dimensions than one, or `node_of` gives no node, or one below 0.
    """

    def __init__(self, order: npt.ArrayLike, node_of: NodeOf) -> None:
        self._order = np.asarray(order, dtype=np.int64)
        if self._order.ndim != 1:
            raise OptionError(f"order has {self._order.ndim} dimensions; give keys in a single list")
        self._nodes = np.asarray(node_of(self._order), dtype=np.int64)
        if self._nodes.shape != self._order.shape or (self._nodes < 0).any():
            raise OptionError("node_of must give a number from 0 for each key")
        by_node = np.argsort(self._nodes, kind="stable")
        count = int(self._nodes.max()) + 1 if len(self._nodes) else 0
        bounds = np.searchsorted(self._nodes[by_node], np.arange(1, count))
        #: The positions of each node's samples, rising.
        self._lists: list[Keys] = np.split(by_node, bounds) if count else []
        #: Every position before it was taken.
        self._nearest = 0
        self._taken = np.zeros(len(self._order), dtype=bool)

    def __len__(self) -> int:
        return len(self._order)

    @property
    def nodes(self) -> int:
        """How many lists there are; some may be empty."""
        return len(self._lists)

    def key(self, position: int) -> int:
        """What is read there."""
        return int(self._order[position])

    def node(self, position: int) -> int:
        """Where that lies."""
        return int(self._nodes[position])

    def is_taken(self, position: int) -> bool:
        """Whether it was taken from its list."""
        return bool(self._taken[position])

    def nearest(self) -> int | None:
        """The first position of all that was not taken; None where every one was."""
        while self._nearest < len(self._order) and self._taken[self._nearest]:
            self._nearest += 1
        return self._nearest if self._nearest < len(self._order) else None

    def left_before(self, end: int) -> int:
        """How many positions before `end` were not taken."""
        return int(np.count_nonzero(~self._taken[self._nearest : end]))

    def following(self, position: int, count: int) -> list[int]:
        """This position and those behind it in its node's list that were not taken, at most `count`."""
        positions = self._lists[self.node(position)]
        found: list[int] = []
        for place in range(int(np.searchsorted(positions, position)), len(positions)):
            if len(found) >= count:
                break
            if not self._taken[positions[place]]:
                found.append(int(positions[place]))
        return found

    def take(self, positions: Sequence[int]) -> None:
        """Take these from their lists. Raises UsageError: one of them was taken before."""
        taken = next((one for one in positions if self._taken[one]), None)
        if taken is not None:
            raise UsageError(f"position {taken} was taken already; each one is read once an epoch")
        self._taken[list(positions)] = True
