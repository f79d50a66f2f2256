"""The contract of a cache policy: which keys to keep. It holds no values, no lock and no clock.

Whoever stores the values drives a policy like this::

    if not policy.access(key, job):          # the job reads; a miss
        values[key] = load(key)
        for gone in policy.admit(key, size):  # may name `key` itself: do not keep it
            del values[gone]

and tells it what it hears from samplers (`foresee`) and of jobs that leave (`forget`). Keys are sample indices,
not negative. Not thread-safe: the owner locks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from torch_dpflow.errors import OptionError
from torch_dpflow.lookahead import Keys, Lookahead

Job = Hashable
Mask = npt.NDArray[np.bool_]
Sizes = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStatistics:
    """A snapshot of what a policy has counted since it was made.

    Always `offered == admitted + bypassed + refused` and `items == admitted - evicted - discarded`.
    """

    hits: int
    misses: int
    #: keys offered by `admit` that were not resident at that moment
    offered: int
    #: offered and kept, be it for a moment
    admitted: int
    #: offered, would fit, and not kept because everything else is worth more
    bypassed: int
    #: offered and larger than the whole budget
    refused: int
    #: resident keys that had to go for the budget's sake or by `evict`
    evicted: int
    #: resident keys that the owner took away by `discard`
    discarded: int
    #: resident now
    items: int
    #: sizes of the resident keys, in the unit of `admit`'s `size`
    bytes: int
    #: jobs known now
    jobs: int

    @property
    def hit_rate(self) -> float:
        """Hits per access; 0.0 before the first access."""
        return self.hits / max(1, self.hits + self.misses)


class Policy(ABC):
    """Decides which keys stay, within a budget of items, of bytes, or of both.

    Every call costs O(log n) or better, amortised; the `_many` forms are the numpy forms of the same calls.
    """

    #: what the registry knows it by
    name: ClassVar[str]

    def __init__(self, *, max_items: int | None = None, max_bytes: int | None = None) -> None:
        """At least one budget is required; OptionError for none or one below 1."""
        if max_items is None and max_bytes is None:
            raise OptionError("a policy needs a budget: give max_items, max_bytes, or both")
        for option, value in (("max_items", max_items), ("max_bytes", max_bytes)):
            if value is not None and value < 1:
                raise OptionError(f"{option}={value}: a budget of at least 1 is required")
        self.max_items = max_items
        self.max_bytes = max_bytes

    @abstractmethod
    def access(self, key: int, job: Job) -> bool:
        """`job` reads `key` now; returns whether it is resident. A job not known yet joins."""

    @abstractmethod
    def admit(self, key: int, size: int = 1) -> Sequence[int]:
        """Offer a loaded key of `size` bytes; returns the keys that must go, `key` itself if it is not kept.

        A resident key is not offered again: it takes the new size.
        """

    @abstractmethod
    def evict(self) -> int | None:
        """Choose the resident key worth least, drop it and return it; None if nothing is resident."""

    @abstractmethod
    def discard(self, key: int) -> bool:
        """The owner has lost `key`; returns whether it was resident. Not an eviction."""

    @abstractmethod
    def forget(self, job: Job) -> None:
        """The job is gone: drop all that is known of it. A job never seen is ignored."""

    def join(self, job: Job, *, weight: float = 1.0) -> None:
        """A job starts to read, its interest counting `weight` (more than 0) times that of weight 1."""
        if not 0 < weight < float("inf"):
            raise OptionError(f"weight={weight!r} of job {job!r}: a positive finite number is allowed")

    def foresee(self, job: Job, lookahead: Lookahead) -> None:  # noqa: B027 (to look only back is a policy too)
        """Hear what `job`'s sampler knows of its future. Policies that look only back ignore it."""

    def access_many(self, keys: Keys, job: Job) -> Mask:
        """`job` reads all of `keys` at one moment; returns which were resident, shape as `keys`."""
        return np.fromiter((self.access(key, job) for key in keys.tolist()), dtype=np.bool_, count=len(keys))

    def admit_many(self, keys: Keys, sizes: Sizes | None = None) -> Keys:
        """Offer loaded keys together; returns those that must go, some of `keys` among them perhaps.

        `sizes`: bytes of each key, None for 1 each.
        """
        gone: list[int] = []
        for key, size in zip(keys.tolist(), [1] * len(keys) if sizes is None else sizes.tolist()):
            gone.extend(self.admit(key, size))
        return np.asarray(gone, dtype=np.int64)

    @abstractmethod
    def statistics(self) -> PolicyStatistics: ...

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """The resident keys, in no particular order."""
