"""A job on another host, over tcp with CURVE, whose link is cut in mid-epoch: it goes on, each sample once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.chaos_jobs import ChaosJob, Nursery
from tests.shared_cluster import TestCluster, wait
from tests.support.hosts import Host, Hosts

pytestmark = pytest.mark.hosts


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """This host, as another one sees it."""
    with Hosts(1) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def elsewhere(hosts: Hosts) -> Host:
    """The other one."""
    return hosts[0]


@pytest.fixture(scope="module")
def cluster(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestCluster]:
    """A cluster that listens on the link."""
    started = TestCluster.start_over_tcp(tmp_path_factory.mktemp("c"), hosts.address)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def nursery(elsewhere: Host) -> Iterator[Nursery]:
    """What jobs are forked of, on the other host."""
    started = Nursery(*elsewhere.network_prefix)
    yield started
    started.close()


def begin(nursery: Nursery, cluster: TestCluster, folder: Path, *ordered: bool) -> list[ChaosJob]:
    """A job for each, which reads until it is told that it is enough."""
    jobs = [
        ChaosJob.start(
            nursery,
            cluster,
            folder,
            flow=f"chaos/{folder.name}",  # its data names the folder
            number=number,
            size=400,
            epochs=2,
            endless=True,
            step_s=0.01,
            ordered=own,
        )
        for number, own in enumerate(ordered)
    ]
    wait(lambda: all(job.batches() >= 10 for job in jobs), what="the first batches")
    return jobs


def finish(jobs: list[ChaosJob], folder: Path) -> None:
    """Every epoch was whole."""
    (folder / "enough").touch()
    for job in jobs:
        assert job.finish() >= 2


def cut_for(elsewhere: Host, jobs: list[ChaosJob], seconds: float) -> None:
    """Cut the link, bring it up again, and wait until all jobs go on."""
    elsewhere.cut()
    try:
        threading.Event().wait(seconds)
        during = [job.batches() for job in jobs]
    finally:
        elsewhere.mend()
    wait(
        lambda: all(job.batches() > before + 10 for job, before in zip(jobs, during)),
        what="batches after the cut",
    )


def test_jobs_go_on_after_a_short_cut(elsewhere: Host, nursery: Nursery, cluster: TestCluster, tmp_path: Path) -> None:
    jobs = begin(nursery, cluster, tmp_path, False, True)
    cut_for(elsewhere, jobs, 1.0)
    finish(jobs, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [5.0, 20.0, 45.0])
def test_jobs_go_on_after_cuts_longer_than_every_lease(
    elsewhere: Host, nursery: Nursery, cluster: TestCluster, tmp_path: Path, seconds: float
) -> None:
    jobs = begin(nursery, cluster, tmp_path, False, True, False)
    cut_for(elsewhere, jobs, seconds)
    finish(jobs, tmp_path)


@pytest.mark.slow
def test_a_link_that_comes_and_goes(elsewhere: Host, nursery: Nursery, cluster: TestCluster, tmp_path: Path) -> None:
    jobs = begin(nursery, cluster, tmp_path, False, True)
    for _ in range(5):
        cut_for(elsewhere, jobs, 0.5)
    finish(jobs, tmp_path)


@pytest.mark.slow
def test_packets_that_are_late_or_lost(tmp_path: Path) -> None:
    with Hosts(1, rtt_s=0.04, loss=0.02) as hosts:
        cluster = TestCluster.start_over_tcp(tmp_path, hosts.address)
        nursery = Nursery(*hosts[0].network_prefix)
        finish(begin(nursery, cluster, tmp_path, False, True), tmp_path)
        nursery.close()
        cluster.stop()
