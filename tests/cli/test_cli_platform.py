"""`dpflow workers`, `sweep` and `check`, on processes of this host."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.contracts.launchers import PROGRAM, caller, launch_spec_to
from tests.contracts.processes import TIMEOUT_S
from tests.new_process import Interpreter
from torch_dpflow.cli.main import root
from torch_dpflow.cluster.security.connection_file import generate_keys, write_connection_file
from torch_dpflow.remote.launchers.contract import prefix_of
from torch_dpflow.remote.launchers.processes import SubprocessLauncher

#: Not that of another test which runs beside this one.
CLUSTER = f"{os.getpid():08x}"
NAME = f"{prefix_of(CLUSTER, '0123456789')}0-1"


def dpflow(*arguments: str) -> Result:
    return CliRunner().invoke(root, arguments)


@pytest.fixture(scope="module")
def member() -> Iterator[socket.socket]:
    """The connection of a member that somebody has started and left."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        closing(SubprocessLauncher(PROGRAM)) as launcher,
    ):
        listener.settimeout(TIMEOUT_S)
        launcher.start(NAME, launch_spec_to(listener), deadline_s=TIMEOUT_S)
        with caller(listener) as (connection, _):
            yield connection
        launcher.stop(NAME, None)


def test_workers_are_listed_and_swept_once_it_is_said_whose(member: socket.socket) -> None:
    told = dpflow("workers", "processes")
    assert told.exit_code == 0
    assert NAME in told.stdout.splitlines()
    assert f"1 of cluster {CLUSTER}" in told.stderr
    told = dpflow("sweep", "processes")
    assert told.exit_code == 1
    assert f"would end {NAME}\n" in told.stdout
    assert f"1 of cluster {CLUSTER}" in told.stderr
    assert "nothing was ended: give --cluster, as above, or --all" in told.stderr
    for whose in (["--all"], ["--cluster", CLUSTER]):
        told = dpflow("sweep", "processes", "--dry-run", *whose)
        assert told.exit_code == 0, told.output
        assert f"would end {NAME}\n" in told.stdout
    assert NAME in dpflow("workers", "processes").stdout
    listed = json.loads(dpflow("workers", "processes", "--json").stdout)
    assert (listed["platform"], NAME in listed["workers"]) == ("processes", True)
    told = dpflow("sweep", "processes", "--cluster", CLUSTER, "--dry-run", "--json")
    assert json.loads(told.stdout) == {"found": [NAME], "ended": [], "failed": {}}
    told = dpflow("sweep", "processes", "--cluster", CLUSTER, "--json")
    assert json.loads(told.stdout) == {"found": [NAME], "ended": [NAME], "failed": {}}
    assert member.recv(1) == b"", "it has ended"
    assert dpflow("sweep", "processes", "--cluster", CLUSTER).stdout == "0 ended\n"
    told = dpflow("sweep", "processes", "--cluster", CLUSTER, "--dry-run")
    assert (told.exit_code, told.stdout, told.stderr) == (0, "", "no workers on processes\n")


def test_what_is_no_name_of_a_worker_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        with closing(SubprocessLauncher(PROGRAM)) as launcher:
            name = f"dpf-{CLUSTER}-somebody-elses"
            launcher.start(name, launch_spec_to(listener), deadline_s=TIMEOUT_S)
            with caller(listener):
                assert launcher.list(name)
                told = dpflow("workers", "processes")
                assert told.exit_code == 0, told.output
                assert name not in told.stdout
                assert dpflow("sweep", "processes", "--cluster", CLUSTER).exit_code == 0
                assert launcher.list(name)
            launcher.stop(name, None)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["sweep", "processes", "--cluster", "all"], "--cluster 'all': give 8 hexadecimal digits"),
        (["sweep", "processes", "--cluster", ""], "--cluster '': give 8"),
        (["sweep", "processes", "--cluster", CLUSTER, "--all"], "exclude each other"),
        (["sweep", "rai", "--all"], "did you mean 'ray'"),
        (["workers", "rai"], "did you mean 'ray'"),
        (["check", "rai"], "did you mean 'ray'"),
        (["check", "processes", "--listen", "127.0.0.1:0"], "must be tcp://HOST:PORT"),
        (["check", "processes", "--listen", ""], "must be tcp://HOST:PORT"),
    ],
)
def test_arguments_that_cannot_be_meant_end_in_a_line_with_the_remedy(arguments: list[str], told: str) -> None:
    done = dpflow(*arguments)
    assert done.exit_code == 1
    assert told in done.output
    assert done.output.count("\n") == 1


def test_a_check_says_of_settings_what_is_wrong_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dpflow.toml").write_text("[network]\nlisten = 'tcp://nowhere.invalid:0'\n")
    monkeypatch.chdir(tmp_path)
    done = dpflow("check", "processes")
    assert done.exit_code == 1
    assert "nowhere.invalid has no address here" in done.output


def test_a_check_tries_one_worker() -> None:
    told = dpflow("check", "processes")
    assert told.exit_code == 0, told.output
    assert "WRONG" not in told.output
    for text in ("can be executed", "has sent a sample after", "same versions", "ms from request", "MB/s"):
        assert text in told.output


@pytest.mark.parametrize(
    ("library", "arguments", "planned"),
    [
        (
            "boto3",
            ("lambda", "--image", "ecr/d:1"),
            ["would be created, or changed where it differs:", "ecr/d:1"],
        ),
        ("boto3", ("lambda", "--remove"), ["'dpflow-worker' in eu-central-1 would be removed"]),
        (
            "alibabacloud_fc20230330",
            ("fc", "--image", "r/i:1"),
            ["would be created, or changed where it differs:", "r/i:1"],
        ),
        ("alibabacloud_fc20230330", ("fc", "--remove"), ["'dpflow-worker' in cn-hangzhou would be removed"]),
        (
            "alibabacloud_eci20180808",
            ("eci", "--nodes", "2", "--image", "r/i:1", "--vswitch", "v", "--security-group", "s"),
            ["node-0 would be created: r/i:1", "node-1 would be created: r/i:1"],
        ),
        (
            "alibabacloud_eci20180808",
            ("eci", "--remove"),
            ["all container groups of cluster", "would be removed"],
        ),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, tuple) else None,
)
def test_a_dry_run_of_deploy_needs_no_credentials(
    library: str,
    arguments: tuple[str, ...],
    planned: list[str],
    tmp_path: Path,
) -> None:
    pytest.importorskip(library)
    vendors = ("AWS_", "ALIBABA_", "DPFLOW_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(vendors)}
    (tmp_path / "dpflow.toml").write_text(
        '[platform.lambda]\nregion = "eu-central-1"\nrole = "arn:aws:iam::1:role/r"\n'
    )
    keys = tmp_path / "keys"
    write_connection_file(keys, generate_keys("tcp://10.0.0.5:5555"))
    env |= {
        "HOME": str(tmp_path),
        "DPFLOW_CONFIG": str(tmp_path / "dpflow.toml"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "ALIBABA_CLOUD_ECS_METADATA_DISABLED": "true",
    }
    joined = ("--join", str(keys)) if arguments[0] == "eci" else ()
    for dry_run in ((), ("--dry-run",)):
        # In a process of its own: the vendor's chain takes the environment as it was when it was imported.
        command = [sys.executable, "-m", "torch_dpflow.cli", "deploy", *arguments, *joined, *dry_run]
        with Interpreter(command, env=env) as process:
            output = "".join(process.communicate(timeout=TIMEOUT_S))
        assert "redentials" in output, "the reason"
        assert process.returncode == (0 if dry_run else 1), output
        assert [part in output for part in planned] == [bool(dry_run)] * len(planned)
