"""How a worker's results go out: alone, together, or late."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torch_dpflow.cluster.messages.shard import SAMPLE
from torch_dpflow.ipc.messages.headers import Exchange, Window, WorkerHandshake, decode
from torch_dpflow.ipc.messages.headers import encode as encode_header
from torch_dpflow.ipc.serialization.codec import decode as decode_payload
from torch_dpflow.ipc.serialization.codec import encode
from torch_dpflow.ipc.transport import Listener, connect, listen
from torch_dpflow.workers.task_worker import MAX_BYTES, MAX_FRAMES, MAX_RESULTS, ResultOutbox, TaskWorker

Message = tuple[list[int], int | None, int]


class Shard:
    """What hears a worker, and its outbox."""

    def __init__(self, listener: Listener, hold_s: float, late_s: float) -> None:
        self._listener = listener
        self._connection = connect(listener.address)
        self.outbox = ResultOutbox(self._connection, hold_s=hold_s, late_s=late_s)

    def add(self, task: int, *, hold: bool = True, frames: int = 1, value: object = None) -> None:
        table, own = encode(value)
        table = type(table)(len(own) + frames - 1, table.blocks, table.head, table.buffers)
        self.outbox.add(task, SAMPLE, table, [*own, *[b"x"] * (frames - 1)], task + 1, hold=hold)

    def heard(self, wait_s: float = 30.0) -> Message | None:
        """The tasks of the next message, what it says is begun, and its frames."""
        frames = self.receive(wait_s)
        if not frames:
            return None
        header = decode(frames[0])
        assert isinstance(header, Exchange)
        return [task for one in header.finished for task in one.numbers], header.started, len(frames) - 1

    def receive(self, wait_s: float = 30.0) -> list[memoryview]:
        """The frames of the next message; none if none comes."""
        message = self._listener.receive(wait_s)
        return [] if message is None else message[1]

    def close(self) -> None:
        self.outbox.close()
        self._connection.close()
        self._listener.close()


#: Longer than any test, seconds; not more than a thread can wait.
FOREVER_S = 1e6


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[float, float], Shard]]:
    """Opens a shard whose worker's results wait so long, and go so late."""
    shards: list[Shard] = []

    def open_shard(hold_s: float, late_s: float) -> Shard:
        shards.append(Shard(listen(f"ipc://{tmp_path}/{secrets.token_hex(4)}"), hold_s, late_s))
        return shards[-1]

    yield open_shard
    for shard in shards:
        shard.close()


@pytest.fixture
def shard(opened: Callable[[float, float], Shard]) -> Shard:
    return opened(FOREVER_S, FOREVER_S)


def test_the_first_goes_at_once_and_those_that_follow_go_together(shard: Shard) -> None:
    for task in range(1 + MAX_RESULTS):
        shard.add(task)
    assert shard.heard() == ([0], 1, 1)
    assert shard.heard() == (list(range(1, 1 + MAX_RESULTS)), 1 + MAX_RESULTS, MAX_RESULTS)


def test_one_that_may_not_wait_takes_along_those_that_do(shard: Shard) -> None:
    shard.add(0)
    shard.add(1)
    shard.add(2, hold=False)
    assert shard.heard() == ([0], 1, 1)
    assert shard.heard() == ([1, 2], 3, 2)


def test_slow_results_do_not_wait(opened: Callable[[float, float], Shard]) -> None:
    shard = opened(0.0, FOREVER_S)
    for task in range(3):
        shard.add(task)
        assert shard.heard() == ([task], task + 1, 1)


def test_what_waits_goes_when_the_next_takes_long(opened: Callable[[float, float], Shard]) -> None:
    shard = opened(FOREVER_S, 0.001)
    shard.add(0)
    assert shard.heard() == ([0], 1, 1)
    shard.add(1)
    assert shard.heard() == ([1], 2, 1)


def test_a_flush_says_that_nothing_is_left_to_do(shard: Shard) -> None:
    shard.add(0)
    shard.add(1)
    shard.outbox.flush()
    assert shard.heard() == ([0], 1, 1)
    assert shard.heard() == ([1], None, 1)
    shard.outbox.flush()
    assert shard.heard() == ([], None, 0)


def test_many_frames_do_not_go_together(shard: Shard) -> None:
    shard.add(0)
    shard.add(1, frames=MAX_FRAMES)
    shard.add(2, frames=2)
    assert shard.heard() == ([0], 1, 1)
    assert shard.heard() == ([1], 2, MAX_FRAMES)
    shard.outbox.flush()
    assert shard.heard() == ([2], None, 2)


def test_many_bytes_do_not_wait(shard: Shard) -> None:
    shard.add(0)
    shard.add(1, value=bytes(100))
    shard.add(2, value=bytes(MAX_BYTES))
    shard.add(3)
    assert shard.heard() == ([0], 1, 1)
    assert shard.heard() == ([1, 2], 3, 3)


def test_nothing_is_sent_after_the_end(shard: Shard) -> None:
    shard.add(0)
    shard.add(1)
    assert shard.heard() == ([0], 1, 1)
    shard.outbox.close()
    assert shard.heard(wait_s=0) is None


@pytest.mark.parametrize("hold", [True, False])
@pytest.mark.parametrize("kind", [np.ones, torch.ones])
def test_a_result_does_not_change_with_memory_that_the_dataset_uses_again(
    shard: Shard, kind: Callable[[int], Any], hold: bool
) -> None:
    shard.add(0)
    shard.heard()
    sample = kind(1 << 20)
    table, frames = encode(sample)
    shard.outbox.add(1, SAMPLE, table, frames, None, hold=hold)
    sample[:] = 7
    shard.outbox.flush()
    received = shard.receive()
    assert (decode_payload(table, received[1:]) == 1).all()


class QuickWorker(TaskWorker):
    """Whose results only wait, until its rules send them."""

    def __init__(self, address: str, min_group: int) -> None:
        super().__init__(connect(address, identity=b"0"), 0, 0, 1 << 20, None)
        self._outbox = ResultOutbox(self._connection, hold_s=FOREVER_S, late_s=FOREVER_S)
        self.min_group = min_group

    def _load(self, task: int, payload: memoryview) -> None:
        table, frames = encode(task)
        self._outbox.add(task, SAMPLE, table, frames, None, hold=self._may_hold())

    def close(self) -> None:
        self._outbox.close()
        self._connection.close()


@pytest.mark.parametrize(
    ("min_group", "window", "groups"), [(8, 20, [10, 10]), (8, 15, [8, 7]), (8, 14, [14]), (8, 1, [1]), (1, 14, [7, 7])]
)
def test_half_a_window_goes_first_unless_it_is_small(
    tmp_path: Path, min_group: int, window: int, groups: list[int]
) -> None:
    listener = listen(f"ipc://{tmp_path}/shard")
    worker = QuickWorker(listener.address, min_group)

    def heard() -> Any:
        message = listener.receive(30.0)
        assert message is not None
        return decode(message[1][0])

    try:
        worker.begin()
        assert isinstance(heard(), WorkerHandshake)
        for tasks, sizes in (([0], [1]), (list(range(1, 1 + window)), groups)):
            assert listener.send(b"0", [encode_header(Window(tasks, [])), *[b"task"] * len(tasks)])
            for _ in tasks:  # a step is one task, as this worker looks at its messages after each
                worker.step()
            finished = [heard().finished for _ in sizes]
            assert [sum(len(one.numbers) for one in message) for message in finished] == sizes
    finally:
        worker.close()
        listener.close()
