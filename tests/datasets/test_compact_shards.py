"""Metadata of a million samples fits into 64 MB, and is read once for all processes forked from one."""

from __future__ import annotations

import os
import random

import msgspec
import pytest

from tests.datasets.samples_source import Numbered, numbers, publish
from torch_dpflow.datasets import DatasetStore
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.datasets.shard_cache import CompactShards
from torch_dpflow.datasets.spec import SampleMeta

ROOM = 1 << 20


def shard(number: int, samples: int) -> list[SampleMeta]:
    """As an import of packs writes it, the same for the same number."""
    draw = random.Random(number)
    return [
        SampleMeta(
            path=f"pack-{number}-{n // 600}.bin",
            offset=n % 600 * 100_123,
            length=draw.randrange(50_000, 150_000),
            checksum=f"crc32:{draw.getrandbits(32):08x}",
            meta=msgspec.Raw(b'{"label":%d,"class":"n%08d"}' % (n, draw.randrange(10**8))),
        )
        for n in range(samples)
    ]


@pytest.mark.parametrize("samples", [1, 31, 32, 33, 1000])
def test_gives_back_what_it_was_given(samples: int) -> None:
    compact = CompactShards(3, ROOM)
    for number in (2, 0):
        compact.put(number, shard(number, samples))
    offsets = [samples - 1, 0, samples // 2]
    for number in (0, 2):
        assert compact.get(number, offsets) == [shard(number, samples)[offset] for offset in offsets]
    assert compact.get(1, [0]) is None


def test_a_sample_may_be_little_known() -> None:
    compact = CompactShards(1, ROOM)
    sample = SampleMeta(path="s3://elsewhere/ä.jpg", meta=msgspec.Raw(b"{}"))
    compact.put(0, [sample])
    assert compact.get(0, [0]) == [sample]


def test_a_million_samples_take_less_than_64_megabytes() -> None:
    compact = CompactShards(4, ROOM)
    for number in range(4):
        compact.put(number, shard(number, 1000))
    assert 0 < compact.taken * 250 < 64 << 20


def test_keeps_no_more_than_it_has_room_for() -> None:
    compact = CompactShards(9, 40_000)
    for number in range(9):
        compact.put(number, shard(number, 500))
    kept = [number for number in range(9) if compact.get(number, [0]) == shard(number, 1)]
    assert kept
    assert [number for number in range(9) if compact.get(number, [0]) is not None] == kept != [*range(9)]
    assert compact.taken <= 40_000


def test_forked_processes_that_keep_shards_at_once_spoil_none() -> None:
    compact = CompactShards(30, ROOM)
    children = []
    for seed in range(3):
        child = os.fork()
        if child == 0:
            for number in random.Random(seed).sample(range(30), 30):
                compact.put(number, shard(number, 40))
            os._exit(0)
        children.append(child)
    for child in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert compact.taken
    for number in range(30):
        compact.put(number, shard(number, 40))
        assert compact.get(number, [*range(40)]) == shard(number, 40)


def test_what_a_forked_child_has_read_its_parent_need_not_read(
    local_store: DatasetStore, metadata_reads: list[int]
) -> None:
    stored = publish(local_store, Numbered(400), shard_size=40)
    reader = DatasetReader(stored, metadata_cache=sum(entry.bytes for entry in stored.variant.shards) // 2)
    order = random.Random(0).sample(range(400), 400)
    expected = [numbers(400)[index] for index in order]
    child = os.fork()
    if child == 0:
        first = [reader[index] for index in order] == expected
        again = reader.__getitems__(order) == expected
        os._exit(0 if first and again and len(metadata_reads) == 10 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert reader.__getitems__(order) == expected
    assert not metadata_reads
    reader.close()
