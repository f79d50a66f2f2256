"""A cluster whose flows share few workers of a platform, and which dies with all that it has.

All of it is slow: its members import torch.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.shared.test_shared_platform import Join, kept, keys, member_pids, members, working
from tests.cluster_command import CommandedCluster
from tests.shared_cluster import wait
from tests.shared_datasets import SlowNumbers
from tests.worker_cases import has_ended, kill

pytestmark = pytest.mark.slow

WORKERS = 2
#: A setting of the platform, which only its provisioner may know.
SECRET = "sesame-of-the-provisioner-alone"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandedCluster]:
    folder = tmp_path_factory.mktemp("c")
    settings = folder / "dpflow.toml"
    settings.write_text(f'[platform.processes.env]\nSESAME = "{SECRET}"\n')
    before, os.environ["DPFLOW_CONFIG"] = os.environ.get("DPFLOW_CONFIG"), str(settings)
    try:
        started = CommandedCluster.up(
            folder,
            "--platform",
            "processes",
            "--worker-listen",
            "tcp://127.0.0.1:0",
            "--workers",
            str(WORKERS),
        )
    finally:
        del os.environ["DPFLOW_CONFIG"]
        if before is not None:
            os.environ["DPFLOW_CONFIG"] = before
    yield started
    started.stop()


def test_two_flows_share_one_maximum(cluster: CommandedCluster, join: Join, flow: str) -> None:
    flows = [f"{flow}/a", f"{flow}/b"]
    first = join(flows[0], SlowNumbers(200, 0.02), batch_size=8, workers=WORKERS)
    reading = [first.traverse(0)]
    read = [keys([next(reading[0])])]
    wait(lambda: len(working(cluster, flows[0])) == WORKERS, what="all workers, for the only flow")
    second = join(flows[1], SlowNumbers(60, 0.02), batch_size=8, workers=WORKERS)
    reading.append(second.traverse(0))
    read.append(keys([next(reading[1])]))
    wait(lambda: all(len(working(cluster, one)) == 1 for one in flows), what="one worker for each")
    assert kept(cluster) <= WORKERS + 1
    for job, size in enumerate((200, 60)):
        assert sorted(read[job] + keys(reading[job])) == list(range(size))


def test_all_members_are_killed_and_each_sample_comes_once(cluster: CommandedCluster, join: Join, flow: str) -> None:
    batches = join(flow, SlowNumbers(160, 0.02), batch_size=8, workers=WORKERS).traverse(0)
    read = keys([next(batches)])
    wait(lambda: len(working(cluster, flow)) >= 1, what="a member")
    for pid in member_pids(cluster, flow):
        kill(pid)
    assert sorted(read + keys(batches)) == list(range(160))


def test_the_provisioner_is_killed_while_members_start(cluster: CommandedCluster, join: Join, flow: str) -> None:
    batches = join(flow, SlowNumbers(80, 0.01), batch_size=8, workers=1).traverse(0)
    wait(lambda: any(flow in shard and views for shard, views in members(cluster).items()), what="a start")
    cluster.kill("provisioner")
    assert sorted(keys(batches)) == list(range(80))


def test_no_service_but_the_provisioner_has_the_platforms_settings(
    cluster: CommandedCluster, join: Join, flow: str
) -> None:
    next(join(flow, SlowNumbers(80, 0.01), batch_size=8, workers=1).traverse(0))
    views = [view for view in cluster.processes() if not view.id.startswith("test/") or flow in view.id]  # others end
    found = {view.id: holds(view.pid, SECRET.encode()) for view in views}
    assert found.pop("provisioner")
    assert len(found) >= 3
    assert not any(found.values()), found


def holds(pid: int, secret: bytes) -> bool:
    """Whether a process has this anywhere in its memory."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            (
                area,
                rights,
                *_,
            ) = line.split()
            if not rights.startswith("rw") or line.endswith(("[vvar]", "[vsyscall]")):
                continue
            first, end = (int(one, 16) for one in area.split("-"))
            try:
                memory.seek(first)
                if secret in memory.read(end - first):
                    return True
            except OSError:
                continue
    return False


def test_all_members_are_gone_within_a_minute_of_the_heads_death(
    cluster: CommandedCluster, join: Join, flow: str
) -> None:
    job = join(flow, SlowNumbers(4000, 0.05), batch_size=8, workers=WORKERS)
    batches = job.traverse(0)
    keys([next(batches)])
    wait(lambda: working(cluster, flow), what="a member")
    pids, services = member_pids(cluster), [view.pid for view in cluster.processes()]
    os.kill(cluster.pid, signal.SIGKILL)
    wait(lambda: all(map(has_ended, services)), what="the end of all services")
    wait(lambda: all(map(has_ended, pids)), what="the end of all members, by their silence")
