"""Nodes join a cluster, run its shards, leave it, and find it again."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from tests.joined_nodes import StartedNode, await_nodes, nodes_of, started
from tests.new_process import ROOT, interpreter
from tests.shared_cluster import TestCluster, free_port, open_job, wait
from tests.shared_datasets import SlowNumbers
from tests.worker_cases import has_ended
from torch_dpflow.cli.main import root
from torch_dpflow.cluster.client.open_job import JobOptions
from torch_dpflow.cluster.messages.node import NodeAssignment, NodeJoin, NodeJoined, NodeReport
from torch_dpflow.cluster.security.connection_file import (
    ConnectionFile,
    find_cluster,
    generate_keys,
    node_proof,
    read_connection_file,
    write_connection_file,
)
from torch_dpflow.cluster.services.joining_node import Joining, JoiningNode
from torch_dpflow.cluster.services.joining_options import NodeOptions, own_address
from torch_dpflow.errors import ErrorKind, OptionError, RemoteCallError, UsageError
from torch_dpflow.remote.shipping.compatibility import versions_here

OPTIONS = JobOptions(reconnect_timeout_s=120.0, ready=1, requested=2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestCluster]:
    """A cluster that others may join, for the tests of this file."""
    one = TestCluster.start_over_tcp(tmp_path_factory.mktemp("n"))
    yield one
    one.stop()


def keys(batches: Any) -> list[int]:
    return [int(key) for _, labels in batches for key in labels]


def places(cluster: TestCluster, flow: str, role: str) -> set[str]:
    """The nodes on which a flow's processes of this role run."""
    return {view.node for view in cluster.processes(f"{flow}:v1/") if view.role == role}


def workers_at(cluster: TestCluster, flow: str) -> list[str]:
    """The node of each of a flow's workers."""
    return [view.node for view in cluster.processes(f"{flow}:v1/") if view.role == "worker"]


def pids(cluster: TestCluster, flow: str) -> dict[str, int]:
    return {view.id: view.pid for view in cluster.processes(f"{flow}:v1/shard")}


def test_shards_run_on_a_node_until_that_leaves(cluster: TestCluster, flow: str, tmp_path: Path) -> None:
    options = replace(OPTIONS, memory_bytes=1 << 46)
    with open_job(
        flow, SlowNumbers(240, 0.01), address=cluster.address, batch_size=4, workers=2, options=options
    ) as job:
        batches = job.traverse(0)
        seen = keys(islice(batches, 2))
        assert places(cluster, flow, "shard") == {""}
        node = StartedNode(cluster, "a", tmp_path / "a", folder=tmp_path)
        with started(node):
            wait(lambda: places(cluster, flow, "shard") == {"a"}, what="its shard on the node")
            wait(lambda: workers_at(cluster, flow) == ["a", "a"], what="its workers beside it")
            assert places(cluster, flow, "router") == {""}
            seen += keys(islice(batches, 5))
            told = CliRunner().invoke(root, ["status", "--address", cluster.address, "--json"])
            (shown,) = json.loads(told.output)["nodes"]
            assert (shown["name"], shown["standing"], shown["shards"], shown["workers"]) == (
                "a",
                "here",
                1,
                2,
            )
            printed = CliRunner().invoke(root, ["status", "--address", cluster.address]).output
            assert "last heartbeat" in printed
            assert node.stop() == 0, node
            # Of a share: half of it, where the host's own shard has not ended yet.
            assert "bytes of samples, and this node has" in str(node)
            assert not nodes_of(cluster)
        assert sorted(seen + keys(batches)) == [*range(240)]
        assert "has expired" not in cluster.log.read_text()


def test_a_node_joins_once_its_fork_server_has_started(cluster: TestCluster, tmp_path: Path) -> None:
    begun, may_end = tmp_path / "begun", tmp_path / "may_end"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "if 'forkserver' in open('/proc/self/cmdline').read():\n"
        f"    open({str(begun)!r}, 'w').close()\n"
        f"    while not os.path.exists({str(may_end)!r}): time.sleep(0.02)\n"
    )
    node = StartedNode(
        cluster,
        "late",
        tmp_path / "late",
        prefix=["env", f"PYTHONPATH={tmp_path}:{ROOT}"],
        folder=tmp_path,
    )
    with started(node):
        wait(begun.exists, what="the import")
        assert "late" not in nodes_of(cluster)
        may_end.touch()
        await_nodes(cluster, "late")
        assert node.stop() == 0, node


#: `dpflow`, which a signal ends as soon as the cluster has taken in the node.
ENDED_AT_ONCE = """
import signal
from torch_dpflow.cli import main
from torch_dpflow.cluster.services.joining_node import Joining
join = Joining.join
def join_and_be_ended(*given, **named):
    joined = join(*given, **named)
    signal.raise_signal(signal.SIGTERM)
    return joined
Joining.join = join_and_be_ended
main()
"""


def test_a_node_that_is_ended_as_it_joins_tells_its_cluster(cluster: TestCluster, tmp_path: Path) -> None:
    arguments = ("node", "--join", cluster.address, "--name", "brief")
    with interpreter(ENDED_AT_ONCE, *arguments, env={"TMPDIR": str(tmp_path)}) as node:
        told, said = node.communicate(timeout=250)
    assert node.returncode == 0, said
    assert "node brief has left" in told
    assert "brief" not in nodes_of(cluster)


@pytest.mark.slow
def test_nodes_and_their_shards_outlive_a_coordinator(cluster: TestCluster, flow: str, tmp_path: Path) -> None:
    nodes = [StartedNode(cluster, name, tmp_path / name, folder=tmp_path) for name in "ab"]
    with (
        started(*nodes),
        open_job(
            flow, SlowNumbers(600, 0.01), address=cluster.address, batch_size=4, workers=2, options=OPTIONS
        ) as job,
    ):
        batches = job.traverse(0)
        seen = keys(islice(batches, 2))
        wait(lambda: places(cluster, flow, "worker") == {"a", "b"}, what="workers on each node")
        before = pids(cluster, flow)
        killed = cluster.kill("coordinator")
        wait(lambda: has_ended(killed), what="the coordinator's end")
        wait(lambda: [one.standing for one in nodes_of(cluster).values()] == ["here"] * 2, what="both nodes")
        assert pids(cluster, flow) == before, "its successor knows them, and moves nothing"
        assert sorted(seen + keys(batches)) == [*range(600)]
        assert [node.stop() for node in nodes] == [0, 0], nodes


def refused(cluster: TestCluster, **changes: Any) -> RemoteCallError:
    """What a node is told that asks for something else than it should."""
    file = read_connection_file(cluster.address)
    good = NodeJoin("n", "p", "0", versions_here(), node_proof(file, "n"), "127.0.0.1", 1)
    body = msgspec.structs.replace(good, release=_release(), **changes) if "release" not in changes else good
    with cluster.coordinator() as client, pytest.raises(RemoteCallError) as told:
        client.call("join_node", body, reply_type=NodeJoined)
    return told.value


def _release() -> str:
    from torch_dpflow import __version__

    return __version__


def test_who_is_no_node_of_this_cluster_is_told_why(cluster: TestCluster) -> None:
    assert "has torch_dpflow 0 and the cluster" in refused(cluster, release="0").text
    text = refused(cluster, proof="0" * 64).text
    assert "does not have the server key of this cluster" in text
    other = {**versions_here(), "python": "2.7.1"}
    assert "functions travel as bytecode" in refused(cluster, versions=other).text
    assert not nodes_of(cluster)


def test_a_name_is_one_nodes(cluster: TestCluster) -> None:
    keys = read_connection_file(cluster.address)
    joining = Joining(find_cluster(cluster.address), keys, "twin", "127.0.0.1")
    joined = joining.join()
    assert joining.join(0.0) == joined, "the answer may have been lost"
    other = Joining(find_cluster(cluster.address), keys, "twin", "127.0.0.1")
    with pytest.raises(UsageError, match="a node called 'twin' at 127"):
        other.join(0.0)
    with cluster.coordinator() as client:

        def report(**changes: Any) -> NodeAssignment:
            good = NodeReport("twin", joined.generation, joined.token, "here", [])
            body = msgspec.structs.replace(good, **changes)
            answer: NodeAssignment = client.call("report_node", body, reply_type=NodeAssignment).body
            return answer

        assert report().is_known
        for foreign in ({"token": "0"}, {"generation": joined.generation - 1}, {"name": "nobody"}):
            assert not report(**foreign).is_known
            assert not report(**foreign, standing="gone").is_known
        assert report().is_known
        report(standing="gone")
        assert not report().is_known
        again = other.join(0.0)
        assert again.generation > joined.generation
        joined = again
        report(standing="gone")
    assert not nodes_of(cluster)


def file_of(folder: Path, **changes: Any) -> str:
    keys = msgspec.structs.replace(generate_keys("tcp://127.0.0.1:9"), **changes)
    write_connection_file(folder / "file", keys)
    return str(folder / "file")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"server_secret": None}, "holds no server_secret"),
        ({"address": "ipc:///x"}, "can be reached on its own host only; start it by `dpflow up --listen"),
        ({"address": "tcp://127.0.0.1:0"}, "no cluster's address"),
        ({"address": "tcp://127.0.0.1:99999"}, "is not tcp://ADDRESS:PORT"),
        ({"address": "tcp://[::1:7600"}, "is not tcp://ADDRESS:PORT"),
        ({"address": "tcp://:7600"}, "is not tcp://ADDRESS:PORT"),
        ({"server_secret": "short"}, r"--join .*file': secret has 5 bytes"),
    ],
)
def test_files_with_which_nobody_can_join(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=text):
        JoiningNode(NodeOptions(join=file_of(tmp_path, **changes)))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"name": "a/b"}, "--name 'a/b': give --name of at most 63"),
        ({"name": ""}, "give --name"),
    ],
)
def test_options_of_a_node(given: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        NodeOptions(join="x", **given)


@pytest.mark.parametrize(
    ("cluster_at", "listen", "text"),
    [
        ("tcp://192.0.2.1:7600", "127.0.0.1", "jobs cannot reach it"),
        ("tcp://127.0.0.1:7600", "0.0.0.0", "give the address of this host by which jobs reach it"),
        ("tcp://127.0.0.1:7600", "192.0.2.7", "give an address of this host"),
        ("tcp://127.0.0.1:7600", "here", "give an IP address"),
        ("tcp://no-such-host.invalid:7600", None, "cannot be reached"),
    ],
)
def test_addresses_at_which_no_job_could_find_a_node(cluster_at: str, listen: str | None, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        own_address(cluster_at, listen)


@pytest.mark.slow
def test_other_keys_get_no_answer(cluster: TestCluster, tmp_path: Path) -> None:
    file = file_of(tmp_path, address=find_cluster(cluster.address).address)
    joining = Joining(find_cluster(file), read_connection_file(file), "a", "127.0.0.1")
    with pytest.raises(UsageError, match="does not answer clients with other keys"):
        joining.join(is_over=lambda: True)


def test_a_cluster_of_one_host_has_no_nodes(common_cluster: TestCluster) -> None:
    proof = node_proof(generate_keys(""), "a")
    body = NodeJoin("a", "p", _release(), versions_here(), proof, "127.0.0.1", 1)
    with common_cluster.coordinator() as client, pytest.raises(RemoteCallError) as told:
        client.call("join_node", body, reply_type=NodeJoined)
    assert told.value.kind is ErrorKind.USAGE
    assert "start it by `dpflow up --listen" in told.value.text


def test_a_proof_says_nothing_about_the_key_and_is_of_one_name() -> None:
    keys: ConnectionFile = generate_keys("")
    assert keys.server_secret is not None
    assert node_proof(keys, "a") != node_proof(keys, "b")
    assert keys.server_secret not in node_proof(keys, "a")


@pytest.mark.slow
def test_nodes_find_a_cluster_that_is_started_anew(flow: str, tmp_path: Path) -> None:
    write_connection_file(tmp_path / "keys", generate_keys(""))
    where = {"listen": f"tcp://127.0.0.1:{free_port()}", "keys": tmp_path / "keys"}
    cluster = TestCluster.start(tmp_path, **where)  # type: ignore[arg-type]
    node = StartedNode(cluster, "a", tmp_path / "a", folder=tmp_path)
    try:
        with started(node):
            await_nodes(cluster, "a")
            job = open_job(flow, SlowNumbers(600, 0.01), address=cluster.address, batch_size=4, options=OPTIONS)
            batches = job.traverse(0)
            seen = keys(islice(batches, 3))
            (was,) = [view.pid for view in cluster.processes(f"{flow}:v1/shard") if view.role == "shard"]
            os.kill(cluster.pid, signal.SIGKILL)
            wait(lambda: has_ended(cluster.pid), what="the cluster's end")
            cluster = TestCluster.start(tmp_path, **where)  # type: ignore[arg-type]
            await_nodes(cluster, "a")
            assert sorted(seen + keys(batches)) == [*range(600)]
            assert has_ended(was)
            assert "joined again" in node.log.read_text()
            assert node.process.poll() is None
            job.close()
    finally:
        cluster.stop()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nodes_are_told_of_a_signal_that_ends_their_cluster(tmp_path: Path, number: signal.Signals) -> None:
    cluster = TestCluster.start_over_tcp(tmp_path)
    node = StartedNode(cluster, "a", tmp_path / "a", folder=tmp_path)
    with started(node):
        await_nodes(cluster, "a")
        os.kill(cluster.pid, number)
        assert node.process.wait() == 0, node
        assert "the cluster ends" in node.log.read_text()
        assert "does not answer, retrying" not in node.log.read_text()
        wait(lambda: has_ended(cluster.pid), what="the cluster's end")


@pytest.mark.slow
def test_a_node_ends_with_its_cluster_or_without_it(tmp_path: Path) -> None:
    cluster = TestCluster.start_over_tcp(tmp_path)
    nodes = [StartedNode(cluster, name, tmp_path / name, folder=tmp_path) for name in "ab"]
    with started(*nodes):
        await_nodes(cluster, "a", "b")
        done = CliRunner().invoke(root, ["down", "--address", cluster.address])
        assert done.exit_code == 0, done.output
        assert [node.process.wait() for node in nodes] == [0, 0], nodes
        wait(lambda: has_ended(cluster.pid), what="the cluster's end")
    cluster = TestCluster.start_over_tcp(tmp_path)
    left = StartedNode(cluster, "c", tmp_path / "c", folder=tmp_path)
    with started(left):
        await_nodes(cluster, "c")
        os.kill(cluster.pid, signal.SIGKILL)
        assert left.process.wait() == 1
        assert "the cluster has not answered for 6" in left.log.read_text(), left
