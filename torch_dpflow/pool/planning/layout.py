"""Layout of a cached dataset: its identity, and where each record lies. Pure.

A dataset here is an immutable version of samples. Records of a stored dataset may have any length; records of an array
have one shape and type. Consecutive records lie together in a stripe, which one server holds. A record's place in its
stripe follows from the layout alone, so records can be loaded or requested in any order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from torch_dpflow._core.checks import check_int
from torch_dpflow.errors import OptionError, OptionTypeError

#: Records of any length begin at multiples of this many bytes, a cache line.
ALIGNMENT = 64
#: Maximum bytes of a stripe of an array.
ARRAY_STRIPE_BYTES = 64 << 20
#: Maximum bytes of a block of rows, unless a row is larger; and of blocks of an array: 4 TiB.
ARRAY_BLOCK_BYTES, _MAX_BLOCKS = 256 << 10, 1 << 24
_IDENTITY_BYTES = 16


def identity(kind: str, facts: dict[str, Any]) -> bytes:
    """Return the identity of a dataset: equal only for equal facts, on any host.

    kind: kind of dataset.
    facts: everything that determines its bytes, of types that msgspec encodes.
    """
    encoded = msgspec.msgpack.encode([kind, facts], order="deterministic")
    return hashlib.blake2b(encoded, digest_size=_IDENTITY_BYTES).digest()


class RecordLayout:
    """Assignment of records to stripes.

    Args:
        identity: of the dataset.
        records: number of records, at least one.
        per_stripe: number of records in a stripe.

    Raises OptionError if a number is below 1.
    """

    def __init__(self, identity: bytes, records: int, per_stripe: int) -> None:
        self.identity = identity
        self.records = check_int("records", records, minimum=1)
        self.per_stripe = check_int("per_stripe", per_stripe, minimum=1)

    @property
    def stripes(self) -> int:
        """Number of stripes."""
        return -(-self.records // self.per_stripe)

    def records_of(self, stripe: int) -> range:
        """Return the records of a stripe."""
        first = stripe * self.per_stripe
        return range(first, min(first + self.per_stripe, self.records))


class SampleLayout(RecordLayout):
    """Records of any length, one after the other, each at a multiple of `ALIGNMENT`.

    lengths: bytes of each record.

    Raises OptionError unless this is a non-empty list of non-negative integers.
    """

    def __init__(self, identity: bytes, lengths: npt.ArrayLike, per_stripe: int) -> None:
        self.lengths = np.asarray(lengths)
        if self.lengths.ndim != 1 or self.lengths.dtype.kind not in "iu" or (self.lengths < 0).any():
            raise OptionError("lengths: a list of whole numbers from 0 is needed, one for each record")
        super().__init__(identity, len(self.lengths), per_stripe)
        padded = -(-self.lengths.astype(np.int64) // ALIGNMENT) * ALIGNMENT
        #: Where each record would end in a single stripe.
        self._ends = np.cumsum(padded)

    def offsets(self, stripe: int) -> npt.NDArray[np.int64]:
        """Return where each record of a stripe begins in it."""
        own = self.records_of(stripe)
        ends = self._ends[own.start : own.stop]
        return np.concatenate([[self._start(stripe)], ends[:-1]]) - self._start(stripe)

    def stripe_bytes(self, stripe: int) -> int:
        """Return the bytes of a stripe."""
        return int(self._ends[self.records_of(stripe)[-1]]) - self._start(stripe)

    def _start(self, stripe: int) -> int:
        first = stripe * self.per_stripe
        return int(self._ends[first - 1]) if first else 0


class ArrayLayout(RecordLayout):
    """Rows of an array, in stripes of whole rows.

    A server stores blocks of rows, as records of one length (`blocks`): an index entry per row would take more memory
    than small rows do. Blocks fill whole cache lines, so rows lie at multiples of their size throughout.

    Args:
        dtype: of the elements, as numpy writes it; no Python objects, no fields.
        shape: of one record; empty for a scalar.

    Raises:
        OptionTypeError: the dtype is of objects, or has fields.
        OptionError: records have no bytes, are too many, or one is larger than a stripe.
    """

    def __init__(
        self,
        identity: bytes,
        records: int,
        dtype: str,
        shape: Sequence[int],
        stripe_bytes: int = ARRAY_STRIPE_BYTES,
        block_bytes: int = ARRAY_BLOCK_BYTES,
    ) -> None:
        try:
            self.dtype, self.shape = np.dtype(dtype), tuple(shape)
        except TypeError as error:
            raise OptionTypeError(f"dtype={dtype!r}: {error}; give one of numpy's types") from error
        if self.dtype.hasobject or self.dtype.kind == "V":
            raise OptionTypeError(
                f"dtype={dtype!r} is of Python objects or has fields; give an array of numbers or bytes, such as one "
                "for each field"
            )
        self.record_bytes = math.prod(self.shape) * self.dtype.itemsize
        if self.record_bytes < 1:
            raise OptionError(f"dtype={dtype!r}, shape={shape}: records have no bytes; give at least one")
        if self.record_bytes > stripe_bytes:
            raise OptionError(
                f"dtype={dtype!r}, shape={shape}: a record has {self.record_bytes:,} bytes, and at most "
                f"{stripe_bytes:,} are allowed; have more and smaller ones, as by reshape"
            )
        whole_lines = ALIGNMENT // math.gcd(ALIGNMENT, self.record_bytes)
        fit = min(block_bytes, stripe_bytes) // self.record_bytes
        #: Rows of a block.
        self.per_block = max(1, fit // whole_lines * whole_lines or fit)
        self.blocks_per_stripe = max(1, stripe_bytes // (self.per_block * self.record_bytes))
        super().__init__(identity, records, self.per_block * self.blocks_per_stripe)
        if -(-records // self.per_block) > _MAX_BLOCKS:
            raise OptionError(f"{records:,} records of {self.record_bytes:,} bytes are too many; split the array")

    def blocks(self) -> SampleLayout:
        """Return the layout of the blocks of rows, as a server stores them."""
        lengths = np.full(-(-self.records // self.per_block), self.per_block * self.record_bytes)
        lengths[-1] = (self.records - (len(lengths) - 1) * self.per_block) * self.record_bytes
        return SampleLayout(self.identity, lengths, self.blocks_per_stripe)
