"""Flows whose workers a platform runs: processes here, which call over tcp as others do.

Members import torch, which takes seconds, so most tests are slow ones.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.cluster_command import CommandedCluster
from tests.new_process import ROOT
from tests.shared_cluster import free_port, open_job, wait
from tests.shared_datasets import Failing, Numbers, SlowNumbers
from tests.worker_cases import has_ended, kill
from torch_dpflow.cli.main import root
from torch_dpflow.cluster.client.open_job import SharedJob
from torch_dpflow.cluster.messages.coordinator import FlowView, Scale
from torch_dpflow.cluster.services.local_cluster import ClusterOptions
from torch_dpflow.errors import OptionError, PoisonTaskError, WorkerStartError
from torch_dpflow.remote.launchers.contract import cluster_of
from torch_dpflow.remote.launchers.processes import NAME_VARIABLE

Join = Callable[..., SharedJob]

#: A script with a class of its own and a module beside it, neither of which the cluster can import.
SCRIPT = """
import sys
from beside import Turned
from torch_dpflow import DPFlowDataLoader, JobOptions

class Box:
    def __init__(self, value):
        self.value = value

class Data:
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return Box(Turned(index))

loader = DPFlowDataLoader(
    Data(), batch_size=3, num_workers=1, collate_fn=list, flow=sys.argv[1], address=sys.argv[2],
    job=JobOptions(idle_s=3.0),
)
boxes = [box for batch in loader for box in batch]
assert {type(box) for box in boxes} == {Box}
assert {type(box.value) for box in boxes} == {Turned}
print(sorted(-box.value.turned for box in boxes))
"""
BESIDE = """
class Turned:
    def __init__(self, value):
        self.turned = -value
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandedCluster]:
    folder = tmp_path_factory.mktemp("c")
    started = CommandedCluster.up(folder, "--platform", "processes", "--worker-listen", "tcp://127.0.0.1:0")
    yield started
    pids = member_pids(started)
    started.stop()
    assert all(map(has_ended, pids))


def member_pids(cluster: CommandedCluster, flow: str = "") -> list[int]:
    """Of all members that the cluster's shards have asked for, and whatever has been left of them."""
    names = {view["name"] for shard, views in members(cluster).items() if flow in shard for view in views}
    clusters = {cluster_of(name) for name in names}
    found = [(name, pid) for name, pid in found_members() if cluster_of(name)]  # others may have retitled theirs
    return [pid for name, pid in found if name in names or cluster_of(name) in clusters]


def found_members() -> list[tuple[str, int]]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            mark = f"{NAME_VARIABLE}=".encode()
            names = [one.removeprefix(mark).decode() for one in variables if one.startswith(mark)]
            found.extend((name, int(entry.name)) for name in names)
    return found


def members(cluster: CommandedCluster) -> dict[str, list[dict[str, Any]]]:
    """As `dpflow workers` lists them, by the shard."""
    result = CliRunner().invoke(root, ["workers", "--json", "--address", cluster.address])
    assert result.exit_code == 0, result.output
    listed: dict[str, list[dict[str, Any]]] = json.loads(result.output)["workers"]
    return listed


def working(cluster: CommandedCluster, flow: str) -> dict[str, int]:
    """The pids of those that work for a flow, by name."""
    return {
        view["name"]: int(view["where"].rpartition(" ")[2])
        for shard, views in members(cluster).items()
        if shard.startswith(f"{flow}:v")
        for view in views
        if view["state"] == "working"
    }


def keys(batches: Any) -> list[int]:
    return [int(key) for _, labels in batches for key in labels]


def kept(cluster: CommandedCluster, *, but: int = 0) -> int:
    """How many members the cluster's provisioner has; -1: it does not serve, or is the process `but`."""
    return max(
        (view.status.get("kept", -1) for view in cluster.processes("provisioner") if view.pid != but),
        default=-1,
    )


@pytest.mark.slow
def test_two_jobs_read_each_sample_once_while_the_provisioner_and_then_a_member_is_killed(
    cluster: CommandedCluster, join: Join, flow: str
) -> None:
    dataset = SlowNumbers(120, 0.01)
    jobs = [join(flow, dataset, batch_size=8, workers=2) for _ in range(2)]
    reading = [job.traverse(0) for job in jobs]
    read = [keys([next(batches)]) for batches in reading]
    wait(lambda: len(working(cluster, flow)) == 2, what="both members")
    first = working(cluster, flow)
    killed = cluster.kill("provisioner")
    wait(lambda: kept(cluster, but=killed) == 2, what="another provisioner")
    read[0] += keys([next(reading[0])])
    assert working(cluster, flow) == first
    kill(next(iter(first.values())))
    for job, batches in enumerate(reading):
        read[job] += keys(batches)
        assert sorted(read[job]) == list(range(120))
    wait(lambda: len(working(cluster, flow).keys() - first.keys()) == 1, what="another member in its place")


def scale(cluster: CommandedCluster, flow: str, workers: int) -> None:
    with cluster.coordinator() as coordinator:
        coordinator.call("scale", Scale(flow, 1, workers), reply_type=FlowView)


@pytest.mark.slow
def test_a_fleet_grows_and_shrinks_while_its_job_reads(cluster: CommandedCluster, join: Join, flow: str) -> None:
    job = join(flow, Numbers(2000), batch_size=8, workers=1)
    batches = job.traverse(0)
    read = keys([next(batches)])
    shard = cluster.process(f"{flow}:v1/shard").pid
    for workers in (3, 1):
        scale(cluster, flow, workers)
        wait(lambda workers=workers: len(working(cluster, flow)) == workers, what=f"{workers} members")
        read += keys([next(batches)])
    assert sorted(read + keys(batches)) == list(range(2000))
    assert [view.pid for view in cluster.processes(f"{flow}:v1/shard")] == [shard]


@pytest.mark.slow
def test_a_scripts_classes_and_modules_beside_it_come_along(
    cluster: CommandedCluster, flow: str, tmp_path: Path
) -> None:
    (tmp_path / "beside.py").write_text(BESIDE)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, flow, cluster.address],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "[0, 1, 2, 3, 4, 5]"


@pytest.mark.slow
def test_a_sample_that_kills_its_members_is_told_and_the_others_come(
    cluster: CommandedCluster, join: Join, flow: str
) -> None:
    batches = join(flow, Failing(12, kills=5), batch_size=4, workers=2, strategy="independent").read(
        iter([[0, 1], [5], [6, 7]]), 0
    )
    assert keys([next(batches)]) == [0, 1]
    with pytest.raises(PoisonTaskError, match=r"sample 5: .*took down 3 workers"):
        next(batches)
    assert keys(batches) == [6, 7]


def leave_at_once(worker: int) -> None:
    os._exit(3)


@pytest.mark.slow
def test_members_that_end_at_their_start_are_told_of_and_not_started_for_ever(
    cluster: CommandedCluster, join: Join, flow: str
) -> None:
    job = join(flow, Numbers(12), batch_size=4, workers=1, worker_init_fn=leave_at_once)
    with pytest.raises(WorkerStartError, match=r"workers ended.* before they could load anything.*exited with code 3"):
        next(job.traverse(0))
    wait(lambda: not [name for name, _ in found_members() if name in names_of(cluster, flow)])
    before = names_of(cluster, flow)
    with pytest.raises(WorkerStartError, match="before they could load anything"):
        next(job.traverse(1))
    assert names_of(cluster, flow) <= before


@pytest.mark.slow
def test_a_shard_whose_ports_are_taken_waits_for_one_and_tells_what_is_missing(tmp_path: Path, flow: str) -> None:
    port = free_port()
    at = f"tcp://127.0.0.1:{port}-{port}"
    cluster = CommandedCluster.up(tmp_path, "--platform", "processes", "--worker-listen", at)
    with (
        socket.create_server(("127.0.0.1", port)) as taken,
        closing(open_job(flow, Numbers(8), address=cluster.address, batch_size=4)) as job,
    ):
        reason = rf"(?s)no worker for sample .* for {flow}:v1/shard-000: no port of {at} is free .*reduce the shards by"
        for epoch in range(2):
            with pytest.raises(WorkerStartError, match=reason):
                next(job.traverse(epoch))
        taken.close()
        wait(lambda: has_read(job), what="a worker, once a port is free")
    cluster.stop()


def has_read(job: SharedJob) -> bool:
    try:
        return len(keys(job.traverse(2))) == 8
    except WorkerStartError:
        return False


def names_of(cluster: CommandedCluster, flow: str) -> set[str]:
    return {view["name"] for shard, views in members(cluster).items() if flow in shard for view in views}


@pytest.mark.slow
def test_members_leave_when_their_shard_is_killed_and_its_successor_has_others(
    cluster: CommandedCluster, join: Join, flow: str
) -> None:
    job = join(flow, Numbers(400), batch_size=8, workers=1)
    batches = job.traverse(0)
    read = keys([next(batches)])
    wait(lambda: working(cluster, flow), what="a member")
    before = working(cluster, flow)
    cluster.kill(f"{flow}:v1/shard")
    wait(lambda: all(map(has_ended, before.values())), what="the end of its members")
    assert sorted(read + keys(batches)) == list(range(400))
    wait(lambda: working(cluster, flow), what="other members")
    assert not before.keys() & working(cluster, flow).keys()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["shard", "provisioner"])
def test_a_shard_and_a_provisioner_that_are_told_to_end_leave_no_member(
    cluster: CommandedCluster, join: Join, flow: str, part: str
) -> None:
    job = join(flow, Numbers(400), batch_size=8, workers=1)
    batches = job.traverse(0)
    read = keys([next(batches)])
    wait(lambda: working(cluster, flow), what="a member")
    before = working(cluster, flow)
    id = "provisioner" if part == "provisioner" else f"{flow}:v1/shard"
    pid = cluster.kill(id, signal.SIGTERM)
    wait(lambda: cluster.process(id).pid not in (0, pid), what="its successor")
    assert cluster.process(id).ended == f"pid {pid} exited with code 0"
    wait(lambda: all(map(has_ended, before.values())), what="the end of its members")
    assert sorted(read + keys(batches)) == list(range(400))


@pytest.mark.slow
def test_members_end_with_their_flow(cluster: CommandedCluster, join: Join, flow: str) -> None:
    job = join(flow, Numbers(8), batch_size=8, workers=1)
    assert len(keys(job.traverse(0))) == 8
    pids = working(cluster, flow).values()
    job.close()
    wait(lambda: all(map(has_ended, pids)), what="the end of members whose flow is idle")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"platform": "rya"}, "did you mean 'ray'"),
        ({"worker_listen": "tcp://127.0.0.1:0"}, "without --platform"),
        ({"platform": "processes", "worker_listen": "tcp://127.0.0.1:7009-7000"}, "of a range of ports"),
        *(
            (
                {"platform": "processes", "worker_listen": given},
                f"--worker-listen '{given}': must be tcp://HOST:PORT, or tcp://HOST:FIRST-LAST",
            )
            for given in (
                "foo",
                "127.0.0.1",
                "tcp://127.0.0.1",
                "tcp://:7000",
                "tcp://127.0.0.1:7000-99999",
                "tcp://127.0.0.1:7000-7001-7002",
            )
        ),
        (
            {"platform": "processes", "worker_listen": "tcp://192.0.2.1:7000-7005"},
            "--worker-listen 'tcp://192.0.2.1:7000-7005': Cannot assign requested address; give an address of this",
        ),
        ({"nodes": "2"}, "--nodes '2' without --platform: give a platform that runs nodes: ray; or leave it out"),
        ({"platform": "processes", "nodes": "2"}, "which runs single workers; give a platform that runs nodes: ray"),
        *(
            ({"platform": "ray", "nodes": given}, f"--nodes '{given}': give N or MIN:MAX with 1 <= MIN <= MAX <= 256")
            for given in ("0", "3:2", "257", "1:", "two", "-1", "")
        ),
        (
            {"platform": "ray", "nodes": "2", "worker_listen": "tcp://127.0.0.1:7000"},
            "--worker-listen 'tcp://127.0.0.1:7000' with --nodes: workers connect to shards of their own node",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ClusterOptions(**given)
