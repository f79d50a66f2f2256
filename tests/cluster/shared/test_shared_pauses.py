"""Jobs that stop reading, for a while or for good, keep no room of a small flow from those that read on."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.shared_cluster import TestCluster, wait
from tests.shared_datasets import Numbers
from torch_dpflow import DPFlowDataLoader, JobOptions

SIZE = 24
#: A sample is 1.2 MB, and three of them have room.
WIDTH, ROOM = 300_000, 4 << 20
ORDERS = pytest.mark.parametrize(
    "order", [{"shuffle": True}, {"sampler": list(range(SIZE))}], ids=["routed", "planned"]
)


@pytest.fixture
def open_loader(cluster: TestCluster, flow: str) -> Any:
    def opened(**order: Any) -> Any:
        options = JobOptions(memory_bytes=ROOM, idle_s=3.0)
        given: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "address": cluster.address}
        return DPFlowDataLoader(Numbers(SIZE, width=WIDTH), flow=flow, job=options, **given, **order)

    return opened


def keys(batches: Any) -> list[int]:
    return [int(key) for _, labels in batches for key in labels]


def begin(loader: Any) -> Any:
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    return batches


@ORDERS
def test_a_job_that_pauses_leaves_room_and_reads_on(open_loader: Any, order: dict[str, Any]) -> None:
    paused = begin(open_loader(**order))
    assert sorted(keys(open_loader(shuffle=True))) == list(range(SIZE))
    assert len(keys(paused)) == SIZE - 4


@ORDERS
def test_an_iterator_that_is_dropped_leaves_room(open_loader: Any, order: dict[str, Any]) -> None:
    kept = open_loader(**order)
    del_me = begin(kept)
    del del_me
    assert sorted(keys(open_loader(shuffle=True))) == list(range(SIZE))
    assert sorted(keys(kept)) == list(range(SIZE)), "the loader itself can be read again"


@ORDERS
def test_a_loader_that_is_dropped_in_mid_epoch_leaves_no_thread(open_loader: Any, order: dict[str, Any]) -> None:
    before = {thread.ident for thread in threading.enumerate()}
    begin(open_loader(**order))
    wait(
        lambda: not {thread.ident for thread in threading.enumerate()} - before,
        what="the end of the job's threads",
    )
