"""Compares what the pool caches with its storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

from torch_dpflow.datasets.sample_reader import SampleReader
from torch_dpflow.datasets.store import StoredDataset
from torch_dpflow.datasets.verify import Problem
from torch_dpflow.errors import DPFlowError, OptionError, UsageError
from torch_dpflow.pool.array_files import ArrayReader, array_layout
from torch_dpflow.pool.messages import ArraySource
from torch_dpflow.pool.reader.pool_reader import PoolReader
from torch_dpflow.pool.sources import RecordReader, identity_of, source_of
from torch_dpflow.pool.transport.address import AddressLike, find_address
from torch_dpflow.pool.transport.control_connection import PoolConnection

#: Samples per read; or bytes of rows, but at least one block.
_AT_ONCE, _AT_ONCE_BYTES = 256, 64 << 20
#: A server is not used after this long without an answer, seconds.
_SILENCE_S = 5.0


@dataclass
class PoolComparison:
    """Number of samples equal in memory and storage, and number only in storage."""

    equal: int = 0
    in_storage: int = 0


def samples_of(stored: StoredDataset | ArraySource) -> int:
    """Return the number of samples or rows."""
    return stored.shape[0] if isinstance(stored, ArraySource) else len(stored)


def verify_pool(
    stored: StoredDataset | ArraySource,
    address: AddressLike = "auto",
    *,
    progress: Callable[[int], None] = lambda samples: None,
    compared: PoolComparison | None = None,
) -> Iterator[Problem]:
    """Read every sample, or row, of a cached dataset from storage again; yield those that differ from memory.

    Args:
        progress: called with the number of compared samples.
        compared: filled with the counts.

    Raises UsageError if it is not cached, OptionError if no storage has it, PeerLostError if there is no server.
    """
    source, identity = source_of(stored, None), identity_of(stored)
    with PoolConnection(address) as connection:
        if all(one.identity != identity for one in connection.contents().datasets):
            raise UsageError(f"{stored.ref} is not in the pool; `dpflow pool list` shows what is")
    counts, samples = compared if compared is not None else PoolComparison(), samples_of(stored)
    reader, per_record, at_once = _past_the_pool(stored)
    with (
        closing(reader) as storage,
        closing(PoolReader(find_address(address), source, identity, _SILENCE_S)) as memory,
    ):
        records = -(-samples // per_record)
        for first in range(0, records, at_once):
            numbers = range(first, min(first + at_once, records))
            for number, held, found in zip(numbers, memory.read(numbers), storage.read_each(numbers)):
                own = range(number * per_record, min((number + 1) * per_record, samples))
                if held is None:
                    counts.in_storage += len(own)
                    continue
                problems = [*_problems(own, held, found)]
                counts.equal += len(own) - sum(one.samples for one in problems)
                yield from problems
            progress(min(numbers.stop * per_record, samples))


def _past_the_pool(stored: StoredDataset | ArraySource) -> tuple[RecordReader, int, int]:
    """Return a reader of records from storage, the number of samples of each record, and of records per read."""
    if not isinstance(stored, ArraySource):
        return SampleReader(stored, check=True), 1, _AT_ONCE
    if stored.is_pushed:
        raise OptionError(f"{stored.ref} was pushed from memory, so there is no storage to compare it with")
    rows = array_layout(stored)
    return ArrayReader(stored), rows.per_block, max(1, _AT_ONCE_BYTES // (rows.per_block * rows.record_bytes))


def _problems(own: range, held: bytes, found: tuple[bytes, object] | DPFlowError) -> Iterator[Problem]:
    """Yield the differences in one record, which is one sample or several rows of the same length."""
    if isinstance(found, DPFlowError):
        what = f"is in memory, and cannot be compared: {type(found).__name__}: {found}"
        yield Problem(own.start, len(own), what)
    elif len(held) != len(found[0]):
        yield Problem(own.start, len(own), f"has {len(held)} bytes in memory, and {len(found[0])} in storage")
    elif held != found[0]:
        size = len(held) // len(own)
        for at, sample in enumerate(own):
            mine, other = (one[at * size : (at + 1) * size] for one in (held, found[0]))
            if mine != other:
                yield Problem(sample, 1, _first_difference(mine, other))


def _first_difference(held: bytes, content: bytes) -> str:
    at = next(place for place, (one, other) in enumerate(zip(held, content)) if one != other)
    return f"byte {at} of {len(held)} is {held[at]} in memory, and {content[at]} in storage: unload it, load it again"
