"""Services and closed jobs keep nothing of what has been read."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.shared_cluster import TestCluster, wait
from tests.shared_datasets import Numbers
from torch_dpflow.cluster.client.open_job import SharedJob

Join = Callable[..., SharedJob]
SIZE = 120_000
#: What a service may come to keep between a third of the epoch and its end, bytes: an object for each sample would
#: be ten times as much.
GROWTH = 5 << 20


@pytest.fixture(scope="module")
def cluster(cluster_of_file: TestCluster) -> TestCluster:
    return cluster_of_file


@pytest.mark.slow
def test_services_do_not_grow_with_what_two_jobs_read(cluster: TestCluster, join: Join, flow: str) -> None:
    jobs = [join(flow, Numbers(SIZE), batch_size=64, seed=seed, workers=2) for seed in range(2)]
    reached, measured = threading.Barrier(3), threading.Barrier(3)
    counts = [0, 0]

    def read(number: int) -> None:
        for keys, _ in jobs[number].traverse(0):
            before, counts[number] = counts[number], counts[number] + len(keys)
            if before < SIZE // 3 <= counts[number]:
                reached.wait()
                measured.wait()

    readers = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for reader in readers:
        reader.start()
    reached.wait()
    before = memory_of(cluster)
    measured.wait()
    for reader in readers:
        reader.join()
    after = memory_of(cluster)
    assert counts == [SIZE, SIZE]
    growth = {id: after[id] - before[id] for id in before if id in after}
    assert any("shard" in id for id in growth)
    assert {id: size for id, size in growth.items() if size > GROWTH} == {}


def test_a_job_that_is_closed_in_mid_epoch_maps_no_samples(cluster: TestCluster, join: Join, flow: str) -> None:
    def mapped() -> set[str]:
        return {line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line}

    before = mapped()
    job = join(flow, Numbers(100_000, width=512), batch_size=5000, workers=1, shards=1)
    batches = job.traverse(0)
    next(batches)
    wait(lambda: mapped() > before, what="samples in shared memory")
    job.close()
    # A call that is interrupted by the close leaves a cycle of an exception and its frames.
    wait(lambda: gc.collect() >= 0 and mapped() <= before, what="the memory of the job's samples to be unmapped")
    assert job.is_read is False


def memory_of(cluster: TestCluster) -> dict[str, int]:
    """Bytes of its own memory of every process of the cluster, by id."""
    return {view.id: psutil.Process(view.pid).memory_full_info().uss for view in cluster.processes()}
