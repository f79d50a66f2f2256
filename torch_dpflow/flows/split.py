"""random_split: disjoint random parts of flows (thesis, algorithm 3.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.flows.read import DataLoadFlowRead


def random_split(
    flows: DataLoadFlowRead | Sequence[DataLoadFlowRead],
    lengths: Sequence[int] | Sequence[float],
    *,
    seed: int = 0,
) -> list[DataLoadFlowRead]:
    """Disjoint random parts that together are all samples, one part of each flow.

    Flows may differ in their stages, such as one with augmentation for training and one without for
    validation; they must read the same samples of the same dataset. The parts are those that torch's
    `random_split` makes with a generator of this seed.

    Args:
        flows: a read for each part, or one that all parts are of.
        lengths: how many samples each part has, adding up to all of them; or shares, adding up to 1: then
            each part has the whole number below its share, and the first ones get what is left, one each.
        seed: decides the parts, and nothing else does.

    Raises:
        OptionError: they do not add up; as many flows as lengths are needed; the flows read different
            samples.
        OptionTypeError: a length is no number.
    """
    reads = [flows] * len(lengths) if isinstance(flows, DataLoadFlowRead) else list(flows)
    if len(reads) != len(lengths) or not reads:
        raise OptionError(
            f"{len(reads)} flows and {len(lengths)} lengths; give one flow for each length, or one for all"
        )
    _check_same_samples(reads)
    counts = _counts(lengths, len(reads[0]))
    order = torch.randperm(len(reads[0]), generator=torch.Generator().manual_seed(seed)).tolist()
    ends = [sum(counts[: part + 1]) for part in range(len(counts))]
    return [read.subset(order[end - count : end]) for read, count, end in zip(reads, counts, ends)]


def _check_same_samples(reads: list[DataLoadFlowRead]) -> None:
    first = reads[0]
    for other in reads[1:]:
        if other.flow.source != first.flow.source or list(other.indices()) != list(first.indices()):
            raise OptionError(
                f"{other.flow.source} with {len(other)} samples and {first.flow.source} with {len(first)} "
                "are not the same samples in the same order, so their parts would overlap; split flows of "
                "one dataset"
            )


def _counts(lengths: Sequence[int] | Sequence[float], total: int) -> list[int]:
    for length in lengths:
        if isinstance(length, bool) or not isinstance(length, int | float):
            raise OptionTypeError(f"lengths: {length!r} is no number; give counts or shares")
        if not (math.isfinite(length) and length >= 0):
            raise OptionError(f"lengths: {length!r} is out of range; give counts or shares of at least 0")
    if all(isinstance(length, int) for length in lengths) and sum(lengths) == total:
        return [int(length) for length in lengths]
    if not math.isclose(sum(lengths), 1.0):
        raise OptionError(
            f"lengths={list(lengths)} add up to {sum(lengths)}; give counts of {total} or shares of 1"
        )
    counts = [math.floor(length * total) for length in lengths]
    for part in range(total - sum(counts)):
        counts[part % len(counts)] += 1
    return counts
