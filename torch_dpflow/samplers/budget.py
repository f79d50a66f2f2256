"""BudgetBatchSampler: batches up to a number of tokens, frames or pixels, for torch's DataLoader or ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torch_dpflow._core.checks import check_number
from torch_dpflow._core.dealing import Places, taken
from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.samplers.epoch_sampler import EpochSampler, mixed_seed
from torch_dpflow.samplers.indices import CompactArray, IndexArray, compact


class BudgetBatchSampler(EpochSampler[list[int]]):
    """Sampler of batches of samples of similar length, which each cost at most a budget: tokens, frames, pixels.

    A batch costs its number of samples times the length of its longest sample, because padding makes lengths equal. The
    lengths within most batches differ by at most the factor `1 + spread`. At most the share `spread / (1 + spread)` of
    such a batch is padding, and on average about half of this share.

    All ranks have the same number of batches. At each step they read batches of similar length, so no rank waits long
    for another. Seed and epoch determine which samples form a batch; the number of batches is the same in every epoch.
    If a different number of ranks resumes an epoch, the ranks' batches of a step differ more in length until the next
    epoch.

    Without ranks every iteration is a new epoch; with ranks only `set_epoch` changes the epoch.

    Args:
        lengths: lengths of all samples, in any unit: numbers above 0, in a sequence, array or tensor.
        budget: highest cost of a batch, in the same unit.
        spread: by how much lengths of one batch may differ, as a share of the shortest. A smaller value means less
            padding, and less random batches.
        num_replicas: number of ranks; by default torch.distributed's, if it is initialised, else 1.
        rank: this rank; by default torch.distributed's, if it is initialised, else 0.
        ranks: a 1-D DeviceMesh, such as `mesh["dp"]`, or a process group that defines both.
        shuffle: False reads batches from the shortest to the longest.
        seed: determines the order, together with the epoch.
        drop_last: leave out the batches that do not divide evenly among the ranks, instead of repeating some.

    Raises:
        OptionError: a sample is longer than the budget, `lengths` is empty, or a value is out of range.
        OptionTypeError: an argument is of the wrong type.
    """

    def __init__(
        self,
        lengths: Sequence[float] | np.ndarray[Any, Any] | torch.Tensor,
        budget: float,
        *,
        spread: float = 0.1,
        num_replicas: int | None = None,
        rank: int | None = None,
        ranks: Any = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.budget = check_number("budget", budget, exclusive=True)
        self.spread = check_number("spread", spread, minimum=0.001, maximum=100)
        self._lengths = _checked(lengths, self.budget)
        self._buckets = LengthBuckets(self._lengths, self.budget, self.spread)
        super().__init__(
            self._buckets.batches,
            num_replicas=num_replicas,
            rank=rank,
            ranks=ranks,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )

    @property
    def batches_left(self) -> int:
        """Number of batches that this rank still has to yield in the epoch that `state_dict` describes."""
        return self._left()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last yielded batch, as plain data; no side effect."""
        return self._state()

    def _reader(self, epoch: int, began_with: int) -> Callable[[Places], list[list[int]]]:
        order: CompactArray = np.arange(len(self._lengths))
        if self.shuffle:
            order = _permutation(len(order), mixed_seed(self.seed, epoch, 0))
        samples, batches = self._buckets.epoch(order)
        if self.shuffle:
            batches = self._shuffled_steps(batches, epoch, began_with)
        bounds = self._buckets.bounds

        def read(places: Places) -> list[list[int]]:
            return [samples[bounds[batch] : bounds[batch + 1]].tolist() for batch in taken(batches, places)]

        return read

    def _shuffled_steps(self, batches: IndexArray, epoch: int, ranks: int) -> IndexArray:
        """Group batches, ordered by length, into steps of `ranks` batches; return them with the steps in random order.

        Batches that fill no step come last; they are neighbours at a random place among the lengths.
        """
        ranks = min(ranks, len(batches) + 1)  # more of them fill no step either
        short = len(batches) % ranks
        at = mixed_seed(self.seed, epoch, 1) % (len(batches) - short + 1)
        steps = np.delete(batches, slice(at, at + short)).reshape(-1, ranks)
        # Rotate each step by its number: otherwise the last rank would always get the longest batch.
        turned = (np.arange(ranks) + np.arange(len(steps))[:, None]) % ranks
        steps = np.take_along_axis(steps, turned, axis=1)
        shuffled = steps[_permutation(len(steps), mixed_seed(self.seed, epoch, 2))]
        return np.concatenate([shuffled.ravel(), batches[at : at + short]])

    def _identity(self) -> dict[str, Any]:
        return {
            **super()._identity(),
            "budget": self.budget,
            "spread": self.spread,
            "lengths": blake2b(self._lengths.tobytes(), digest_size=16).hexdigest(),
        }


def _permutation(length: int, seed: int) -> CompactArray:
    """Return `torch_order(length, seed)[:]`, in half of the time as all of it is needed at once."""
    generator = torch.Generator().manual_seed(seed)
    drawn: CompactArray = torch.randperm(length, generator=generator, dtype=torch.int32).numpy()
    return drawn


def _checked(lengths: Any, budget: float) -> FloatArray:
    array = lengths.numpy(force=True) if isinstance(lengths, torch.Tensor) else np.asarray(lengths)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise OptionTypeError(
            f"lengths: one dimension of numbers is required, got dtype {array.dtype} and shape {array.shape}"
        )
    if not len(array):
        raise OptionError("lengths is empty; give the length of each sample")
    array = array.astype(np.float64)
    for wrong, what in (
        (~(array > 0) | np.isinf(array), "a length must be a finite number above 0"),
        (array > budget, f"it is longer than budget={budget:g}; raise that, or leave the sample out"),
    ):
        if wrong.any():
            first = int(np.argmax(wrong))
            raise OptionError(f"lengths[{first}]={array[first]:g}: {what} ({int(wrong.sum())} of {len(array)} are so)")
    return array


FloatArray = NDArray[np.float64]


def upper_edges(longest: float, shortest: float, budget: float, spread: float) -> FloatArray:
    """Return the highest lengths of the buckets, ascending; the last one is `longest`.

    Lengths of a bucket differ by at most the factor `1 + spread`. If possible, a bucket ends at `budget / n` for a
    whole number n, so that n samples of this length fill a batch.
    """
    edges = [longest]
    while edges[-1] / (1 + spread) >= shortest:
        edges.append(_next_edge(edges[-1], budget, spread))
    return np.array(edges[::-1])


def _next_edge(edge: float, budget: float, spread: float) -> float:
    lowest = edge / (1 + spread)
    even = budget / np.floor(budget / lowest)
    # Rounding may put it at `edge` itself, which would be no bucket.
    return float(even) if lowest <= even < edge else lowest


class LengthBuckets:
    """Division of samples into buckets of similar length, and of buckets into batches.

    A batch costs its number of samples times its longest length. All batches of a bucket have the same number of
    samples: as many as the budget allows at the bucket's longest length. Samples that do not fill a batch go into the
    first batches of the next bucket. So only the last batch can be short.

    Args:
        lengths: one number per sample, above 0 and not above `budget`.
        budget: the highest cost of a batch.
        spread: by how much lengths of one bucket may differ, as a share of the shortest.
    """

    def __init__(self, lengths: FloatArray, budget: float, spread: float) -> None:
        self.lengths = lengths
        edges = upper_edges(float(lengths.max()), float(lengths.min()), budget, spread)
        buckets = np.searchsorted(edges, lengths)
        # NumPy sorts 8 and 16 bits by radix, in a fraction of the time.
        self._buckets = buckets.astype(np.min_scalar_type(len(edges)))
        longest = np.zeros(len(edges))
        np.maximum.at(longest, buckets, lengths)
        ends = np.cumsum(np.bincount(buckets, minlength=len(edges)))
        #: The index, in the samples ordered by bucket, at which each batch begins; and the number of samples.
        self.bounds = _bounds(ends, longest, budget)

    @property
    def batches(self) -> int:
        """Number of batches of an epoch."""
        return len(self.bounds) - 1

    def epoch(self, order: CompactArray) -> tuple[CompactArray, IndexArray]:
        """Return (an epoch's samples, ordered by bucket; its batch numbers, ordered by the batch's longest sample).

        Batch `i` is `samples[bounds[i]:bounds[i + 1]]`.

        order: all samples; samples of one bucket keep this order.
        """
        samples = order[np.argsort(self._buckets[order], kind="stable")].astype(compact(len(order)))
        longest = np.maximum.reduceat(self.lengths[samples], self.bounds[:-1])
        return samples, np.argsort(longest, kind="stable")


def _bounds(ends: IndexArray, longest: FloatArray, budget: float) -> IndexArray:
    bounds, at = [np.zeros(1, np.int64)], 0
    for end, length in zip(ends.tolist(), longest.tolist()):
        if not length:
            continue  # a bucket without samples
        size = max(1, int(min(budget / length, ends[-1])))
        batches = (end - at) // size
        bounds.append(at + size * np.arange(1, batches + 1))
        at += size * batches
    if at < ends[-1]:
        bounds.append(ends[-1:])
    return np.concatenate(bounds)
