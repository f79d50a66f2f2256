"""Whatever process of a cluster dies or freezes, every job gets every sample of its epochs once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.chaos.chaos_jobs import ChaosJob, Nursery
from tests.shared_cluster import TestCluster, wait
from tests.worker_cases import has_ended


def begin(nursery: Nursery, cluster: TestCluster, folder: Path, jobs: int = 2, **options: float) -> list[ChaosJob]:
    given: dict[str, object] = {"size": 600, "epochs": 2, **options}
    started = [
        ChaosJob.start(nursery, cluster, folder, flow="chaos/flow", number=number, **given) for number in range(jobs)
    ]
    wait(lambda: all(job.batches() >= 10 for job in started), what="the first batches")
    return started


def test_each_service_and_a_worker_can_be_killed_while_jobs_read(
    cluster: TestCluster, nursery: Nursery, tmp_path: Path
) -> None:
    jobs = begin(nursery, cluster, tmp_path, size=300, epochs=1, endless=True, cost_s=0.003)
    for part in ("/worker-0", "/shard-000", "/router", "coordinator"):
        before = max(job.batches() for job in jobs)
        pid = cluster.kill(part) if part != "/shard-000" else kill_shard(cluster)
        wait(lambda pid=pid: has_ended(pid), what=f"the end of {part}")
        wait(lambda before=before: max(job.batches() for job in jobs) >= before + 3, what="further batches")
    (tmp_path / "enough").touch()
    for job in jobs:
        job.finish()


def kill_shard(cluster: TestCluster) -> int:
    shard = cluster.process("/shard-000", role="shard")
    os.kill(shard.pid, signal.SIGKILL)
    return shard.pid


@pytest.mark.slow
def test_a_worker_that_is_frozen_is_overtaken(cluster: TestCluster, nursery: Nursery, tmp_path: Path) -> None:
    (job,) = begin(nursery, cluster, tmp_path, jobs=1, epochs=1, endless=True, workers=2, step_s=0.005)
    wait(lambda: figure(cluster, "working") == 2, what="both workers at their shard")
    frozen = cluster.kill("/worker-0", signal.SIGSTOP)
    try:
        wait(lambda: figure(cluster, "overtaken"), what="samples that are given to a second worker")
        (tmp_path / "enough").touch()
        job.finish()
    finally:
        if not has_ended(frozen):
            os.kill(frozen, signal.SIGCONT)


def figure(cluster: TestCluster, name: str) -> object:
    """What the shard's status tells."""
    return cluster.process("/shard-000", role="shard").status.get(name)


@pytest.mark.slow
def test_a_job_that_is_killed_holds_nobody_up(cluster: TestCluster, nursery: Nursery, tmp_path: Path) -> None:
    jobs = begin(nursery, cluster, tmp_path, jobs=3)
    jobs.pop().kill()
    for job in jobs:
        job.finish()
    wait(lambda: status(cluster, "/router")["jobs"] == 0, what="the end of the dead job's lease")


def status(cluster: TestCluster, part: str) -> dict[str, object]:
    found = cluster.processes(part)
    return found[0].status if found and found[0].status else {"jobs": -1}


@pytest.mark.slow
def test_a_job_that_freezes_for_longer_than_its_lease_goes_on_where_it_was(
    cluster: TestCluster, nursery: Nursery, tmp_path: Path
) -> None:
    jobs = begin(nursery, cluster, tmp_path, epochs=1)
    frozen = jobs[0]
    frozen.signal(signal.SIGSTOP)
    jobs[1].finish()
    wait(lambda: status(cluster, "/router")["jobs"] == 0, what="the end of the frozen job's lease")
    frozen.signal(signal.SIGCONT)
    frozen.finish()


def test_a_cluster_that_ends_leaves_nothing(cluster: TestCluster, nursery: Nursery, tmp_path: Path) -> None:
    (job,) = begin(nursery, cluster, tmp_path, jobs=1)
    wait(lambda: len(cluster.processes()) == 5, what="the second worker")
    pids = [view.pid for view in cluster.processes()]
    cluster.stop()
    wait(lambda: all(map(has_ended, pids)), what="the end of every process")
    assert not Path(cluster.address).exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("dpflow-")] == []
    job.kill()


@pytest.mark.slow
def test_the_processes_of_a_node_that_is_killed_end_by_themselves(
    cluster: TestCluster, nursery: Nursery, tmp_path: Path
) -> None:
    (job,) = begin(nursery, cluster, tmp_path, jobs=1)
    pids = [view.pid for view in cluster.processes()]
    os.kill(cluster.pid, signal.SIGKILL)
    wait(lambda: all(map(has_ended, pids)), what="the end of every process")
    wait(
        lambda: sorted(path.name for path in tmp_path.iterdir()) == ["connection", "job-0", "log"],
        what="the end of its directory",
    )
    job.kill()
