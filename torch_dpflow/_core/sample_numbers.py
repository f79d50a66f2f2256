"""A short description of many sample numbers, equal for equal ones."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

#: First numbers in a description.
_SHOWN = 3


def describe_numbers(numbers: npt.NDArray[np.integer[Any]]) -> str:
    """Return how many numbers there are, the first of them, and a digest of all in their order."""
    digest = hashlib.sha256(numbers.astype("<i8").tobytes()).hexdigest()[:12]
    shown = [*map(str, numbers[:_SHOWN].tolist()), *["..."] * (len(numbers) > _SHOWN)]
    return f"{len(numbers)} samples [{', '.join(shown)}] with digest {digest}"
