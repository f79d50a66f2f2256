"""Hosts that run a cluster's shards are killed, frozen and cut off while a job reads: each sample once all the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.joined_nodes import StartedNode, await_nodes, nodes_of, started
from tests.shared_cluster import TestCluster, open_job, wait
from tests.shared_datasets import SlowNumbers
from tests.support.hosts import Host, Hosts
from torch_dpflow.cluster.client.open_job import JobOptions

pytestmark = pytest.mark.hosts
OPTIONS = JobOptions(reconnect_timeout_s=120.0, ready=1, requested=2)
SIZE = 300


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as made:
        yield made


@pytest.fixture
def cluster(hosts: Hosts, tmp_path: Path) -> Iterator[TestCluster]:
    """A cluster of this host that the other two have joined, as "a" and "b"."""
    one = TestCluster.start_over_tcp(tmp_path, hosts.address)
    nodes = [node_on(hosts[place], one, "ab"[place]) for place in range(2)]
    with started(*nodes):
        await_nodes(one, "a", "b")
        yield one
        one.stop()


def node_on(host: Host, cluster: TestCluster, name: str) -> StartedNode:
    return StartedNode(cluster, name, Path(cluster.log.parent, f"node-{name}"), prefix=host.prefix)


def keys(batches: Any) -> list[int]:
    return [int(key) for _, labels in batches for key in labels]


def kill_all(host: Host) -> None:
    while pids := host.pids():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def read_through(cluster: TestCluster, flow: str, hosts: Hosts, disturb: Callable[[], None]) -> None:
    """Read an epoch, disturbed once both hosts serve it; each sample has to come once."""
    with open_job(
        flow, SlowNumbers(SIZE, 0.01), address=cluster.address, batch_size=4, workers=2, options=OPTIONS
    ) as job:
        batches = job.traverse(0)
        seen = keys(islice(batches, 3))
        wait(lambda: serving(cluster, flow) == {host.address for host in hosts}, what="a shard on each host")
        seen += keys(islice(batches, 3))
        disturb()
        assert sorted(seen + keys(batches)) == [*range(SIZE)]


def serving(cluster: TestCluster, flow: str) -> set[str]:
    """The addresses of the hosts whose shards serve a flow."""
    shards = [view for view in cluster.processes(f"{flow}:v1/") if view.role == "shard" and view.status.get("keys")]
    return {view.address.removeprefix("tcp://").rpartition(":")[0] for view in shards}


def test_a_host_is_killed_with_its_shards(cluster: TestCluster, hosts: Hosts) -> None:
    """At once, as a machine that loses its power; nobody is told."""
    read_through(cluster, "killed", hosts, lambda: kill_all(hosts[0]))


@pytest.mark.slow
def test_a_host_that_was_killed_comes_back(cluster: TestCluster, hosts: Hosts) -> None:
    """Under its name, before anybody knows that it was away: it waits until that is known."""
    before = nodes_of(cluster)["a"]

    def disturb() -> None:
        kill_all(hosts[0])
        back.append(node_on(hosts[0], cluster, "a"))

    back: list[StartedNode] = []
    try:
        read_through(cluster, "back", hosts, disturb)
        wait(lambda: nodes_of(cluster).get("a", before).silent_s < 5 and "has expired" in cluster.log.read_text())
        await_nodes(cluster, "a", "b")
        wait(lambda: nodes_of(cluster)["a"].shards == 1, what="its shard")
    finally:
        for node in back:
            node.kill()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["frozen", "cut off"])
def test_a_host_that_is_away_for_a_while_joins_again(cluster: TestCluster, hosts: Hosts, fault: str) -> None:
    begin, end = (hosts[0].freeze, hosts[0].thaw) if fault == "frozen" else (hosts[0].cut, hosts[0].mend)

    def disturb() -> None:
        begin()
        wait(lambda: [*nodes_of(cluster)] == ["b"], what="that it is given up")
        end()

    read_through(cluster, "away", hosts, disturb)
    await_nodes(cluster, "a", "b")
    wait(lambda: serving(cluster, "away") == {host.address for host in hosts}, what="a shard on each host")
    log = Path(cluster.log.parent, "node-a").read_text()
    assert "joining again" in log
