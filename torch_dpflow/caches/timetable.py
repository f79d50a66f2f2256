"""Table of when each job reads each key, from the jobs' lookaheads; updated at each read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_dpflow._core.sparse_zeros import sparse_zeros
from torch_dpflow.caches.policy import Job
from torch_dpflow.lookahead import Keys, Lookahead


def _no_keys() -> Keys:
    return np.empty(0, dtype=np.int64)


@dataclass(slots=True, eq=False)
class JobProgress:
    """Record of a job in a `Timetable`: its position, its cells, and estimates for reads of unknown position."""

    #: the job's weight, alpha of eq. 3-5
    weight: float
    #: the cell of each key, XORed with `outsiders`; and a view of these that returns Python's integers
    cells: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    cell_of: memoryview[Any] = field(default_factory=lambda: memoryview(b""))
    #: the number of the plane with its codes, their place there, the code of `outsiders`; whether a cell was written
    plane: int = -1
    place: int = 0
    code: int = 0
    is_marked: bool = True
    #: the number of the running epoch; None before the first lookahead
    epoch: int | None = None
    #: N: the epoch's number of samples; and k: how many of them it has read
    length: int = 0
    position: int = 0
    #: whether the epoch ends after `length` reads; False if the length is a guess
    turns: bool = False
    #: cell value of keys that are in no lookahead
    outsiders: int = -1
    #: the position after the last certain one
    certain_end: int = 0
    #: whether some of its cells may be estimates, which change as it reads
    estimates: bool = False
    #: positions of the last lookahead, which a later one may revise: the first position, and the keys in order
    announced: tuple[int, Keys] = field(default_factory=lambda: (0, _no_keys()))
    #: keys of S_uc in the last lookahead; how many are unread; their mean rank by weight, divided by their number
    likely: Keys = field(default_factory=_no_keys)
    likely_left: int = 0
    likely_rank: float = 1.0
    #: what each key's cell becomes once it is read: its position in the next epoch, XORed with READ. None: not known
    following: npt.NDArray[np.int32] | None = None
    #: reads of all jobs for each read of this job; the time, in such reads, when it read position 0, or would have
    pace: float = 1.0
    base: float = 0.0
    #: whether `pace` was measured; the time of the last measurement, and the job's reads since then
    is_measured: bool = False
    began: int = 0
    reads: int = 0

    @property
    def certain_left(self) -> int:
        """Number of certain keys that the job has not read: |S_c| of the thesis."""
        return max(0, self.certain_end - self.position)

    @property
    def likely_distance(self) -> float:
        """Distance of a likely key by the thesis's eq. 3-2, in samples from the job's position."""
        certain = self.certain_left
        return certain + self.likely_rank * max(0, self.length - self.position - certain)

    @property
    def unknown_distance(self) -> float:
        """Distance of a key at an unknown position by the thesis's eq. 3-3, in samples from the job's position."""
        announced = self.certain_left + self.likely_left
        return announced + max(0, self.length - self.position - announced) / 2

    def note_lookahead(self, lookahead: Lookahead, likely: Keys) -> None:
        """Record a lookahead. likely: those of its likely keys that are unread."""
        self.certain_end = lookahead.position + len(lookahead.certain)
        self.announced = lookahead.position, lookahead.certain
        self.likely = likely
        self.likely_left = len(likely)
        self.likely_rank = _mean_rank(lookahead)

    def cells_of(self, keys: Keys) -> npt.NDArray[np.int32]:
        cells: npt.NDArray[np.int32] = self.cells.take(keys) ^ self.outsiders
        return cells


def _mean_rank(lookahead: Lookahead) -> float:
    """Return the sum of w_i * i / m over the likely keys, i from 1: eq. 3-2 without the common terms."""
    count = len(lookahead.likely)
    if count == 0:
        return 1.0
    ranks = np.arange(1, count + 1) / count
    if len(lookahead.weights) == 0:
        return float(ranks.mean())
    return float(np.average(ranks, weights=lookahead.weights))


#: Values of a cell that are not positions: the job does not read the key; has read it in this epoch (S_v); is likely
#: to read it soon (S_uc); reads it at an unknown time (S_uk).
ABSENT, READ, LIKELY, UNKNOWN = -1, -2, -3, -4

#: Number of jobs whose codes share one byte, two bits each.
JOBS_PER_PLANE = 4


class _Plane:
    """Codes of up to `JOBS_PER_PLANE` epochs, by key."""

    def __init__(self, span: int) -> None:
        self.codes = sparse_zeros(span, np.uint8)
        self.code_of = self.codes.data
        #: Places that were given to epochs, and those of them that are in use.
        self.given = self.used = 0


class Timetable:
    """Cells by key and job: the position at which the job reads the key, or ABSENT, READ, LIKELY or UNKNOWN.

    Positions count from the start of the job's epoch; a position at or above its length is in the next epoch. The kind
    of each cell is also stored as a *code* of two bits. A byte array with the codes of four jobs is a *plane*.

    A key that is in no lookahead is stored as zero: all cells and codes are XORed with such a key's. So an epoch
    begins with new arrays of zeros, which need not be filled for all keys (a flow may have 100 million).

    Args:
        codes: the codes of a position, and of ABSENT, READ, LIKELY and UNKNOWN, each 0 to 3; two kinds may share one.
    """

    def __init__(self, codes: tuple[int, int, int, int, int]) -> None:
        self._codes = np.array(codes, dtype=np.uint8)
        self._code_of = codes
        self._span = 0
        #: By job, in the order in which they joined.
        self.progress_of: dict[Job, JobProgress] = {}
        self.planes: list[_Plane] = []

    def __iter__(self) -> Iterator[JobProgress]:
        return iter(self.progress_of.values())

    def add(self, job: Job, weight: float) -> JobProgress:
        """Add a job; its keys are absent until `begin`."""
        progress = self.progress_of[job] = JobProgress(weight)
        self._clear(progress)
        return progress

    def remove(self, job: Job) -> JobProgress | None:
        """Remove a job; return its progress, or None if the job is unknown."""
        progress = self.progress_of.pop(job, None)
        if progress is not None:
            self._free(progress)
        return progress

    def grow(self, span: int) -> None:
        """Make space for all keys below `span`."""
        self._span = span
        for plane in self.planes:
            plane.codes = grown(plane.codes, span)
            plane.code_of = plane.codes.data
        for progress in self:
            progress.cells = grown(progress.cells, span)
            progress.cell_of = progress.cells.data
            if progress.following is not None:
                progress.following = grown(progress.following, span)

    def _clear(self, progress: JobProgress) -> None:
        progress.code = self._code_of[-progress.outsiders]
        if not progress.is_marked:
            return
        self._free(progress)
        progress.is_marked = False
        progress.cells = sparse_zeros(self._span, np.int32)
        progress.cell_of = progress.cells.data
        number = next((n for n, plane in enumerate(self.planes) if plane.given < JOBS_PER_PLANE), len(self.planes))
        if number == len(self.planes):
            self.planes.append(_Plane(self._span))
        plane = self.planes[number]
        progress.plane, progress.place = number, plane.given
        plane.given += 1
        plane.used += 1

    def _free(self, progress: JobProgress) -> None:
        """Free the codes of a job's epoch, if the job has begun one."""
        if progress.plane >= 0:
            plane = self.planes[progress.plane]
            plane.used -= 1
            if not plane.used:
                self.planes[progress.plane] = _Plane(self._span)

    def begin(self, progress: JobProgress, lookahead: Lookahead) -> None:
        """Begin an epoch of a job, and record its lookahead."""
        rest = READ if lookahead.complete else UNKNOWN
        certain, members = lookahead.certain, lookahead.members
        if lookahead.complete and lookahead.position == 0 and members is None:
            members = certain
        progress.epoch, progress.length, progress.position = (
            lookahead.epoch,
            lookahead.length,
            lookahead.position,
        )
        progress.turns, progress.estimates = lookahead.length > 0, not lookahead.complete
        progress.outsiders = rest if members is None else ABSENT
        progress.following = None
        self._clear(progress)
        if members is not None and members is not certain:
            self._store(progress, members, rest)
        self._store(progress, lookahead.likely, LIKELY)
        self._store_order(progress, certain, _count(lookahead.position, len(certain)))
        progress.note_lookahead(lookahead, lookahead.likely)
        if lookahead.following is not None:
            self.follow(progress, lookahead.following)

    def revise(self, progress: JobProgress, lookahead: Lookahead) -> Keys:
        """Record a later lookahead of a running epoch; return keys whose cells may have changed, with repeats."""
        start = lookahead.position
        progress.estimates = True
        first, announced = progress.announced
        if start < first:  # of a lookahead before that one
            announced = np.flatnonzero(progress.cells)
        cells = progress.cells_of(announced)
        announced = announced[(cells >= start) & (cells < progress.length)]
        once_likely = progress.likely[progress.cells_of(progress.likely) == LIKELY]
        self._store(progress, announced, UNKNOWN)
        self._store(progress, once_likely, UNKNOWN)
        cells = progress.cells_of(lookahead.certain)
        expected = (cells != READ) & (cells < progress.length)
        self._store_order(progress, lookahead.certain[expected], start + np.flatnonzero(expected))
        cells = progress.cells_of(lookahead.likely)
        likely = lookahead.likely[(cells < 0) & (cells != READ)]
        self._store(progress, likely, LIKELY)
        progress.note_lookahead(lookahead, likely)
        return np.concatenate([announced, once_likely, lookahead.certain, lookahead.likely])

    def follow(self, progress: JobProgress, order: Keys) -> None:
        """Record the order of a job's next epoch; the cells of keys already read get their positions in that epoch.

        In epoch 0, positions in the next one are recorded one epoch later than they are, because the job may end after
        epoch 0. In a simulation (four jobs, a third of an epoch apart, half of the samples in the cache) this gains 1.7
        points of hit rate if each job has one epoch, and costs 0.6 points if each job has four.
        """
        following = sparse_zeros(self._span, np.int32)
        first = progress.length if progress.epoch else 2 * progress.length
        following[order[::-1]] = _count(first, len(order))[::-1] ^ READ
        progress.following = following
        self._store_read(progress, order[progress.cells_of(order) == READ])

    def next_epoch(self, progress: JobProgress) -> Lookahead:
        """Return the lookahead of a job's next epoch: with its order if known, else with its keys if known."""
        epoch = 0 if progress.epoch is None else progress.epoch + 1
        if progress.following is not None:
            keys = np.flatnonzero(progress.following)
            return Lookahead.of_order(keys[(progress.following[keys] ^ READ).argsort()], epoch=epoch)
        members = np.flatnonzero(progress.cells) if progress.outsiders == ABSENT else None
        return Lookahead.unknown(progress.length, epoch=epoch, members=members)

    def read(self, progress: JobProgress, key: int) -> None:
        outsiders, following = progress.outsiders, progress.following
        cell = progress.cell_of[key] ^ outsiders
        if progress.position <= cell < progress.length:
            progress.position = cell + 1
        elif cell < 0 or cell >= progress.length:
            progress.position += 1
            if cell == LIKELY:
                progress.likely_left -= 1
        progress.reads += 1
        cell = READ if following is None else int(following[key]) ^ READ
        progress.cell_of[key] = cell ^ outsiders
        progress.is_marked = True
        code = self._code_of[0 if cell >= 0 else -cell] ^ progress.code
        codes, shift = self.planes[progress.plane].code_of, 2 * progress.place
        codes[key] = (codes[key] & ~(3 << shift)) | (code << shift)

    def read_many(self, progress: JobProgress, keys: Keys) -> int:
        """Record reads of the first of `keys`, up to the end of the job's epoch; return the number of recorded keys."""
        cells = progress.cells_of(keys)
        last = int(cells[-1])
        if cells[0] >= 0 and last < progress.length and bool((cells[1:] > cells[:-1]).all()):
            progress.position = max(progress.position, last + 1)
        else:
            keys = keys[: self._read_unexpected(progress, keys, cells)]
        progress.reads += len(keys)
        self._store_read(progress, keys)
        return len(keys)

    def _read_unexpected(self, progress: JobProgress, keys: Keys, cells: npt.NDArray[np.int32]) -> int:
        """Advance a job over keys, some of them not announced, up to its epoch's end; return the number of keys.

        A key announced for position c advances the job to c + 1 at least, any other key by one.
        """
        first = np.zeros(len(keys), dtype=np.bool_)
        first[np.unique(keys, return_index=True)[1]] = True
        expected = first & (cells >= 0) & (cells < progress.length)
        others = np.cumsum(~expected)
        furthest = np.maximum.accumulate(np.where(expected, cells + 1 - others, progress.position))
        positions = others + np.maximum(furthest, progress.position)
        count = len(keys)
        if progress.turns and positions[-1] >= progress.length:
            count = int(positions.searchsorted(progress.length)) + 1
        progress.position = int(positions[count - 1])
        progress.likely_left -= int(np.count_nonzero(first[:count] & (cells[:count] == LIKELY)))
        return count

    def _store_read(self, progress: JobProgress, keys: Keys) -> None:
        """Record keys as read: set their cells to the positions in the next epoch if known, else to READ."""
        if progress.following is None:
            self._store(progress, keys, READ)
            return
        cells = progress.following.take(keys) ^ READ
        progress.cells[keys] = cells ^ progress.outsiders
        self._encode(progress, keys, self._codes.take(np.negative(np.minimum(cells, 0))))

    def _store(self, progress: JobProgress, keys: Keys, value: int) -> None:
        """Set the cells of keys to a value that is not a position."""
        progress.cells[keys] = value ^ progress.outsiders
        self._encode(progress, keys, self._code_of[-value])

    def _store_order(self, progress: JobProgress, keys: Keys, positions: npt.NDArray[np.integer[Any]]) -> None:
        """Set the cells of keys to ascending positions; a repeated key gets its first position."""
        progress.cells[keys[::-1]] = positions[::-1] ^ progress.outsiders
        self._encode(progress, keys, self._code_of[0])

    def _encode(self, progress: JobProgress, keys: Keys, codes: npt.NDArray[np.uint8] | int) -> None:
        progress.is_marked |= len(keys) > 0
        plane, shift = self.planes[progress.plane].codes, 2 * progress.place
        found = plane.take(keys)
        found &= 0xFF & ~(3 << shift)
        found |= (codes ^ progress.code) << shift
        plane[keys] = found


def grown(array: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """Return a longer copy of an array, with zeros at its end."""
    longer = sparse_zeros(length, array.dtype)
    longer[: len(array)] = array
    return longer


def _count(first: int, length: int) -> npt.NDArray[np.int32]:
    return np.arange(first, first + length, dtype=np.int32)
