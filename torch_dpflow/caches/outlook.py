"""How far away the next use of a key is, over all jobs together."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from torch_dpflow.caches.reader import Reader
from torch_dpflow.caches.residents import Distances, Ranking
from torch_dpflow.caches.timetable import JOBS_PER_PLANE, Timetable
from torch_dpflow.lookahead import Keys

_INFINITY = float("inf")

#: For each place in a plane, the code that each of the 256 bytes has there.
_CODE_AT = [(np.arange(256) >> 2 * place) & 3 for place in range(JOBS_PER_PLANE)]


class Outlook(Ranking):
    """Distances of keys from the cells of a timetable, with what time does not change worked out beforehand.

    A key's distance joins its *anchor*, which follows from its certain cells and changes only when a job
    reads it, with a *value* for each job, which follows from its code there. The values of four jobs are
    joined for all 256 bytes at once, so that a distance costs hardly more with many jobs than with few.
    """

    #: of a position, ABSENT, READ, LIKELY and UNKNOWN, as `Timetable` wants them
    codes: ClassVar[tuple[int, int, int, int, int]]
    #: joins values and anchors, and what joining leaves as it is
    join: ClassVar[np.ufunc]
    neutral: ClassVar[float]

    def __init__(self) -> None:
        self.table = Timetable(self.codes)
        #: By key; right for resident keys only.
        self.anchors: Distances = np.zeros(0)
        self._anchor_of: memoryview[Any] = self.anchors.data
        #: What time has taken off all anchors.
        self.now = 0.0
        #: By plane and place, the values of the four codes.
        self._values: list[list[list[float]]] = []
        #: The same joined over places, by byte; None where values have changed since. As arrays and as lists.
        self._joined: list[Distances | None] = []
        self._joined_of: list[list[float] | None] = []
        self.settle()

    # -- what differs ----------------------------------------------------------------------------------------

    @abstractmethod
    def values(self, reader: Reader) -> list[float]:
        """What a job adds to the distance of keys of codes 0 to 3."""

    @abstractmethod
    def advance(self, reader: Reader) -> None:
        """Take note of a job's having read."""

    # -- what they share -------------------------------------------------------------------------------------

    def distances(self, keys: Keys) -> Distances:
        return self._distances_from(self.anchors.take(keys), keys)

    def _distances_from(self, distances: Distances, keys: Keys) -> Distances:
        """What the codes make of anchors, which are overwritten."""
        distances -= self.now
        for number, plane in enumerate(self.table.planes):
            joined = self._joined[number]
            if joined is None:
                joined = self._join_plane(number)
            self.join(distances, joined.take(plane.take(keys)), out=distances)
        return distances

    def grow(self, span: int) -> None:
        """Make room for keys below `span`."""
        self.anchors = np.concatenate([self.anchors, np.zeros(span - len(self.anchors))])
        self._anchor_of = self.anchors.data
        self.table.grow(span)

    def settle(self) -> None:
        """Work out anew what hangs on jobs alone, not on keys: some came, went or began an epoch."""
        planes = len(self.table.planes)
        self._values = [[[self.neutral] * 4 for _ in range(JOBS_PER_PLANE)] for _ in range(planes)]
        self._joined = [None] * planes
        for reader in self.table:
            self._values[reader.plane][reader.place] = self.values(reader)
        self._joined_of = [self._join_plane(number).tolist() for number in range(planes)]

    def update(self, reader: Reader) -> None:
        """A job's values have changed."""
        self._values[reader.plane][reader.place] = self.values(reader)
        self._joined[reader.plane] = self._joined_of[reader.plane] = None

    def _join_plane(self, number: int) -> Distances:
        first, *others = (np.take(row, codes) for row, codes in zip(self._values[number], _CODE_AT))
        for values in others:
            self.join(first, values, out=first)
        self._joined[number] = first
        return first

    def _column_of(self, attribute: str, absent: float) -> npt.NDArray[np.float64]:
        """An attribute of the jobs as a column vector, shape (width, 1)."""
        column = np.full((self.table.width, 1), absent)
        for reader in self.table:
            column[reader.column] = getattr(reader, attribute)
        return column


class EarliestUse(Outlook):
    """The distance is the time until some job reads the key: the minimum over jobs.

    A job's time for a position is its `base` plus the position times its `pace`, so an anchor is a moment:
    the earliest certain one. A key that a job has read comes back after N samples, as the thesis has it, if
    the job's next epoch is not known.
    """

    codes = (0, 0, 1, 2, 3)
    join = np.minimum
    neutral = _INFINITY

    def settle(self) -> None:
        super().settle()
        self._paces = self._column_of("pace", 0.0)
        self._bases = self._column_of("base", 0.0)
        self._moments = list(zip(self._paces[:, 0].tolist(), self._bases[:, 0].tolist()))

    def advance(self, reader: Reader) -> None:
        now = reader.base + reader.position * reader.pace
        if now > self.now:
            self.now = now
        if reader.estimates:
            self.update(reader)

    def renew(self, key: int) -> float:
        width = self.table.width
        moment = _INFINITY
        for cell, (pace, base) in zip(
            self.table.cell_of[key * width : (key + 1) * width].tolist(), self._moments
        ):
            if cell >= 0:
                due = base + cell * pace
                if due < moment:
                    moment = due
        self._anchor_of[key] = moment
        return self.distance(key)

    def renew_many(self, keys: Keys) -> Distances:
        cells = self.table.cells.take(keys, axis=0).T
        moments = np.empty(cells.shape)
        np.multiply(cells, self._paces, out=moments)
        moments += self._bases
        np.copyto(moments, _INFINITY, where=cells < 0)
        earliest = moments.min(axis=0, initial=_INFINITY)
        self.anchors[keys] = earliest
        return self._distances_from(earliest, keys)

    def distance(self, key: int) -> float:
        least: float = self._anchor_of[key] - self.now
        for codes, joined, values in zip(self.table.code_of, self._joined_of, self._values):
            code = codes[key]
            if joined is None:
                value = min(row[(code >> shift) & 3] for row, shift in zip(values, (0, 2, 4, 6)))
            else:
                value = joined[code]
            if value < least:
                least = value
        return least

    def values(self, reader: Reader) -> list[float]:
        estimates = (reader.length, reader.likely_distance, reader.unknown_distance)
        return [_INFINITY, *(estimate * reader.pace for estimate in estimates)]


class WeightedMean(Outlook):
    """The distance is the weighted sum over jobs of the thesis's distances (eq. 3-5): its weights sum to
    one, ours need not, which changes no comparison.

    A key that a job has read, or never reads, is N away for that job. The anchor sums up positions; what time
    takes off, k for each job whose cell is certain, is that job's value.
    """

    codes = (1, 0, 0, 2, 3)
    join = np.add
    neutral = 0.0

    def settle(self) -> None:
        super().settle()
        self._weights = self._column_of("weight", 0.0)
        self._weight_of = self._weights[:, 0].tolist()

    def advance(self, reader: Reader) -> None:
        if reader.estimates:
            self.update(reader)
        else:
            self._values[reader.plane][reader.place][1] = -reader.position * reader.weight
            self._joined[reader.plane] = None

    def renew(self, key: int) -> float:
        width = self.table.width
        total = 0.0
        for cell, weight in zip(
            self.table.cell_of[key * width : (key + 1) * width].tolist(), self._weight_of
        ):
            if cell > 0:
                total += cell * weight
        self._anchor_of[key] = total
        return self.distance(key)

    def renew_many(self, keys: Keys) -> Distances:
        cells = self.table.cells.take(keys, axis=0).T
        positions = np.empty(cells.shape)
        np.maximum(cells, 0, out=positions)
        positions *= self._weights
        total = positions.sum(axis=0)
        self.anchors[keys] = total
        return self._distances_from(total, keys)

    def distance(self, key: int) -> float:
        total: float = self._anchor_of[key]
        for codes, values in zip(self.table.code_of, self._values):
            code = codes[key]
            first, second, third, fourth = values
            total += first[code & 3] + second[(code >> 2) & 3] + third[(code >> 4) & 3] + fourth[code >> 6]
        return total

    def values(self, reader: Reader) -> list[float]:
        distances = (reader.length, -reader.position, reader.likely_distance, reader.unknown_distance)
        return [distance * reader.weight for distance in distances]
