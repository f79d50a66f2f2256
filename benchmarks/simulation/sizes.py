"""Sizes and capacities as text: "110kB", "64GiB", "25%"."""

import re
from dataclasses import dataclass

_UNITS = {"B": 1} | {
    prefix + suffix: base ** (power + 1)
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate(("k", "M", "G", "T"))
}


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
    """Bytes in `text`, a number with a unit: B, kB, MB, GB, TB are decimal, KiB to TiB binary.

    Raises ValueError for anything else, and for less than one byte.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    factor = units.get(match[2].lower() or "b") if match else None
    if match is None or factor is None or float(match[1]) * factor < 1:
        raise ValueError(f"{text!r} is no size; write a number with one of {', '.join(_UNITS)}, e.g. 16GiB")
    return int(float(match[1]) * factor)


def parse_capacity(text: str) -> Capacity:
    """A size, or a share of the data set as a percentage. Raises ValueError for anything else."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", text)
    if match is None:
        return Capacity(text.strip(), parse_size(text), is_share=False)
    if not 0 < float(match[1]) <= 100:
        raise ValueError(f"{text!r}: more than 0% and at most 100% of the data set can be held")
    return Capacity(text.strip(), float(match[1]) / 100, is_share=True)
