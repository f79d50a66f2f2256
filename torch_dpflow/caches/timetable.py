"""Table of when each job reads each key, from the jobs' lookaheads; updated at each read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_dpflow.caches.policy import Job
from torch_dpflow.lookahead import Keys, Lookahead


def _no_keys() -> Keys:
    return np.empty(0, dtype=np.int64)


@dataclass(slots=True, eq=False)
class JobProgress:
    """A policy's record of a job, apart from the job's cells in the timetable."""

    #: the column of its cells; the plane of its codes, and their place in it
    column: int
    plane: int
    place: int
    #: alpha of eq. 3-5
    weight: float
    #: the epoch of the last lookahead; None before the first
    epoch: int | None = None
    #: N, and k: how many samples of the epoch it has read
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
    #: announced positions that a later lookahead may revise: the first, and their keys in order.
    #: None: not recorded, find them in the cells
    announced: tuple[int, Keys] | None = None
    #: S_uc as announced, how many of it are unread, and its mean rank by weight, as a share of its size
    likely: Keys = field(default_factory=_no_keys)
    likely_left: int = 0
    likely_rank: float = 1.0
    #: by key, its position in the next epoch, which its cell holds once it is read. None: not known
    following: npt.NDArray[np.int32] | None = None
    following_of: memoryview | None = None
    #: time for one sample, and the time at which it read position 0, or would have
    pace: float = 1.0
    base: float = 0.0
    #: the time at which the epoch began, and its reads since then, from which its pace is measured
    began: float = 0.0
    reads: int = 0

    @property
    def certain_left(self) -> int:
        """|S_c|"""
        return max(0, self.certain_end - self.position)

    @property
    def likely_distance(self) -> float:
        """Eq. 3-2, in samples; its positions count from k, so k is not subtracted."""
        certain = self.certain_left
        return certain + self.likely_rank * max(0, self.length - self.position - certain)

    @property
    def unknown_distance(self) -> float:
        """Eq. 3-3, in samples."""
        announced = self.certain_left + self.likely_left
        return announced + max(0, self.length - self.position - announced) / 2

    def note_lookahead(self, lookahead: Lookahead, likely: Keys) -> None:
        """Record a lookahead. likely: its likely keys that are unread."""
        self.certain_end = lookahead.position + len(lookahead.certain)
        self.announced = None if lookahead.complete else (lookahead.position, lookahead.certain)
        self.likely = likely
        self.likely_left = len(likely)
        self.likely_rank = _mean_rank(lookahead)

    def announced_from(self, start: int) -> Keys | None:
        """Return the keys announced for positions from `start` on; None if that is not recorded."""
        if self.announced is None or start < self.announced[0]:
            return None
        first, keys = self.announced
        return keys[start - first :]

    def follow(self, following: npt.NDArray[np.int32] | None) -> None:
        """Record the next epoch's positions."""
        self.following = following
        self.following_of = None if following is None else following.data


def _mean_rank(lookahead: Lookahead) -> float:
    """Return the sum of w_i * i / m over the likely keys, i from 1: eq. 3-2 without the common terms."""
    count = len(lookahead.likely)
    if count == 0:
        return 1.0
    ranks = np.arange(1, count + 1) / count
    if len(lookahead.weights) == 0:
        return float(ranks.mean())
    return float(np.average(ranks, weights=lookahead.weights))


#: Values of a cell that are not positions: the job never reads the key; has read it in this epoch (S_v); is
#: likely to read it soon (S_uc); reads it at an unknown time (S_uk).
ABSENT, READ, LIKELY, UNKNOWN = -1, -2, -3, -4

#: Jobs whose codes share one byte of a key, two bits each.
JOBS_PER_PLANE = 4

#: Keys that are encoded at once, which bounds the memory.
_CHUNK = 1 << 16


class Timetable:
    """A cell for each key and job: the position at which the job reads the key, or one of the above values.

    Positions count from the start of the job's epoch; those from its length on are in the next epoch. Besides
    its cells, each key has two bits for each job, the code, which distinguish kinds of cells.

    Args:
        codes: the codes of a position, and of ABSENT, READ, LIKELY and UNKNOWN.
    """

    def __init__(self, codes: tuple[int, int, int, int, int]) -> None:
        self._codes = np.array(codes, dtype=np.uint8)
        self._position_code, self._read_code = codes[0], codes[-READ]
        self._span = 0
        #: By job, in the order in which they joined.
        self.progress_of: dict[Job, JobProgress] = {}
        self._free: list[int] = []
        #: Shape (span, width). A row holds a key's cells, so that one memory access serves all jobs.
        self.cells: npt.NDArray[np.int32] = np.zeros((0, 0), dtype=np.int32)
        #: Number of columns, free ones included.
        self.width = 0
        #: Codes of `JOBS_PER_PLANE` columns each, by key.
        self.planes: list[npt.NDArray[np.uint8]] = []
        self._make_views()

    def __iter__(self) -> Iterator[JobProgress]:
        return iter(self.progress_of.values())

    def add(self, job: Job, weight: float) -> JobProgress:
        """Add a job; its keys are unknown."""
        if not self._free:
            self._widen()
        column = self._free.pop()
        progress = JobProgress(column, *divmod(column, JOBS_PER_PLANE), weight)
        self.progress_of[job] = progress
        return progress

    def remove(self, job: Job) -> JobProgress | None:
        """Forget a job; returns its progress."""
        progress = self.progress_of.pop(job, None)
        if progress is not None:
            self._column(progress)[:] = ABSENT
            self._encode_from(progress, 0)
            self._free.append(progress.column)
        return progress

    def grow(self, span: int) -> None:
        """Grow arrays to hold keys below `span`."""
        old = self._span
        cells = np.full((span, self.width), ABSENT, dtype=np.int32)
        cells[:old] = self.cells
        self._span, self.cells = span, cells
        self.planes = [np.concatenate([plane, self._blank(span - old)]) for plane in self.planes]
        for progress in self:
            self._column(progress)[old:] = progress.outsiders
            self._encode_from(progress, old)
            if progress.following is not None:
                unknown = np.full(span - old, READ, dtype=np.int32)
                progress.follow(np.concatenate([progress.following, unknown]))
        self._make_views()

    def _widen(self) -> None:
        width = self.width
        cells = np.full((self._span, width + 1), ABSENT, dtype=np.int32)
        cells[:, :width] = self.cells
        self.cells, self.width = cells, width + 1
        self._free.append(width)
        if width % JOBS_PER_PLANE == 0:
            self.planes.append(self._blank(self._span))
        self._make_views()

    def _blank(self, length: int) -> npt.NDArray[np.uint8]:
        return np.full(length, int(self._codes[-ABSENT]) * 0b01010101, dtype=np.uint8)

    def _make_views(self) -> None:
        self.cell_of = self.cells.reshape(-1).data
        self.code_of = [plane.data for plane in self.planes]

    def begin(self, progress: JobProgress, lookahead: Lookahead) -> None:
        """Start an epoch of a job; overwrites all of its cells."""
        rest = READ if lookahead.complete else UNKNOWN
        whole = lookahead.complete and lookahead.position == 0
        members = lookahead.certain if whole and lookahead.members is None else lookahead.members
        progress.epoch, progress.length, progress.position = (
            lookahead.epoch,
            lookahead.length,
            lookahead.position,
        )
        progress.turns, progress.reads, progress.estimates = lookahead.length > 0, 0, not lookahead.complete
        progress.outsiders = rest if members is None else ABSENT
        progress.follow(None)
        column = self._column(progress)
        column[:] = progress.outsiders
        if members is not None:
            column[members] = rest
        column[lookahead.likely] = LIKELY
        _write(column, lookahead.certain, _count(lookahead.position, len(lookahead.certain)))
        progress.note_lookahead(lookahead, lookahead.likely)
        if lookahead.following is not None:
            self.follow(progress, lookahead.following)
        elif members is None:
            self._encode_all(progress, rest)
            self._encode(progress, lookahead.likely)
            self._encode(progress, lookahead.certain)
            return
        self._encode_from(progress, 0)

    def revise(self, progress: JobProgress, lookahead: Lookahead) -> Keys:
        """Record more of a running epoch; returns keys whose cells may have changed, possibly repeated."""
        column = self._column(progress)
        start = lookahead.position
        progress.estimates = True
        announced = progress.announced_from(start)
        if announced is None:
            announced = np.flatnonzero(column >= start)
        announced = announced[(column[announced] >= start) & (column[announced] < progress.length)]
        once_likely = progress.likely[column[progress.likely] == LIKELY]
        column[announced] = UNKNOWN
        column[once_likely] = UNKNOWN
        cells = column[lookahead.certain]
        expected = (cells != READ) & (cells < progress.length)
        _write(column, lookahead.certain[expected], start + np.flatnonzero(expected))
        cells = column[lookahead.likely]
        likely = lookahead.likely[(cells < 0) & (cells != READ)]
        column[likely] = LIKELY
        progress.note_lookahead(lookahead, likely)
        touched = np.concatenate([announced, once_likely, lookahead.certain, lookahead.likely])
        self._encode(progress, touched)
        return touched

    def follow(self, progress: JobProgress, order: Keys) -> None:
        """Record the order of a job's next epoch: keys that it has read get their position there."""
        following = np.full(self._span, READ, dtype=np.int32)
        _write(following, order, _count(progress.length, len(order)))
        progress.follow(following)
        column = self._column(progress)
        read = np.flatnonzero(column == READ)
        column[read] = following[read]
        self._encode(progress, read)

    def next_epoch(self, progress: JobProgress) -> Lookahead:
        """Return a lookahead for a next epoch that the job has not announced: its order if known, else its keys."""
        epoch = 0 if progress.epoch is None else progress.epoch + 1
        if progress.following is not None:
            keys = np.flatnonzero(progress.following != READ)
            return Lookahead.of_order(keys[progress.following[keys].argsort()], epoch=epoch)
        known = progress.outsiders == ABSENT
        members = np.flatnonzero(self._column(progress) != ABSENT) if known else None
        return Lookahead.unknown(progress.length, epoch=epoch, members=members)

    def read(self, progress: JobProgress, key: int) -> None:
        """Record that a job reads a key."""
        at = key * self.width + progress.column
        cell = self.cell_of[at]
        if progress.position <= cell < progress.length:
            progress.position = cell + 1
        elif cell < 0 or cell >= progress.length:
            progress.position += 1
            if cell == LIKELY:
                progress.likely_left -= 1
        progress.reads += 1
        cell = READ if progress.following_of is None else progress.following_of[key]
        self.cell_of[at] = cell
        code = self._position_code if cell >= 0 else self._read_code
        codes, shift = self.code_of[progress.plane], 2 * progress.place
        codes[key] = (codes[key] & ~(3 << shift)) | (code << shift)

    def read_many(self, progress: JobProgress, keys: Keys) -> int:
        """Record that a job reads keys in order, up to the end of its epoch; returns how many."""
        at = keys * self.width
        at += progress.column
        flat = self.cells.reshape(-1)
        cells = flat.take(at)
        last = int(cells[-1])
        if cells[0] >= 0 and last < progress.length and bool((cells[1:] > cells[:-1]).all()):
            progress.position = max(progress.position, last + 1)
        else:
            count = self._read_unexpected(progress, keys, cells)
            keys, at = keys[:count], at[:count]
        progress.reads += len(keys)
        if progress.following is None:
            flat[at] = READ
            plane, shift = self.planes[progress.plane], 2 * progress.place
            codes = plane.take(keys)
            codes &= 0xFF & ~(3 << shift)
            codes |= self._read_code << shift
            plane[keys] = codes
        else:
            flat[at] = progress.following.take(keys)
            self._encode(progress, keys)
        return len(keys)

    def _read_unexpected(self, progress: JobProgress, keys: Keys, cells: npt.NDArray[np.int32]) -> int:
        """Advance a job over keys some of which it had not announced; returns how many, up to its epoch's end.

        A key announced for position c advances it to c + 1 at least, any other by one.
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

    def _column(self, progress: JobProgress) -> npt.NDArray[np.int32]:
        return self.cells[:, progress.column]

    def _encode_all(self, progress: JobProgress, value: int) -> None:
        """Set the codes of all keys to that of one cell value: in one pass, as a flow may have 100 million keys."""
        plane, shift = self.planes[progress.plane], 2 * progress.place
        plane &= np.uint8(0xFF & ~(3 << shift))
        plane |= np.uint8(int(self._codes[-value]) << shift)

    def _encode_from(self, progress: JobProgress, first: int) -> None:
        """Update the codes of all keys from `first` on, by a job's cells."""
        for start in range(first, self._span, _CHUNK):
            self._encode(progress, slice(start, start + _CHUNK))

    def _encode(self, progress: JobProgress, keys: Any) -> None:
        """Update the codes of some keys, by a job's cells."""
        plane = self.planes[progress.plane]
        cells = self.cells[keys, progress.column]
        code = self._codes.take(np.negative(np.minimum(cells, 0))) << 2 * progress.place
        plane[keys] = (plane[keys] & np.uint8(0xFF & ~(3 << 2 * progress.place))) | code


def _count(first: int, length: int) -> npt.NDArray[np.int32]:
    return np.arange(first, first + length, dtype=np.int32)


def _write(column: npt.NDArray[np.int32], keys: Keys, positions: npt.NDArray[np.integer[Any]]) -> None:
    """Write positions into cells; a repeated key keeps the earlier one."""
    column[keys[::-1]] = positions[::-1]
