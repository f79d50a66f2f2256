"""Ordered lists of what is to be read, one for each storage node: pure.

The patent on prefetch caches ([0007] to [0009], claims 1 to 3): the order of an epoch is known when it begins, so it
is split by where each sample lies. Within a node's list the order of the epoch stays, and one request takes several
samples of a list at once. Readers use it for storage nodes and for servers of the pool alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_dpflow.checks import check_int
from torch_dpflow.errors import OptionError, UsageError

Keys = npt.NDArray[np.integer[Any]]
#: The node of each key, from 0.
NodeOf = Callable[[Keys], npt.NDArray[np.integer[Any]]]
_LARGEST_KEY = (1 << 31) - 1


def by_modulo(nodes: int) -> NodeOf:
    """The patent's mapping ([0008]): key i lies at node i mod N. Raises OptionError for less than one node."""
    check_int("nodes", nodes, minimum=1)
    return lambda keys: keys % nodes


def one_node(keys: Keys) -> npt.NDArray[np.integer[Any]]:
    """All keys lie at one node, as in an object store."""
    return np.zeros(len(keys), dtype=np.int8)


class NodeLists:
    """One epoch's order, split by node; positions are taken from each list in order, each position once.

    Making it costs a stable sort. `following` and `left_before` look at each position up to their last one that was not
    taken; in reading ahead those are few. It takes 4 bytes a position, and with more nodes than one 5 to 12.

    Args:
        order: the keys in the order in which they are read, below 2^31; kept as it is if it is an array of int32.
        node_of: the node of each of them.

    Raises:
        OptionError: the order has more dimensions than one, a key is too large, or `node_of` gives no node, or one
            below 0.
    """

    def __init__(self, order: npt.ArrayLike, node_of: NodeOf = one_node) -> None:
        given = np.asarray(order)
        given = given if given.dtype == np.int32 else given.astype(np.int64)
        if given.ndim != 1:
            raise OptionError(f"order has {given.ndim} dimensions; give keys in a single list")
        if len(given) and int(given.max()) > _LARGEST_KEY:
            raise OptionError(f"key {int(given.max())} is above {_LARGEST_KEY}; give smaller ones")
        self._order = given.astype(np.int32, copy=False)
        nodes = np.asarray(node_of(given))
        if nodes.shape != given.shape or (nodes < 0).any():
            raise OptionError("node_of must give a number from 0 for each key")
        count = int(nodes.max()) + 1 if len(nodes) else 0
        #: The positions of each node's samples, rising; and the node of each position. None where there is one.
        self._lists: list[npt.NDArray[np.int32]] | None = None
        self._nodes = None if count <= 1 else nodes.astype(np.min_scalar_type(count))
        if self._nodes is not None:
            by_node = np.argsort(self._nodes, kind="stable").astype(np.int32)
            bounds = np.searchsorted(self._nodes[by_node], np.arange(1, count))
            self._lists = np.split(by_node, bounds)
        #: How many lists there are; some may be empty.
        self.nodes = count
        #: Every position before it was taken, and these behind it.
        self._nearest = 0
        #: The position of the first key that is kept.
        self._first = 0
        self._taken: set[int] = set()

    def __len__(self) -> int:
        return self._first + len(self._order)

    def extend(self, keys: npt.NDArray[np.int32]) -> None:
        """These come behind the others, and keys that were taken are forgotten.

        Raises UsageError: there are several nodes.
        """
        if self._lists is not None:
            raise UsageError(f"an order of {self.nodes} nodes cannot be extended; announce it as a whole")
        self._order = np.concatenate([self._order[self._nearest - self._first :], keys])
        self._first = self._nearest

    def key(self, position: int) -> int:
        """What is read there, where that is not taken."""
        return int(self._order[position - self._first])

    def node(self, position: int) -> int:
        """Where that lies."""
        return 0 if self._nodes is None else int(self._nodes[position])

    def is_taken(self, position: int) -> bool:
        """Whether it was taken from its list."""
        return position < self._nearest or position in self._taken

    def nearest(self) -> int | None:
        """The first position of all that was not taken; None where every one was."""
        return self._nearest if self._nearest < len(self) else None

    def left_before(self, end: int) -> int:
        """How many positions before `end` were not taken."""
        return max(0, end - self._nearest) - sum(position < end for position in self._taken)

    def following(self, position: int, count: int) -> list[int]:
        """This position and those behind it in its node's list that were not taken, at most `count`."""
        rest = range(position, len(self)) if self._lists is None else self._behind(position)
        found: list[int] = []
        for one in rest:
            if len(found) >= count:
                break
            if not self.is_taken(one):
                found.append(one)
        return found

    def _behind(self, position: int) -> Iterator[int]:
        assert self._lists is not None
        positions = self._lists[self.node(position)]
        for place in range(int(np.searchsorted(positions, position)), len(positions)):
            yield int(positions[place])

    def take(self, positions: Sequence[int]) -> None:
        """Take these from their lists. Raises UsageError: one of them was taken before."""
        taken = next((one for one in positions if self.is_taken(one)), None)
        if taken is not None:
            raise UsageError(f"position {taken} was taken already; each one is read once an epoch")
        self._taken.update(positions)
        while self._nearest in self._taken:
            self._taken.discard(self._nearest)
            self._nearest += 1
