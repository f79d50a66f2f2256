"""Sizes as text: "110kB", "64GiB"."""

import re

_UNITS = {"B": 1} | {
    prefix + suffix: base ** (power + 1)
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate(("K", "M", "G", "T"))
}


def parse_size(text: str) -> int:
    """Bytes in `text`, a number with a unit: B, kB, MB, GB, TB are decimal, KiB to TiB binary.

    Raises ValueError for anything else, and for less than one byte.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = match[2][:1].upper() + match[2][1:] if match else ""
    factor = _UNITS.get(unit or "B")
    if match is None or factor is None or int(float(match[1]) * factor) < 1:
        raise ValueError(f"{text!r} is no size; write a number with one of {', '.join(_UNITS)}, e.g. 16GiB")
    return int(float(match[1]) * factor)
