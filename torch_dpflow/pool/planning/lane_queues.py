"""What a batch has left to ask for, by lane, and which lane is asked next: pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class LaneQueues:
    """Places of a batch's records, by lane. The lane that has the fewest bytes under way is asked next.

    Lanes that have the same are asked in the order of what they have left, so that all of them end together.

    Args:
        lanes: of each record, any names.
        sizes: of each record, bytes.
        together: what one lane is asked for before the next at least, bytes, where so much may be asked for.
    """

    def __init__(self, lanes: Sequence[str], sizes: Sequence[int], together: int = 0) -> None:
        self._lanes, self._sizes, self._together = lanes, sizes, together
        self._waiting: dict[str, deque[int]] = {}
        for place, lane in enumerate(lanes):
            self._waiting.setdefault(lane, deque()).append(place)
        #: Bytes under way, by lane.
        self._out = dict.fromkeys(self._waiting, 0)
        #: The lane that is asked, and for how many bytes in a row it was.
        self._asked, self._run = "", 0
        #: Sizes of records, as many of which are still to be asked for as follow this one.
        self._order, self._at = [*sizes], 0

    @property
    def lanes(self) -> list[str]:
        """Those that have something left."""
        return [*self._waiting]

    def sizes(self, count: int) -> list[int]:
        """What those that are left are like, bytes: of so many records, in any order."""
        return self._order[self._at : self._at + count]

    def take(self, room: int) -> list[int]:
        """The next places, at least one where something is left, and more while they fit in so many bytes."""
        share = (sum(self._out.values()) + room) / max(1, len(self._waiting))
        taken = list[int]()
        while self._waiting:
            lane = self._next()
            queue = self._waiting[lane]
            while queue and (not self._run or self._run < self._together or self._has_room(lane, share)):
                size = self._sizes[queue[0]]
                if taken and size > room:
                    self._at += len(taken)
                    return taken
                room -= size
                self._run += max(1, size)
                self._out[lane] += size
                taken.append(queue.popleft())
            if not queue:
                del self._waiting[lane]
        self._at += len(taken)
        return taken

    def _next(self) -> str:
        """The lane that has not been asked for enough yet, or that has the fewest bytes under way."""
        if self._asked not in self._waiting or self._run >= self._together:
            self._asked = min(self._waiting, key=lambda one: (self._out[one], -len(self._waiting[one])))
            self._run = 0
        return self._asked

    def _has_room(self, lane: str, share: float) -> bool:
        return self._out[lane] + self._sizes[self._waiting[lane][0]] <= share

    def came(self, place: int) -> None:
        """It is not under way any more."""
        self._out[self._lanes[place]] -= self._sizes[place]

    def again(self, place: int) -> None:
        """It is to be asked for once more."""
        self._waiting.setdefault(self._lanes[place], deque()).append(place)
        self._order.append(self._sizes[place])

    def drop(self, lane: str) -> None:
        """Nothing is asked for over it any more, and nothing comes."""
        self._at += len(self._waiting.pop(lane, ()))
        self._out[lane] = 0
