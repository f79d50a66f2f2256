"""Checksum of the sample indices that an epoch has drawn, to check that a resumed epoch draws the same indices."""

from __future__ import annotations

import zlib
from array import array
from typing import Any

import numpy as np

#: Key of the checksum in `LoaderState.made_of`.
READ = "samples read"


def extended(checksum: int | None, index: Any) -> int | None:
    """Return `checksum` updated by `index`, an index or a batch; None if `checksum` is None, or an index is no integer.

    The result does not depend on how indices are grouped into batches.
    """
    if checksum is None:
        return None
    try:
        numbers = array("q", index if isinstance(index, list | tuple | np.ndarray) else [index])
    except Exception:  # other keys; or raised by a class of the user
        return None
    return zlib.crc32(numbers, checksum)
