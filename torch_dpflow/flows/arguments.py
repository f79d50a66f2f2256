"""Checks of whole numbers, which users may give as Python's, numpy's or a tensor's."""

from __future__ import annotations

import operator
from typing import Any

from torch_dpflow.errors import OptionError, OptionTypeError

#: Bounds of the integers that sample seeds are packed in.
LEAST_INT64, MOST_INT64 = -(2**63), 2**63 - 1


def whole_number(name: str, value: Any, *, least: int, most: int | None = None) -> int:
    """`value` as an int. Raises OptionTypeError for what is no whole number, OptionError outside the bounds."""
    allowed = f"a whole number >= {least}" if most is None else f"a whole number from {least} to {most}"
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise OptionTypeError(f"{name}={value!r:.80} is of type {type(value).__name__}; give {allowed}")
    if number < least or (most is not None and number > most):
        raise OptionError(f"{name}={number} is out of range; give {allowed}")
    return number
