"""`dpflow deploy eci`: nodes of a cluster as container groups, by the vendor's client, on a control plane of ours."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cluster.shared.test_shared_platform import keys as numbers_of
from tests.holdings import own_threads
from tests.joined_nodes import await_nodes, nodes_of
from tests.remote.launchers.eci_server import Group, GroupServer
from tests.remote.launchers.fc_server.account import KEYS, keys  # noqa: F401 - a fixture
from tests.remote.launchers.fc_server.server import Fault, Refusal
from tests.remote.launchers.test_kubernetes_manifest import own_address
from tests.shared_cluster import TestCluster, open_job, wait
from tests.shared_datasets import SlowNumbers
from torch_dpflow.cli.main import root
from torch_dpflow.cluster.security.connection_file import (
    generate_keys,
    read_connection_file,
    write_connection_file,
)

__all__ = ["own_address"]

PLACE = ("--image", "r/i:1", "--vswitch", "vsw-1", "--security-group", "sg-1")


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Instead of the check of all tests: the vendor's client keeps its connections. Of ours nothing is left."""
    before = own_threads()
    yield
    wait(lambda: not own_threads() - before, what="the end of the test's threads")


@pytest.fixture
def server() -> Iterator[GroupServer]:
    with GroupServer(KEYS) as server:
        yield server


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Of a cluster that does not run."""
    write_connection_file(tmp_path / "cluster.json", generate_keys("tcp://10.0.0.5:7600"))
    return tmp_path / "cluster.json"


def dpflow(server: GroupServer, *arguments: object) -> tuple[int, str]:
    words = ["deploy", "eci", "--endpoint", server.endpoint, *map(str, arguments)]
    done = CliRunner().invoke(root, words)
    assert "Traceback" not in done.output
    return done.exit_code, done.output


def numbered(server: GroupServer) -> list[str]:
    """Which nodes there are groups for."""
    return sorted(tag["Value"] for one in server.groups.values() for tag in one.tags if "node" in tag["Key"])


def test_groups_are_made_once_and_those_that_have_ended_or_are_too_many_replaced(
    server: GroupServer, file: Path
) -> None:
    deploy = ("--join", file, *PLACE)
    assert "created" in dpflow(server, *deploy, "--nodes", 2, "--dry-run")[1]
    assert not server.groups
    code, said = dpflow(server, *deploy, "--nodes", 22, "--cpu", 8, "--memory", "32GiB", "--spot")
    assert (code, said.count("created"), len(server.groups)) == (0, 22, 22)
    there = {*server.groups}
    assert dpflow(server, *deploy, "--nodes", 22)[1].count("stays") == 22, "on two pages"
    assert {*server.groups} == there
    ended = next(iter(server.groups.values()))
    ended.status = "Failed"
    said = dpflow(server, *deploy, "--nodes", 3)[1]
    assert (said.count("created"), said.count("stays"), said.count("removed")) == (1, 2, 20)
    assert numbered(server) == ["0", "1", "2"]
    assert ended.id not in server.groups

    cluster = ended.name.split("-")[1]
    file.unlink()
    assert dpflow(server, "--list", "--cluster", cluster)[1].count("Running") == 3
    assert "would be removed" in dpflow(server, "--remove", "--cluster", cluster, "--dry-run")[1]
    assert len(server.groups) == 3
    assert dpflow(server, "--remove", "--cluster", cluster)[1].count("removed") == 3
    assert not server.groups
    assert "there are no container groups" in dpflow(server, "--remove", "--cluster", cluster)[1]


def test_a_group_has_what_a_node_needs_and_its_keys_are_in_a_file_alone(server: GroupServer, file: Path) -> None:
    said = dpflow(server, "--join", file, *PLACE, "--nodes", 1, "--memory", "8GiB")[1]
    (asked,) = (one.asked for one in server.groups.values())
    assert (asked["RestartPolicy"], asked["Cpu"], asked["Memory"]) == ("Never", "4.0", "8.0")
    assert asked["ClientToken"] == asked["ContainerGroupName"] == asked["Container.1.Arg.2"]
    assert "SpotStrategy" not in asked
    (content,) = (name for name in asked if name.endswith(".Content"))
    sent = json.loads(base64.b64decode(asked[content]))
    connection = read_connection_file(file)
    assert connection.server_secret is not None
    assert (sent["server_secret"], sent["address"]) == (connection.server_secret, connection.address)
    others = [value for name, value in asked.items() if name != content]
    for secret in (connection.server_secret, connection.client_secret, asked[content]):
        assert secret not in said
        assert not [value for value in others if secret in value]


def test_the_control_plane_takes_a_signature_once(
    server: GroupServer, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, signed = server.check, []
    monkeypatch.setattr(server, "check", lambda *request: (check(*request), signed.append(request)))
    assert dpflow(server, "--join", file, "--list")[0] == 0
    with pytest.raises(Refusal, match="nonce has been used"):
        check(*signed[0])


@pytest.mark.parametrize(
    "fault",
    [
        Fault(lose=True),
        Fault(429, "Throttling.User"),
        Fault(400, "Throttling"),
        Fault(503, "ServiceUnavailable"),
    ],
)
def test_calls_that_are_throttled_or_not_answered_are_made_again(server: GroupServer, file: Path, fault: Fault) -> None:
    actions = ("CreateContainerGroup", "DescribeContainerGroups", "DeleteContainerGroup")
    for action in actions:
        server.fault(action, fault)
    assert dpflow(server, "--join", file, *PLACE, "--nodes", 1)[0] == 0
    assert len(server.tokens) == 1, "an answer that was lost is that of the same group"
    assert dpflow(server, "--join", file, "--remove")[0] == 0
    assert not server.groups
    assert [server.count(action) for action in actions] == [2, 3, 2]


def test_a_quota_is_told_with_what_was_made_and_a_further_call_goes_on(server: GroupServer, file: Path) -> None:
    server.quota = 2
    code, said = dpflow(server, "--join", file, *PLACE, "--nodes", 3)
    assert (code, said.count("vCPU"), len(server.groups)) == (1, 2, 2)
    assert "QuotaExceeded" in said
    server.quota = 3
    assert dpflow(server, "--join", file, *PLACE, "--nodes", 3)[0] == 0
    assert numbered(server) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nodes", "1"], "--image"),
        ([*PLACE], "--nodes"),
        ([*PLACE, "--nodes", "257"], "256"),
        ([*PLACE, "--nodes", "1", "--cpu", "0"], "cpu"),
        (["--remove", "--list"], "exclude"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_asked(
    server: GroupServer, file: Path, arguments: list[str], says: str
) -> None:
    code, said = dpflow(server, "--join", file, *arguments)
    assert code != 0
    assert says in said
    assert not server.log


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:7600", "tcp://0.0.0.0:7600", "ipc:///tmp/socket"])
def test_a_cluster_that_groups_cannot_reach(server: GroupServer, tmp_path: Path, address: str) -> None:
    write_connection_file(tmp_path / "file", generate_keys(address))
    code, said = dpflow(server, "--join", tmp_path / "file", *PLACE, "--nodes", 1)
    assert code == 1
    assert "--listen" in said


def test_what_only_jobs_have_and_what_names_no_cluster(server: GroupServer, tmp_path: Path) -> None:
    write_connection_file(tmp_path / "file", generate_keys("tcp://10.0.0.5:7600").for_jobs())
    assert "server_secret" in dpflow(server, "--join", tmp_path / "file", *PLACE, "--nodes", 1)[1]
    assert "--join FILE" in dpflow(server, "--cluster", "0123abcd", *PLACE, "--nodes", 1)[1]
    assert "--join FILE" in dpflow(server, "--cluster", "x", "--remove")[1]


def test_another_secret_is_refused_in_one_line(
    server: GroupServer, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALIBABA_CLOUD_ACCESS_KEY_SECRET", "another")
    code, said = dpflow(server, "--join", file, "--list")
    assert code == 1
    assert "SignatureDoesNotMatch" in said


@pytest.mark.slow
def test_a_job_reads_through_groups_one_of_which_is_killed(own_address: str, tmp_path: Path) -> None:
    cluster = TestCluster.start_over_tcp(tmp_path, own_address)
    deploy = ("--join", cluster.address, *PLACE, "--nodes", 2)
    try:
        with GroupServer(KEYS, runs=True) as server:
            assert dpflow(server, *deploy)[0] == 0
            groups = [*server.groups.values()]
            await_nodes(cluster, *(one.name for one in groups))
            with open_job("a/b", SlowNumbers(240, 0.01), address=cluster.address, batch_size=4, workers=2) as job:
                batches = job.traverse(0)
                read = numbers_of(islice(batches, 1))
                wait(
                    lambda: [one.shards for one in nodes_of(cluster).values()] == [1, 1],
                    what="a shard on each",
                )
                read += numbers_of(islice(batches, 2))
                groups[0].kill()
                said = dpflow(server, *deploy)[1]
                assert (said.count("stays"), said.count("created"), said.count("removed")) == (1, 1, 1)
                read += numbers_of(batches)
            assert sorted(read) == [*range(240)]
            running: list[Group] = [*server.groups.values()]
            wait(lambda: {one.name for one in running} <= {*nodes_of(cluster)}, what="that another joins")
            assert dpflow(server, "--join", cluster.address, "--remove")[0] == 0
            ends = [one.process.returncode for one in running if one.process is not None]
            assert ends == [0, 0], [one.log() for one in running]
            assert not server.groups
    finally:
        cluster.stop()
