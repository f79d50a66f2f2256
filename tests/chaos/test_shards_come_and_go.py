"""Shards come and go at random while jobs read, and are killed meanwhile: nothing is lost, nothing comes twice.

Their number is set to anything from one to four, or left to the law, whose thresholds are so low here that it changes
the number often. It prints what was done::

    .venv/bin/python -m pytest -m slow -s tests/chaos/test_shards_come_and_go.py
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pytest

from tests.chaos.chaos_jobs import ChaosJob, Nursery
from tests.shared_cluster import TestCluster, wait
from torch_dpflow.cluster.messages.coordinator import FlowView, Scale
from torch_dpflow.errors import DPFlowError

#: A law that changes the number of shards at every chance.
RESTLESS_LAW = """
import os

from torch_dpflow.cluster.control import shard_scaling

os.sched_getaffinity = lambda pid: {0, 1, 2, 3}
shard_scaling.FULL = shard_scaling.NEARLY_FULL = 0.02
shard_scaling.LOW, shard_scaling.STALLED = 0.04, 0.0
shard_scaling.WINDOW_S, shard_scaling.SETTLE_S, shard_scaling.DOWN_S = 1.0, 0.0, 1.0
shard_scaling.BROUGHT, shard_scaling.LONGEST_S = -9.0, 1.0
"""
FLOW, JOBS, SIZE, ROUNDS = "chaos/shards", 4, 600, 60


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TestCluster]:
    started = TestCluster.start(tmp_path, first=RESTLESS_LAW)
    yield started
    started.stop()


def scale(cluster: TestCluster, number: int | Literal["auto"]) -> bool:
    """Set the number of shards; whether the coordinator was there to hear it."""
    with suppress(DPFlowError), cluster.coordinator() as client:
        client.call("scale", Scale(FLOW, number), reply_type=FlowView, timeout_s=3.0)
        return True
    return False


def kill(cluster: TestCluster, role: str, chance: random.Random) -> bool:
    """Kill one process of this role; whether there was one."""
    with suppress(DPFlowError, ProcessLookupError):
        views = [view for view in cluster.running(timeout_s=3.0) if view.role == role]
        if views:
            os.kill(chance.choice(views).pid, signal.SIGKILL)
            return True
    return False


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_sample_comes_once_while_shards_come_and_go(
    cluster: TestCluster, nursery: Nursery, tmp_path: Path, seed: int
) -> None:
    jobs = [
        ChaosJob.start(
            nursery,
            cluster,
            tmp_path,
            flow=FLOW,
            number=number,
            size=SIZE,
            epochs=2,
            endless=True,
            ordered=number % 4 == 3,
            cost_s=0.001,
            step_s=0.004 * number,
            shards=None,
            workers=4,
        )
        for number in range(JOBS)
    ]
    wait(lambda: all(job.batches() >= 5 for job in jobs), what="the first batches")
    chance, done, began = random.Random(seed), Counter[str](), time.monotonic()
    try:
        for _ in range(ROUNDS):
            number: int | Literal["auto"] = chance.choice((1, 2, 3, 4, "auto", "auto"))
            done[f"shards={number}"] += scale(cluster, number)
            for role in chance.choice(((), ("shard",), ("shard", "shard"), ("shard", "coordinator"), ("router",))):
                time.sleep(chance.uniform(0.0, 1.0))
                done[f"kill {role}"] += kill(cluster, role, chance)
            time.sleep(chance.uniform(0.2, 2.5))
            failed = [job.error() for job in jobs if job.has_failed]
            assert not failed, failed[0]
    finally:
        (tmp_path / "enough").touch()
    epochs = sum(job.finish(timeout_s=300) for job in jobs)
    numbers = cluster.owning_shards()
    changes = sum(before != after for before, after in zip([1, *numbers], numbers))
    print(f"\n{time.monotonic() - began:.0f} s, {JOBS} jobs, {epochs} epochs of {SIZE} samples: 0 missing, 0 twice")
    print(f"the number of shards changed {changes} times, to {dict(sorted(Counter(numbers).items()))}")
    print(dict(sorted(done.items())))
    assert done["kill shard"] >= ROUNDS / 4
    assert changes >= ROUNDS / 4
