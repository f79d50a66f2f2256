"""Batches of samples of similar length under a budget, the same number of them in every epoch. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torch_dpflow.samplers.indices import CompactArray, IndexArray, compact

FloatArray = NDArray[np.float64]


def upper_edges(longest: float, shortest: float, budget: float, spread: float) -> FloatArray:
    """Return the upper ends of the buckets, ascending; the last is `longest`.

    Lengths of a bucket differ by at most the factor `1 + spread`. Where that allows it, a bucket ends at `budget / n`,
    so that n of its longest samples fill a batch.
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
    """Samples in buckets of similar length, and how many of them each batch has.

    A batch's cost is its number of samples times its longest one. A bucket's batches have as many samples as the budget
    allows of its longest. What does not fill a batch goes into the first batches of the next bucket, so only the last
    batch may be short, and the number of batches depends on the lengths alone.

    Args:
        lengths: one number a sample, above 0 and not above `budget`.
        budget: the highest cost of a batch.
        spread: by how much lengths of one bucket may differ, as a share of the shortest.
    """

    def __init__(self, lengths: FloatArray, budget: float, spread: float) -> None:
        self.lengths = lengths
        edges = upper_edges(float(lengths.max()), float(lengths.min()), budget, spread)
        buckets = np.searchsorted(edges, lengths)
        #: The bucket of each sample.
        self._buckets = buckets.astype(np.int32)
        longest = np.zeros(len(edges))
        np.maximum.at(longest, buckets, lengths)
        ends = np.cumsum(np.bincount(buckets, minlength=len(edges)))
        #: Where each batch begins in the samples ordered by bucket, and the end.
        self.bounds = _bounds(ends, longest, budget)

    @property
    def batches(self) -> int:
        """Number of batches of an epoch."""
        return len(self.bounds) - 1

    def epoch(self, order: CompactArray) -> tuple[CompactArray, IndexArray]:
        """Return an epoch's samples, ordered by batch, and the batches from the shortest to the longest.

        order: all samples; those of one bucket keep it.
        """
        samples = order[np.argsort(self._buckets[order], kind="stable")].astype(compact(len(order)))
        longest = np.maximum.reduceat(self.lengths[samples], self.bounds[:-1])
        return samples, np.argsort(longest, kind="stable")


def _bounds(ends: IndexArray, longest: FloatArray, budget: float) -> IndexArray:
    bounds, at = [np.zeros(1, np.int64)], 0
    for end, length in zip(ends.tolist(), longest.tolist()):
        if not length:
            continue  # a bucket without samples
        size = max(1, int(budget / length))
        batches = (end - at) // size
        bounds.append(at + size * np.arange(1, batches + 1))
        at += size * batches
    if at < ends[-1]:
        bounds.append(ends[-1:])
    return np.concatenate(bounds)
