"""A cache's capacity, as users write it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

from torch_dpflow.errors import OptionError, OptionTypeError

_BYTES = {"b": 1} | {
    f"{prefix}{suffix}": base ** (power + 1)
    for power, prefix in enumerate("kmgt")
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE | re.ASCII)
_ALLOWED = (
    'give bytes as text, such as "16GiB" or "500MB" (B, kB, MB, GB, TB, KiB, MiB, GiB, TiB), '
    "or a number of samples as an int"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """A budget of samples or of bytes; the other is None."""

    items: int | None = None
    bytes: int | None = None


def parse_capacity(capacity: int | str) -> Capacity:
    """Read a capacity: an int of samples, or text with a unit of bytes.

    Raises:
        OptionError: a number below one, a bool, or text that is no size.
        OptionTypeError: neither an int nor text.
    """
    if isinstance(capacity, bool):
        raise OptionError(f"capacity={capacity!r} is a bool; {_ALLOWED}")
    if isinstance(capacity, str):
        return Capacity(bytes=_parse_bytes(capacity))
    if not isinstance(capacity, int):
        raise OptionTypeError(f"capacity={capacity!r} is a {type(capacity).__name__}; {_ALLOWED}")
    if capacity < 1:
        raise OptionError(f"capacity={capacity} is below 1; {_ALLOWED}")
    return Capacity(items=capacity)


def _parse_bytes(text: str) -> int:
    match = _TEXT.fullmatch(text)
    unit = _BYTES.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise OptionError(f"capacity={text!r} is no size; {_ALLOWED}")
    size = int(Decimal(match[1]) * unit)
    if size < 1:
        raise OptionError(f"capacity={text!r} is below one byte; {_ALLOWED}")
    return size
