"""What a cluster does whose state store is away, frozen, emptied, or another's."""

from __future__ import annotations

import hashlib
import os
import signal
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.new_process import interpreter
from tests.redis_server import RedisServer
from tests.shared_cluster import TestCluster, open_job, wait
from tests.shared_datasets import Numbers
from tests.worker_cases import has_ended
from torch_dpflow.cli.main import root
from torch_dpflow.cluster.client.flow_registration import register
from torch_dpflow.cluster.client.open_job import JobOptions, SharedJob
from torch_dpflow.cluster.messages.coordinator import FlowSpec, FlowView, Scale
from torch_dpflow.cluster.security.connection_file import find_cluster
from torch_dpflow.cluster.services.state_store import open_store
from torch_dpflow.errors import DeadlineError, DPFlowError, RemoteCallError

OPTIONS = JobOptions(ready=1, requested=2)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis server."""
    server = RedisServer(tmp_path_factory.mktemp("r"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def cluster(redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestCluster]:
    """A cluster that keeps its flows there."""
    started = TestCluster.start(tmp_path_factory.mktemp("c"), state=redis.url)
    yield started
    started.stop()


def open_at(cluster: TestCluster, flow: str) -> SharedJob:
    return open_job(flow, Numbers(400), address=cluster.address, batch_size=4, options=OPTIONS)


def flows_of(cluster: TestCluster) -> dict[str, FlowView] | None:
    """None while the coordinator waits for its state."""
    try:
        return cluster.flows()
    except RemoteCallError:
        return None


def said_by(cluster: TestCluster) -> str:
    """What a call of the coordinator fails with."""
    try:
        with find_cluster(cluster.address).connect() as client:
            client.call("flows")
    except DPFlowError as error:
        return str(error)
    return ""


def keys(batches: object) -> list[int]:
    return [int(key) for _, labels in batches for key in labels]  # type: ignore[attr-defined]


def has(redis: RedisServer, flow: str) -> bool:
    with closing(open_store(redis.url)) as store:
        return f"flow/{flow}:v1" in store.items()


def test_jobs_read_and_come_while_the_store_is_away_and_all_is_written_again(
    cluster: TestCluster, redis: RedisServer, flow: str
) -> None:
    with open_at(cluster, flow) as job:
        batches = job.traverse(0)
        seen = keys(islice(batches, 3))
        wait(lambda: has(redis, flow), what="the flow in the store")
        redis.stop()
        killed = cluster.kill(f"{flow}:v1/router")
        wait(lambda: has_ended(killed), what="the router's end")
        assert sorted(seen + keys(batches)) == list(range(400))
        with open_at(cluster, f"{flow}/other") as other:
            assert sorted(keys(other.traverse(0))) == list(range(400))
        wait(lambda: "is it up?; jobs read on" in cluster.log.read_text(), what="a line that says so")
        redis.start()  # it has lost everything
        wait(lambda: has(redis, flow) and has(redis, f"{flow}/other"), what="both flows in the store")
    wait(lambda: "state store recovered" in cluster.log.read_text(), what="the end of it")


def test_what_is_not_stored_is_not_acknowledged(cluster: TestCluster, redis: RedisServer, flow: str) -> None:
    with open_at(cluster, flow):
        wait(lambda: has(redis, flow), what="the flow in the store")
    redis.stop()
    try:
        scaled = CliRunner().invoke(root, ["flow", "scale", flow, "--shards", "2", "--address", cluster.address])
    finally:
        redis.start()
    assert scaled.exit_code == 1, scaled.output
    assert "this is in force but not stored: the state store 'unix:" in scaled.output
    wait(lambda: has(redis, flow), what="the flow in the store")
    again = CliRunner().invoke(root, ["flow", "scale", flow, "--shards", "2", "--address", cluster.address])
    assert again.exit_code == 0, again.output


def test_a_coordinator_that_starts_anew_while_the_store_is_frozen_waits_and_jobs_read_on(
    cluster: TestCluster, redis: RedisServer, flow: str
) -> None:
    with open_at(cluster, flow) as job:
        batches = job.traverse(0)
        seen = keys(islice(batches, 3))
        wait(lambda: has(redis, flow), what="the flow in the store")
        before = {view.pid for view in cluster.processes(f"{flow}:v1/")}
        redis.freeze()
        try:
            killed = cluster.kill("coordinator")
            wait(lambda: has_ended(killed), what="the coordinator's end")
            assert sorted(seen + keys(batches)) == list(range(400))
        finally:
            redis.thaw()
        wait(lambda: f"{flow}:v1" in (flows_of(cluster) or ()), what="the flow at the next coordinator")
        wait(
            lambda: before <= {view.pid for view in cluster.processes(f"{flow}:v1/")},
            what="the same processes, as their node says",
        )


def test_a_coordinator_without_its_state_says_why_it_serves_nobody(
    cluster: TestCluster, redis: RedisServer, flow: str
) -> None:
    redis.stop()
    try:
        killed = cluster.kill("coordinator")
        wait(lambda: has_ended(killed), what="the coordinator's end")
        wait(lambda: "the state store" in said_by(cluster), what="a coordinator that waits for its state")
        impatient = JobOptions(reconnect_timeout_s=3.0)
        with pytest.raises(DeadlineError, match=r"the state store .* is it up\?; retry .waited 3 s"):
            open_job(flow, Numbers(400), address=cluster.address, options=impatient)
        listed = CliRunner().invoke(root, ["flow", "list", "--address", cluster.address])
        assert listed.exit_code == 1
        assert "the state store 'unix:" in listed.output
    finally:
        redis.start()
    wait(lambda: flows_of(cluster) is not None, what="an answer")


@pytest.mark.slow
def test_a_cluster_whose_store_is_spoilt_before_it_is_up_fails_with_the_reason(tmp_path: Path) -> None:
    program = """
import sys
from torch_dpflow.errors import StateError
from torch_dpflow.cluster.services.local_cluster import ClusterOptions, LocalCluster
cluster = LocalCluster(ClusterOptions(connection_file=sys.argv[1], state=sys.argv[2]))
open(sys.argv[2], "w").write("no database" * 1000)
try:
    cluster.serve(lambda: print("up"))
except StateError as error:
    print(error)
"""
    with interpreter(program, str(tmp_path / "connection"), str(tmp_path / "state")) as process:
        output = process.communicate(timeout=250)[0]
    assert output.startswith(f"the state store '{tmp_path}/state' cannot be used: file is not a database")
    assert not (tmp_path / "connection").exists()


def test_a_second_cluster_does_not_share_the_store(
    cluster: TestCluster, redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command looks for modules in the working directory, too
    arguments = ["up", "--state", redis.url, "--address", str(tmp_path / "connection")]
    refused = CliRunner().invoke(root, arguments, env={"COLUMNS": "300"})
    assert refused.exit_code == 1
    assert "another cluster keeps its flows in the state store" in refused.output
    assert cluster.flows() is not None
    assert list(tmp_path.iterdir()) == []


def test_what_was_acknowledged_outlives_the_coordinator(tmp_path: Path) -> None:
    """The store takes no write for a moment: what dies before that has acknowledged nothing."""
    state = tmp_path / "state"
    cluster = TestCluster.start(tmp_path, state=str(state))

    def ask_and_kill(method: str, body: object, acknowledged: threading.Event) -> None:
        with cluster.coordinator() as client:
            pid = cluster.process("coordinator").pid
            client.call(method, body)
            os.kill(pid, signal.SIGKILL)
            wait(lambda: has_ended(pid), what="the coordinator's end")
            acknowledged.set()

    try:
        content = b"nothing that would be loaded"
        digest = hashlib.sha256(content).hexdigest()
        spec = FlowSpec(name="f", version=1, size=8, content=digest, fingerprint={})
        register(find_cluster(cluster.address), spec, content, reconnect_timeout_s=120.0)
        with closing(open_store(str(state))) as store:
            wait(lambda: any(key.startswith("flow/") for key in store.items()), what="the flow in the store")
        for method, body in (("scale", Scale("f", 3, 5)), ("delete", "f:v1")):
            acknowledged = threading.Event()
            with closing(sqlite3.connect(state, isolation_level=None)) as held:
                held.execute("BEGIN IMMEDIATE")
                asking = threading.Thread(target=ask_and_kill, args=(method, body, acknowledged))
                asking.start()
                acknowledged.wait(1)
                held.execute("ROLLBACK")
            assert acknowledged.wait(120)
            asking.join()
            found = cluster.flows()
            assert not found if method == "delete" else found["f:v1"].spec.workers == 5
    finally:
        cluster.stop()
