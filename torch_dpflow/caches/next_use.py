"""Distance to a key's next use, over all jobs."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from torch_dpflow._core.sparse_zeros import sparse_zeros
from torch_dpflow.caches.residents import Distances, Ranking
from torch_dpflow.caches.timetable import JOBS_PER_PLANE, JobProgress, Timetable
from torch_dpflow.lookahead import Keys

_INFINITY = float("inf")

#: For each place in a plane, the code that each of the 256 bytes has there.
_CODE_AT = [(np.arange(256) >> 2 * place) & 3 for place in range(JOBS_PER_PLANE)]


class NextUseRanking(Ranking):
    """Computes distances of keys from a timetable; the time-invariant part is computed once and stored.

    A key's distance combines its *anchor*, which depends on its certain cells and changes only when a job reads it,
    with a *value* per job, which depends on the key's code for that job. The values of four jobs are combined for all
    256 possible bytes at once, so a distance costs hardly more with many jobs than with few.
    """

    #: the argument of `Timetable`: codes of a position, ABSENT, READ, LIKELY and UNKNOWN
    codes: ClassVar[tuple[int, int, int, int, int]]
    #: combines values and anchors; and its neutral element
    combine: ClassVar[np.ufunc]
    neutral: ClassVar[float]

    def __init__(self) -> None:
        self.timetable = Timetable(self.codes)
        #: By key; valid for resident keys only.
        self.anchors: Distances = np.zeros(0)
        self._anchor_of: memoryview[Any] = self.anchors.data
        #: How much all anchors have shrunk since the start.
        self.now = 0.0
        #: By plane and place, the values of the four codes.
        self._values: list[list[list[float]]] = []
        #: The same combined over places, by byte; None where values have changed since. As arrays and as lists.
        self._combined: list[Distances | None] = []
        self._combined_of: list[list[float] | None] = []
        self.recompute()

    @abstractmethod
    def values(self, progress: JobProgress) -> list[float]:
        """Return a job's contribution to the distance of keys of codes 0 to 3."""

    @abstractmethod
    def advance(self, progress: JobProgress) -> None:
        """Record that a job's position has advanced."""

    def distances(self, keys: Keys) -> Distances:
        return self._distances_from(self.anchors.take(keys), keys)

    def _distances_from(self, distances: Distances, keys: Keys) -> Distances:
        """Return the distances for these anchors, which are overwritten."""
        distances -= self.now
        for number, plane in enumerate(self.timetable.planes):
            combined = self._combined[number]
            if combined is None:
                combined = self._combine_plane(number)
            self.combine(distances, combined.take(plane.take(keys)), out=distances)
        return distances

    def grow(self, span: int) -> None:
        """Grow arrays to hold keys below `span`."""
        anchors = sparse_zeros(span, np.float64)
        anchors[: len(self.anchors)] = self.anchors
        self.anchors = anchors
        self._anchor_of = self.anchors.data
        self.timetable.grow(span)

    def recompute(self) -> None:
        """Recompute everything that depends on jobs only, as jobs have joined, left or begun an epoch."""
        planes = len(self.timetable.planes)
        self._values = [[[self.neutral] * 4 for _ in range(JOBS_PER_PLANE)] for _ in range(planes)]
        self._combined = [None] * planes
        for progress in self.timetable:
            self._values[progress.plane][progress.place] = self.values(progress)
        self._combined_of = [self._combine_plane(number).tolist() for number in range(planes)]

    def update(self, progress: JobProgress) -> None:
        """Recompute a job's values."""
        self._values[progress.plane][progress.place] = self.values(progress)
        self._combined[progress.plane] = self._combined_of[progress.plane] = None

    def _combine_plane(self, number: int) -> Distances:
        first, *others = (np.take(row, codes) for row, codes in zip(self._values[number], _CODE_AT))
        for values in others:
            self.combine(first, values, out=first)
        self._combined[number] = first
        return first

    def _column_of(self, attribute: str, absent: float) -> npt.NDArray[np.float64]:
        """Return an attribute of the jobs as a column vector, shape (width, 1)."""
        column = np.full((self.timetable.width, 1), absent)
        for progress in self.timetable:
            column[progress.column] = getattr(progress, attribute)
        return column


class EarliestUse(NextUseRanking):
    """Ranking by the time until the first job reads the key: the minimum over jobs.

    A job's time for a position is its `base` plus the position times its `pace`, so an anchor is a moment:
    the earliest certain one. A key that a job has read is read again after N samples, as in the thesis, if
    the job's next epoch is not known.
    """

    codes = (0, 0, 1, 2, 3)
    combine = np.minimum
    neutral = _INFINITY

    def recompute(self) -> None:
        super().recompute()
        self._paces = self._column_of("pace", 0.0)
        self._bases = self._column_of("base", 0.0)
        self._moments = list(zip(self._paces[:, 0].tolist(), self._bases[:, 0].tolist()))

    def advance(self, progress: JobProgress) -> None:
        now = progress.base + progress.position * progress.pace
        if now > self.now:
            self.now = now
        if progress.estimates:
            self.update(progress)

    def renew(self, key: int) -> float:
        width = self.timetable.width
        moment = _INFINITY
        for cell, (pace, base) in zip(self.timetable.cell_of[key * width : (key + 1) * width].tolist(), self._moments):
            if cell >= 0:
                time = base + cell * pace
                if time < moment:
                    moment = time
        self._anchor_of[key] = moment
        return self.distance(key)

    def renew_many(self, keys: Keys) -> Distances:
        cells = self.timetable.cells.take(keys, axis=0).T
        moments = np.empty(cells.shape)
        np.multiply(cells, self._paces, out=moments)
        moments += self._bases
        np.copyto(moments, _INFINITY, where=cells < 0)
        earliest = moments.min(axis=0, initial=_INFINITY)
        self.anchors[keys] = earliest
        return self._distances_from(earliest, keys)

    def distance(self, key: int) -> float:
        least: float = self._anchor_of[key] - self.now
        for codes, combined, values in zip(self.timetable.code_of, self._combined_of, self._values):
            code = codes[key]
            if combined is None:
                value = min(row[(code >> shift) & 3] for row, shift in zip(values, (0, 2, 4, 6)))
            else:
                value = combined[code]
            if value < least:
                least = value
        return least

    def values(self, progress: JobProgress) -> list[float]:
        estimates = (progress.length, progress.likely_distance, progress.unknown_distance)
        return [_INFINITY, *(estimate * progress.pace for estimate in estimates)]


class WeightedMean(NextUseRanking):
    """Ranking by the weighted sum over jobs of the thesis's distances (eq. 3-5).

    In the thesis the weights sum to one; here they need not, which changes no comparison.

    A key that a job has read, or never reads, is N away for that job. The anchor is the weighted sum of positions; k,
    which is subtracted for each job whose cell is certain, is in that job's value.
    """

    codes = (1, 0, 0, 2, 3)
    combine = np.add
    neutral = 0.0

    def recompute(self) -> None:
        super().recompute()
        self._weights = self._column_of("weight", 0.0)
        self._weight_of = self._weights[:, 0].tolist()

    def advance(self, progress: JobProgress) -> None:
        if progress.estimates:
            self.update(progress)
        else:
            self._values[progress.plane][progress.place][1] = -progress.position * progress.weight
            self._combined[progress.plane] = None

    def renew(self, key: int) -> float:
        width = self.timetable.width
        total = 0.0
        for cell, weight in zip(self.timetable.cell_of[key * width : (key + 1) * width].tolist(), self._weight_of):
            if cell > 0:
                total += cell * weight
        self._anchor_of[key] = total
        return self.distance(key)

    def renew_many(self, keys: Keys) -> Distances:
        cells = self.timetable.cells.take(keys, axis=0).T
        positions = np.empty(cells.shape)
        np.maximum(cells, 0, out=positions)
        positions *= self._weights
        total = positions.sum(axis=0)
        self.anchors[keys] = total
        return self._distances_from(total, keys)

    def distance(self, key: int) -> float:
        total: float = self._anchor_of[key]
        for codes, values in zip(self.timetable.code_of, self._values):
            code = codes[key]
            first, second, third, fourth = values
            total += first[code & 3] + second[(code >> 2) & 3] + third[(code >> 4) & 3] + fourth[code >> 6]
        return total

    def values(self, progress: JobProgress) -> list[float]:
        distances = (progress.length, -progress.position, progress.likely_distance, progress.unknown_distance)
        return [distance * progress.weight for distance in distances]
