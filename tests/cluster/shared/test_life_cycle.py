"""A flow's life (thesis, figure 4-7) through a whole cluster, as its commands tell it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.shared_cluster import TestCluster, wait
from tests.shared_datasets import Numbers
from tests.worker_cases import has_ended
from torch_dpflow.cli.main import root
from torch_dpflow.cluster.client.open_job import SharedJob
from torch_dpflow.cluster.messages.coordinator import FlowView
from torch_dpflow.cluster.messages.node import Running
from torch_dpflow.cluster.security.connection_file import find_cluster
from torch_dpflow.errors import RemoteCallError
from torch_dpflow.ipc.rpc import ClientOptions, RpcClient


@pytest.fixture(scope="module")
def cluster(cluster_of_file: TestCluster) -> TestCluster:
    return cluster_of_file


def run(cluster: TestCluster, *arguments: str) -> str:
    result = CliRunner().invoke(root, [*arguments, "--address", cluster.address], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def shown(cluster: TestCluster, flow: str) -> dict[str, Any]:
    (found,) = json.loads(run(cluster, "flow", "show", flow, "--json"))
    assert isinstance(found, dict)
    return found


def test_a_life_from_creation_to_deletion(cluster: TestCluster, join: Callable[..., SharedJob], flow: str) -> None:
    job = join(flow, Numbers(20), batch_size=5, idle_s=3.0)
    wait(lambda: shown(cluster, flow)["state"] == "accessed", what="the job at the coordinator")
    text = run(cluster, "flow", "show", flow)
    assert f"{flow}:v1: 20 samples, read by 1 job" in text
    wait(lambda: len(cluster.processes(f"{flow}:v1/")) == 4, what="a router, a shard and two workers")
    pids = [view.pid for view in cluster.processes(f"{flow}:v1/")]
    job.close()
    wait(lambda: shown(cluster, flow)["state"] == "idle", what="the end of patience")
    wait(lambda: all(map(has_ended, pids)), what="the end of the services")
    assert shown(cluster, flow)["part"] is None
    assert "samples, idle" in run(cluster, "flow", "show", flow)
    again = join(flow, Numbers(20), batch_size=5, idle_s=3.0)
    assert len(list(again.traverse(0))) == 4
    wait(lambda: shown(cluster, flow)["state"] == "accessed", what="the second job at the coordinator")
    again.close()
    steps = [step["state"] for step in shown(cluster, flow)["life"]]
    assert steps[:1] + [step for step in steps[1:] if step != "ready"] == [
        "created",
        "accessed",
        "idle",
        "accessed",
    ]
    wait(lambda: shown(cluster, flow)["jobs"] == 0, what="the second job's end")
    run(cluster, "flow", "delete", flow)
    refused = CliRunner().invoke(root, ["flow", "show", flow, "--address", cluster.address])
    assert (refused.exit_code, "is not registered" in refused.output) == (1, True)


def test_a_flow_that_nobody_reads_tells_when_its_services_end(
    cluster: TestCluster, join: Callable[..., SharedJob], flow: str
) -> None:
    join(flow, Numbers(20), batch_size=5, idle_s=900.0).close()
    wait(lambda: shown(cluster, flow)["state"] == "ready", what="the job's end at the coordinator")
    assert 0 < shown(cluster, flow)["idle_in_s"] <= 900.0
    assert "its services end in" in run(cluster, "flow", "show", flow)
    run(cluster, "flow", "delete", flow)


def versions(cluster: TestCluster, flow: str) -> list[FlowView]:
    found = [one for one in cluster.flows().values() if one.spec.name == flow]
    return sorted(found, key=lambda one: one.spec.version)


def test_commands_take_a_version_and_say_which_one_they_took(
    cluster: TestCluster, join: Callable[..., SharedJob], flow: str
) -> None:
    for version in (1, 2):
        join(flow, Numbers(20), version=version, batch_size=5, idle_s=900.0)
    assert run(cluster, "flow", "scale", f"{flow}:v1", "--workers", "3").endswith(f"unchanged versions: {flow}:v2\n")
    assert f"{flow}:v2 will have" in run(cluster, "flow", "scale", flow, "--workers", "4")
    assert [one.spec.workers for one in versions(cluster, flow)] == [3, 4]
    higher = join(flow, Numbers(20), version=3, batch_size=5, idle_s=900.0)
    higher.close()
    wait(lambda: [one.jobs for one in versions(cluster, flow)] == [1, 1, 0], what="the jobs that are left")
    deleted = run(cluster, "flow", "delete", flow)
    assert deleted == f"deleted {flow}:v3; still registered: {flow}:v1, {flow}:v2\n"
    refused = CliRunner().invoke(root, ["flow", "delete", f"{flow}:v1", "--address", cluster.address])
    assert f"flow '{flow}:v1' is read by 1 job" in refused.output


def test_a_coordinator_that_starts_anew_in_the_middle_of_an_epoch_knows_what_runs(
    cluster: TestCluster, join: Callable[..., SharedJob], flow: str
) -> None:
    job = join(flow, Numbers(200), batch_size=5, shards=2, workers=2, idle_s=30.0)
    reading = job.traverse(0)
    keys = [int(key) for _ in range(3) for key in next(reading)[1]]
    before = {view.id: view.pid for view in cluster.processes(f"{flow}:v1/")}
    for _ in range(2):
        killed = cluster.kill("coordinator")
        wait(lambda killed=killed: has_ended(killed), what="the coordinator's end")
        keys += [int(key) for _ in range(3) for key in next(reading)[1]]
        wait(
            lambda: before.items() <= {view.id: view.pid for view in cluster.processes(f"{flow}:v1/")}.items(),
            what="the same processes at the next coordinator",
        )
    assert sorted(keys + [int(key) for _, labels in reading for key in labels]) == list(range(200))
    wait(lambda: shown(cluster, flow)["jobs"] == 1, what="the job at the next coordinator")


def test_who_asks_a_node_for_changes_hears_of_them_and_else_how_things_stand(cluster: TestCluster) -> None:
    wait(lambda: cluster.processes("coordinator"), what="the coordinator")
    folder = find_cluster(cluster.address).address.rpartition("/")[0]
    with RpcClient(f"{folder}/node", options=ClientOptions(timeout_s=60.0)) as node:

        def changes(seen: int) -> Running:
            running: Running = node.call("changes", seen, reply_type=Running).body
            return running

        first = changes(0)
        settled = changes(first.revision)
        while settled.revision != first.revision:  # what an earlier test ran ends still
            first, settled = settled, changes(settled.revision)
        killed = cluster.kill("coordinator")
        after = changes(settled.revision)
        while next(view.pid for view in after.processes if view.id == "coordinator") in (0, killed):
            after = changes(after.revision)
        assert after.revision > settled.revision
        with pytest.raises(RemoteCallError, match="Expected"):
            node.call("changes", -1)


def sockets_of(cluster: TestCluster) -> set[Path]:
    place = os.path.dirname(find_cluster(cluster.address).address.removeprefix("ipc://"))
    return {path for path in Path(place).iterdir() if path.is_socket()}


def test_shards_and_flows_that_end_for_good_leave_no_sockets(
    cluster: TestCluster, join: Callable[..., SharedJob], flow: str
) -> None:
    wait(lambda: cluster.processes("coordinator"), what="the coordinator")
    before = sockets_of(cluster)
    job = join(flow, Numbers(20), batch_size=5, shards=3, workers=3)
    assert len(list(job.traverse(0))) == 4
    wait(
        lambda: len(sockets_of(cluster) - before) == 5,
        what="the sockets of a router, of three shards, and of the process that imports for workers",
    )
    own = sockets_of(cluster) - before
    run(cluster, "flow", "scale", flow, "--shards", "1")
    wait(lambda: len(sockets_of(cluster) & own) == 3, what="the end of two shards")
    assert len(list(job.traverse(1))) == 4
    job.close()
    wait(lambda: cluster.flows()[f"{flow}:v1"].jobs == 0, what="the job's end")
    run(cluster, "flow", "delete", flow)
    wait(lambda: not sockets_of(cluster) & own, what="the end of the flow's services")


def test_a_cluster_that_is_told_to_end_leaves_nothing(tmp_path_factory: pytest.TempPathFactory, flow: str) -> None:
    folder = tmp_path_factory.mktemp("c")
    cluster = TestCluster.start(folder)
    wait(lambda: cluster.processes("coordinator"), what="the coordinator")
    place = os.path.dirname(find_cluster(cluster.address).address.removeprefix("ipc://"))
    pids = [cluster.pid, *(view.pid for view in cluster.processes())]
    run(cluster, "down")
    wait(lambda: all(map(has_ended, pids)), what="the end of every process")
    assert not Path(place).exists()
    # The process that forked the others ends by itself, when the node has.
    wait(lambda: place not in Path("/proc/net/unix").read_text(), what="the end of every socket")
    assert not Path(cluster.address).exists()
