"""Workers that end before they can load anything: when what waits for them is given up, and when it is not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster.shard.driven_workers import Workers
from torch_dpflow.cluster.cache.objects import Load
from torch_dpflow.cluster.messages.shard import FAILED, SAMPLE, WORKERLESS
from torch_dpflow.cluster.shard.workers import OUTAGE_S
from torch_dpflow.ipc.messages.fields import AwaitedWorkersError, LostWorkersError
from torch_dpflow.ipc.messages.headers import Exchange, Finished, WorkerHandshake, WorkerReady, encode
from torch_dpflow.ipc.serialization.fast_path import encode_sample
from torch_dpflow.ipc.transport import connect
from torch_dpflow.workers.platform import RETRY_S


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    driven = Workers(f"ipc://{tmp_path}/shard")
    with closing(driven.listener):
        yield driven


def begin(workers: Workers, number: int, incarnation: int = 1) -> bytes:
    """A worker says hello; its connection."""
    peer = f"{number}/{incarnation}/token".encode()
    workers.shard.on_message(peer, [encode(WorkerHandshake(number, incarnation, os.getpid(), None))])
    return peer


def test_what_waits_is_given_up_until_a_worker_has_come_up(workers: Workers) -> None:
    workers.shard.load([Load(0, 0, 0)])
    for incarnation in range(3):
        assert 0 not in workers.loaded
        begin(workers, 0, incarnation)
        workers.shard.ended(0, incarnation)
        workers.turn()
    assert workers.loaded[0].kind == WORKERLESS
    peer = begin(workers, 0, 3)
    workers.shard.on_message(peer, [encode(WorkerReady())])
    workers.shard.load([Load(1, 1, 0)])
    workers.turn()
    assert 1 not in workers.loaded


def test_what_comes_later_waits_for_workers_of_its_own_time(tmp_path: Path) -> None:
    now_s = [0.0]
    workers = Workers(f"ipc://{tmp_path}/shard", clock=lambda: now_s[0])

    def end_at_start(first: int) -> None:
        for incarnation in range(first, first + 3):
            begin(workers, 0, incarnation)
            workers.shard.ended(0, incarnation)
            workers.turn()

    with closing(workers.listener):
        end_at_start(0)
        now_s[0] = RETRY_S - 1.0
        workers.shard.load([Load(0, 0, 0)])
        workers.turn()
        assert workers.loaded[0].kind == WORKERLESS
        now_s[0] = RETRY_S
        workers.shard.load([Load(1, 1, 0)])
        workers.turn()
        assert 1 not in workers.loaded
        end_at_start(3)
        assert workers.loaded[1].kind == WORKERLESS
        # One that works ends the refusal, even if it is lost soon.
        workers.shard.on_message(begin(workers, 0, 6), [encode(WorkerReady())])
        workers.turn()
        workers.shard.ended(0, 6)
        workers.shard.load([Load(2, 2, 0)])
        workers.turn()
        assert 2 not in workers.loaded


@pytest.mark.parametrize("told_first", [False, True])
def test_workers_that_are_taken_away_while_they_begin_are_no_such(workers: Workers, told_first: bool) -> None:
    workers.shard.resize(5)
    workers.shard.load([Load(0, 0, 0)])
    for number in range(5):
        begin(workers, number)
    if told_first:
        workers.shard.resize(1)
    for number in range(1, 5):
        workers.shard.ended(number, 1)
    workers.turn()
    workers.shard.resize(1)
    workers.turn()
    assert not workers.loaded


def test_the_limit_of_a_start_leaves_out_the_fetching_of_what_is_to_be_loaded(tmp_path: Path) -> None:
    now_s = [0.0]
    workers = Workers(f"ipc://{tmp_path}/shard", task_timeout_s=10.0, clock=lambda: now_s[0])
    with closing(workers.listener), ExitStack() as kept:
        workers.shard.load([Load(0, 0, 0)])
        peer = b"0/1/token"
        worker = kept.enter_context(closing(connect(f"ipc://{tmp_path}/shard", identity=peer)))
        worker.send([encode(WorkerHandshake(0, 1, os.getpid(), None))])
        workers.until(lambda: worker.receive(0.02))
        for now_s[0] in (8.0, 16.0, 24.0):
            workers.shard.on_message(peer, [encode(Exchange([], None))])
            workers.turn()
            assert not workers.to_end
        now_s[0] = 34.0
        workers.turn()
        assert workers.to_end == [(0, 1)]


class Limited:
    """Remote workers that a platform limits."""

    limited_by = shortage = importing = ""

    def resize(self, workers: int) -> None:
        """Ignored."""

    def send(self, peer: bytes, frames: object) -> bool:
        return True

    rest = resume = start_all = lambda self: None


@pytest.mark.parametrize(("limited_by", "expected"), [("platform", LostWorkersError), ("quota", AwaitedWorkersError)])
def test_workers_that_are_all_gone_are_lost_unless_they_have_to_wait_for_room(
    tmp_path: Path, limited_by: str, expected: type[Exception]
) -> None:
    now_s = [0.0]
    workers = Workers(f"ipc://{tmp_path}/shard", clock=lambda: now_s[0])
    with closing(workers.listener):
        remote: Any = Limited()
        workers.shard.use_platform(lambda: workers.shard.serve(remote))
        workers.turn()
        assert workers.shard.outage() is None
        now_s[0] = OUTAGE_S
        workers.turn()
        assert type(workers.shard.outage()) is AwaitedWorkersError, "they start"
        peer = begin(workers, 0)
        workers.shard.on_message(peer, [encode(WorkerReady())])
        workers.turn()
        assert workers.shard.outage() is None
        workers.shard.lose(0, "nothing was heard of it", had_tasks=True, may_blame=False)
        remote.limited_by, remote.shortage = limited_by, f"limited by {limited_by}: full or away"
        workers.turn()
        assert workers.shard.outage() is None
        now_s[0] += OUTAGE_S
        workers.turn()
        outage = workers.shard.outage()
        assert type(outage) is expected
        assert str(outage).endswith(f"workers of the flow run, limited by {limited_by}: full or away")
        workers.shard.resize(0)
        workers.turn()
        assert type(workers.shard.outage()) is AwaitedWorkersError, "none are to be"


def test_a_load_counts_each_time_that_a_sample_was_decoded_for_it(workers: Workers) -> None:
    peer = begin(workers, 0)
    workers.shard.on_message(peer, [encode(WorkerReady())])
    table, frames = encode_sample(torch.zeros(4))
    received = [memoryview(frame) for frame in frames]
    decoding, drawing = 2 * 1, 2 * 2 + 1  # tasks of the loads 1 and 2
    for task, kind in ((decoding, SAMPLE), (decoding, SAMPLE), (drawing, SAMPLE), (drawing, SAMPLE), (2 * 3, FAILED)):
        workers.shard.on_message(peer, [encode(Exchange([Finished([task], kind, table)], None)), *received])
    assert workers.shard.decodes == 2
