"""Times as users write them."""

from __future__ import annotations

import re

from torch_dpflow._core.checks import check_seconds, check_type
from torch_dpflow.errors import OptionError

#: What to give.
DURATION_ALLOWED = 'give a time as text, such as "14m" or "1h" (s, m, h, d), or a number of seconds'
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TEXT = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([smhd])\s*", re.ASCII)


def parse_duration(name: str, value: float | str, *, maximum: float | None = None) -> float:
    """A time as seconds, above 0 and up to `maximum`.

    Raises:
        OptionTypeError: it is neither text nor a number.
        OptionError: it is no time, or out of range.
    """
    check_type(name, value, (str, float, int), DURATION_ALLOWED.removeprefix("give "))
    given = repr(value)
    if isinstance(value, str):
        match = _TEXT.fullmatch(value)
        if match is None:
            raise OptionError(f"{name}={given} is no time; {DURATION_ALLOWED}")
        value = float(match[1]) * _UNITS[match[2]]
    seconds = check_seconds(name, value)
    if maximum is not None and seconds > maximum:
        raise OptionError(f"{name}={given} is too long; give at most {format_duration(maximum)}")
    return seconds


def format_duration(seconds: float) -> str:
    """A time with its unit, for people."""
    unit = next((unit for unit in "dhm" if seconds >= _UNITS[unit] and seconds % _UNITS[unit] == 0), "s")
    return f"{seconds / _UNITS[unit]:g} {unit}"
