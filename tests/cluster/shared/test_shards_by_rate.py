"""Shards that come and go by themselves while jobs read, as the law decides by what threads really do.

The law is tested by itself, in `tests/cluster/control/test_shard_scaling.py`. Its thresholds are lower here: two jobs
of free samples keep a shard's thread busy, but for how much of the time depends on what else the host does.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.shared_cluster import TestCluster, open_job, wait
from tests.shared_datasets import Numbers
from torch_dpflow.cli.main import root
from torch_dpflow.cluster.client.open_job import JobOptions, SharedJob

#: A law that needs little to change the number of shards.
QUICK_LAW = """
from torch_dpflow.cluster.control import shard_scaling

shard_scaling.FULL = shard_scaling.NEARLY_FULL = shard_scaling.LOW = 0.04
shard_scaling.WINDOW_S, shard_scaling.SETTLE_S, shard_scaling.DOWN_S = 1.5, 0.5, 2.0
"""
SAMPLES, BATCH = 960, 8


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TestCluster]:
    started = TestCluster.start(tmp_path, first=QUICK_LAW)
    yield started
    started.stop()


class Reader:
    """A job that reads epoch after epoch in a thread, as fast as it can or slowly."""

    def __init__(self, cluster: TestCluster, name: str) -> None:
        self.fast, self.enough = threading.Event(), threading.Event()
        self.fast.set()
        self.batches = 0
        self.epochs: list[list[int]] = []
        options = JobOptions(name=name, idle_s=3.0)
        given: Any = {"batch_size": BATCH, "workers": 2, "seed": len(name)}
        self.job: SharedJob = open_job("free", Numbers(SAMPLES), address=cluster.address, options=options, **given)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self.enough.is_set():
                self.epochs.append([])
                for _, keys in self.job.traverse(len(self.epochs) - 1):
                    self.epochs[-1] += keys.tolist()
                    self.batches += 1
                    if not self.fast.is_set():
                        self.fast.wait(0.25)
        except BaseException as error:
            self.error = error

    def finish(self) -> None:
        """End it after its epoch; each one must have had every sample once."""
        self.fast.set()
        self.enough.set()
        self._thread.join()
        self.job.close()
        if self.error is not None:
            raise self.error
        for epoch, order in enumerate(self.epochs):
            assert sorted(order) == list(range(SAMPLES)), f"epoch {epoch}"


def shards(cluster: TestCluster) -> dict[str, int]:
    """The process of each shard."""
    return {view.id: view.pid for view in cluster.processes("/shard-") if view.role == "shard"}


def limited_by(cluster: TestCluster) -> str:
    """The limit of the only flow, as `dpflow top` prints it."""
    result = CliRunner().invoke(root, ["top", "--count", "1", "--json", "--address", cluster.address])
    assert result.exit_code == 0, result.output
    (flow,) = json.loads(result.output)["flows"]
    assert isinstance(flow["limited_by"], str)
    return flow["limited_by"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a host of one processor has one shard")
def test_a_flow_whose_shard_is_the_limit_gets_another_and_gives_it_back(cluster: TestCluster) -> None:
    readers = [Reader(cluster, name) for name in ("a", "bb")]

    def all_read_on() -> None:
        before = [one.batches for one in readers]
        wait(
            lambda: (
                any(one.error for one in readers)
                or all(one.batches >= count + 5 for one, count in zip(readers, before))
            ),
            what="further batches",
        )

    try:
        all_read_on()
        flow = cluster.flows()["free:v1"]
        assert flow.spec.shards is None
        wait(lambda: len(shards(cluster)) >= 2, what="a second shard")
        wait(lambda: limited_by(cluster) == readers[0].job.limited_by == "shard", what="the limit: it has two workers")
        found, killed = shards(cluster), cluster.kill("coordinator")
        wait(lambda: cluster.process("coordinator").pid != killed, what="another coordinator")
        wait(lambda: limited_by(cluster) == "shard", what="what that one has measured")
        assert shards(cluster) == found, "it goes on with the number of the first"
        all_read_on()
        for one in readers:
            one.fast.clear()
        wait(lambda: len(shards(cluster)) == 1, what="one shard again")
        all_read_on()
    finally:
        for one in readers:
            one.enough.set()
            one.fast.set()
    for one in readers:
        one.finish()
    assert cluster.owning_shards() == [2, 1]
