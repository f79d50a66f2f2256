"""ALSDCache: a dataset that keeps samples of another dataset in memory."""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch.utils.data import Dataset, IterableDataset

from torch_dpflow._core.checks import check_type, length_or_none, working
from torch_dpflow.caches.policy import parse_capacity
from torch_dpflow.caches.policy_registry import POLICIES, make_policy
from torch_dpflow.caches.store import CacheStatistics, NamedSample, SampleStore
from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.lookahead import Lookahead, Order, announce_order


class LookaheadSampler(Protocol):
    """Interface of a sampler that reports its future draws."""

    def lookahead(self) -> Lookahead | None:
        """Return the known future draws; None if nothing is known. Draws nothing."""
        ...


#: Calls per epoch to a sampler that has no new lookahead, at most.
_POLLS_PER_EPOCH = 64


class LookaheadPoller:
    """Poller that requests a new lookahead from a sampler when one is due: call `poll` before each read.

    One is due after as many reads as the last one had certain samples, at the earliest after a small part of the epoch,
    and when the sampler's `epoch` changes. Raises OptionTypeError if `sampler` has no method `lookahead`.
    """

    def __init__(self, sampler: LookaheadSampler) -> None:
        if not callable(working(sampler, "lookahead")):
            raise OptionTypeError(
                f"sampler={sampler!r} has no method lookahead(); pass a DynaGCSSampler or another with one, "
                "or leave it out"
            )
        self.sampler = sampler
        self._epoch: object = None
        #: Reads until the next poll.
        self._left = 0

    def poll(self, count: int) -> Lookahead | None:
        """Return a new lookahead; None if none is due, or the sampler has none. count: number of reads that follow.

        This runs the sampler's code, so the caller must hold no lock.
        """
        epoch = working(self.sampler, "epoch")
        lookahead = None
        if self._left <= 0 or epoch != self._epoch:
            # Set before the call: the sampler may read samples itself.
            self._epoch, self._left = epoch, _POLLS_PER_EPOCH
            try:
                lookahead = self.sampler.lookahead()
            except BaseException:
                self._left = 0
                raise
            if lookahead is not None:
                self._left = max(1, len(lookahead.certain), lookahead.length // _POLLS_PER_EPOCH)
        self._left -= count
        return lookahead


#: Number of names of indices that are always remembered.
_MIN_NAMES = 4096


class _Place(NamedTuple):
    """The key of a sample, and the index by which the dataset loads it; key None: the sample is not kept."""

    key: int | None
    index: Any
    is_named: bool


class ALSDCache(Dataset[Any]):
    """View of a map-style dataset that keeps in memory the samples that are read again soonest.

    Indexing returns `transform` of the dataset's sample. Decode in the dataset, before the cache; augment randomly in
    `transform`, which runs at each read. Kept samples are copies, and reads return copies of them. Thread-safe:
    simultaneous reads of a sample share one load. If it fails, each of these reads raises its error, and the next read
    loads again.

    Each process has a separate cache. A forked worker's cache usually starts with its parent's samples; otherwise, and
    when unpickled, it is empty. With torch's loader use `persistent_workers=True`, or workers' caches end with the
    epoch.

    Without `sampler`, "alsd" assumes that every sample is read once per epoch, and keeps the samples that this epoch
    has not read yet. With `sampler`, it evicts the samples whose next use is farthest. The sampler must draw in the
    process that reads: in a worker, its copy has no position in the epoch, and DynaGCSSampler has no lookahead.

    If the dataset has a length, integer indices are positions: negative ones count from the end; out of range, the
    dataset's error or IndexError is raised. All other indices are compared by equality; samples of unhashable ones are
    not kept.

    If the dataset's content changes, call `clear()` in each process that reads it, or make a new cache. Only a change
    of its length, or a different `dataset`, is detected: that drops all samples and counts.

    Args:
        dataset: a map-style dataset; its `__getitems__` is used if it has one.
        capacity: maximum size in memory as text, such as "16GiB" or "500MB"; or number of samples as an int.
        policy: "alsd", "alsd-mean", "use-distance", "refcnt", "lru", "lfu" or "minio".
        transform: function whose result for a sample is returned, but not kept.
        sampler: the sampler that draws the indices, if it has a method `lookahead()`.
        copy: False keeps and returns the dataset's own objects; do not write to them.

    Raises:
        OptionError: `capacity` or `policy` is not allowed.
        OptionTypeError: an argument is of the wrong type; `dataset` is not map-style; `sampler` has no lookahead.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        capacity: int | str,
        *,
        policy: str = "alsd",
        transform: Callable[[Any], Any] | None = None,
        sampler: LookaheadSampler | None = None,
        copy: bool = True,
    ) -> None:
        _check_dataset(dataset)
        if policy not in sorted(POLICIES):
            raise OptionError(f"policy={policy!r} is not one of {sorted(POLICIES)}")
        if transform is not None and not callable(transform):
            raise OptionTypeError(f"transform={transform!r} is not callable; give a function of one sample, or None")
        check_type("copy", copy, int, "True or False")  # text would count as True
        self._dataset = dataset
        self.capacity = capacity
        self.policy = policy
        self.transform = transform
        self.sampler = sampler
        self.copy = bool(copy)
        self._budget = parse_capacity(capacity)
        self._open()

    @property
    def dataset(self) -> Dataset[Any]:
        """The wrapped dataset. Setting a different one drops all samples, and resets the counts to 0."""
        return self._dataset

    @dataset.setter
    def dataset(self, dataset: Dataset[Any]) -> None:
        _check_dataset(dataset)
        if dataset is not self._dataset:
            self._dataset = dataset
            self._open()

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Any:
        place = self._locate(index)
        if place.key is None:
            return self._transformed(self.dataset[index])
        return self._transformed(self._own(place, self._store.get(place.key, partial(self._load, place))))

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        """Return the samples of several indices, in order; missing ones are loaded together if the dataset can."""
        places = [self._locate(index) for index in indices]
        keys = [place.key for place in places if place.key is not None]
        if len(keys) < len(places):
            return [self[index] for index in indices]
        kept = self._store.get_many(keys, lambda own: self._load_many([places[k] for k in own]))
        return [self._transformed(self._own(place, one)) for place, one in zip(places, kept)]

    def announce_order(self, order: Order, spread: int, extends: bool = False) -> None:
        """Forward the order of an epoch to the wrapped dataset; see `lookahead.announce_order`."""
        announce_order(self.dataset, order, spread, extends)

    def statistics(self) -> CacheStatistics:
        """Return this process's counts of reads, loads and evictions."""
        return self._store.statistics()

    def clear(self) -> None:
        """Drop all samples and counts of this process."""
        self._store.clear()

    def _open(self) -> None:
        length = length_or_none(self.dataset)
        #: Keys of indices that are not positions.
        self._names: dict[Hashable, int] = {}
        self._numbers = itertools.count(length or 0)
        #: Numbers of names that were forgotten.
        self._free: deque[int] = deque()
        self._max_names = _MIN_NAMES
        poller = None if self.sampler is None else LookaheadPoller(self.sampler)
        self._store = SampleStore(
            partial(
                make_policy,
                self.policy,
                max_items=self._budget.items,
                max_bytes=self._budget.bytes,
                keys=length,
            ),
            copies=self.copy,
            before_read=None if poller is None else poller.poll,
        )
        self._length = length  # last: until then other threads open again too

    def _locate(self, index: Any) -> _Place:
        if self._length is not None and length_or_none(self.dataset) != self._length:
            self._open()
        length = self._length
        try:
            position = operator.index(index)
        except TypeError:
            return _Place(self._name(index), index, is_named=True)
        if length is None:
            return _Place(self._name(position), index, is_named=True)
        if not -length <= position < length:
            self.dataset[index]  # its own error says more
            raise IndexError(
                f"index {position} is outside the dataset, which has {length} samples; where a dataset has a length, "
                "integers are positions"
            )
        position %= length
        return _Place(position, position, is_named=False)

    def _name(self, index: Any) -> int | None:
        """Return the key of an index that is not a position; None if the index cannot be hashed."""
        try:
            known = self._names.get(index)
            if known is not None:
                return known
            if len(self._names) >= self._max_names:
                self._forget()
            try:
                number = self._free.popleft()
            except IndexError:
                number = next(self._numbers)
            # One atomic step, so that threads agree; an unused number is skipped.
            return self._names.setdefault(index, number)
        except TypeError:
            return None

    def _forget(self) -> None:
        """Forget the keys of indices whose samples are not held. These keys are used again: see `_own`."""
        held, names = self._store.held(), dict(self._names)
        kept = {index: number for index, number in names.items() if number in held}
        self._free = deque(sorted({*names.values(), *self._free} - held))
        self._names, self._max_names = kept, max(_MIN_NAMES, 4 * len(kept))

    def _load_many(self, places: list[_Place]) -> list[Any]:
        together = working(self.dataset, "__getitems__")
        if not callable(together):
            return [self._load(place) for place in places]
        loaded = list(together([place.index for place in places]))
        if len(loaded) != len(places) or not any(place.is_named for place in places):
            return loaded  # the store counts them
        return [NamedSample(place.index, one) if place.is_named else one for place, one in zip(places, loaded)]

    def _load(self, place: _Place) -> Any:
        sample = self.dataset[place.index]
        return NamedSample(place.index, sample) if place.is_named else sample

    def _own(self, place: _Place, kept: Any) -> Any:
        """Return the sample of `place`: `kept`, unless its key was used again and it is the sample of another index."""
        if not place.is_named:
            return kept
        return kept.sample if kept.index == place.index else self.dataset[place.index]

    def _transformed(self, sample: Any) -> Any:
        return sample if self.transform is None else self.transform(sample)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _NOT_PICKLED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


#: A pickle leaves the content out.
_NOT_PICKLED = {"_store", "_names", "_numbers", "_free", "_max_names", "_length"}


def _check_dataset(dataset: Dataset[Any]) -> None:
    if isinstance(dataset, IterableDataset) or working(dataset, "__getitem__") is None:
        raise OptionTypeError(
            f"dataset is a {type(dataset).__name__}, which cannot be indexed; ALSDCache keeps samples by "
            "index, so give a map-style dataset (one with __getitem__)"
        )
