"""One fault at a time, of every kind, under jobs that read steadily: how long they wait, by kind::

.venv/bin/python -m pytest -m slow -s tests/chaos/test_single_faults.py
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.chaos.chaos_jobs import ChaosJob, Nursery
from tests.chaos.faults import Fault
from tests.chaos.stalls import stalls_of, table
from tests.shared_cluster import TestCluster, wait
from tests.worker_cases import has_ended

KILLS = ("worker", "shard", "router", "coordinator", "fork server") * 4
FREEZES = ("worker", "shard", "router", "coordinator")
FORK_SERVER = "fork server"


def find(cluster: TestCluster, role: str) -> tuple[int, str]:
    """A process of this role, and its id."""
    if role == FORK_SERVER:
        return cluster.fork_server(), role
    view = next(view for view in cluster.running() if view.role == role)
    return view.pid, view.id


def is_whole(cluster: TestCluster, roles: dict[str, int]) -> bool:
    """Whether as many of each role run as before, and services can be reached."""
    views = [view for view in cluster.running() if view.address or view.role == "worker"]
    return all(sum(view.role == role for view in views) == count for role, count in roles.items())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_fault_at_a_time(cluster: TestCluster, nursery: Nursery, tmp_path: Path) -> None:
    jobs = [
        ChaosJob.start(
            nursery,
            cluster,
            tmp_path,
            flow="chaos/single",
            number=number,
            size=1000,
            epochs=1,
            endless=True,
            cost_s=0.003,
            step_s=0.02,
        )
        for number in range(2)
    ]
    wait(lambda: all(job.batches() >= 10 for job in jobs), what="the first batches")
    began, faults = time.monotonic(), []
    count = {role: sum(view.role == role for view in cluster.running()) for role in FREEZES}
    for action, roles, number in (("kill", KILLS, signal.SIGKILL), ("freeze", FREEZES, signal.SIGSTOP)):
        for role in roles:
            pid, id = find(cluster, role)
            os.kill(pid, number)
            faults.append(Fault(action, role, id, time.monotonic(), time.monotonic()))
            wait(lambda pid=pid: has_ended(pid), what=f"the end of {id}")
            wait(lambda: is_whole(cluster, count), what=f"what comes after {id}")
            before = [job.batches() for job in jobs]
            wait(
                lambda before=before: all(job.batches() > seen + 20 for job, seen in zip(jobs, before)),
                what="further batches",
            )
    (tmp_path / "enough").touch()
    epochs = sum(job.finish() for job in jobs)
    print(f"\n{epochs} epochs, each sample once\n{table(stalls_of(jobs, faults), faults, began)}")
