"""Compares what the pool holds of a dataset with what its storage has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

from torch_dpflow.dataservice.lanes.pool_address import AddressLike, find_address
from torch_dpflow.dataservice.lanes.pool_connection import PoolConnection
from torch_dpflow.dataservice.reader.reading import SetReading
from torch_dpflow.dataservice.sources.set_names import identity_of, source_of
from torch_dpflow.datasets.sample_reader import SampleReader
from torch_dpflow.datasets.store import StoredDataset
from torch_dpflow.datasets.verify import Problem
from torch_dpflow.errors import DPFlowError, UsageError

#: Samples that are read at the same time.
_AT_ONCE = 256


@dataclass
class PoolComparison:
    """How many samples are equal in memory and in storage, and how many are in storage alone."""

    equal: int = 0
    in_storage: int = 0


def verify_pool(
    stored: StoredDataset,
    address: AddressLike = "auto",
    *,
    silence_s: float = 5.0,
    progress: Callable[[int], None] = lambda samples: None,
    compared: PoolComparison | None = None,
) -> Iterator[Problem]:
    """Read every sample of a held dataset from storage again, past the pool; yields those that differ from memory.

    progress: is told how many samples were looked at.
    compared: filled with how many are equal.

    Raises UsageError: the pool does not hold it; PeerLostError: there is no server.
    """
    source, identity = source_of(stored, None), identity_of(stored)
    with PoolConnection(address) as connection:
        if all(one.identity != identity for one in connection.contents().sets):
            raise UsageError(f"{stored.ref} is not in the pool; `dpflow pool list` has what is")
    counts = compared if compared is not None else PoolComparison()
    with (
        closing(SampleReader(stored, check=True)) as storage,
        closing(SetReading(find_address(address), source, identity, silence_s)) as memory,
    ):
        for first in range(0, len(stored), _AT_ONCE):
            numbers = range(first, min(first + _AT_ONCE, len(stored)))
            for number, held, sample in zip(numbers, memory.read(numbers), storage.read_each(numbers)):
                if held is None:
                    counts.in_storage += 1
                elif difference := _difference(held, sample):
                    yield Problem(number, 1, difference)
                else:
                    counts.equal += 1
            progress(numbers.stop)


def _difference(held: bytes, sample: tuple[bytes, object] | DPFlowError) -> str:
    """How they differ; empty where they do not."""
    if isinstance(sample, DPFlowError):
        return f"is in memory, and cannot be compared: {type(sample).__name__}: {sample}"
    content = sample[0]
    if held == content:
        return ""
    if len(held) != len(content):
        return f"has {len(held)} bytes in memory, and {len(content)} in storage"
    at = next(place for place, (one, other) in enumerate(zip(held, content)) if one != other)
    return f"byte {at} of {len(held)} is {held[at]} in memory, and {content[at]} in storage: unload it, load it again"
