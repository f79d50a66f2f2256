"""Ordered lists of what is to be read, one for each storage node: the patent's ([0007] to [0009], claims 1 to 3).

The order of an epoch is known when it begins, so it is split by where each sample lies. Within a node's list the order
of the epoch stays, and one request takes several samples of a list at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_dpflow._core.checks import check_int
from torch_dpflow.errors import OptionError, UsageError
from torch_dpflow.pool.planning.read_ahead import KnownOrder

Keys = npt.NDArray[np.integer[Any]]
#: The node of each key, from 0.
NodeOf = Callable[[Keys], npt.NDArray[np.integer[Any]]]


def by_modulo(nodes: int) -> NodeOf:
    """The patent's mapping ([0008]): key i lies at node i mod N. Raises OptionError for less than one node."""
    check_int("nodes", nodes, minimum=1)
    return lambda keys: keys % nodes


class NodeLists(KnownOrder):
    """One epoch's order, split by node; making it costs a stable sort, and 5 to 12 bytes a position in all.

    node_of: the node of each key.
    Raises OptionError: `node_of` gives no node, or one below 0; and as `KnownOrder`.
    """

    def __init__(self, order: npt.ArrayLike, node_of: NodeOf) -> None:
        super().__init__(order)
        nodes = np.asarray(node_of(self._order))
        if nodes.shape != self._order.shape or (nodes < 0).any():
            raise OptionError("node_of must give a number from 0 for each key")
        count = int(nodes.max()) + 1 if len(nodes) else 0
        self._nodes = nodes.astype(np.min_scalar_type(count))
        by_node = np.argsort(self._nodes, kind="stable").astype(np.int32)
        #: The positions of each node's samples, rising.
        self._lists = np.split(by_node, np.searchsorted(self._nodes[by_node], np.arange(1, count)))

    def node(self, position: int) -> int:
        """Where that lies."""
        return int(self._nodes[position])

    def extend(self, keys: npt.NDArray[np.int32]) -> None:
        """Raises UsageError: what is behind each list would change."""
        raise UsageError("an order of nodes cannot be extended; announce it as a whole")

    def behind(self, position: int) -> Iterator[int]:
        """This position and those behind it in its node's list."""
        positions = self._lists[self.node(position)]
        for place in range(int(np.searchsorted(positions, position)), len(positions)):
            yield int(positions[place])
