"""`dpflow deploy lambda` and `dpflow check lambda`, over a control plane of ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.remote.launchers.lambda_server import LambdaServer, lambda_server
from tests.shared_cluster import wait
from torch_dpflow.cli.main import root


@pytest.fixture(scope="module")
def server(no_leaks_of_module: None) -> Iterator[LambdaServer]:
    with lambda_server(cold_start_s=0) as server:
        yield server


@pytest.fixture(autouse=True)
def no_leaks(server: LambdaServer) -> Iterator[None]:
    """Instead of the check of all tests: environments stay."""
    yield
    wait(lambda: not server.running, what="the end of all invocations")


@pytest.fixture
def write(server: LambdaServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of settings, which may be written anew."""
    for variable, text in server.env.items():
        monkeypatch.setenv(variable, text)
    path = tmp_path / "dpflow.toml"
    monkeypatch.setenv("DPFLOW_CONFIG", str(path))
    server.functions.clear()
    path.write_text(
        '[platform.lambda]\nmax_workers = 4\nmemory = "3GiB"\nlifetime = "10m"\nrole = "arn:aws:iam::1:role/r"\n'
        'vpc = { subnets = ["subnet-1"], security_groups = ["sg-1"] }\n'
    )
    return path


def dpflow(*arguments: str) -> Result:
    return CliRunner().invoke(root, arguments)


def test_a_function_is_created_changed_and_removed(server: LambdaServer, write: Path) -> None:
    planned = dpflow("deploy", "lambda", "--image", "ecr/d:1", "--dry-run")
    assert planned.output.startswith("function 'dpflow-worker' in eu-central-1 would be created:\n  image: ecr/d:1\n")
    assert not server.functions
    assert dpflow("deploy", "lambda", "--image", "ecr/d:1").exit_code == 0
    function = server.functions["dpflow-worker"]
    assert function["Code"] == {"ImageUri": "ecr/d:1"}
    assert (function["Timeout"], function["MemorySize"]) == (630, 3072)
    assert function["VpcConfig"] == {"SubnetIds": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}
    again = dpflow("deploy", "lambda", "--image", "ecr/d:1").output
    assert "nothing differs" in again
    write.write_text(write.read_text().replace("10m", "14m"))
    changed = dpflow("deploy", "lambda", "--image", "ecr/d:2").output.splitlines()
    assert changed[1:3] == ["  image: ecr/d:1 -> ecr/d:2", "  Timeout: 630 -> 870"]
    assert (function["Timeout"], function["Code"]) == (870, {"ImageUri": "ecr/d:2"})
    assert dpflow("deploy", "lambda", "--remove", "--dry-run").output.endswith("would be removed\n")
    assert server.functions
    assert dpflow("deploy", "lambda", "--remove").output == "function 'dpflow-worker' in eu-central-1 removed\n"
    assert not server.functions
    assert "there is no function" in dpflow("deploy", "lambda", "--remove").output


def test_what_is_missing_is_told_before_anything_is_done(server: LambdaServer, write: Path) -> None:
    told = dpflow("deploy", "lambda")
    assert told.exit_code == 1
    assert "no image: give --image" in told.output
    write.write_text("[platform.lambda]\n")
    told = dpflow("deploy", "lambda", "--image", "ecr/d:1")
    assert told.exit_code == 1
    assert "no role: give the ARN" in told.output
    server.create()
    server.functions["dpflow-worker"]["PackageType"] = "Zip"
    write.write_text('[platform.lambda]\nrole = "arn"\n')
    assert "is no container image, and cannot become one" in dpflow("deploy", "lambda", "--image", "x").output


def test_a_function_that_cannot_run_is_told_of(server: LambdaServer, write: Path) -> None:
    assert dpflow("deploy", "lambda", "--image", "ecr/d:1").exit_code == 0
    server.functions["dpflow-worker"].update(LastUpdateStatus="Failed", LastUpdateStatusReason="no such image")
    told = dpflow("deploy", "lambda", "--image", "ecr/d:9")
    assert told.exit_code == 1
    assert "cannot run: no such image" in told.output


@pytest.mark.slow
def test_a_check_tries_a_worker_of_what_was_deployed(server: LambdaServer, write: Path) -> None:
    assert dpflow("deploy", "lambda", "--image", "ecr/d:1").exit_code == 0
    told = dpflow("check", "lambda")
    assert told.exit_code == 0, told.output
    for text in ("is Active, with 3072 MiB", "room for 1000 workers", "same versions", "one worker sends"):
        assert text in told.output
    server.functions["dpflow-worker"]["Timeout"] = 3
    told = dpflow("check", "lambda")
    assert told.exit_code == 1
    assert "WRONG function 'dpflow-worker'" in told.output
