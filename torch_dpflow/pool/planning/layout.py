"""What the pool holds: sets of records, their identity, and where each record lies in them. Pure.

A set is an immutable version of samples. A file set has records of any length, an array set records of one shape and
type. Consecutive records lie together in a stripe, which one server holds. Where a record lies in its stripe follows
from the set alone, before any byte has come: so it can be loaded, or asked for, in any order.
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

#: Records of a file set begin at multiples of so many bytes, a cache line.
ALIGNMENT = 64
#: Bytes of a stripe of an array set, at most, unless a record is larger.
ARRAY_STRIPE_BYTES = 64 << 20
#: Bytes of a block of rows, at most, unless a row is larger; and how many blocks a set may have: 4 TiB.
ARRAY_BLOCK_BYTES, _MAX_BLOCKS = 256 << 10, 1 << 24
_IDENTITY_BYTES = 16


def identity(kind: str, facts: dict[str, Any]) -> bytes:
    """The name of a set: equal for equal facts alone, whoever makes it and wherever.

    kind: what sort of set it is.
    facts: everything that determines its bytes, of types that msgspec knows.
    """
    encoded = msgspec.msgpack.encode([kind, facts], order="deterministic")
    return hashlib.blake2b(encoded, digest_size=_IDENTITY_BYTES).digest()


class RecordLayout:
    """How the records of one set are dealt to stripes.

    Args:
        identity: its name.
        records: how many there are, at least one.
        per_stripe: how many lie together.

    Raises:
        OptionError: a number is below 1.
    """

    def __init__(self, identity: bytes, records: int, per_stripe: int) -> None:
        self.identity = identity
        self.records = check_int("records", records, minimum=1)
        self.per_stripe = check_int("per_stripe", per_stripe, minimum=1)

    @property
    def stripes(self) -> int:
        """How many stripes there are."""
        return -(-self.records // self.per_stripe)

    def records_of(self, stripe: int) -> range:
        """The records in a stripe."""
        first = stripe * self.per_stripe
        return range(first, min(first + self.per_stripe, self.records))


class SampleLayout(RecordLayout):
    """Records of any length, one behind the other, each at a multiple of `ALIGNMENT`.

    lengths: bytes of each record.
    Raises OptionError: there is no record, a length is below 0, or it is no list of whole numbers.
    """

    def __init__(self, identity: bytes, lengths: npt.ArrayLike, per_stripe: int) -> None:
        self.lengths = np.asarray(lengths)
        if self.lengths.ndim != 1 or self.lengths.dtype.kind not in "iu" or (self.lengths < 0).any():
            raise OptionError("lengths: a list of whole numbers from 0 is needed, one for each record")
        super().__init__(identity, len(self.lengths), per_stripe)
        padded = -(-self.lengths.astype(np.int64) // ALIGNMENT) * ALIGNMENT
        #: Where each record would end if all stripes were one.
        self._ends = np.cumsum(padded)

    def offsets(self, stripe: int) -> npt.NDArray[np.int64]:
        """Where each record of a stripe begins in it."""
        own = self.records_of(stripe)
        ends = self._ends[own.start : own.stop]
        return np.concatenate([[self._start(stripe)], ends[:-1]]) - self._start(stripe)

    def stripe_bytes(self, stripe: int) -> int:
        """The bytes that a stripe takes."""
        return int(self._ends[self.records_of(stripe)[-1]]) - self._start(stripe)

    def _start(self, stripe: int) -> int:
        first = stripe * self.per_stripe
        return int(self._ends[first - 1]) if first else 0


class ArrayLayout(RecordLayout):
    """Rows of an array, in stripes of whole rows.

    A server knows blocks of rows, as files of one length (`blocks`): what it keeps of each row would take more memory
    than the row. Blocks of small rows fill cache lines, so that rows lie at multiples of their bytes all through.

    Args:
        dtype: of the elements, as numpy writes it; no Python objects, no fields.
        shape: of one record; empty for a number.

    Raises:
        OptionTypeError: the type is of objects, or has fields.
        OptionError: records have no bytes, or there are too many; or one takes more than a stripe.
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
            raise OptionError(
                f"{records:,} records of {self.record_bytes:,} bytes are too many; split the array"
            )

    def blocks(self) -> SampleLayout:
        """The blocks of rows, as a server holds them."""
        lengths = np.full(-(-self.records // self.per_block), self.per_block * self.record_bytes)
        lengths[-1] = (self.records - (len(lengths) - 1) * self.per_block) * self.record_bytes
        return SampleLayout(self.identity, lengths, self.blocks_per_stripe)
