"""Records that somebody waits for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class WantedRecords:
    """Those of a set that are to be read before others, each once, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._queue: OrderedDict[int, None] = OrderedDict()
        #: Who is told when a record is there, or could not be read.
        self._watchers: dict[int, list[Callable[[bool], None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, record: int) -> None:
        """Have a record read, if it is not to be read already."""
        self._queue.setdefault(record)

    def take(self, most: int) -> list[int]:
        """The next ones, at most so many, which are wanted no longer."""
        return [self._queue.popitem(last=False)[0] for _ in range(min(most, len(self._queue)))]

    def watch(self, record: int, told: Callable[[bool], None]) -> None:
        """Have somebody told, once, whether a record is there."""
        self._watchers.setdefault(record, []).append(told)

    def tell(self, record: int, *, is_here: bool) -> None:
        """Tell those who watch a record."""
        for told in self._watchers.pop(record, ()):
            told(is_here)

    def give_up(self) -> None:
        """Tell all that their records do not come."""
        for record in [*self._watchers]:
            self.tell(record, is_here=False)
