"""Finds the epoch that a sample is drawn for, without a call of `set_epoch`."""

from __future__ import annotations

from multiprocessing.context import get_spawning_popen
from typing import Any

import torch

from torch_dpflow.epoch.rng import loading_epoch

#: Fields at the head of the counter: whether an epoch was set, which, and the counted epoch.
_IS_SET, _SET, _COUNTED, _HEAD = range(4)


class EpochCounter:
    """Returns the epoch of each sample that is read. Shared by a process and its workers.

    An epoch that was set takes precedence. Next comes the epoch of our loader, resumed or not. torch's loader gives a
    dataset no number to derive the epoch from: the base seed of its workers is random, stays the same for persistent
    workers, and does not exist without workers. But a dataset sees that a sample is read again. So a sample's epoch is
    the number of times it was read before, and at least that of any other sample: in passes over all samples it is the
    number of the pass, whichever process reads the sample.

    Two processes that count at the same time may each miss the other's increment; both then see a sample that is read
    again, which gives the same epoch.

    Args:
        samples: their number; they are numbered from 0.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        words: Any = torch.zeros(_HEAD + (samples + 1) // 2, dtype=torch.int64)
        self._open(words.share_memory_())

    def set(self, epoch: int) -> None:
        """Set the epoch that samples are read in, also for running workers."""
        self._head[_SET] = epoch
        self._head[_IS_SET] = 1

    def of(self, sample: int) -> int:
        """The epoch of this read of the sample."""
        if self._head[_IS_SET]:
            return int(self._head[_SET])
        loading = loading_epoch()
        if loading is not None:
            return loading
        epoch = max(int(self._head[_COUNTED]), int(self._reads[sample]))
        self._head[_COUNTED] = epoch
        self._reads[sample] = epoch + 1
        return epoch

    def _open(self, words: Any) -> None:
        self._words = words
        self._head = words.numpy()[:_HEAD]
        self._reads = words.numpy()[_HEAD:].view("int32")

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is not None:
            return _shared, (self._samples, self._words)
        # A process that is not forked from this one counts for itself, and counts do not change a flow's fingerprint.
        was_set = int(self._head[_SET]) if self._head[_IS_SET] else None
        return _without_counts, (self._samples, was_set)


def _shared(samples: int, words: Any) -> EpochCounter:
    counter = EpochCounter.__new__(EpochCounter)
    counter._samples = samples
    counter._open(words)
    return counter


def _without_counts(samples: int, was_set: int | None) -> EpochCounter:
    counter = EpochCounter(samples)
    if was_set is not None:
        counter.set(was_set)
    return counter
