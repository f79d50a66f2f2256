"""The end of a job: from any thread, twice, and by the garbage collector wherever that runs."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import FrameType
from typing import Any

import pytest

from tests.shared_cluster import TestCluster, open_job, wait
from tests.shared_datasets import Numbers
from torch_dpflow import DPFlowDataLoader, JobOptions
from torch_dpflow.cluster.client import shared_job
from torch_dpflow.cluster.client.open_job import SharedJob
from torch_dpflow.cluster.client.shard_link import ShardLinks
from torch_dpflow.errors import UsageError

Make = Callable[..., DPFlowDataLoader[Any]]


@pytest.fixture
def make(cluster: TestCluster, flow: str) -> Make:
    def make(**arguments: Any) -> DPFlowDataLoader[Any]:
        job = JobOptions(idle_s=60.0)
        return DPFlowDataLoader(
            Numbers(60), batch_size=2, flow=flow, address=cluster.address, job=job, num_workers=2, **arguments
        )

    return make


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Garbage stays until a test has it collected."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def begin_and_drop(loader: DPFlowDataLoader[Any]) -> Any:
    """Read a batch, and put the loader and its iterator out of reach, in a circle; what it was read by."""
    iterator: Any = iter(loader)
    next(iterator)
    iterator.circle = [loader, iterator]
    return iterator._batches


def threads_of_jobs() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in ("dpflow-heartbeat", "dpflow-read")]


def await_leaving(cluster: TestCluster, flow: str) -> None:
    """Wait until the threads have ended and the job has left: its lease would last for longer."""
    wait(lambda: not threads_of_jobs(), what="the threads' end")
    wait(lambda: not cluster.flows()[f"{flow}:v1"].jobs, what="the job's leaving")


def test_a_loader_collected_in_its_own_reading_thread_leaves(
    cluster: TestCluster, flow: str, make: Make, uncollected: None
) -> None:
    dropped, batches = threading.Event(), list[int]()

    def collate(samples: list[Any]) -> int:
        batches.append(len(samples))
        if len(batches) == 2:
            assert dropped.wait(150)
            gc.collect()
        return len(samples)

    begin_and_drop(make(collate_fn=collate))
    dropped.set()
    await_leaving(cluster, flow)


def test_a_loader_collected_in_its_heartbeat_leaves(
    cluster: TestCluster, flow: str, make: Make, uncollected: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_heartbeat = ShardLinks.send_heartbeat

    def collecting(links: ShardLinks, *job: Any) -> None:
        gc.collect()
        send_heartbeat(links, *job)

    monkeypatch.setattr(ShardLinks, "send_heartbeat", collecting)
    begin_and_drop(make())
    await_leaving(cluster, flow)


def test_a_loader_collected_by_a_thread_that_holds_its_locks_leaves(
    cluster: TestCluster, flow: str, make: Make, uncollected: None
) -> None:
    batches = begin_and_drop(make())
    router, links = batches._router, batches._links

    def collect() -> None:
        with ExitStack() as held:
            held.enter_context(router._lock)
            held.enter_context(links._lock)
            for client in (router._router, *links._clients.values()):
                held.enter_context(client._changed)
            gc.collect()

    collector = threading.Thread(target=collect, daemon=True)
    collector.start()
    collector.join(150)
    assert not collector.is_alive()
    await_leaving(cluster, flow)


def test_a_job_is_closed_by_many_threads_and_by_its_own(cluster: TestCluster, flow: str) -> None:
    jobs: list[SharedJob] = []

    def collate(samples: list[Any]) -> int:
        if jobs:
            jobs[0].close()
        return len(samples)

    job = open_job(flow, Numbers(60), address=cluster.address, batch_size=2, collate_fn=collate)
    reading = job.traverse(0)
    next(reading)
    jobs.append(job)
    closers = [threading.Thread(target=job.close) for _ in range(3)]
    for thread in closers:
        thread.start()
    for thread in closers:
        thread.join()
    job.close()
    assert not threads_of_jobs()
    with pytest.raises(UsageError, match="its job was closed"):
        for _ in reading:
            pass


def test_a_job_is_abandoned_at_any_line_of_an_epochs_beginning(cluster: TestCluster, flow: str) -> None:
    """As by a finalizer: what is begun then ends by itself, and says that its job was closed."""
    line = 0
    while True:
        job = open_job(flow, Numbers(60), address=cluster.address, batch_size=2)
        next(job.traverse(0))
        with AtLine(line, job.abandon) as abandoning:
            try:
                reading = job.traverse(1)
            except UsageError:
                reading = None
        if not abandoning.done:
            break
        wait(lambda: not threads_of_jobs(), what="the threads' end")
        if reading is not None:
            with pytest.raises(UsageError, match="its job was closed"):
                list(reading)
        line += 1
    job.close()
    assert line > 10


class AtLine:
    """Calls something at the n-th line of the job's own code that this thread runs."""

    def __init__(self, line: int, call: Callable[[], None]) -> None:
        self._left, self._call, self.done = line, call, False

    def __enter__(self) -> AtLine:
        sys.settrace(self._step)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != shared_job.__file__:
            return None
        if event == "line" and not self.done:
            self.done = self._left == 0
            self._left -= 1
            if self.done:
                self._call()
        return self._step
