"""Lookahead: one job's future reads as its sampler predicts them, for caches.

It divides the `length` samples of an epoch into four parts (thesis, 3.4.3): those drawn already (S_v, the first
`position`), those `certain` to be drawn next (S_c), those `likely` to follow, with weights (S_uc), the others (S_uk).

Loaders also announce orders to datasets, by `announce_order`. A dataset that uses them defines the method
`announce_order(order, spread, extends)`. A dataset that wraps another one should forward the call, with the keys that
it will read from the inner dataset.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torch_dpflow._core.dealing import row_of
from torch_dpflow.errors import OptionError

Keys = npt.NDArray[np.integer[Any]]
Weights = npt.NDArray[np.floating[Any]]

_NO_KEYS: Keys = np.empty(0, dtype=np.int64)
_NO_WEIGHTS: Weights = np.empty(0, dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lookahead:
    """One job's future reads, after the sampler has drawn `position` samples of an epoch.

    All arrays are one-dimensional. Except for `weights`, they hold keys: sample indices of at least 0. Do not write to
    them afterwards, because they are not copied. A later lookahead of the same `epoch` replaces what earlier ones said
    about its `position` and all later positions. A lookahead of a different epoch starts a new epoch of the job.

    Raises OptionError for keys that are negative or not a one-dimensional integer array, for weights that are not
    positive or not one per likely key, and for parts that do not fit into `length`.
    """

    epoch: int
    """The number of the epoch; policies only compare it with that of the job's last lookahead."""
    length: int
    """N: how many samples the job reads in this epoch, those already read included."""
    position: int = 0
    """k: how many samples of the epoch the sampler has drawn."""
    certain: Keys = field(default_factory=lambda: _NO_KEYS)
    """S_c in reading order: `certain[i]` is read at absolute position `position + i` of the epoch."""
    likely: Keys = field(default_factory=lambda: _NO_KEYS)
    """S_uc, the likeliest first; no key of `certain` among them."""
    weights: Weights = field(default_factory=lambda: _NO_WEIGHTS)
    """One positive weight for each of `likely`, of any scale; empty means equal weights."""
    members: Keys | None = None
    """Every key that the job reads in an epoch. None stands for the keys of `certain` if they are the whole epoch,
    otherwise for all keys of the dataset."""
    following: Keys | None = None
    """The whole order of the next epoch, if known. If several lookaheads of an epoch have one, the first is used."""

    def __post_init__(self) -> None:
        for name in ("certain", "likely", "members", "following"):
            _check_keys(name, getattr(self, name))
        if self.length < 0 or not 0 <= self.position <= self.length:
            raise OptionError(f"length={self.length}, position={self.position}: 0 <= position <= length is required")
        if self.position + len(self.certain) + len(self.likely) > self.length:
            raise OptionError(
                f"{len(self.certain)} certain and {len(self.likely)} likely samples do not fit into the "
                f"{self.length - self.position} that are left of the epoch; pass fewer, or a larger length"
            )
        if len(self.weights) not in (0, len(self.likely)) or not np.all(self.weights > 0):
            raise OptionError(
                f"{len(self.weights)} weights for {len(self.likely)} likely samples: "
                "give one positive weight for each, or none at all"
            )

    @classmethod
    def of_order(
        cls,
        order: Keys,
        *,
        epoch: int,
        position: int = 0,
        following: Keys | None = None,
    ) -> Lookahead:
        """Make the lookahead of a job at `position` of an epoch whose whole order is known.

        following: the order of the next epoch, if known.
        """
        return cls(
            epoch=epoch,
            length=len(order),
            position=position,
            certain=order[position:],
            members=order,
            following=following,
        )

    @classmethod
    def unknown(cls, length: int, *, epoch: int, members: Keys | None = None) -> Lookahead:
        """Make the lookahead of a job that reads `length` samples (`members`, if known) in an unknown order."""
        return cls(epoch=epoch, length=length, members=members)

    @property
    def complete(self) -> bool:
        """Whether `certain` has all remaining samples of the epoch, so that none is likely or unknown."""
        return self.position + len(self.certain) == self.length


def _check_keys(name: str, keys: Keys | None) -> None:
    if keys is None:
        return
    if not isinstance(keys, np.ndarray) or keys.ndim != 1 or keys.dtype.kind not in "iu":
        shape = getattr(keys, "shape", "")
        raise OptionError(
            f"{name}: a one-dimensional integer numpy array is required, got {type(keys).__name__} "
            f"{getattr(keys, 'dtype', '')} {shape}"
        )
    if len(keys) and int(keys.min()) < 0:
        raise OptionError(f"{name}: keys must not be negative, got {int(keys.min())}")


#: Function that returns the keys that will be read next, in order, up to the first one that could still change. Called
#: only if the dataset uses the order.
Order: TypeAlias = Callable[[], npt.NDArray[np.integer[Any]]]


def is_subset(dataset: Any) -> bool:
    """Return whether the type of a dataset is torch's `Subset`, without importing torch; False for a subclass."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and type(dataset) is data.Subset


def takes_orders(dataset: Any) -> bool:
    """Return whether this dataset, or the dataset inside torch's Subset, has a method `announce_order`."""
    while is_subset(dataset):
        dataset = dataset.dataset
    return callable(getattr(type(dataset), "announce_order", None))


def announce_order(dataset: Any, order: Order, spread: int, extends: bool = False) -> None:
    """Announce the order of reads to a dataset, or to the one inside torch's Subset, if it has an `announce_order`.

    Args:
        order: returns the keys; see `Order`.
        spread: maximum number of samples in flight; reads deviate from the order by at most this many places.
        extends: whether these keys follow those of earlier announcements; otherwise they replace them.
    """
    if is_subset(dataset):
        indices = dataset.indices
        announce_order(dataset.dataset, lambda: row_of(indices)[order()], spread, extends)
        return
    # From the class: a user's dataset may have a `__getattr__` that runs code, or passes it to a dataset inside.
    own = getattr(type(dataset), "announce_order", None)
    if callable(own):
        own(dataset, order, spread, extends)
