"""Least frequently used, in O(1): Shah, Mitra and Matani, "An O(1) algorithm for implementing the LFU cache
eviction scheme" (2010)."""

from __future__ import annotations

from collections import OrderedDict

from torch_dpflow.caches.keyed import KeyedPolicy


class _Frequency:
    """The keys read `count` times, the one longest at that count first; linked to the next lower and higher counts."""

    __slots__ = ("count", "higher", "keys", "lower")

    def __init__(self, count: int) -> None:
        self.count = count
        # Not a dict: finding its first key skips all entries that were deleted before it.
        self.keys: OrderedDict[int, None] = OrderedDict()
        self.lower = self
        self.higher = self

    def insert_above(self, count: int) -> _Frequency:
        frequency = _Frequency(count)
        frequency.lower, frequency.higher = self, self.higher
        self.higher.lower = frequency
        self.higher = frequency
        return frequency

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
        #: The head of the ring, without keys; its `higher` is the lowest count in use.
        self._head = _Frequency(0)
        self._frequency_of: dict[int, _Frequency] = {}

    def _entered(self, key: int) -> None:
        self._put(key, self._head)

    def _used(self, key: int) -> None:
        frequency = self._frequency_of[key]
        self._put(key, frequency)
        self._take(key, frequency)

    def _left(self, key: int) -> None:
        self._take(key, self._frequency_of.pop(key))

    def _next_victim(self) -> int:
        return next(iter(self._head.higher.keys))

    def _put(self, key: int, below: _Frequency) -> None:
        """Put `key` one count above `below`."""
        frequency = below.higher
        if frequency.count != below.count + 1:
            frequency = below.insert_above(below.count + 1)
        frequency.keys[key] = None
        self._frequency_of[key] = frequency

    def _take(self, key: int, frequency: _Frequency) -> None:
        del frequency.keys[key]
        if not frequency.keys:
            frequency.remove()
