"""The word that tells which task a worker is at, also after the worker's death."""

from __future__ import annotations

import os

import msgspec
import pytest

from tests.new_process import interpreter
from torch_dpflow.ipc.memory.arena import Arena, RunningTask, RunningTaskReader
from torch_dpflow.ipc.memory.arena_reader import ArenaReader
from torch_dpflow.ipc.messages.headers import BlockRef


def pair() -> tuple[RunningTask, RunningTaskReader, Arena]:
    """Both ends in this process."""
    arena = Arena(budget_bytes=1 << 20)
    running = RunningTask(arena)
    reader = RunningTaskReader.open(ArenaReader(os.getpid()), running.ref)
    assert reader is not None
    return running, reader, arena


@pytest.mark.parametrize("task", [0, 1, 1 << 40, (1 << 63) - 1])
def test_what_is_noted_is_read(task: int) -> None:
    running, reader, _ = pair()
    assert reader.tasks() == ()
    running.note(task)
    assert reader.tasks() == (task,)
    running.note(None)
    assert reader.tasks() == ()


WORKER = """
import signal, sys, msgspec
from torch_dpflow.ipc.memory.arena import Arena
from torch_dpflow.ipc.memory.arena import RunningTask

arena = Arena(budget_bytes=1 << 20)
running = RunningTask(arena)
running.note(7)
print(msgspec.json.encode(running.ref).decode(), flush=True)
signal.pause()
"""


def test_it_outlives_a_worker_that_is_killed() -> None:
    with interpreter(WORKER) as worker:
        assert worker.stdout is not None
        ref = msgspec.json.decode(worker.stdout.readline(), type=BlockRef)
        reader = RunningTaskReader.open(ArenaReader(worker.pid), ref)
        worker.kill()
    assert reader is not None
    assert reader.tasks() == (7,)


def test_without_shared_memory_nothing_is_told() -> None:
    running = RunningTask(None)
    running.note(3)
    assert running.ref is None
    assert RunningTaskReader.open(ArenaReader(os.getpid()), None) is None


def test_what_cannot_be_read_is_left_alone() -> None:
    running, reader, _ = pair()
    assert running.ref is not None
    own = ArenaReader(os.getpid())
    assert RunningTaskReader.open(own, msgspec.structs.replace(running.ref, nbytes=4)) is None
    assert RunningTaskReader.open(own, msgspec.structs.replace(running.ref, fd=999_999)) is None
    running.note(5)
    assert reader.tasks() == (5,)
