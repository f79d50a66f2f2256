"""Checksum of the samples that an epoch has drawn, which a resumed epoch must draw again."""

from __future__ import annotations

import zlib
from array import array
from typing import Any

import numpy as np

#: The name of the checksum among the values that a state must share with the loader that resumes it.
READ = "samples read"


def extended(checksum: int | None, index: Any) -> int | None:
    """Return the checksum after one more batch of indices, or one more index; None if an index is not an integer.

    The checksum does not depend on the division of the indices into batches.
    """
    if checksum is None:
        return None
    try:
        numbers = array("q", index if isinstance(index, list | tuple | np.ndarray) else [index])
    except Exception:  # other keys; or raised by a class of the user
        return None
    return zlib.crc32(numbers, checksum)
