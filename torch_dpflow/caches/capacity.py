"""A cache's capacity, as users write it."""

from __future__ import annotations

from dataclasses import dataclass

from torch_dpflow._core.checks import BYTES_ALLOWED, parse_bytes
from torch_dpflow.errors import OptionError, OptionTypeError

_ALLOWED = f"{BYTES_ALLOWED}, or a number of samples as an int"


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
        return Capacity(bytes=parse_bytes("capacity", capacity, _ALLOWED))
    if not isinstance(capacity, int):
        raise OptionTypeError(f"capacity={capacity!r} is of type {type(capacity).__name__}; {_ALLOWED}")
    if capacity < 1:
        raise OptionError(f"capacity={capacity} is below 1; {_ALLOWED}")
    return Capacity(items=capacity)
