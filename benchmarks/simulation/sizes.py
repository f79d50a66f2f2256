"""Sizes and capacities as text: "110kB", "64GiB", "25%"."""

import re
from dataclasses import dataclass

from torch_dpflow.caches.policy import parse_capacity as parse_budget


@dataclass(frozen=True)
class Capacity:
    """A cache's capacity, in bytes or as a share of the data set."""

    #: as the user wrote it
    text: str
    amount: float
    is_share: bool

    def share_of(self, whole: int) -> float:
        """The share of a data set of `whole` bytes that fits in, at most 1."""
        return min(1.0, self.amount if self.is_share else self.amount / whole)


def parse_size(text: str) -> int:
    """Bytes, in the units of ALSDCache's capacity. Raises ValueError where that does."""
    size = parse_budget(text).bytes
    assert size is not None, "text is always a size in bytes"
    return size


def parse_capacity(text: str) -> Capacity:
    """A size, or a share of the data set as a percentage. Raises ValueError for anything else."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", text)
    if match is None:
        return Capacity(text.strip(), parse_size(text), is_share=False)
    if not 0 < float(match[1]) <= 100:
        raise ValueError(f"{text!r}: more than 0% and at most 100% of the data set can be held")
    return Capacity(text.strip(), float(match[1]) / 100, is_share=True)
