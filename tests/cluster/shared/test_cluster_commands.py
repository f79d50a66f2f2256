"""The commands for a cluster, as a person or a program calls them."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

from tests.new_process import ROOT, interpreter
from tests.shared_cluster import PATIENCE_S, TestCluster, open_job, wait
from tests.shared_datasets import Numbers
from tests.worker_cases import has_ended
from torch_dpflow.cli.main import root
from torch_dpflow.cluster.client.open_job import SharedJob
from torch_dpflow.cluster.security.connection_file import NODE_SOCKET
from torch_dpflow.ipc.rpc import RpcServer
from torch_dpflow.ipc.transport import is_refused, listen


@pytest.fixture(scope="module")
def cluster(cluster_of_file: TestCluster) -> TestCluster:
    return cluster_of_file


def run(*arguments: str) -> Result:
    return CliRunner().invoke(root, [*arguments], env={"COLUMNS": "200"})


def test_status_top_and_flow_tell_of_a_job(cluster: TestCluster, join: Callable[..., SharedJob], flow: str) -> None:
    job = join(flow, Numbers(40), batch_size=10)
    assert sum(len(labels) for _, labels in job.traverse(0)) == 40
    wait(lambda: cluster.flows()[f"{flow}:v1"].jobs == 1, what="the job's name at the coordinator")
    cluster.process(f"{flow}:v1/shard-000/worker")
    told = json.loads(run("status", "--address", cluster.address, "--json").output)
    assert [(one["spec"]["name"], one["state"]) for one in told["flows"] if one["jobs"]] == [(flow, "accessed")]
    assert {one["role"] for one in told["processes"]} == {"coordinator", "router", "shard", "worker"}
    assert flow in run("status", "--address", cluster.address).output

    def mine() -> list[dict[str, str]]:
        jobs = json.loads(run("status", "--address", cluster.address, "--json").output)["jobs"]
        return [one for one in jobs if one["flow"] == f"{flow}:v1"]

    wait(mine, what="the job's first report")
    assert mine()[0]["job"] in run("status", "--address", cluster.address).output
    looks = run("top", "--count", "2", "--interval", "0", "--address", cluster.address).output
    assert f"{flow}:v1" in looks
    assert "shard-000" in looks
    shown = json.loads(run("flow", "show", flow, "--json", "--address", cluster.address).output)
    assert shown[0]["spec"]["size"] == 40
    for name in (flow, f"{flow}:v1"):  # as printed
        assert f"{flow}:v1: 40 samples" in run("flow", "show", name, "--address", cluster.address).output
    assert "is not registered" in run("flow", "show", f"{flow}:v2", "--address", cluster.address).output
    scaled = run("flow", "scale", flow, "--shards", "2", "--address", cluster.address)
    assert f"{flow}:v1 will have 2 shards and 2 workers; " in scaled.output
    scaled = run("flow", "scale", flow, "--workers", "3", "--address", cluster.address)
    assert f"{flow}:v1 will have 2 shards and 3 workers; " in scaled.output
    refused = run("flow", "scale", flow, "--address", cluster.address)
    assert "give --shards, --workers or both" in refused.output
    refused = run("flow", "delete", flow, "--address", cluster.address)
    assert refused.exit_code == 1
    assert "is read by 1 jobs; end them first" in refused.output
    job.close()
    wait(lambda: cluster.flows()[f"{flow}:v1"].jobs == 0, what="the job's end")
    assert run("flow", "delete", flow, "--address", cluster.address).output == f"deleted {flow}:v1\n"
    assert flow not in run("flow", "list", "--address", cluster.address).output


def test_keys_are_written_for_the_owner_alone_and_never_over_others(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    assert run("keygen", str(path)).exit_code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = run("keygen", str(path))
    assert again.exit_code == 1
    assert "exists already" in again.output


def test_output_that_finds_no_room_is_told(cluster: TestCluster, tmp_path: Path) -> None:
    program = "import sys; from torch_dpflow.cli.main import root; root(sys.argv[1:])"
    at = ["--address", cluster.address]
    for arguments in (["status", *at], ["flow", "list", *at, "--json"], ["keygen", str(tmp_path / "keys")]):
        with open("/dev/full", "w") as full:
            ended = subprocess.run(
                [sys.executable, "-c", program, *arguments], stdout=full, stderr=subprocess.PIPE, text=True
            )
        told = "Error: No space left on device: free space, or write the output elsewhere\n"
        assert (ended.returncode, ended.stderr) == (1, told)


def test_a_cluster_that_is_not_there_is_told_so(tmp_path: Path) -> None:
    refused = run("status", "--address", str(tmp_path / "none"))
    assert refused.exit_code == 1
    assert "is the cluster up?" in refused.output


@pytest.mark.parametrize("as_json", [False, True])
def test_top_ends_quietly_by_control_c(cluster: TestCluster, as_json: bool) -> None:
    program = "import sys; from torch_dpflow.cli.main import root; root(sys.argv[1:])"
    arguments = ["top", "--address", cluster.address, "--interval", "60", *(["--json"] if as_json else [])]
    # What was read up to a line may end in the midst of a character.
    with interpreter(program, *arguments, errors="replace") as top:
        assert top.stdout is not None
        assert top.stdout.readline()
        top.send_signal(signal.SIGINT)
        _, said = top.communicate(timeout=250)
    assert (top.returncode, said) == (0, "")


@pytest.fixture
def own_cluster(tmp_path_factory: pytest.TempPathFactory) -> TestCluster:
    """A cluster that the test ends itself."""
    return TestCluster.start(tmp_path_factory.mktemp("c"))


def test_a_cluster_ends_quietly_by_control_c_in_its_terminal(own_cluster: TestCluster) -> None:
    with open_job("f", Numbers(40), address=own_cluster.address, batch_size=4) as job:
        assert sum(len(labels) for _, labels in job.traverse(0)) == 40
    os.killpg(own_cluster.pid, signal.SIGINT)
    wait(lambda: has_ended(own_cluster.pid), what="the cluster's end")
    assert "Traceback" not in own_cluster.log.read_text()


@pytest.mark.slow
def test_commands_end_while_nothing_answers_and_down_does_without_a_coordinator(
    own_cluster: TestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ANSWER_S", "NODE_S"):
        monkeypatch.setattr(f"torch_dpflow.cli.cluster_views.{name}", 1.0)
    coordinator = own_cluster.process("coordinator")
    os.kill(own_cluster.pid, signal.SIGSTOP)
    try:
        os.kill(coordinator.pid, signal.SIGKILL)
        doubt = "Whether it was done is unknown; see `dpflow flow show images`"
        for arguments, is_sent in ((["scale", "images", "--shards", "2"], True), (["delete", "images"], False)):
            refused = run("flow", *arguments, "--address", own_cluster.address)
            assert refused.exit_code == 1
            assert "within 1 s; is it up, or is another program there?" in refused.output
            assert (doubt in refused.output) == is_sent  # `delete` requests the versions first
        refused = run("down", "--address", own_cluster.address)
        assert refused.exit_code == 1
        assert "end the process of `dpflow up`" in refused.output
    finally:
        os.kill(own_cluster.pid, signal.SIGCONT)
    own_cluster.kill("coordinator", signal.SIGSTOP)
    monkeypatch.setattr("torch_dpflow.cli.cluster_views.NODE_S", PATIENCE_S)  # its node answers
    assert run("down", "--address", own_cluster.address).exit_code == 0
    wait(lambda: has_ended(own_cluster.pid), what="the node's end")


def test_down_ends_a_cluster_that_is_still_coming_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_dpflow.cli.cluster_views.ANSWER_S", 1.0)
    address = f"ipc://{tmp_path}/coordinator"

    def come_up() -> None:
        with closing(listen(address)) as coordinator:
            coordinator.receive(None)
            node = RpcServer(listen(f"ipc://{tmp_path}/{NODE_SOCKET}"))
            node.register("stop", lambda call: node.stop(), body_type=None)
            node.serve()
            node.close()

    thread = threading.Thread(target=come_up, daemon=True)
    thread.start()
    wait(lambda: not is_refused(address), what="the coordinator's socket")
    assert run("down", "--address", address).exit_code == 0
    thread.join(150)
    assert not thread.is_alive()


def test_a_cluster_goes_on_in_the_background_and_says_why_it_cannot(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch_dpflow.cli", "up", "--detach", "--json"]
    command += ["--address", str(tmp_path / "found.json")]
    # Files and not pipes: whoever reads one of these to its end would wait for the cluster's.
    out, err, env = tmp_path / "out", tmp_path / "err", {**os.environ, "TMPDIR": str(tmp_path)}
    with out.open("w") as stdout, err.open("w") as stderr:
        first = subprocess.run(command, stdout=stdout, stderr=stderr, env=env, timeout=PATIENCE_S)
        facts = json.loads(out.read_text())
        try:
            assert (first.returncode, os.getsid(facts["pid"])) == (0, facts["pid"])
            again = subprocess.run(command, stdout=stdout, stderr=stderr, env=env, timeout=PATIENCE_S)
            log = tmp_path / "found.log"
            said = err.read_text()
            assert again.returncode == 1
            assert f"the cluster has not started; {log} has:\nError: a cluster is up already at" in said
            assert stat.S_IMODE(log.stat().st_mode) == 0o600
            assert "process coordinator started" in log.read_text()
        finally:
            assert run("down", "--address", facts["connection_file"]).exit_code == 0
            wait(lambda: has_ended(facts["pid"]), what="the cluster's end")


def test_a_cluster_in_the_background_without_space_for_its_log_names_the_log(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch_dpflow.cli", "up", "--detach", "--address", str(tmp_path / "found.json")]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 0; exec "$@"', "bash", *command],  # fails as a full disk does
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert f"{tmp_path / 'found.log'} has:\nno line of this start; is there space left for it?" in done.stderr


def test_control_c_while_the_fork_server_imports_prints_no_traceback(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "torch_dpflow.cli", "up", "--address", str(tmp_path / "connection")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        children = psutil.Process(process.pid).children
        wait(lambda: any("forkserver" in str(one.cmdline()) for one in children()), what="the fork server")
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate()
    assert "Traceback" not in said
    assert said.endswith("dpflow is down\n")
    assert process.returncode == 0
