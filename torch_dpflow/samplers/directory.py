"""Record of which samples the caches of a flow together hold, for strategies that decide what is evicted."""

import numpy as np

from torch_dpflow._core.need_counts import NeedCounts, States
from torch_dpflow._core.sparse_zeros import sparse_zeros
from torch_dpflow.samplers.indices import BoolArray, CompactArray, IndexArray, compact

#: State of a sample in a job's epoch, in addition to `NEEDED` and `READ`: needed, and known to be resident.
LISTED = 1
#: Above this many residents per eviction a search pays for several evictions at once.
_RESIDENTS_PER_VICTIM = 16
#: Among at least this many residents, the oldest loads, a search selects victims: one of all of a large cache, of 10
#: million samples, would delay a draw by seconds.
_SEARCHED = 1 << 20
#: Loads of one piece of the log.
_PIECE = 1 << 16


class Directory:
    """Record of the resident samples: those that the caches hold, up to `capacity` samples in total.

    Samples that no job needs any more are evicted first, then those that the fewest jobs still need in their epochs,
    among equals the oldest load. Of many residents, only the oldest loads are compared. The latest `protected` loads
    stay while any job needs them, if `capacity` allows, because jobs that follow closely had no chance to read them.
    """

    def __init__(self, size: int, capacity: int) -> None:
        self.capacity = capacity
        #: Number of the latest loads that stay while any job needs them (see the class); set by the owner.
        self.protected = 0
        #: How many jobs still need each sample in their epochs.
        self.needed = NeedCounts(size)
        self._held = sparse_zeros(size, np.bool_)
        self._residents = 0
        #: For each sample, the number of its latest load.
        self._loaded = sparse_zeros(size, np.int64)
        self._loads = 0
        #: Samples and numbers of loads, in order, in pieces; entries of samples that were evicted or loaded again stay
        #: until `_current`. Draws are collected until they make a piece.
        self._log: list[tuple[CompactArray, IndexArray]] = []
        self._latest: list[tuple[CompactArray, IndexArray]] = []
        self._latest_length = 0
        #: The piece that is swept next.
        self._swept = 0
        #: Residents that no job needs, evicted first.
        self._finished: list[CompactArray] = []
        #: The next victims, and their load numbers when they were selected.
        self._victims: CompactArray = np.empty(0, compact(size))
        self._chosen_as: IndexArray = np.empty(0, np.int64)

    def resident(self, samples: CompactArray) -> BoolArray:
        return self._held[samples]

    def begin(self, states: States, read: CompactArray, *, whole: bool) -> None:
        """Add a job's epoch. The arguments are those of `NeedCounts.begin`."""
        self.needed.begin(states, read, whole=whole)
        self.needs_changed()

    def on_read(self, samples: CompactArray) -> None:
        """Record that a job has read these distinct samples, which it needed."""
        self.needed.on_read(samples)
        self.finished(samples)

    def load(self, samples: CompactArray) -> BoolArray:
        """Record that these distinct samples are read, in this order; resident ones also count as loaded now.

        Returns a mask of the samples that were not resident, which must be loaded. Call `shrink` next.
        """
        absent = ~self._held[samples]
        numbers = np.arange(self._loads, self._loads + len(samples))
        self._held[samples] = True
        self._loaded[samples] = numbers
        self._append(samples, numbers)
        self._loads += len(samples)
        self._residents += int(np.count_nonzero(absent))
        return absent

    def finished(self, samples: CompactArray) -> None:
        """Select the next samples to evict: those of these distinct samples that are resident and that no job needs."""
        done = samples[(self.needed.of(samples) == 0) & self._held[samples]]
        if len(done):
            self._finished.append(done)

    def needs_changed(self) -> None:
        """Drop the selection of the next samples to evict. Call this when jobs need more samples than before."""
        self._finished = []
        self._victims, self._chosen_as = self._victims[:0], self._chosen_as[:0]

    def shrink(self) -> CompactArray:
        """Evict the samples beyond the capacity and return them."""
        gone = [self._victims[:0]]
        while (excess := self._residents - self.capacity) > 0:
            if self._finished:
                batch = self._next_finished(excess)
            else:
                batch = self._next_victims(excess)
            self._held[batch] = False
            self._residents -= len(batch)
            gone.append(batch)
        return np.concatenate(gone)

    def _next_finished(self, count: int) -> CompactArray:
        first = self._finished.pop(0)
        if len(first) > count:
            self._finished.insert(0, first[count:])
        batch = first[:count]
        held: CompactArray = batch[self._held[batch]]
        return held

    def _next_victims(self, count: int) -> CompactArray:
        if not len(self._victims):
            self._choose(max(count, min(self.capacity, _SEARCHED) // _RESIDENTS_PER_VICTIM))
        batch, numbers = self._victims[:count], self._chosen_as[:count]
        self._victims, self._chosen_as = self._victims[count:], self._chosen_as[count:]
        current: CompactArray = batch[self._held[batch] & (self._loaded[batch] == numbers)]
        return current

    def _choose(self, count: int) -> None:
        """Select the next `count` victims, or all that may be evicted."""
        samples, numbers = self._oldest()
        needed = self.needed.of(samples)
        free = np.flatnonzero((numbers < self._loads - self.protected) | (needed == 0))
        order = free[np.argsort(needed[free], kind="stable")[:count]]
        if not len(order):
            # All are protected: one draw loaded more than the caches hold.
            order = np.arange(min(count, len(samples)))
        self._victims, self._chosen_as = samples[order], numbers[order]

    def _oldest(self) -> tuple[CompactArray, IndexArray]:
        """Return (residents, the numbers of their loads), oldest load first: all, or at least `_SEARCHED` of them."""
        self._end_piece()
        end = found = 0
        while end < len(self._log) and found < _SEARCHED:
            self._log[end] = self._current(*self._log[end])
            found += len(self._log[end][0])
            end += 1
        joined = _joined(self._log[:end])
        self._log[:end] = [joined]
        return joined

    def _append(self, samples: CompactArray, numbers: IndexArray) -> None:
        self._latest.append((samples, numbers))
        self._latest_length += len(samples)
        if self._latest_length >= _PIECE:
            self._end_piece()

    def _end_piece(self) -> None:
        if not self._latest:
            return
        self._log.append(_joined(self._latest))
        self._latest, self._latest_length = [], 0
        for _ in range(2):  # more than are added, so that each piece is swept again and again
            self._sweep()

    def _sweep(self) -> None:
        """Remove the loads of samples that were evicted or loaded again from one piece of the list of loads."""
        self._swept %= len(self._log)
        piece = self._current(*self._log[self._swept])
        if len(piece[0]) or len(self._log) == 1:
            self._log[self._swept] = piece
            self._swept += 1
        else:
            del self._log[self._swept]

    def _current(self, samples: CompactArray, numbers: IndexArray) -> tuple[CompactArray, IndexArray]:
        """Return those of these loads whose samples have stayed resident since the load: (samples, load numbers).

        samples, numbers: the samples, and the number of the load of each.
        """
        held = self._held[samples] & (self._loaded[samples] == numbers)
        return (samples, numbers) if held.all() else (samples[held], numbers[held])


def _joined(pieces: list[tuple[CompactArray, IndexArray]]) -> tuple[CompactArray, IndexArray]:
    if not pieces:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    samples, numbers = zip(*pieces)
    return np.concatenate(samples), np.concatenate(numbers)
