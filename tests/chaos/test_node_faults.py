"""What befalls a node itself: its fork server is killed or hangs, or it may have only so many files open."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from tests.chaos.chaos_jobs import ChaosJob, Nursery
from tests.shared_cluster import TestCluster, wait
from tests.worker_cases import has_ended
from torch_dpflow.cluster.messages.node import ProcessView


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_fork_server_that_is_killed_or_hangs_takes_nobody_along(
    cluster: TestCluster, nursery: Nursery, tmp_path: Path, number: signal.Signals
) -> None:
    job = ChaosJob.start(
        nursery, cluster, tmp_path, flow="chaos/flow", number=0, size=400, epochs=1, endless=True, step_s=0.01
    )
    wait(lambda: job.batches() >= 5, what="the first batches")
    wait(lambda: len(cluster.processes()) == 5, what="the second worker")
    before = {view.id: view for view in cluster.processes()}
    os.kill(cluster.fork_server(), number)
    killed = cluster.kill("/worker-0")
    wait(lambda: has_ended(killed), what="the worker's end")
    wait(
        lambda: any(view.pid != killed for view in cluster.processes("/worker-0")),
        what="another worker, from another fork server",
    )
    after = {view.id: view for view in cluster.processes()}
    (replaced,) = [id for id in before if after[id].pid != before[id].pid]
    assert replaced.endswith("/worker-0")
    assert [id for id in after if after[id].restarts > before[id].restarts] == [replaced]
    (tmp_path / "enough").touch()
    job.finish()


def test_a_node_runs_no_more_workers_than_its_limit_of_open_files_allows(nursery: Nursery, tmp_path: Path) -> None:
    cluster = TestCluster.start(tmp_path, descriptors=112)
    try:
        job = ChaosJob.start(
            nursery, cluster, tmp_path, flow="chaos/flow", number=0, size=160, epochs=1, workers=40, shards=8
        )
        job.finish()
        assert 2 <= len(cluster.processes("/worker-")) <= 6
    finally:
        cluster.stop()


def service_of(cluster: TestCluster, part: str) -> ProcessView:
    """As the node knows it: others may not reach a coordinator that takes no connections."""
    return next(view for view in cluster.running() if part in view.id and view.role != "worker")


def worker_of(cluster: TestCluster) -> int:
    """The pid of the first worker. One that has ended is listed until the node has reaped it."""
    found: list[int] = []

    def is_there() -> bool:
        listed = [view.pid for view in cluster.running() if view.id.endswith("/worker-0")]
        found[:] = [pid for pid in listed if not has_ended(pid)]
        return bool(found)

    wait(is_there, what="the worker")
    return found[0]


# A router serves as a coordinator does, and takes another cluster's time.
@pytest.mark.parametrize("parts", [("/shard-000", "coordinator"), pytest.param(("/router",), marks=pytest.mark.slow)])
def test_a_service_without_descriptors_lives_on(
    cluster: TestCluster, nursery: Nursery, tmp_path: Path, parts: tuple[str, ...]
) -> None:
    job = ChaosJob.start(
        nursery, cluster, tmp_path, flow="chaos/flow", number=0, size=400, epochs=1, endless=True, step_s=0.01
    )
    wait(lambda: job.batches() >= 5, what="the first batches")
    before = {part: service_of(cluster, part) for part in parts}
    for service in before.values():
        killed = worker_of(cluster)
        logged = len(cluster.log.read_text())
        descriptors = len(os.listdir(f"/proc/{service.pid}/fd"))
        limits = resource.prlimit(service.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(service.pid, resource.RLIMIT_NOFILE, (descriptors, limits[1]))
        # Its successor cannot connect to the shard for now; nor can other jobs to the others.
        os.kill(killed, signal.SIGKILL)
        wait(lambda killed=killed: has_ended(killed), what="the worker's end")
        wait(
            lambda logged=logged: "too many open files" in cluster.log.read_text()[logged:],
            what="a line that says so",
        )
        seen = job.batches()
        wait(lambda seen=seen: job.batches() > seen, what="further batches")
        resource.prlimit(service.pid, resource.RLIMIT_NOFILE, limits)
    (tmp_path / "enough").touch()
    job.finish()
    assert {part: service_of(cluster, part).pid for part in parts} == {
        part: service.pid for part, service in before.items()
    }


@pytest.mark.slow
def test_a_storm_of_starts_takes_nobody_for_silent(cluster: TestCluster, nursery: Nursery, tmp_path: Path) -> None:
    job = ChaosJob.start(
        nursery, cluster, tmp_path, flow="chaos/flow", number=0, size=2000, epochs=1, endless=True, workers=32
    )
    wait(lambda: job.batches() >= 5, what="the first batches")
    wait(
        lambda: sum(bool(view.status.get("up")) for view in cluster.running()) == 32,
        what="all workers",
    )
    assert [view.id for view in cluster.running() if view.restarts] == []
    assert "no heartbeat" not in cluster.log.read_text()
    (tmp_path / "enough").touch()
    job.finish()
