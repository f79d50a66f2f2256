"""References, descriptors and allocations that an arena or its reader refuses."""

from __future__ import annotations

import fcntl
import os
import resource
from pathlib import Path

import msgspec
import pytest

from tests.ipc.memory.arena_writer import SIZE, pair, writer
from torch_dpflow.errors import MessageError, OptionError, SegmentLostError
from torch_dpflow.ipc.memory.arena import Arena
from torch_dpflow.ipc.memory.arena_reader import ArenaReader
from torch_dpflow.ipc.memory.headroom import Headroom
from torch_dpflow.ipc.memory.segment import HEADER_BYTES
from torch_dpflow.ipc.messages.headers import BlockRef


@pytest.mark.parametrize(
    "change",
    [
        {"nbytes": SIZE * 100},
        {"nbytes": -1},
        {"capacity": 1},
        {"capacity": 1 << 60},
        {"capacity": -5},
        {"segment": 999},
        {"segment": -1},
        {"fd": 0},
        {"fd": 1},
        {"fd": -1},
        {"fd": 1 << 40},
    ],
    ids=str,
)
def test_references_are_not_believed(change: dict[str, int]) -> None:
    with writer() as remote:
        reader = ArenaReader(remote.pid)
        ref = remote.write(SIZE, 1)
        wrong = msgspec.structs.replace(ref, **change)
        with pytest.raises((MessageError, SegmentLostError)):
            reader.view(wrong)
        if set(change) <= {"nbytes", "capacity"}:
            reader.release(ref)
            ref = remote.write(SIZE, 1)
            with pytest.raises(MessageError):
                reader.view(msgspec.structs.replace(ref, **change))


def test_a_reference_is_good_for_once() -> None:
    arena, reader = pair()
    block = arena.allocate(SIZE)
    assert block is not None
    ref = arena.publish(block)
    view = reader.view(ref)
    with pytest.raises(MessageError, match="opened before"):
        reader.view(ref)
    with pytest.raises(MessageError, match="opened before"):
        reader.release(ref)
    assert view.size == SIZE


def test_a_block_that_is_not_published_cannot_be_opened() -> None:
    arena, reader = pair()
    block = arena.allocate(SIZE)
    assert block is not None
    segment = block.segment
    ref = BlockRef(segment.number, segment.fd, segment.capacity, SIZE, segment.generation, 0)
    with pytest.raises(MessageError, match="not published"):
        reader.view(ref)
    block.memory[:] = 3
    assert reader.view(arena.publish(block))[-1] == 3


def test_a_block_is_published_once() -> None:
    arena, reader = pair()
    block = arena.allocate(SIZE)
    assert block is not None
    address = block.segment.address
    assert arena.block_at(address, SIZE) is not None
    assert arena.block_at(address, SIZE + 1) is None
    assert arena.block_at(address + 64, SIZE - 64) is None
    reader.release(arena.publish(block))
    assert arena.block_at(address, SIZE) is None
    with pytest.raises(OptionError, match="published before"):
        arena.publish(block)


def test_a_foreign_descriptor_is_refused(tmp_path: Path) -> None:
    reader = ArenaReader(os.getpid())
    capacity = 4096 - HEADER_BYTES
    with open(tmp_path / "other", "w+b") as other:
        other.truncate(4096)
        with pytest.raises(MessageError, match=r"not a segment, but '.*/other'"):
            reader.view(BlockRef(1, other.fileno(), capacity, 10, 1, 0))
    memory = os.memfd_create("torch_dpflow", os.MFD_ALLOW_SEALING)
    os.truncate(memory, 4096)
    with pytest.raises(MessageError, match="not sealed"):
        reader.view(BlockRef(1, memory, capacity, 10, 1, 0))
    os.close(memory)
    # Memory of any size costs the process that makes it nothing, and the one that reads it all of it.
    sparse = os.memfd_create("torch_dpflow", os.MFD_ALLOW_SEALING)
    os.truncate(sparse, 1 << 40)
    fcntl.fcntl(sparse, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    with pytest.raises(MessageError, match="not reserved"):
        reader.view(BlockRef(1, sparse, (1 << 40) - HEADER_BYTES, 10, 1, 0))
    os.close(sparse)
    ends = os.pipe()
    with pytest.raises(MessageError, match="not a segment"):
        reader.view(BlockRef(1, ends[0], capacity, 10, 1, 0))
    for end in ends:
        os.close(end)


def test_another_arena_does_not_pass_for_this_one() -> None:
    first, second = Arena(budget_bytes=1 << 26), Arena(budget_bytes=1 << 26)
    reader = ArenaReader(os.getpid())
    probe, other = first.probe_ref(), second.probe_ref()
    assert probe is not None
    assert other is not None
    assert reader.probe(probe)
    second_block = [second.allocate(SIZE), second.allocate(SIZE)][1]
    assert second_block is not None
    with pytest.raises(MessageError, match="another arena"):
        reader.view(second.publish(second_block))


def test_a_probe_that_cannot_work_says_so() -> None:
    arena = Arena(budget_bytes=1 << 20)
    probe = arena.probe_ref()
    assert probe is not None
    assert not ArenaReader(1 << 22).probe(probe)
    assert not ArenaReader(os.getpid()).probe(msgspec.structs.replace(probe, token=bytes(16)))
    block = arena.allocate(SIZE)
    assert block is not None
    reader, larger = ArenaReader(os.getpid()), arena.publish(block)
    assert not reader.probe(msgspec.structs.replace(probe, block=larger))
    assert reader.view(larger).nbytes == SIZE, "it was looked into, whatever its size"
    assert Arena(budget_bytes=0).probe_ref() is None


def test_without_descriptors_nothing_is_lent() -> None:
    arena = Arena(budget_bytes=1 << 26)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        assert arena.allocate(SIZE) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert arena.allocate(SIZE) is not None


def test_without_memory_nothing_is_lent() -> None:
    assert Arena(budget_bytes=1 << 62).allocate(Headroom().available()) is None


def test_a_closed_arena_lends_nothing() -> None:
    arena, reader = pair()
    block = arena.allocate(SIZE)
    assert block is not None
    view = reader.view(arena.publish(block))
    arena.close()
    block.memory[:] = 4
    assert view[0] == 4
    assert (arena.segments, arena.allocated_bytes) == (0, 0)
    assert arena.allocate(SIZE) is None


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(OptionError, match="budget_bytes=-1"):
        Arena(budget_bytes=-1)
