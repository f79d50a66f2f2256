"""Base class of sampling groups that pick samples for several jobs at once, and the cells from which they pick."""

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from torch_dpflow.errors import OptionError
from torch_dpflow.lookahead import Lookahead
from torch_dpflow.samplers.group import Draw, Member, SamplingGroup
from torch_dpflow.samplers.indices import BoolArray, CompactArray, IndexArray, compact

#: Maximum number of jobs in a group, each of which is one bit of a mask.
MAX_JOBS = 256
#: Bits of a word of masks in an array.
_WORD_BITS = 64
#: Up to this many cells are searched in plain Python, because a call of numpy costs as much.
_FEW_CELLS = 64
#: A sample's cell, and its index in the cell (the slot). Valid until a sample of the cell is taken.
CellSlot: TypeAlias = tuple[int, int]


class Cells:
    """Partition of the samples into cells: the samples of one cell are still needed by the same jobs.

    Any intersection, union or difference of the jobs' sets is a union of cells. Its size is a sum over cells, and a
    uniform draw from it draws a cell by size, then a sample of that cell. Taking a sample from a cell costs O(1). There
    are at most 2^jobs cells.

    Jobs are bits: bit j of a cell's mask is set if job j needs the cell's samples.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        #: The jobs that need each cell. Empty cells stay until the next insertion or deletion.
        self.masks: list[int] = []
        #: The number of samples of each cell.
        self.sizes: list[int] = []
        self._place: dict[int, int] = {}
        self._samples: list[CompactArray] = []
        #: For each bit, the number of samples that the job needs.
        self.needed = [0] * MAX_JOBS
        #: `masks` as an array of words, once there are many; out of date where it is shorter.
        self._mask_array: NDArray[np.uint64] = _words_of([], 1)

    def insert(self, job: int, members: BoolArray) -> None:
        """Add a job. members: mask of the samples that it needs, of shape (size,)."""
        bit = 1 << job
        rest = members.copy()
        parts: list[tuple[int, CompactArray]] = []
        for mask, samples in self.items():
            inside = members[samples]
            rest[samples] = False
            parts += [(mask | bit, samples[inside]), (mask, samples[~inside])]
        parts.append((bit, np.flatnonzero(rest).astype(compact(self.size))))
        self._rebuild(parts)
        self.needed[job] = int(np.count_nonzero(members))

    def delete(self, job: int) -> None:
        """Remove a job; cells that differed only in this job are merged."""
        merged: dict[int, list[CompactArray]] = {}
        for mask, samples in self.items():
            merged.setdefault(mask & ~(1 << job), []).append(samples)
        merged.pop(0, None)
        self._rebuild((mask, np.concatenate(parts)) for mask, parts in merged.items())
        self.needed[job] = 0

    def items(self) -> Iterable[tuple[int, CompactArray]]:
        """Yield (mask of jobs, samples) of each cell; the arrays must not be kept or written to."""
        for mask, place in self._place.items():
            if self.sizes[place]:
                yield mask, self._samples[place][: self.sizes[place]]

    def needed_by(self, jobs: int, short_of: int = 0) -> list[int]:
        """Return the numbers of the cells that all jobs of the mask `jobs` need, ascending.

        short_of: mask of other jobs; cells that all of these need too are left out.
        """
        if len(self.masks) > _FEW_CELLS:
            return self._search(jobs, short_of)
        if short_of:
            return [cell for cell, mask in enumerate(self.masks) if mask & jobs == jobs and mask & short_of != short_of]
        return [cell for cell, mask in enumerate(self.masks) if mask & jobs == jobs]

    def samples_in(self, cells: Iterable[int]) -> int:
        sizes = self.sizes
        return sum([sizes[cell] for cell in cells])

    def pick(self, cells: Iterable[int], rng: np.random.Generator) -> CellSlot:
        """Draw a sample uniformly from these cells; return its cell and slot. At least one cell must not be empty."""
        sizes = self.sizes
        slot = int(rng.random() * self.samples_in(cells))
        for cell in cells:
            if slot < sizes[cell]:
                return cell, slot
            slot -= sizes[cell]
        raise AssertionError("a uniform number reached 1")

    def pick_many(self, cells: list[int], rng: np.random.Generator, count: int) -> list[CellSlot]:
        """Draw `count` distinct samples uniformly from these cells; return the cell and slot of each."""
        if count == 1:
            return [self.pick(cells, rng)]
        sizes = np.array([self.sizes[cell] for cell in cells])
        ends = np.cumsum(sizes)
        drawn = rng.choice(int(ends[-1]), count, replace=False)
        found = np.searchsorted(ends, drawn, side="right")
        slots = drawn - ends[found] + sizes[found]
        return [(cells[k], slot) for k, slot in zip(found.tolist(), slots.tolist())]

    def take(self, place: CellSlot, jobs: int) -> int:
        """Return the sample in this slot, and record that the jobs of the mask `jobs` no longer need it."""
        cell, slot = place
        samples = self._samples[cell]
        sample = int(samples[slot])
        self.sizes[cell] -= 1
        samples[slot] = samples[self.sizes[cell]]
        if left := self.masks[cell] & ~jobs:
            self._add(left, sample)
        for job in bits_of(jobs):
            self.needed[job] -= 1
        return sample

    def _search(self, jobs: int, short_of: int) -> list[int]:
        if len(self._mask_array) < len(self.masks):
            highest = max(mask.bit_length() for mask in self.masks)
            self._mask_array = _words_of(self.masks, -(-highest // _WORD_BITS))
        words = self._mask_array.shape[1]
        if jobs.bit_length() > words * _WORD_BITS:
            return []
        wanted = _words_of([jobs], words)
        found: BoolArray = ((self._mask_array & wanted) == wanted).all(axis=1)
        if short_of and short_of.bit_length() <= words * _WORD_BITS:
            short = _words_of([short_of], words)
            found &= ((self._mask_array & short) != short).any(axis=1)
        cells: list[int] = np.flatnonzero(found).tolist()
        return cells

    def _add(self, mask: int, sample: int) -> None:
        place = self._place.get(mask)
        if place is None:
            place = self._place[mask] = len(self._samples)
            self._samples.append(np.empty(8, compact(self.size)))
            self.masks.append(mask)
            self.sizes.append(0)
        length, samples = self.sizes[place], self._samples[place]
        if length == len(samples):
            samples = self._samples[place] = np.concatenate([samples, np.empty_like(samples)])
        samples[length] = sample
        self.sizes[place] = length + 1

    def _rebuild(self, parts: Iterable[tuple[int, CompactArray]]) -> None:
        kept = [(mask, samples) for mask, samples in parts if len(samples)]
        self.masks = [mask for mask, _ in kept]
        self.sizes = [len(samples) for _, samples in kept]
        self._place = {mask: place for place, mask in enumerate(self.masks)}
        # `take` swaps within a cell, so cells must not share arrays.
        self._samples = [samples.copy() for _, samples in kept]
        self._mask_array = _words_of([], 1)


def _words_of(masks: list[int], words: int) -> NDArray[np.uint64]:
    """Return masks as an array of shape (masks, words), the lowest bits first."""
    packed = b"".join([mask.to_bytes(words * _WORD_BITS // 8, "little") for mask in masks])
    return np.frombuffer(packed, np.dtype("<u8")).reshape(-1, words)


def bits_of(mask: int) -> Iterable[int]:
    """Yield the numbers of the bits that are set, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def free_bit(taken: Iterable[int], limit: int = MAX_JOBS) -> int:
    """Return the lowest number below `limit` that is not in `taken`, for a job. Raises OptionError if there is none."""
    used = set(taken)
    for job in range(limit):
        if job not in used:
            return job
    raise OptionError(f"{limit} jobs are in the group, which is the limit of this strategy; use another group")


class BufferedGroup(SamplingGroup):
    """Base class of groups that pick a sample for several jobs at once; each job has a buffer of picks for its draws.

    In a job's lookahead, the samples in its buffer are certain. Its other unread samples are likely, weighted by the
    number of jobs that need a sample: the more jobs need it, the sooner it is picked.
    """

    max_jobs: ClassVar[int] = MAX_JOBS
    # Epochs that begin and end, and lookaheads, pass over all samples.
    max_flow: ClassVar[int] = 1 << 22

    def __init__(self, size: int, *, capacity: int | None = None, seed: int = 0) -> None:
        super().__init__(size, capacity=capacity, seed=seed)
        self._cells = Cells(self.size)
        self._rng = np.random.default_rng(self.seed)
        #: By job: its number in the cells' masks.
        self._bits: dict[str, int] = {}
        #: By job in an epoch: picked but not drawn yet, in order.
        self._buffers: dict[str, deque[int]] = {}

    @abstractmethod
    def _fill(self, member: Member, n: int) -> None:
        """Add at least one sample to the member's buffer, for a draw of `n`. Other buffers may be filled too."""

    def _joined(self, member: Member) -> None:
        try:
            self._bits[member.name] = free_bit(self._bits.values(), self.max_jobs)
        except Exception:
            del self._members[member.name]
            raise

    def _left(self, member: Member) -> None:
        self._cells.delete(self._bits.pop(member.name))
        self._buffers.pop(member.name, None)

    def _started(self, member: Member, epoch: int, done: IndexArray) -> None:
        members = np.zeros(self.size, np.bool_)
        members[member.samples()] = True
        members[done] = False
        bit = self._bits[member.name]
        self._cells.delete(bit)
        self._cells.insert(bit, members)
        self._buffers[member.name] = deque()

    def _draw(self, member: Member, n: int) -> Draw:
        buffer = self._buffers[member.name]
        while len(buffer) < n:
            self._fill(member, n)
        return Draw(np.array([buffer.popleft() for _ in range(n)], np.int64))

    def _unpicked(self, member: Member) -> int:
        """Return how many samples the member needs beyond its buffer; 0 between epochs."""
        return self._cells.needed[self._bits[member.name]]

    def _to_fill(self, member: Member) -> list[Member]:
        """Return this member, then the other members whose buffers hold less than a batch."""
        others = (
            m
            for m in self._members.values()
            if m is not member and self._unpicked(m) and len(self._buffers[m.name]) < m.batch_size
        )
        return [member, *others]

    def _lookahead(self, member: Member, epoch: int) -> Lookahead:
        bit = 1 << self._bits[member.name]
        cells = [(mask, samples) for mask, samples in self._cells.items() if mask & bit]
        cells.sort(key=lambda cell: -len(list(bits_of(cell[0]))))
        return Lookahead(
            epoch=epoch,
            length=member.length,
            position=member.position,
            certain=np.array(self._buffers[member.name], np.int64),
            likely=np.concatenate([samples for _, samples in cells] or [np.empty(0, np.int64)]),
            weights=np.concatenate(
                [np.full(len(samples), len(list(bits_of(mask))), np.float64) for mask, samples in cells]
                or [np.empty(0)]
            ),
            members=member.samples(),
        )
