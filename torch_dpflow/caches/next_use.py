"""Distances to the next use of keys, over all jobs: the time to the earliest use, or a weighted mean."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from torch_dpflow.caches.residents import Distances, Loads, Ranking
from torch_dpflow.caches.timetable import JOBS_PER_PLANE, JobProgress, Timetable
from torch_dpflow.lookahead import Keys

_INFINITY = float("inf")

#: For each place in a plane, the code that each of the 256 bytes has there.
_CODE_AT = [(np.arange(256) >> 2 * place) & 3 for place in range(JOBS_PER_PLANE)]


class NextUseRanking(Ranking):
    """Ranking by when jobs read a key next, from a `Timetable`. Subclasses define how jobs are combined.

    A key's distance combines parts of two kinds. Its *anchor* follows from the positions at which jobs are certain to
    read it, and is stored until a job reads it or orders change. Its *value* for each job follows from its code in the
    timetable. The codes of four jobs share one byte, so one lookup in a table of 256 combined values serves four jobs.
    """

    #: The argument of `Timetable`: the codes of a position, and of ABSENT, READ, LIKELY and UNKNOWN.
    codes: ClassVar[tuple[int, int, int, int, int]]
    #: Function that combines values and anchors; its neutral element is `neutral`.
    combine: ClassVar[np.ufunc]
    #: Whether distances are times, so that they depend on the jobs' paces.
    timed: ClassVar[bool] = False
    neutral: ClassVar[float]

    def __init__(self) -> None:
        self.timetable = Timetable(self.codes)
        #: Anchors of resident keys, by load number.
        self.anchors: Distances = np.zeros(1)
        self._anchor_of: memoryview[Any] = self.anchors.data
        #: How much all anchors have shrunk since the start: the reads of all jobs if anchors are times, else 0.
        self.now = 0
        #: By plane and place, the values of the four codes as they are stored.
        self._values: list[list[list[float]]] = []
        #: By plane, the combined values of each byte; None if values have changed since. As arrays and as lists.
        self._combined: list[Distances | None] = []
        self._combined_of: list[list[float] | None] = []
        self.recompute()

    @abstractmethod
    def values(self, progress: JobProgress) -> list[float]:
        """Return four numbers: a job's value for keys with the code 0, 1, 2 and 3."""

    @abstractmethod
    def scale(self, progress: JobProgress) -> tuple[float, float]:
        """Return (factor, summand): a job's part of an anchor is `position * factor + summand`."""

    @abstractmethod
    def advance(self, progress: JobProgress, reads: int) -> None:
        """Record `reads` further reads of a job, whose position is already up to date."""

    def distances(self, keys: Keys, loads: Loads) -> Distances:
        return self._distances_from(self.anchors.take(loads), keys)

    def _distances_from(self, distances: Distances, keys: Keys) -> Distances:
        """Return the distances of keys with these anchors; overwrites the anchors."""
        distances -= self.now
        for number, plane in enumerate(self.timetable.planes):
            combined = self._combined[number]
            if combined is None:
                combined = self._combine_plane(number)
            self.combine(distances, combined.take(plane.codes.take(keys)), out=distances)
        return distances

    def renumber(self, loads: npt.NDArray[np.intp], room: int) -> None:
        anchors = self.anchors[loads]
        self.anchors = np.zeros(room)
        self.anchors[: len(anchors)] = anchors
        self._anchor_of = self.anchors.data

    def recompute(self) -> None:
        """Recompute all values of all jobs. Call this when a job joins, leaves, begins an epoch or changes its pace."""
        planes = len(self.timetable.planes)
        self._code_of = [plane.code_of for plane in self.timetable.planes]
        #: By job: its cells and `outsiders`; the two numbers by which a subclass makes a distance of a position.
        self._rows = [(one.cell_of, one.outsiders, *self.scale(one)) for one in self.timetable]
        self._outsiders = np.array([[row[1]] for row in self._rows], np.int32).reshape(-1, 1)
        self._scales, self._shifts = (np.array([[row[n]] for row in self._rows]).reshape(-1, 1) for n in (2, 3))
        self._values = [[[self.neutral] * 4 for _ in range(JOBS_PER_PLANE)] for _ in range(planes)]
        self._combined = [None] * planes
        for progress in self.timetable:
            self._note_values(progress)
        self._combined_of = [self._combine_plane(number).tolist() for number in range(planes)]

    def update(self, progress: JobProgress) -> None:
        """Recompute the values of one job, after its position or lookahead has changed."""
        self._note_values(progress)
        self._combined[progress.plane] = self._combined_of[progress.plane] = None

    def _cells(self, keys: Keys) -> npt.NDArray[np.int32]:
        """Return each job's timetable cells of these keys, as an array of shape (jobs, keys)."""
        cells = np.empty((len(self._rows), len(keys)), np.int32)
        for row, progress in zip(cells, self.timetable):
            progress.cells.take(keys, out=row, mode="clip")  # the others copy the row
        cells ^= self._outsiders
        return cells

    def _note_values(self, progress: JobProgress) -> None:
        values = self.values(progress)
        self._values[progress.plane][progress.place] = [values[code ^ progress.code] for code in range(4)]

    def _combine_plane(self, number: int) -> Distances:
        first, *others = (np.take(row, codes) for row, codes in zip(self._values[number], _CODE_AT))
        for values in others:
            self.combine(first, values, out=first)
        self._combined[number] = first
        return first


class EarliestUse(NextUseRanking):
    """Ranking by the time until the first job reads the key: the minimum over jobs. Time counts reads of all jobs.

    A job reads the sample at `position` at the time `base + position * pace`. An anchor is the earliest time at which
    a job is certain to read the key. If a job has read a key and its next epoch is not known, the next read is assumed
    N samples later (the length of the epoch), as in the thesis.
    """

    codes = (0, 0, 1, 2, 3)
    combine = np.minimum
    timed = True
    neutral = _INFINITY

    def advance(self, progress: JobProgress, reads: int) -> None:
        self.now += reads
        if progress.estimates:
            self.update(progress)

    def renew(self, key: int, load: int) -> float:
        moment = _INFINITY
        for cell_of, outsiders, pace, base in self._rows:
            cell = cell_of[key] ^ outsiders
            if cell >= 0:
                time = base + cell * pace
                if time < moment:
                    moment = time
        self._anchor_of[load] = moment
        return self.distance(key, load)

    def renew_many(self, keys: Keys, loads: Loads) -> Distances:
        cells = self._cells(keys)
        moments = cells * self._scales
        moments += self._shifts
        np.copyto(moments, _INFINITY, where=cells < 0)
        earliest = moments.min(axis=0, initial=_INFINITY)
        self.anchors[loads] = earliest
        return self._distances_from(earliest, keys)

    def scale(self, progress: JobProgress) -> tuple[float, float]:
        return progress.pace, progress.base

    def distance(self, key: int, load: int) -> float:
        least: float = self._anchor_of[load] - self.now
        for codes, combined, values in zip(self._code_of, self._combined_of, self._values):
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

    The distance of a key for one job is the number of samples that the job reads before it. It is an estimate if the
    position is not certain. It is the epoch's length if the job does not read the key in this epoch, or has read it and
    its next order is not known. The weights need not sum to one as in the thesis, which changes no comparison.

    For a key whose position in the job's order is certain, the distance is this position minus the job's own position.
    The first is part of the key's anchor, the second of the job's value (see `NextUseRanking`).
    """

    codes = (1, 0, 0, 2, 3)
    combine = np.add
    neutral = 0.0

    def advance(self, progress: JobProgress, reads: int) -> None:
        if progress.estimates:
            self.update(progress)
        else:
            self._values[progress.plane][progress.place][1 ^ progress.code] = -progress.position * progress.weight
            self._combined[progress.plane] = None

    def renew(self, key: int, load: int) -> float:
        total = 0.0
        for cell_of, outsiders, weight, _ in self._rows:
            cell = cell_of[key] ^ outsiders
            if cell > 0:
                total += cell * weight
        self._anchor_of[load] = total
        return self.distance(key, load)

    def renew_many(self, keys: Keys, loads: Loads) -> Distances:
        total = (np.maximum(self._cells(keys), 0) * self._scales).sum(axis=0)
        self.anchors[loads] = total
        return self._distances_from(total, keys)

    def scale(self, progress: JobProgress) -> tuple[float, float]:
        return progress.weight, 0.0

    def distance(self, key: int, load: int) -> float:
        total: float = self._anchor_of[load]
        for codes, values in zip(self._code_of, self._values):
            code = codes[key]
            first, second, third, fourth = values
            total += first[code & 3] + second[(code >> 2) & 3] + third[(code >> 4) & 3] + fourth[code >> 6]
        return total

    def values(self, progress: JobProgress) -> list[float]:
        distances = (progress.length, -progress.position, progress.likely_distance, progress.unknown_distance)
        return [distance * progress.weight for distance in distances]
