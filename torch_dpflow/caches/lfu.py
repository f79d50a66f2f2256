"""Least frequently used, in O(1): Shah, Mitra and Matani, "An O(1) algorithm for implementing the LFU cache
eviction scheme" (2010)."""

from __future__ import annotations

from collections import OrderedDict

from torch_dpflow.caches.keyed import KeyedPolicy


class _Rung:
    """The keys read `count` times, the one longest there first, between the next lower and higher counts."""

    __slots__ = ("count", "higher", "keys", "lower")

    def __init__(self, count: int) -> None:
        self.count = count
        # Not a dict: finding the first key of a dict that is emptied from the front skips over all deleted entries.
        self.keys: OrderedDict[int, None] = OrderedDict()
        self.lower = self
        self.higher = self

    def insert_above(self, count: int) -> _Rung:
        rung = _Rung(count)
        rung.lower, rung.higher = self, self.higher
        self.higher.lower = rung
        self.higher = rung
        return rung

    def remove(self) -> None:
        self.lower.higher = self.higher
        self.higher.lower = self.lower


class LFU(KeyedPolicy):
    """Evicts the key read least often since it was loaded; among equals the one longest at that count."""

    name = "lfu"

    def __init__(
        self, *, max_items: int | None = None, max_bytes: int | None = None, keys: int | None = None
    ) -> None:
        super().__init__(max_items=max_items, max_bytes=max_bytes, keys=keys)
        #: A ring through this keyless rung; `higher` of it is the lowest count in use.
        self._ground = _Rung(0)
        self._rung_of: dict[int, _Rung] = {}

    def _entered(self, key: int) -> None:
        self._put(key, self._ground)

    def _used(self, key: int) -> None:
        rung = self._rung_of[key]
        self._put(key, rung)
        self._take(key, rung)

    def _left(self, key: int) -> None:
        self._take(key, self._rung_of.pop(key))

    def _first_to_go(self) -> int:
        return next(iter(self._ground.higher.keys))

    def _put(self, key: int, below: _Rung) -> None:
        """Put `key` one count above the rung `below`."""
        rung = below.higher
        if rung.count != below.count + 1:
            rung = below.insert_above(below.count + 1)
        rung.keys[key] = None
        self._rung_of[key] = rung

    def _take(self, key: int, rung: _Rung) -> None:
        del rung.keys[key]
        if not rung.keys:
            rung.remove()
