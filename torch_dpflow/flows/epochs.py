"""Which epoch a sample is drawn for, found out without a call by hand."""

from __future__ import annotations

from multiprocessing.context import get_spawning_popen
from typing import Any

import torch

from torch_dpflow.epoch.rng import loading_epoch

#: Places in the counter's head: whether an epoch was set by hand, which, and the one that is counted.
_IS_SET, _SET, _COUNTED, _HEAD = range(4)


class EpochCounter:
    """Tells for each sample that is read which epoch it is read in. Shared by a process and its workers.

    An epoch that was set by hand counts before all else. Next comes what our loader knows, resumed or not. torch's
    loader tells a dataset nothing, in no process: the base seed of its workers is drawn at random, stays the same for
    those that persist, and does not exist without workers. What a dataset can see is that a sample comes again. So
    then a sample's epoch is the number of times it was read before, and at least that of any other sample: in passes
    over all samples the number of the pass, in whichever process each of them is read.

    Two processes that count at once may each miss the other's step; both then see a sample that comes again, which
    says the same.

    Args:
        samples: how many there are, numbered from 0.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        words: Any = torch.zeros(_HEAD + (samples + 1) // 2, dtype=torch.int64)
        self._open(words.share_memory_())

    def set(self, epoch: int) -> None:
        """Samples are read in this epoch until another one is set, by workers that run as well."""
        self._head[_SET] = epoch
        self._head[_IS_SET] = 1

    def of(self, sample: int) -> int:
        """The epoch in which the sample with this number is now read."""
        if self._head[_IS_SET]:
            return int(self._head[_SET])
        told = loading_epoch()
        if told is not None:
            return told
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
        # What is no worker of this process counts for itself; and what was read changes nothing of a flow's content.
        was_set = int(self._head[_SET]) if self._head[_IS_SET] else None
        return _afresh, (self._samples, was_set)


def _shared(samples: int, words: Any) -> EpochCounter:
    counter = EpochCounter.__new__(EpochCounter)
    counter._samples = samples
    counter._open(words)
    return counter


def _afresh(samples: int, was_set: int | None) -> EpochCounter:
    counter = EpochCounter(samples)
    if was_set is not None:
        counter.set(was_set)
    return counter
