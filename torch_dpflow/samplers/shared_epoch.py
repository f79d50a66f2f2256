"""One job's epoch in the strategy "shared-log": which samples it has not read, and which it reads next."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from torch_dpflow._core.need_counts import NEEDED, READ
from torch_dpflow.samplers.directory import LISTED, Directory
from torch_dpflow.samplers.indices import BoolArray, CompactArray, IndexArray, Order


class Partition:
    """Division of `size` samples into classes, such that each job's registered set of samples is a union of classes."""

    def __init__(self, size: int) -> None:
        self.size = size
        #: Number of classes; 1 while every registered set has all samples.
        self.count = 1
        #: Class of each sample, 0 … count-1, of the narrowest type (radix sort is for two bytes at most);
        #: None while there is one class.
        self.labels: CompactArray | None = None
        #: Number of jobs that read each registered set, by the set's bitmap; without the set of all samples.
        self._readers: dict[bytes, int] = {}

    def register(self, members: bytes | None) -> bool:
        """Record one more job that reads a set; return whether the classes changed. members: `bitmap` of the set."""
        if members is None:
            return False
        self._readers[members] = self._readers.get(members, 0) + 1
        if self._readers[members] > 1:
            return False
        # Sets without readers are removed only now: they split classes further than necessary, which is harmless,
        # while each change of classes costs every running job a pass over its epoch.
        self._readers = {k: readers for k, readers in self._readers.items() if readers}
        self._rebuild()
        return True

    def unregister(self, members: bytes | None) -> None:
        """Record that a job no longer reads a set. The classes stay until a new set is registered."""
        if members is not None:
            self._readers[members] -= 1

    def of(self, samples: CompactArray) -> CompactArray | None:
        """Return the class of each of these samples; None while there is only one class."""
        return None if self.labels is None else self.labels[samples]

    def _rebuild(self) -> None:
        labels = np.zeros(self.size, np.int64)
        count = 1
        for mask in self._masks():
            split = labels * 2 + mask
            present = np.bincount(split, minlength=2 * count) > 0
            count = int(present.sum())
            labels = (np.cumsum(present) - 1)[split]
        self.count = count
        self.labels = labels.astype(np.min_scalar_type(-count)) if count > 1 else None

    def _masks(self) -> Iterable[BoolArray]:
        for key in self._readers:
            yield np.unpackbits(np.frombuffer(key, np.uint8), count=self.size).astype(np.bool_)


def bitmap(samples: CompactArray, size: int) -> bytes | None:
    """Return a set of samples as bytes with one bit for each of `size` samples; None if it has all samples."""
    if len(samples) == size:
        return None
    mask = np.zeros(size, np.bool_)
    mask[samples] = True
    return np.packbits(mask).tobytes()


#: Residents that are compared for each one that is followed. More would find better ones, but take longer.
_CHOICE = 4
#: If a class is rare among the latest residents, up to this many times as many residents are searched.
_DEPTH = 4


class SharedEpoch:
    """Unread remainder of one job's epoch, from which `shared_log` draws.

    Position p of the epoch reads a sample of the class that the job's private permutation has at p. The sample is
    chosen when the position is drawn: a resident one that another job has loaded (the job *follows*), or the next
    unread one of the permutation (the job *leads*).

    Args:
        order: the private permutation; its samples before index `start` will not be read.
        need: state of each sample for this job: `NEEDED`, `READ` or `LISTED`; this object changes it.
        left: number of unread samples.
    """

    def __init__(
        self, order: Order, need: NDArray[np.uint8], partition: Partition, *, start: int = 0, left: int
    ) -> None:
        #: By sample.
        self.need = need
        #: Samples loaded by others since this epoch began, in load order; some have been read or evicted since.
        self._backlog: CompactArray = order[:0]
        self._backlog_length = 0
        self._split(order, partition, start, left)

    def _split(self, order: Order, partition: Partition, start: int, left: int) -> None:
        """Divide an order into classes. start: only needed samples at this place or later will be read."""
        #: Positions that were drawn since `order` was split into classes.
        self._drawn = 0
        self._sequence: CompactArray | None = None
        self._pile: Order = order
        if partition.labels is None:
            #: For each class: the end of its candidates in the pile, the next candidate, and the samples not read yet.
            self._ends: IndexArray = np.array([len(order)])
            self._next_leads: IndexArray = np.array([start])
            self._unread: IndexArray = np.array([left])
            return
        rest = self._still_needed(order[start:])
        labels = partition.labels[rest]
        self._sequence, self._pile = labels, rest[np.argsort(labels, kind="stable")]
        counts = np.bincount(labels, minlength=partition.count)
        self._ends = np.cumsum(counts)
        self._next_leads, self._unread = self._ends - counts, counts

    def _still_needed(self, samples: CompactArray) -> CompactArray:
        needed: CompactArray = samples[self.need[samples] != READ]
        return needed

    def unread(self) -> CompactArray:
        """Return the unread samples, in the order in which the job reads them if it follows no other job."""
        if self._sequence is None:
            return self._still_needed(self._pile[int(self._next_leads[0]) :])
        rest = self._still_needed(self._pile[:])
        order = np.empty_like(rest)
        order[np.argsort(self._sequence[self._drawn :], kind="stable")] = rest
        return order

    def next_unread(self, most: int) -> CompactArray:
        """Return the first samples of `unread`, at most `most`, without a pass over the whole epoch."""
        if self._sequence is None:
            return self._next_of(0, most)
        labels = self._sequence[self._drawn : self._drawn + most]
        counts = np.bincount(labels, minlength=len(self._ends)).tolist()
        found = np.concatenate([self._next_of(number, count) for number, count in enumerate(counts)])
        order = np.empty_like(found)
        order[np.argsort(labels, kind="stable")] = found
        return order

    def _next_of(self, number: int, most: int) -> CompactArray:
        """Return at most `most` of the first unread samples of a class."""
        start, end = int(self._next_leads[number]), int(self._ends[number])
        found = [self._pile[:0]]
        while most > 0 and start < end:
            piece = self._still_needed(self._pile[start : min(end, start + most)])
            start, most = start + most, most - len(piece)
            found.append(piece)
        return np.concatenate(found)

    def relabel(self, partition: Partition) -> None:
        """Divide the unread samples into the partition's new classes; they keep their order."""
        unread = self.unread()
        self._split(unread, partition, 0, len(unread))

    def quota(self, n: int) -> IndexArray:
        """Return the number of samples of each class that the next `n` positions read."""
        if self._sequence is None:
            return np.array([n])
        return np.bincount(self._sequence[self._drawn : self._drawn + n], minlength=len(self._ends))

    def arrange(self, labels: CompactArray | None, n: int) -> tuple[IndexArray, IndexArray] | None:
        """Assign `n` picks to the next `n` positions, each to a position of its class. labels: the class of each pick.

        Returns (positions, picks), two arrays of shape (n,): of the next `n` positions, counted from 0, position
        `positions[i]` gets pick `picks[i]`. None if there is one class: the picks stay in their order.
        """
        start, self._drawn = self._drawn, self._drawn + n
        if labels is None or self._sequence is None:
            return None
        slots = np.argsort(self._sequence[start : self._drawn], kind="stable")
        return slots, np.argsort(labels, kind="stable")

    def offer(self, samples: CompactArray) -> None:
        """Add samples that another job has loaded to the candidates for `follow`, if this job needs them."""
        fresh = samples[self.need[samples] == NEEDED]
        if not len(fresh):
            return
        self.need[fresh] = LISTED
        end = self._backlog_length + len(fresh)
        if end > len(self._backlog):
            grown = np.empty(max(end, 2 * len(self._backlog)), fresh.dtype)
            grown[: self._backlog_length] = self._backlog[: self._backlog_length]
            self._backlog = grown
        self._backlog[self._backlog_length : end] = fresh
        self._backlog_length = end

    def follow(self, quota: IndexArray, directory: Directory, partition: Partition) -> CompactArray:
        """Return resident samples to follow, up to `quota` of each class, and mark them as read.

        Samples that the fewest jobs need come first, so that they can be evicted soon. Among equals, the latest load
        comes first, because nearby jobs read it.
        """
        if not self._backlog_length or not quota.any():
            return self._backlog[:0]
        start, candidates = self._latest(quota, directory, partition)
        chosen = _select(candidates, quota, directory.needed.of(candidates), partition.of(candidates))
        left = np.ones(len(candidates), np.bool_)
        left[chosen] = False
        kept = candidates[left]
        self._backlog_length = start + len(kept)
        self._backlog[start : self._backlog_length] = kept
        picks = candidates[chosen]
        self.need[picks] = READ
        self._unread -= _counts(partition.of(picks), len(picks), len(quota))
        return picks

    def followable(self, directory: Directory, most: int | None = None) -> CompactArray:
        """Return the residents among the last `most` candidates (None: all) for `follow`, the latest load first."""
        first = 0 if most is None else max(0, self._backlog_length - most)
        backlog = self._backlog[first : self._backlog_length][::-1]
        current: CompactArray = backlog[(self.need[backlog] == LISTED) & directory.resident(backlog)]
        return current

    def _latest(self, quota: IndexArray, directory: Directory, partition: Partition) -> tuple[int, CompactArray]:
        """Return (index in the backlog, needed residents listed at this index and after it, in load order).

        There are enough residents to choose from, if the whole backlog has that many.

        quota: how many samples of each class of `partition` are to be chosen.
        """
        span = _CHOICE * int(quota.sum())
        start, found = self._backlog_length, 0
        short = quota.copy()
        pieces: list[CompactArray] = []
        while start and (found < span or (found < _DEPTH * span and (short > 0).any())):
            end, start = start, max(0, start - span)
            piece = self._current(self._backlog[start:end], directory)
            pieces.append(piece)
            found += len(piece)
            short -= _counts(partition.of(piece), len(piece), len(quota))
        return start, np.concatenate(pieces[::-1]) if pieces else self._backlog[:0]

    def _current(self, listed: CompactArray, directory: Directory) -> CompactArray:
        """Return the samples in a piece of the backlog that are still needed and resident; unlist all others."""
        listed = listed[self.need[listed] == LISTED]
        held = directory.resident(listed)
        if held.all():
            return listed
        self.need[listed[~held]] = NEEDED
        return listed[held]

    def lead(self, quota: IndexArray) -> CompactArray:
        """Return the next unread samples of the job's permutation, `quota` of each class, and mark them as read."""
        quota = quota.copy()
        picks = [self._pile[:0]]
        short = np.flatnonzero(quota)
        while len(short):
            picks.append(self._lead_from(short, quota))
            short = short[quota[short] > 0]
        return np.concatenate(picks)

    def _lead_from(self, classes: IndexArray, quota: IndexArray) -> CompactArray:
        """Take samples from one range of the pile for each of these classes; lower `quota` by their number."""
        starts = self._next_leads[classes]
        ahead = self._ends[classes] - starts
        # If the read samples are spread evenly, this many places contain the quota; and some more.
        expected = quota[classes] * ahead // self._unread[classes]
        lengths = np.minimum(ahead, expected + expected // 8 + 16)
        places = _ranges(starts, lengths)
        owners = np.repeat(np.arange(len(classes)), lengths)
        candidates = self._candidates(places)
        needed = np.flatnonzero(self.need[candidates] != READ)
        owners = owners[needed]
        ranks = np.arange(len(needed)) - np.searchsorted(owners, np.arange(len(classes)))[owners]
        taken = ranks < quota[classes][owners]
        places, owners = places[needed[taken]], owners[taken]
        counts = np.bincount(owners, minlength=len(classes))
        full = counts == quota[classes]
        self._next_leads[classes] = starts + lengths
        self._next_leads[classes[full]] = places[np.cumsum(counts)[full] - 1] + 1
        quota[classes] -= counts
        self._unread[classes] -= counts
        picks = candidates[needed[taken]]
        self.need[picks] = READ
        return picks

    def _candidates(self, places: IndexArray) -> CompactArray:
        if isinstance(self._pile, np.ndarray):
            return self._pile[places]
        return self._pile[int(places[0]) : int(places[-1]) + 1]  # of one class, so in one piece


def _select(
    candidates: CompactArray, quota: IndexArray, needed: NDArray[np.int16], labels: CompactArray | None
) -> IndexArray:
    """Return the places of up to `quota` candidates of each class: least needed first, then the latest."""
    latest_first = np.arange(len(candidates) - 1, -1, -1)
    if labels is None:
        if len(candidates) <= quota[0]:
            return latest_first
        return latest_first[np.argsort(needed[::-1], kind="stable")[: quota[0]]]
    needs = int(needed.max(initial=0)) + 1
    # Radix sort, which is for two bytes at most, is several times as fast as any other here.
    keys = (labels.astype(np.int64) * needs + needed).astype(np.min_scalar_type(len(quota) * needs))
    order = latest_first[np.argsort(keys[::-1], kind="stable")]
    classes = labels[order]
    ranks = np.arange(len(order)) - np.searchsorted(classes, np.arange(len(quota)))[classes]
    return order[ranks < quota[classes]]


def _counts(labels: CompactArray | None, total: int, classes: int) -> IndexArray:
    """Return the number of samples in each class, of `total` samples with these labels."""
    return np.array([total]) if labels is None else np.bincount(labels, minlength=classes)


def _ranges(starts: IndexArray, lengths: IndexArray) -> IndexArray:
    """Concatenate the ranges start … start+length-1."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1])
