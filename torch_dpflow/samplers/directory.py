"""Directory of the samples that all caches together hold, in load order, and of the next victims."""

import numpy as np

from torch_dpflow._core.need_counts import NeedCounts, States
from torch_dpflow._core.sparse_zeros import sparse_zeros
from torch_dpflow.samplers.indices import BoolArray, CompactArray, IndexArray, compact

#: Another state of a sample in a job's epoch: needed, and known to be resident.
LISTED = 1
#: Above this many residents per eviction a search pays for several evictions at once.
_RESIDENTS_PER_VICTIM = 16


class Directory:
    """Residents of caches for `capacity` samples, of which the latest `protected` loads are not evicted.

    The samples that the fewest jobs still need in their epochs are evicted first, among equals the oldest load. The
    latest loads are protected while any job needs them, because jobs that follow closely had no chance to read them.

    Samples that no job needs any more are recorded by `on_read` and evicted first. Only if there are none, a search
    in O(capacity) selects several victims.
    """

    def __init__(self, size: int, capacity: int) -> None:
        self.capacity = capacity
        #: How many of the latest loads are protected while a job needs them; set by the owner.
        self.protected = 0
        #: How many jobs still need each sample in their epochs.
        self.needed = NeedCounts(size)
        self._held = sparse_zeros(size, np.bool_)
        self._residents = 0
        #: For each sample, the number of its latest load.
        self._loaded = sparse_zeros(size, np.int64)
        #: Loads so far.
        self._loads = 0
        #: Samples and numbers of loads, in order; those of evicted samples stay until `_compact`.
        self._samples = np.empty(0, compact(size))
        self._numbers = np.empty(0, np.int64)
        self._length = 0
        #: Residents that no job needs, evicted first.
        self._finished: list[CompactArray] = []
        #: The next victims, and their load numbers when they were selected.
        self._victims: CompactArray = self._samples[:0]
        self._chosen_as: IndexArray = self._numbers[:0]

    def resident(self, samples: CompactArray) -> BoolArray:
        """Return whether each sample is held."""
        return self._held[samples]

    def begin(self, states: States, read: CompactArray, *, whole: bool) -> None:
        """Add a job's epoch, as `NeedCounts.begin`."""
        self.needed.begin(states, read, whole=whole)
        self.needs_changed()

    def on_read(self, samples: CompactArray) -> None:
        """Record that a job has read these distinct samples, which it needed."""
        self.needed.on_read(samples)
        self.finished(samples)

    def load(self, samples: CompactArray) -> BoolArray:
        """Record that these distinct samples are read, in this order; all count as the latest loads.

        Returns which of them are not resident, so have to be loaded. Call `shrink` next.
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
        """Record which of these distinct samples, just read, are resident and needed by no job."""
        done = samples[(self.needed.of(samples) == 0) & self._held[samples]]
        if len(done):
            self._finished.append(done)

    def needs_changed(self) -> None:
        """Select victims again, as more samples are needed."""
        self._finished = []
        self._victims, self._chosen_as = self._victims[:0], self._chosen_as[:0]

    def shrink(self) -> CompactArray:
        """Evict the samples beyond the capacity and return them."""
        gone = [self._samples[:0]]
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
            self._choose(max(count, self.capacity // _RESIDENTS_PER_VICTIM))
        batch, numbers = self._victims[:count], self._chosen_as[:count]
        self._victims, self._chosen_as = self._victims[count:], self._chosen_as[count:]
        current: CompactArray = batch[self._held[batch] & (self._loaded[batch] == numbers)]
        return current

    def _choose(self, count: int) -> None:
        """Select the next `count` victims, or all that may be evicted."""
        self._compact()
        samples, numbers = self._samples[: self._length], self._numbers[: self._length]
        needed = self.needed.of(samples)
        free = np.flatnonzero((numbers < self._loads - self.protected) | (needed == 0))
        order = free[np.argsort(needed[free], kind="stable")[:count]]
        if not len(order):
            # All are protected: one draw loaded more than the caches hold.
            order = np.arange(min(count, self._length))
        self._victims, self._chosen_as = samples[order], numbers[order]

    def _append(self, samples: CompactArray, numbers: IndexArray) -> None:
        end = self._length + len(samples)
        if end > len(self._samples):
            self._compact()
            end = self._length + len(samples)
            length = max(end, self._length + self.capacity) + len(samples)
            self._samples, self._numbers = (
                np.concatenate([old[: self._length], np.empty(length - self._length, old.dtype)])
                for old in (self._samples, self._numbers)
            )
        self._samples[self._length : end] = samples
        self._numbers[self._length : end] = numbers
        self._length = end

    def _compact(self) -> None:
        samples, numbers = self._samples[: self._length], self._numbers[: self._length]
        held = self._held[samples] & (self._loaded[samples] == numbers)
        kept = int(np.count_nonzero(held))
        self._samples[:kept], self._numbers[:kept] = samples[held], numbers[held]
        self._length = kept

    def validate(self) -> None:
        """AssertionError unless the residents match the load order and fit the capacity."""
        self._compact()
        listed = self._samples[: self._length]
        assert np.array_equal(np.sort(listed), np.flatnonzero(self._held))
        assert len(listed) == self._residents <= self.capacity
        assert (np.diff(self._numbers[: self._length]) > 0).all()
