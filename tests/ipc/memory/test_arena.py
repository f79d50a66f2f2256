"""Shared memory between real processes: lending, reuse, trimming, and the death of either side."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ipc.memory.arena_writer import SIZE, pair, writer
from tests.new_process import held_by_child, in_fork, run_interpreter
from torch_dpflow.errors import SegmentLostError
from torch_dpflow.ipc.memory.arena import MAX_SEGMENTS, Arena
from torch_dpflow.ipc.memory.arena_reader import ArenaReader, SharedBlocks
from torch_dpflow.ipc.memory.segment import FORKS, HEADER_BYTES, Memory, storage_over, tensor_over
from torch_dpflow.ipc.messages.headers import BlockRef


def mappings() -> int:
    """Segments that this process has mapped."""
    return len(_mapped())


def mapped_bytes() -> int:
    """Their bytes, all together."""
    ranges = [line.split()[0].split("-") for line in _mapped()]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)


def _mapped() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "memfd:torch_dpflow" in line]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_bytes_cross_between_processes(method: str) -> None:
    with writer(method) as remote:
        reader = ArenaReader(remote.pid)
        assert reader.probe(remote.probe())
        view = reader.view(remote.write(SIZE, 7))
        assert view.dtype == np.uint8
        assert view.shape == (SIZE,)
        assert bool(np.all(view == 7))
        view[:] = 9
        assert view.__array_interface__["data"][0] % 64 == 0


def test_a_released_segment_is_lent_again() -> None:
    with writer() as remote:
        reader = ArenaReader(remote.pid)
        first = remote.write(SIZE, 1)
        view = reader.view(first)
        second = remote.write(SIZE, 2)
        assert second.segment != first.segment
        assert view[0] == 1
        del view
        third = remote.write(SIZE, 3)
        assert third.segment == first.segment
        assert reader.view(third)[0] == 3
        assert reader.view(second)[0] == 2
        assert mappings() == 2


def test_any_object_over_the_memory_holds_it() -> None:
    with writer() as remote:
        reader = ArenaReader(remote.pid)
        tensor = torch.from_numpy(reader.view(remote.write(SIZE, 1)))
        part = tensor.view(torch.int32)[5:7].numpy()[1:]
        raw = memoryview(part)
        for holder in (tensor, part):
            del holder
        del tensor, part
        assert remote.write(SIZE, 2).segment != remote.write(SIZE, 3).segment
        assert raw[0] == 0x01010101
        used = remote.holdings()[0]
        del raw
        remote.write(SIZE, 4)
        assert remote.holdings()[0] == used


def test_the_writer_s_own_use_holds_a_segment() -> None:
    with writer() as remote:
        reader = ArenaReader(remote.pid)
        kept = remote.write(SIZE, 1, keep=True)
        reader.release(kept)
        assert remote.write(SIZE, 2).segment != kept.segment
        assert remote.look(1)
        remote.drop()
        assert remote.write(SIZE, 3).segment == kept.segment


@pytest.mark.parametrize("method", ["os.fork", "Process"])
def test_what_a_forked_child_reads_is_not_lent_again(method: str) -> None:
    with writer() as remote:
        reader = ArenaReader(remote.pid)
        first = remote.write(SIZE, 1)
        views = [reader.view(first), reader.view(remote.write(SIZE, 1))]
        with held_by_child(method, lambda: {*views[0].tolist()}) as looked:
            views.clear()
            later = [remote.write(SIZE, 2) for _ in range(2)]
            for ref in later:
                reader.release(ref)
            assert looked() == {1}
            assert first.segment not in {ref.segment for ref in later}
            # What was lent after the fork is lent again, and the rest has left both processes.
            assert remote.write(SIZE, 3).segment in {ref.segment for ref in later}
            assert remote.holdings()[:2] == (2, 2 * (first.capacity + HEADER_BYTES))
            assert mappings() == 2


def test_a_forked_child_keeps_only_what_it_sees() -> None:
    with writer() as remote:
        reader = ArenaReader(remote.pid)
        views = [reader.view(remote.write(SIZE, number)) for number in range(3)]
        del views[1:]
        with held_by_child("os.fork", lambda: (mappings(), {*views[0].tolist()})) as looked:
            views.clear()
            assert mappings() == 3
            assert looked() == (1, {0})


def test_a_view_that_was_made_while_another_thread_forks_is_not_lent_again() -> None:
    """Between the hook before a fork and the fork itself other threads run."""
    arena, reader = pair()
    FORKS._begin()  # as in the thread that forks
    try:
        block = arena.allocate(SIZE)
        assert block is not None
        number = block.segment.number
        view = reader.view(arena.publish(block))
        del block, view
    finally:
        FORKS._running.pop()
    other = arena.allocate(SIZE)
    assert other is not None
    assert other.segment.number != number


def test_what_a_writer_s_forked_child_reads_is_not_lent_again() -> None:
    with writer() as remote:
        reader = ArenaReader(remote.pid)
        reader.release(remote.write(SIZE, 1, keep=True))
        assert remote.look_in_child(SIZE, 1)


def test_an_array_of_a_tensor_outlives_that_the_tensor_is_shared() -> None:
    with writer() as remote:
        reader = ArenaReader(remote.pid)
        ref = remote.write(SIZE, 1)
        tensor = tensor_over(storage_over(reader.view(ref)), torch.uint8, (SIZE,))
        array = tensor.numpy()
        tensor.share_memory_()
        assert remote.write(SIZE, 2).segment != ref.segment
        assert {*array.tolist()} == {*tensor.tolist()} == {1}
        del tensor, array
        assert remote.write(SIZE, 3).segment == ref.segment


def test_unpublished_blocks_come_back_when_their_owner_is_gone() -> None:
    with writer() as remote:
        remote.waste(SIZE, 1000)
        assert remote.holdings()[0] == 1


@pytest.mark.parametrize("nbytes", [1, 5000, SIZE, 5_000_000])
def test_steady_use_needs_no_new_memory(nbytes: int) -> None:
    with writer() as remote:
        reader = ArenaReader(remote.pid)
        held = [reader.view(remote.write(nbytes, index)) for index in range(3)]
        for index in range(3, 50):
            held.pop(0)
            held.append(reader.view(remote.write(nbytes, index)))
            assert held[0][0] == index - 2
        assert remote.holdings()[0] == 3


def test_like_sizes_share_segments() -> None:
    with writer() as remote:
        reader = ArenaReader(remote.pid)
        for nbytes in range(SIZE, int(SIZE * 0.85), -999):
            reader.release(remote.write(nbytes, 1))
        assert remote.holdings()[0] == 1


def test_a_reader_that_keeps_everything_exhausts_the_budget_and_no_more() -> None:
    with writer(budget_bytes=10 * SIZE) as remote:
        reader = ArenaReader(remote.pid)
        views = []
        while (ref := remote.write(SIZE, len(views))) is not None:
            views.append(reader.view(ref))
        assert 8 <= len(views) <= 10
        assert remote.holdings()[1] <= 10 * SIZE
        assert [int(view[-1]) for view in views] == list(range(len(views)))
        views.pop(0)
        assert remote.write(SIZE, 0) is not None
        assert remote.write(SIZE, 0) is None


def test_free_segments_make_room_for_other_sizes() -> None:
    with writer(budget_bytes=4 * SIZE) as remote:
        reader = ArenaReader(remote.pid)
        small = [remote.write(SIZE, 1) for _ in range(3)]
        for ref in small:
            reader.release(ref)
        assert mappings() == 3
        view = reader.view(remote.write(3 * SIZE, 2))
        assert remote.holdings()[0] == 1
        assert mappings() == 1
        assert view[0] == 2


def test_batches_of_any_size_take_little_more_than_is_in_use() -> None:
    sizes = random.Random(0)
    with writer(budget_bytes=1 << 30) as remote:
        reader = ArenaReader(remote.pid)
        held, most = [], 0
        for _ in range(200):
            held.append(reader.view(remote.write(sizes.randint(4_000_000, 12_000_000), 1)))
            most = max(most, remote.holdings()[1], mapped_bytes())
            if len(held) == 4:
                held.pop(0)
        assert most <= 2 * 4 * 12_000_000 + (32 << 20)


def test_a_new_size_does_not_leave_all_the_old_ones_behind() -> None:
    with writer(budget_bytes=1 << 30) as remote:
        reader = ArenaReader(remote.pid)
        for nbytes in (20_000_000, 50_000_000, 110_000_000):
            reader.release(remote.write(nbytes, 1))
        assert remote.holdings()[0] == 1
        assert mappings() == 1


def test_segments_that_lie_idle_are_given_back() -> None:
    with writer() as remote:
        reader = ArenaReader(remote.pid)
        reader.release(remote.write(5 * SIZE, 1))
        remote.waste(SIZE, 600)
        assert remote.holdings()[0] == 1
        reader.release(remote.write(SIZE, 1))
        assert mappings() == 1


def test_giving_segments_back_leaves_those_in_use_alone() -> None:
    with writer(budget_bytes=5 * SIZE) as remote:
        reader = ArenaReader(remote.pid)
        view = reader.view(remote.write(SIZE, 1))
        reader.release(remote.write(SIZE, 2))
        other = reader.view(remote.write(3 * SIZE, 3))
        assert mappings() == 2
        assert bool(np.all(view == 1))
        assert bool(np.all(other == 3))


def test_small_blocks_leave_descriptors_to_the_dataset() -> None:
    with writer() as remote:
        before = remote.holdings()[2]
        while remote.write(100, 1) is not None:
            pass
        segments, _, descriptors = remote.holdings()
        assert segments == MAX_SEGMENTS
        assert descriptors - before == MAX_SEGMENTS


def _blocks_and_files(limit: int) -> tuple[int, int]:
    """Return how many blocks an arena lends under a limit of descriptors, and how many files can be opened then."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    arena, blocks = Arena(budget_bytes=1 << 30), []
    while (block := arena.allocate(SIZE)) is not None:
        blocks.append(block)
    files = []
    with contextlib.suppress(OSError):
        while True:
            files.append(os.open(os.devnull, os.O_RDONLY))
    for file in files:
        os.close(file)
    return len(blocks), len(files)


def test_under_a_low_limit_a_quarter_of_the_descriptors_is_left_to_the_dataset() -> None:
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    blocks, files = in_fork(_blocks_and_files, 4 * (lowest_free + 10))
    assert blocks > 10
    assert files >= lowest_free + 10


def test_the_reader_needs_no_descriptors() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with writer() as remote:
        reader = ArenaReader(remote.pid)
        views = [reader.view(remote.write(SIZE, 1)) for _ in range(20)]
        assert len(os.listdir("/proc/self/fd")) - before < 10
        assert mappings() == len(views)
        assert mapped_bytes() > 20 * SIZE
    reader.close()
    del views
    assert mappings() == 0


def test_what_is_mapped_outlives_a_killed_writer() -> None:
    with writer() as remote:
        reader = ArenaReader(remote.pid)
        view = reader.view(remote.write(SIZE, 5))
        released, reused = remote.write(SIZE, 6), remote.write(SIZE, 7)
        reader.view(released)
        again = remote.write(SIZE, 8)
        remote.kill()
        assert bool(np.all(view == 5))
        assert again.segment == released.segment
        assert bool(np.all(reader.view(again) == 8))
        with pytest.raises(SegmentLostError, match="have to be loaded again"):
            reader.view(reused)
        del view
    reader.close()
    assert mappings() == 0


def test_views_dropped_in_a_forked_child_release_nothing() -> None:
    with writer() as remote:
        reader = ArenaReader(remote.pid)
        ref = remote.write(SIZE, 1)
        view = reader.view(ref)
        child = os.fork()
        if child == 0:
            del view
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert remote.write(SIZE, 2).segment != ref.segment
        assert bool(np.all(view == 1))


def test_a_forked_child_of_the_writer_gets_no_blocks() -> None:
    with writer() as remote:
        assert remote.in_child(SIZE)


def test_views_may_be_dropped_in_any_thread() -> None:
    with writer() as remote:
        reader = ArenaReader(remote.pid)
        for _ in range(20):
            views = [reader.view(remote.write(SIZE, 1)) for _ in range(8)]
            threads = [threading.Thread(target=views.pop) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert remote.holdings()[0] == 8


def test_allocation_from_many_threads() -> None:
    arena, reader = pair()
    overlaps = []

    def work(mark: int) -> None:
        for _ in range(100):
            block = arena.allocate(SIZE)
            assert block is not None
            block.memory[:] = mark
            overlaps.append(not np.all(block.memory == mark))
            reader.release(arena.publish(block))

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(overlaps) == 400
    assert not any(overlaps)


def test_views_that_are_left_at_exit_do_no_harm() -> None:
    program = f"""
import os, torch
from torch_dpflow.ipc.memory.arena import Arena, ArenaReader
arena, reader = Arena(budget_bytes={1 << 24}), ArenaReader(os.getpid())
class Cycle: pass
for index in range(5):
    block = arena.allocate({SIZE})
    holder = Cycle()
    holder.me = holder
    holder.view = torch.from_numpy(reader.view(arena.publish(block)))
    globals()[f"view{{index}}"] = holder
"""
    run = run_interpreter(program, destructors=True)
    assert (run.returncode, run.stderr) == (0, "")


def opened(arena: Arena) -> tuple[BlockRef, Memory]:
    """A block that others may write into, and its view."""
    block = arena.allocate(SIZE)
    assert block is not None
    ref = arena.publish(block, is_open=True)
    return ref, block.memory


def test_others_write_into_an_open_block_until_its_reader_ends_that() -> None:
    arena, reader = Arena(budget_bytes=1 << 26), ArenaReader(os.getpid())
    ref, memory = opened(arena)
    view, late, other = reader.view(ref), SharedBlocks(os.getpid()), SharedBlocks(os.getpid())
    memory[:] = 0
    with late.writing(ref) as may_write, other.writing(ref) as may_write_too:
        assert may_write
        assert may_write_too
        late.view(ref)[:10] = 7
        assert not reader.end_writing(ref), "it is being written"
    assert view[:10].tolist() == [7] * 10
    assert reader.end_writing(ref)
    with late.writing(ref) as may_write:
        assert not may_write
    del view, memory
    again, _memory = opened(arena)  # the same memory, for another batch
    assert again.segment == ref.segment
    with late.writing(ref) as may_write, other.writing(again) as may_write_too:
        assert not may_write
        assert may_write_too


def test_a_block_that_others_may_still_write_is_not_lent_again() -> None:
    arena, reader = Arena(budget_bytes=1 << 26), ArenaReader(os.getpid())
    ref, memory = opened(arena)
    view = reader.view(ref)
    del view, memory
    block = arena.allocate(SIZE)
    assert block is not None
    assert arena.publish(block).segment != ref.segment


def test_an_open_block_of_a_dead_process_is_not_written() -> None:
    with writer() as remote:
        reader, shared = ArenaReader(remote.pid), SharedBlocks(remote.pid)
        ref = remote.write(SIZE, 1)
        view = reader.view(ref)
        shared.view(ref)
    assert not reader.end_writing(ref)
    with shared.writing(ref) as may_write:
        assert not may_write
    assert bool(np.all(view == 1))


def test_nothing_is_left_behind() -> None:
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        arena, reader = Arena(budget_bytes=1 << 26), ArenaReader(os.getpid())
        for nbytes in (SIZE, 2 * SIZE, 3 * SIZE):
            block = arena.allocate(nbytes)
            assert block is not None
            reader.view(arena.publish(block))
        del arena, reader, block
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert mappings() == 0
