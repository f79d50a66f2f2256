"""random_split: disjoint random parts of flows (thesis, algorithm 3.2)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import torch

from torch_dpflow._core.checks import check_int, check_type
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
        lengths: the number of samples of each part, adding up to all of them; or shares, adding up to 1: then
            each share is rounded down, and the first parts get one more sample each until all are assigned.
        seed: determines the parts.

    Raises:
        OptionError: they do not add up; as many flows as lengths are needed; the flows read different
            samples.
        OptionTypeError: a length is no number, a flow was not prepared to be read, the seed is no whole number.
    """
    shares = _checked_lengths(lengths)
    seed = check_int("seed", seed, minimum=-(2**63), maximum=2**64 - 1)
    reads = _checked_reads(flows, len(shares))
    if len(reads) != len(shares) or not reads:
        raise OptionError(
            f"{len(reads)} flows and {len(shares)} lengths; give one flow for each length, or one for all"
        )
    _check_same_samples(reads)
    counts = _counts(shares, len(reads[0]))
    order = torch.randperm(len(reads[0]), generator=torch.Generator().manual_seed(seed)).tolist()
    ends = [sum(counts[: part + 1]) for part in range(len(counts))]
    return [read.subset(order[end - count : end]) for read, count, end in zip(reads, counts, ends)]


def _checked_reads(flows: Any, parts: int) -> list[DataLoadFlowRead]:
    reads = list(flows) if isinstance(flows, Iterable) else [flows] * parts
    for read in reads:
        check_type("flows", read, DataLoadFlowRead, "what flow.prepare_read(reader) returns")
    return reads


def _check_same_samples(reads: list[DataLoadFlowRead]) -> None:
    first = reads[0]
    for other in reads[1:]:
        if not other.flow.source.is_same(first.flow.source) or list(other.indices()) != list(first.indices()):
            raise OptionError(
                f"{other.flow.source} with {len(other)} samples and {first.flow.source} with {len(first)} "
                "are not the same samples in the same order, so their parts would overlap; split flows of "
                "one dataset"
            )


def _checked_lengths(lengths: Any) -> list[int | float]:
    """The lengths as ints and floats."""
    if isinstance(lengths, str | bytes) or not isinstance(lengths, Iterable):
        raise OptionTypeError(
            f"lengths={lengths!r:.80} is of type {type(lengths).__name__}; give counts or shares, one for each part"
        )
    checked: list[int | float] = []
    for length in lengths:
        if isinstance(length, bool) or not isinstance(length, Real):
            raise OptionTypeError(f"lengths: {length!r} is no number; give counts or shares")
        number = int(length) if isinstance(length, Integral) else float(length)
        if not (math.isfinite(number) and number >= 0):
            raise OptionError(f"lengths: {length!r} is out of range; give counts or shares of at least 0")
        checked.append(number)
    return checked


def _counts(lengths: list[int | float], total: int) -> list[int]:
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
