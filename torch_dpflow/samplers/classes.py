"""Partitions of the samples into classes: two samples are in one class if the same jobs' sets hold them."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from torch_dpflow.samplers.indices import BoolArray, CompactArray


class Partition:
    """The class of each of `size` samples; every registered set is a union of classes."""

    def __init__(self, size: int) -> None:
        self.size = size
        #: Number of classes; 1 while every registered set has all samples.
        self.count = 1
        #: Class of each sample, 0 … count-1, of the narrowest type (radix sort is for two bytes at most);
        #: None while there is one class.
        self.labels: CompactArray | None = None
        #: How many jobs read each registered set, by its bitmap; without the set of all samples.
        self._readers: dict[bytes, int] = {}

    def register(self, members: BoolArray | None) -> bool:
        """Count one more reader of a set, given as a mask of shape (size,); None: all samples.

        Returns whether the classes changed.
        """
        if members is None or members.all():
            return False
        key = np.packbits(members).tobytes()
        self._readers[key] = self._readers.get(key, 0) + 1
        if self._readers[key] > 1:
            return False
        # Sets without readers are removed only now: they split classes further than necessary, which does no
        # harm, while each change of classes costs every running job a pass over its epoch.
        self._readers = {k: readers for k, readers in self._readers.items() if readers}
        self._rebuild()
        return True

    def unregister(self, members: BoolArray | None) -> None:
        """Count one reader of a set less. The classes change with the next new set only."""
        if members is not None and not members.all():
            self._readers[np.packbits(members).tobytes()] -= 1

    def of(self, samples: CompactArray) -> CompactArray | None:
        """The class of each sample; None while there is one class."""
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

    def state_dict(self) -> dict[str, Any]:
        """Sets and classes, in copies."""
        labels = None if self.labels is None else self.labels.copy()
        return {"count": self.count, "labels": labels, "readers": dict(self._readers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a partition of the same size."""
        self.count, self._readers = state["count"], dict(state["readers"])
        self.labels = None if state["labels"] is None else state["labels"].copy()
