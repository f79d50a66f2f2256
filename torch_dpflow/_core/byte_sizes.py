"""Numbers of bytes, as users write them."""

from __future__ import annotations

import re
from decimal import Decimal

from torch_dpflow.errors import OptionError

#: What to give.
BYTES_ALLOWED = 'give bytes as text, such as "16GiB" or "500MB" (B, kB, MB, GB, TB, KiB, MiB, GiB, TiB)'
_UNITS = {"b": 1} | {
    f"{prefix}{suffix}": base ** (power + 1)
    for power, prefix in enumerate("kmgt")
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE | re.ASCII)


def parse_bytes(name: str, text: str, allowed: str = BYTES_ALLOWED) -> int:
    """The number of bytes, at least one, in text with their unit. Raises OptionError; `allowed` says what to give."""
    match = _TEXT.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise OptionError(f"{name}={text!r} is no size; {allowed}")
    size = int(Decimal(match[1]) * unit)
    if size < 1:
        raise OptionError(f"{name}={text!r} is below one byte; {allowed}")
    return size
