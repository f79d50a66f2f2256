"""Layout of a cached dataset: its identity, where each record is, and which server holds it. Pure.

A dataset here is an immutable version of samples. Records of a stored dataset may have any length; records of an array
have one shape and type. Consecutive records lie together in a stripe, which one server holds. A record's place in its
stripe follows from the layout alone, so records can be loaded or requested in any order.

Stripes are placed by weighted rendezvous hashing with capacities. Each server has a score for each stripe, which
depends only on the server's name and weight, the dataset's identity and the stripe's number. The server with the
highest score and enough free bytes gets the stripe. If all n+1 servers have equal weights and enough memory, placing a
dataset with one server less moves only that server's stripes, 1/(n+1) of all. Placement by `mod N` or by equal ranges
would move nearly all stripes, and a hash ring needs many points per server.

If a dataset does not fit, a hash of each record's number decides once which records stay in memory. So every batch of
every order finds about the same share of its records there, and none is replaced. For random orders, a share c that
stays in memory serves a share c of reads. Least-recently-used replacement serves c + (1-c) ln(1-c), 0.15 if c = 0.5.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from torch_dpflow._core.checks import check_int
from torch_dpflow.errors import OptionError, OptionTypeError

#: Records of any length begin at multiples of this many bytes, a cache line.
ALIGNMENT = 64
ARRAY_STRIPE_BYTES = 64 << 20
#: Maximum bytes of a block of several rows; maximum number of blocks of an array (4 TiB).
ARRAY_BLOCK_BYTES, _MAX_BLOCKS = 256 << 10, 1 << 24
_IDENTITY_BYTES = 16


def identity(kind: str, facts: dict[str, Any]) -> bytes:
    """Return the identity of a dataset, 16 bytes: a digest that is the same on any host for the same arguments.

    kind: kind of dataset.
    facts: everything that determines the dataset's bytes, in types that msgspec encodes.
    """
    encoded = msgspec.msgpack.encode([kind, facts], order="deterministic")
    return hashlib.blake2b(encoded, digest_size=_IDENTITY_BYTES).digest()


class RecordLayout:
    """Assignment of records to stripes: `per_stripe` consecutive records to each, and the remaining ones to the last.

    Args:
        records: number of records, at least one.
        per_stripe: number of records in each stripe but the last.

    Raises OptionError if a number is below 1.
    """

    def __init__(self, identity: bytes, records: int, per_stripe: int) -> None:
        self.identity = identity
        self.records = check_int("records", records, minimum=1)
        self.per_stripe = check_int("per_stripe", per_stripe, minimum=1)

    @property
    def stripes(self) -> int:
        return -(-self.records // self.per_stripe)

    def records_of(self, stripe: int) -> range:
        first = stripe * self.per_stripe
        return range(first, min(first + self.per_stripe, self.records))


class SampleLayout(RecordLayout):
    """Layout of records of any length: one after the other, each at a multiple of `ALIGNMENT` bytes.

    lengths: bytes of each record.

    Raises OptionError if `lengths` is empty, or is not a list of non-negative integers.
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
        """Return where each record of a stripe begins, bytes from the beginning of the stripe."""
        own = self.records_of(stripe)
        ends = self._ends[own.start : own.stop]
        return np.concatenate([[self._start(stripe)], ends[:-1]]) - self._start(stripe)

    def stripe_bytes(self, stripe: int) -> int:
        return int(self._ends[self.records_of(stripe)[-1]]) - self._start(stripe)

    def _start(self, stripe: int) -> int:
        first = stripe * self.per_stripe
        return int(self._ends[first - 1]) if first else 0


class ArrayLayout(RecordLayout):
    """Layout of the rows of an array. Each row is a record, and each stripe has whole rows.

    A server stores blocks of rows as its records (`blocks`), because an index entry per row would take more memory than
    small rows do. Blocks of small rows fill whole cache lines, so that there is no gap between blocks.

    Args:
        records: number of rows.
        dtype: numpy's dtype string of the elements; object and structured dtypes are refused.
        shape: shape of one row; empty for a scalar.
        stripe_bytes, block_bytes: maximum bytes of a stripe, and of a block of more than one row.

    Raises:
        OptionTypeError: the dtype is unknown, is of objects, or has fields.
        OptionError: a row has no bytes or is larger than a stripe; or there are no rows, or too many.
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


#: Owner of a stripe for which no server had capacity.
UNPLACED = -1


def place(
    identity: bytes,
    stripe_bytes: Sequence[int] | npt.NDArray[np.integer[Any]],
    servers: Mapping[str, int],
    room: Mapping[str, int] | None = None,
    stripes: npt.NDArray[np.integer[Any]] | None = None,
) -> npt.NDArray[np.int32]:
    """Return the owner of each stripe: an index in `sorted(servers)`, or `UNPLACED`.

    Each server gets stripes in proportion to its weight, with a relative deviation of about 1 / sqrt(its stripes). A
    stripe that does not fit on its best server goes to the next best. If not all stripes fit, the
    stripes without a place are spread over the whole dataset.

    Args:
        stripe_bytes: bytes of each stripe.
        servers: weight of each server, by name: the server's bytes.
        room: free bytes of each server; its weight by default.
        stripes: number of each stripe in its dataset; 0, 1, 2, ... by default.

    Raises OptionError if a weight is below 1.
    """
    names = sorted(servers)
    for name in names:
        if servers[name] < 1:
            raise OptionError(f"server {name!r} has {servers[name]} bytes; leave out servers without room")
    sizes = np.asarray(stripe_bytes, dtype=np.int64)
    numbers = np.arange(len(sizes)) if stripes is None else np.asarray(stripes)
    if not names or not len(sizes):
        return np.full(len(sizes), UNPLACED, dtype=np.int32)
    left = [(servers if room is None else room)[name] for name in names]
    scores = np.stack([_scores(identity, name, servers[name], numbers) for name in names])
    owners: npt.NDArray[np.int32] = scores.argmax(axis=0).astype(np.int32)
    loads = np.bincount(owners, weights=sizes, minlength=len(names))
    if all(load <= most for load, most in zip(loads, left)):
        return owners
    return _with_room(scores, sizes, left)


def _with_room(scores: npt.NDArray[np.float64], sizes: npt.NDArray[np.int64], room: list[int]) -> npt.NDArray[np.int32]:
    owners = np.full(len(sizes), UNPLACED, dtype=np.int32)
    preferences = np.argsort(-scores, axis=0)
    for stripe in np.argsort(-scores.max(axis=0)).tolist():
        for server in preferences[:, stripe].tolist():
            if room[server] >= sizes[stripe]:
                room[server] -= int(sizes[stripe])
                owners[stripe] = server
                break
    return owners


def _scores(
    identity: bytes, server: str, weight: int, stripes: npt.NDArray[np.integer[Any]]
) -> npt.NDArray[np.float64]:
    """Return -weight / ln(u), u uniform by hash.

    A server has the highest score with probability weight / sum of weights.
    """
    seed = int.from_bytes(hashlib.blake2b(server.encode(), key=identity, digest_size=8).digest(), "little")
    uniform = (mixed(stripes.astype(np.uint64) + np.uint64(seed)) >> np.uint64(11)).astype(float)
    scores: npt.NDArray[np.float64] = -weight / np.log((uniform + 0.5) / 2.0**53)
    return scores


def mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply SplitMix64 (Steele, Lea and Flood 2014): a bijection of 64-bit numbers whose results look independent."""
    numbers = numbers * np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = numbers ^ (numbers >> np.uint64(31))
    return mixed


Flags = npt.NDArray[np.bool_]
#: The `cut` of `resident` with which every record stays in memory.
ALL = 1 << 63


def resident(identity: bytes, records: int, cut: int) -> Flags:
    """Return a flag for each record: whether it stays in memory, because a hash of its number is below `cut`."""
    stays: Flags = _record_scores(identity, records) < np.uint64(cut)
    return stays


def cut_that_fits(records: SampleLayout, room: int, largest: int) -> int:
    """Return the highest `cut` with which the `resident` records fit into `room` bytes; `ALL` if all records fit.

    largest: maximum bytes of a stripe, which has to fit on one server.
    """
    sizes = -(-records.lengths.astype(np.int64) // ALIGNMENT) * ALIGNMENT
    scores = _record_scores(records.identity, len(sizes))
    cut = _cut(sizes, scores, room)
    stripes = np.add.reduceat(sizes, np.arange(0, len(sizes), records.per_stripe))
    for stripe in np.flatnonzero(stripes > largest).tolist():
        own = slice(stripe * records.per_stripe, (stripe + 1) * records.per_stripe)
        cut = min(cut, _cut(sizes[own], scores[own], largest))
    return cut


def _cut(sizes: npt.NDArray[np.int64], scores: npt.NDArray[np.uint64], room: int) -> int:
    """Return the cut that keeps as many records of these sizes as fit."""
    if int(sizes.sum()) <= room:
        return ALL
    by_score = np.argsort(scores)
    fit = int(np.searchsorted(np.cumsum(sizes[by_score], dtype=np.int64), room, side="right"))
    return int(scores[by_score[fit]])


def resident_layout(records: SampleLayout, cut: int) -> SampleLayout:
    """Return a layout of the same records, in which records that `resident` excludes from memory take 0 bytes."""
    if cut == ALL:
        return records
    lengths = np.where(resident(records.identity, records.records, cut), records.lengths, 0)
    return SampleLayout(records.identity, lengths, records.per_stripe)


def _record_scores(identity: bytes, records: int) -> npt.NDArray[np.uint64]:
    seed = np.uint64(int.from_bytes(identity[:8], "little"))
    scores: npt.NDArray[np.uint64] = mixed(np.arange(records, dtype=np.uint64) + seed) >> np.uint64(1)
    return scores
