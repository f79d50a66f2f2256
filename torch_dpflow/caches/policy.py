"""The contract of a cache policy, which decides which keys stay in a cache. It holds no values, lock or clock.

The owner, which stores the values, uses a policy like this::

    if not policy.access(key, job):          # the job reads; a miss
        values[key] = load(key)
        for gone in policy.admit(key, size):  # may include `key` itself: do not keep it
            del values[gone]

It also passes on the lookaheads of samplers (`hint`), and reports jobs that leave (`forget`). Keys are sample indices
from 0 to 2**31 - 2. Not thread-safe: the owner locks. A call that raises changes no resident key and no count.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from torch_dpflow._core.checks import BYTES_ALLOWED, check_int, check_number, parse_bytes
from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.lookahead import Keys, Lookahead

MAX_KEY = 2**31 - 2

Job = Hashable
Mask = npt.NDArray[np.bool_]
Sizes = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStatistics:
    """Snapshot of the counts of a policy since the policy was made.

    Always `offered == admitted + bypassed + refused` and `items == admitted - evicted - discarded`.
    """

    hits: int
    misses: int
    #: keys given to `admit` that were not resident then
    offered: int
    #: offered keys that were kept
    admitted: int
    #: offered keys that were not kept, because the policy preferred the resident keys
    bypassed: int
    #: offered keys that were not kept, because they are larger than the whole budget
    refused: int
    #: resident keys that were evicted for the budget or by `evict`
    evicted: int
    #: resident keys that the owner removed by `discard`
    discarded: int
    #: keys that are resident now
    items: int
    #: total size of these keys
    bytes: int
    #: jobs that have joined and not left
    jobs: int

    @property
    def hit_rate(self) -> float:
        """Hits per access; 0.0 before the first access."""
        return self.hits / max(1, self.hits + self.misses)


class Policy(ABC):
    """Cache policy: decides which keys stay, within a budget of items, of bytes, or of both.

    Reading, admitting or evicting a key costs O(log n) or better, amortised. Methods whose names end in `many` do the
    same for an array of keys. OptionError is raised for a negative size, and if a negative key is read or admitted.

    Args:
        max_items: maximum number of resident keys; None: no limit.
        max_bytes: maximum total size of the resident keys; None: no limit.
        keys: the number of keys, which are 0 to `keys` - 1; None: not known. Only policies that look ahead use it.

    Raises:
        OptionError: `max_items` and `max_bytes` are both None, or a number is out of range.
        OptionTypeError: an argument is not an int.
    """

    #: The policy's name in `POLICIES`.
    name: ClassVar[str]

    def __init__(self, *, max_items: int | None = None, max_bytes: int | None = None, keys: int | None = None) -> None:
        if keys is not None:
            check_int("keys", keys, minimum=0, maximum=MAX_KEY + 1)
        if max_items is None and max_bytes is None:
            raise OptionError("a policy needs a budget: give max_items, max_bytes, or both")
        self.max_items = None if max_items is None else check_int("max_items", max_items, minimum=1)
        self.max_bytes = None if max_bytes is None else check_int("max_bytes", max_bytes, minimum=1)
        self._hits = self._misses = 0
        self._offered = self._bypassed = self._refused = 0
        self._evicted = self._discarded = 0

    @abstractmethod
    def access(self, key: int, job: Job) -> bool:
        """Record that `job` reads `key` now; return whether the key is resident. An unknown job joins."""

    @abstractmethod
    def admit(self, key: int, size: int = 1) -> Sequence[int]:
        """Offer a loaded key of `size` bytes; return the keys to drop, including `key` if the policy does not keep it.

        A resident key gets the new size.
        """

    @abstractmethod
    def evict(self) -> int | None:
        """Evict the resident key that comes first in the policy's order, and return it; None if nothing is resident."""

    @abstractmethod
    def discard(self, key: int) -> bool:
        """Remove a key that the owner has dropped; return whether it was resident. Not counted as an eviction."""

    @abstractmethod
    def join(self, job: Job, *, weight: float = 1.0) -> None:
        """Add a job, or change its weight, by which policies that average over jobs multiply the job's distances.

        Raises OptionError or OptionTypeError if the weight is not a finite number above 0.
        """

    @abstractmethod
    def hint(self, job: Job, lookahead: Lookahead) -> None:
        """Use a job's future reads, as its sampler predicts them. Policies by past reads only add the job."""

    @abstractmethod
    def forget(self, job: Job) -> None:
        """Drop the records of a job that left. An unknown job is ignored."""

    def access_many(self, keys: Keys, job: Job) -> Mask:
        """Record that `job` reads `keys`, in order; return which are resident, as a bool array of the shape of `keys`.

        Raises OptionError for a key that is not from 0 to `MAX_KEY`.
        """
        check_keys(keys)
        return np.fromiter((self.access(key, job) for key in keys.tolist()), dtype=np.bool_, count=len(keys))

    def admit_many(self, keys: Keys, sizes: Sizes | None = None) -> npt.NDArray[np.int64]:
        """Offer loaded keys together; return the keys to drop (int64), which may include some of `keys`.

        sizes: bytes of each key; None: 1 for each. If a key is repeated, only its last size counts. Raises OptionError
        for a key that is not from 0 to `MAX_KEY`, a negative size, or a wrong number of sizes.
        """
        check_keys(keys)
        if sizes is not None:
            check_sizes(keys, sizes)
        offered = dict(zip(keys.tolist(), [1] * len(keys) if sizes is None else sizes.tolist()))
        gone = dict.fromkeys(victim for key, size in offered.items() for victim in self.admit(key, size))
        return np.array([key for key in gone if key not in self], dtype=np.int64)

    def statistics(self) -> PolicyStatistics:
        """Return the counts of accesses and of keys since the policy was made."""
        return PolicyStatistics(
            hits=self._hits,
            misses=self._misses,
            offered=self._offered,
            admitted=self._offered - self._bypassed - self._refused,
            bypassed=self._bypassed,
            refused=self._refused,
            evicted=self._evicted,
            discarded=self._discarded,
            items=len(self),
            bytes=self.nbytes,
            jobs=len(self.jobs),
        )

    @property
    @abstractmethod
    def jobs(self) -> tuple[Job, ...]:
        """The present jobs, in the order in which they joined."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Total size of the resident keys, bytes."""

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """Return the resident keys, in no particular order."""

    def _is_over(self) -> bool:
        return (self.max_items is not None and len(self) > self.max_items) or (
            self.max_bytes is not None and self.nbytes > self.max_bytes
        )

    def _is_too_large(self, size: int) -> bool:
        return self.max_bytes is not None and size > self.max_bytes


def check_key(key: int) -> None:
    """Raise OptionError if `key` is not from 0 to `MAX_KEY`."""
    if not 0 <= key <= MAX_KEY:
        raise OptionError(f"key {key}: keys from 0 to {MAX_KEY} are allowed")


def check_keys(keys: Keys) -> None:
    """Raise OptionError if any of `keys` is not from 0 to `MAX_KEY`."""
    if len(keys):
        check_key(int(keys.min()))
        check_key(int(keys.max()))


def check_sizes(keys: Keys, sizes: Sizes) -> None:
    """Raise OptionError if `sizes` and `keys` differ in length, or a size is below 0."""
    if len(sizes) != len(keys):
        raise OptionError(f"{len(sizes)} sizes for {len(keys)} keys: give one for each, or None")
    if len(sizes):
        check_size(int(sizes.min()))


def check_size(size: int) -> None:
    """Raise OptionError if `size` is below 0."""
    if size < 0:
        raise OptionError(f"size={size}: a number of bytes of at least 0 is required")


def check_weight(job: Job, weight: float) -> float:
    """Return `weight`, a finite number above 0, as a float. Raises the errors of `check_number`, which name `job`."""
    return check_number(f"job {job!r}: weight", weight, exclusive=True)


_ALLOWED = f"{BYTES_ALLOWED}, or a number of samples as an int"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Budget of a cache: a number of samples (`items`) or of `bytes`; the other one is None."""

    items: int | None = None
    bytes: int | None = None


def parse_capacity(capacity: int | str, name: str = "capacity") -> Capacity:
    """Convert a number of samples, or a size as text such as "16GiB". name: the argument's name, for errors.

    Raises:
        OptionError: the number is below 1 or a bool, or the text is no size.
        OptionTypeError: `capacity` is neither an int nor text.
    """
    if isinstance(capacity, bool):
        raise OptionError(f"{name}={capacity!r} is a bool; {_ALLOWED}")
    if isinstance(capacity, str):
        return Capacity(bytes=parse_bytes(name, capacity, _ALLOWED))
    if not isinstance(capacity, int):
        raise OptionTypeError(f"{name}={capacity!r} is of type {type(capacity).__name__}; {_ALLOWED}")
    if capacity < 1:
        raise OptionError(f"{name}={capacity} is below 1; {_ALLOWED}")
    return Capacity(items=capacity)
