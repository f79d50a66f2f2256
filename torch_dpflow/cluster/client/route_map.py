"""A job's copy of a flow's routing table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torch_dpflow.cluster.messages.router import RoutingTable
from torch_dpflow.errors import OptionError
from torch_dpflow.samplers.indices import IndexArray


class RouteMap:
    """A job's copy of a routing table.

    Raises OptionError for a table that has no routes, or gaps in them.
    """

    def __init__(self, table: RoutingTable) -> None:
        self.generation = table.generation
        self.addresses = [route.address for route in table.routes]
        ends = [route.end for route in table.routes]
        if not ends or [0, *ends[:-1]] != [route.first for route in table.routes]:
            raise OptionError(f"a routing table without routes, or with gaps: {table.routes}")
        self._ends = np.array(ends)

    def places_of(self, keys: Sequence[int]) -> IndexArray:
        """The number of the route that owns each key, shape (n,)."""
        return np.searchsorted(self._ends, np.asarray(keys, np.int64), side="right")
