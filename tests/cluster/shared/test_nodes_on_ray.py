"""`dpflow up --platform ray --nodes`: nodes are actors of a real Ray cluster of several nodes on this host."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from tests.cluster_command import CommandedCluster
from tests.joined_nodes import nodes_of
from tests.remote.launchers.local_ray import add_node, names_in, needs_ray, ray_nodes, workers
from tests.shared_cluster import open_job, wait
from tests.shared_datasets import SlowNumbers
from tests.worker_cases import has_ended
from torch_dpflow.cli.main import root
from torch_dpflow.cluster.client.open_job import JobOptions
from torch_dpflow.remote import Ray
from torch_dpflow.remote.launchers.ray import RayLauncher

pytestmark = [pytest.mark.slow, needs_ray]

OPTIONS = JobOptions(reconnect_timeout_s=120.0, ready=1, requested=2)
SIZE = 300


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[Any]:
    """Two Ray nodes with room for one of ours each."""
    with ray_nodes(1, 1) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_leaks(ray: Any) -> Iterator[None]:
    """Instead of the check of all tests, as in `test_ray`."""
    yield
    wait(lambda: not names_in(RayLauncher(Ray())) and not workers(), what="the end of all nodes")
    wait(lambda: not [one for one in threading.enumerate() if one.name.startswith("dpflow")], what="no thread")


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[[str], CommandedCluster]]:
    """Start a cluster with so many nodes."""
    clusters = []

    def start(nodes: str) -> CommandedCluster:
        clusters.append(CommandedCluster.up(tmp_path, "--platform", "ray", "--nodes", nodes))
        return clusters[-1]

    yield start
    for cluster in clusters:
        cluster.stop()


def await_nodes(cluster: CommandedCluster, count: int) -> set[str]:
    """Wait until so many nodes take shards; their names."""
    found: set[str] = set()

    def there() -> bool:
        found.clear()
        found.update(name for name, view in nodes_of(cluster).items() if view.standing == "here")
        return len(found) == count

    wait(there, what=f"{count} nodes")
    return found


def keys(batches: Any) -> list[int]:
    return [int(key) for _, labels in batches for key in labels]


def shards(cluster: CommandedCluster) -> dict[str, tuple[int, int]]:
    """Port and pid of the shards that listen, by their nodes."""
    views = [view for view in cluster.processes("/shard") if view.role == "shard" and view.address]
    return {view.node: (int(view.address.rpartition(":")[2]), view.pid) for view in views}


def processes_of_nodes() -> list[int]:
    """The nodes, and what they have started."""
    nodes = [*workers()]
    started = [child.pid for pid in nodes for child in psutil.Process(pid).children(recursive=True)]
    assert len(started) >= len(nodes) > 0
    return nodes + started


def is_within(pid: int, ancestors: dict[int, int]) -> bool:
    return bool({one.pid for one in psutil.Process(pid).parents()} & ancestors.keys())


def test_samples_go_in_one_hop_from_nodes_and_a_killed_one_is_replaced(
    up: Callable[[str], CommandedCluster], flow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = up("2")
    before = await_nodes(cluster, 2)
    # A module of the job alone, which is sent to the nodes.
    (tmp_path / "own_numbers.py").write_text(
        "from tests.shared_datasets import SlowNumbers\nclass OwnNumbers(SlowNumbers): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    dataset = importlib.import_module("own_numbers").OwnNumbers(SIZE, 0.02)
    with open_job(flow, dataset, address=cluster.address, batch_size=4, workers=2, options=OPTIONS) as job:
        batches = job.traverse(0)
        seen = keys(islice(batches, 2))
        wait(lambda: shards(cluster).keys() == before, what="a shard on each node")
        seen += keys(islice(batches, 4))
        # This process has a connection to each node's shard, and no other process of the cluster has samples.
        ports = {one.raddr.port for one in psutil.Process().net_connections("tcp") if one.raddr}
        for port, pid in shards(cluster).values():
            assert port in ports
            assert is_within(pid, workers()), "it runs in an actor"
        assert not [view for view in cluster.processes() if view.role in ("shard", "worker") and not view.node]
        os.kill(next(iter(workers())), signal.SIGKILL)
        wait(lambda: len(nodes_of(cluster).keys() - before) == 1, what="a node in its place")
        assert sorted(seen + keys(batches)) == [*range(SIZE)]
    assert "has ended on its platform" in cluster.log.read_text()


def test_nodes_are_replaced_on_other_nodes_of_ray(ray: Any, up: Callable[[str], CommandedCluster], flow: str) -> None:
    added = [add_node(ray, 1) for _ in range(2)]
    cluster = up("4")
    before = await_nodes(cluster, 4)
    with open_job(
        flow, SlowNumbers(600, 0.05), address=cluster.address, batch_size=4, workers=4, options=OPTIONS
    ) as job:
        batches = job.traverse(0)
        seen = keys(islice(batches, 2))
        wait(lambda: shards(cluster).keys() == before, what="a shard on each node")
        seen += keys(islice(batches, 8))
        running = processes_of_nodes()
        ray.remove_node(added.pop(), allow_graceful=False)
        added.append(add_node(ray, 1))
        wait(lambda: len(nodes_of(cluster).keys() - before) == 1, what="a node in its place")
        assert sorted(seen + keys(batches)) == [*range(600)]
    cluster.stop()
    wait(lambda: all(map(has_ended, running)), what="the end of all processes, also of the lost node")
    for node in added:
        ray.remove_node(node)


def test_a_frozen_node_is_ended_and_replaced(up: Callable[[str], CommandedCluster], flow: str) -> None:
    cluster = up("2")
    before = await_nodes(cluster, 2)
    with open_job(
        flow, SlowNumbers(SIZE, 0.05), address=cluster.address, batch_size=4, workers=2, options=OPTIONS
    ) as job:
        batches = job.traverse(0)
        seen = keys(islice(batches, 2))
        wait(lambda: shards(cluster).keys() == before, what="a shard on each node")
        frozen = next(iter(workers()))
        os.kill(frozen, signal.SIGSTOP)
        wait(lambda: len(nodes_of(cluster).keys() - before) == 1, what="a node in its place")
        assert sorted(seen + keys(batches)) == [*range(SIZE)]
    assert has_ended(frozen)


def test_an_epoch_outlives_the_provisioner_and_all_its_nodes(up: Callable[[str], CommandedCluster], flow: str) -> None:
    cluster = up("2")
    before = await_nodes(cluster, 2)
    with open_job(
        flow, SlowNumbers(SIZE, 0.05), address=cluster.address, batch_size=4, workers=2, options=OPTIONS
    ) as job:
        batches = job.traverse(0)
        seen = keys(islice(batches, 2))
        cluster.kill("provisioner")
        wait(lambda: not await_nodes(cluster, 2) & before, what="two other nodes")
        assert sorted(seen + keys(batches)) == [*range(SIZE)]


def test_nodes_follow_the_number_of_workers(
    ray: Any, up: Callable[[str], CommandedCluster], flow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPFLOW_AUTOSCALE_HOLD", "2s")
    added = add_node(ray, 1)
    cluster = up("1:3")
    await_nodes(cluster, 1)
    options = JobOptions(reconnect_timeout_s=120.0, ready=1, requested=2, idle_s=3.0)
    given = {"address": cluster.address, "batch_size": 4, "options": options}
    with open_job(flow, SlowNumbers(900, 0.05), workers=1, **given) as lasting:
        batches = lasting.traverse(0)
        seen = keys(islice(batches, 2))
        with open_job(f"{flow}-2", SlowNumbers(SIZE, 0.02), workers=2, **given) as brief:
            await_nodes(cluster, 3)
            assert sorted(keys(brief.traverse(0))) == [*range(SIZE)]
        await_nodes(cluster, 1)
        wait(lambda: len(workers()) == 1, what="the end of the others")
        assert sorted(seen + keys(batches)) == [*range(900)]
    log = cluster.log.read_text()
    assert "the node leaves once jobs have left its shards" in log
    assert "has ended unexpectedly" not in log
    cluster.stop()
    ray.remove_node(added)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nodes_end_with_the_cluster(up: Callable[[str], CommandedCluster], number: signal.Signals) -> None:
    cluster = up("2")
    await_nodes(cluster, 2)
    running = processes_of_nodes()
    os.kill(cluster.pid, number)
    wait(lambda: has_ended(cluster.pid), what="the cluster's end")
    wait(lambda: all(map(has_ended, running)), what="the end of all processes of nodes")


def test_nodes_without_room_are_reported(up: Callable[[str], CommandedCluster], flow: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("DPFLOW_PLATFORM_RAY_WAIT_S", "12")
    cluster = up("3")
    await_nodes(cluster, 2)

    def status() -> str:
        return CliRunner().invoke(root, ["status", "--address", cluster.address]).output

    wait(lambda: "2 of 3 nodes run on platform ray: " in status(), what="the shortage")
    assert "2 of 3 actors run; the cluster has 2 CPUs, 0 free, and each takes 1" in status()
    with open_job(flow, SlowNumbers(20, 0.0), address=cluster.address, batch_size=4, workers=2, options=OPTIONS) as job:
        assert sorted(keys(job.traverse(0))) == [*range(20)]


def test_why_no_node_can_be_started_is_reported(
    up: Callable[[str], CommandedCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "settings.toml").write_text('[platform.ray]\nruntime_env = { working_dir = "/nowhere" }\n')
    monkeypatch.setenv("DPFLOW_CONFIG", str(tmp_path / "settings.toml"))
    cluster = up("2")

    def status() -> str:
        return CliRunner().invoke(root, ["status", "--address", cluster.address]).output

    wait(lambda: "0 of 2 nodes run on platform ray: " in status(), what="the reason")
    assert "cannot be started: " in status()
    assert "/nowhere" in status()
    assert "no node runs on platform ray, next try in 30 s: " in cluster.log.read_text()
