"""Records that somebody waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class WantedRecords:
    """Those of a set that are to be read before others, each once, in the order in which they were asked for."""

    def __init__(self, records: int) -> None:
        self._queue: deque[int] = deque()
        self._is_queued = bytearray(records)
        #: Who is told when a record is there, or could not be read.
        self._watchers: dict[int, list[Callable[[bool], None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, record: int) -> None:
        """Have a record read, if it is not to be read already."""
        if not self._is_queued[record]:
            self._is_queued[record] = True
            self._queue.append(record)

    def take(self, most: int) -> list[int]:
        """The next ones, at most so many, which are wanted no longer."""
        taken = [self._queue.popleft() for _ in range(min(most, len(self._queue)))]
        for record in taken:
            self._is_queued[record] = False
        return taken

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
