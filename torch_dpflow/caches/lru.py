"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict

from torch_dpflow.caches.keyed import KeyedPolicy


class LRU(KeyedPolicy):
    """Evicts the key that was not read for the longest time."""

    name = "lru"

    def __init__(
        self, *, max_items: int | None = None, max_bytes: int | None = None, keys: int | None = None
    ) -> None:
        super().__init__(max_items=max_items, max_bytes=max_bytes, keys=keys)
        # One mapping holds sizes and order of use.
        self._order: OrderedDict[int, int] = OrderedDict()
        self._sizes = self._order

    def _entered(self, key: int) -> None: ...

    def _used(self, key: int) -> None:
        self._order.move_to_end(key)

    def _left(self, key: int) -> None: ...

    def _next_victim(self) -> int:
        return next(iter(self._order))
