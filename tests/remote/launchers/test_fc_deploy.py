"""`dpflow deploy fc` makes the function that the launcher takes, by the vendor's client, on a control plane of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from tests.remote.launchers.fc_server.account import KEYS, keys, no_leaks  # noqa: F401 - fixtures
from tests.remote.launchers.fc_server.server import FunctionServer
from torch_dpflow.cli.main import root

pytest.importorskip("alibabacloud_fc20230330", reason="pip install 'torch_dpflow[fc]'")


@pytest.fixture(scope="module")
def server() -> Iterator[FunctionServer]:
    with FunctionServer(KEYS) as server:
        yield server


@pytest.fixture(autouse=True)
def settings(server: FunctionServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ENDPOINT": server.endpoint, "MAX_WORKERS": "8", "LIFETIME": "10m"}.items():
        monkeypatch.setenv(f"DPFLOW_PLATFORM_FC_{name}", value)


def dpflow(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(root, [*arguments])
    return done.exit_code, done.output


def test_a_function_is_made_changed_and_removed(server: FunctionServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert dpflow("deploy", "fc", "--image", "r/i:1", "--dry-run")[0] == 0
    assert not server.functions
    code, said = dpflow("deploy", "fc", "--image", "r/i:1")
    assert (code, server.configs["dpflow-worker"]["maxAsyncRetryAttempts"]) == (0, 0)
    assert "'dpflow-worker' in cn-hangzhou created" in said
    made = server.functions["dpflow-worker"]
    assert made["customContainerConfig"]["image"] == "r/i:1"
    assert (made["memorySize"], made["cpu"], made["timeout"], made["instanceConcurrency"]) == (
        2048,
        1.0,
        660,
        1,
    )
    assert "nothing differs" in dpflow("deploy", "fc", "--image", "r/i:1", "--dry-run")[1]

    monkeypatch.setenv("DPFLOW_PLATFORM_FC_MEMORY", "4GiB")
    monkeypatch.setenv("DPFLOW_PLATFORM_FC_VPC", '{ id = "vpc-1", vswitches = ["vsw-1"], security_group = "sg-1" }')
    assert "memorySize: 2048 -> 4096" in dpflow("deploy", "fc", "--image", "r/i:2", "--dry-run")[1]
    assert server.functions["dpflow-worker"]["memorySize"] == 2048
    assert "changed" in dpflow("deploy", "fc", "--image", "r/i:2")[1]
    made = server.functions["dpflow-worker"]
    assert (made["memorySize"], made["customContainerConfig"]["image"]) == (4096, "r/i:2")
    assert made["vpcConfig"] == {"vpcId": "vpc-1", "vSwitchIds": ["vsw-1"], "securityGroupId": "sg-1"}

    assert "would be removed" in dpflow("deploy", "fc", "--remove", "--dry-run")[1]
    assert server.functions
    assert "removed" in dpflow("deploy", "fc", "--remove")[1]
    assert not server.functions
    assert "there is no function" in dpflow("deploy", "fc", "--remove")[1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "--image"),
        ({"ALIBABA_CLOUD_ACCESS_KEY_SECRET": "another"}, "SignatureDoesNotMatch"),
        ({"DPFLOW_PLATFORM_FC_REGION": ""}, "--image"),
    ],
)
def test_what_cannot_be_done_is_one_line(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], says: str) -> None:
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    image = ["--image", "r/i:1"] if "ALIBABA_CLOUD_ACCESS_KEY_SECRET" in change else []
    code, said = dpflow("deploy", "fc", *image)
    assert code == 1
    assert says in said
    assert "Traceback" not in said


def test_a_check_says_that_there_is_no_function() -> None:
    code, said = dpflow("check", "fc", "--listen", "tcp://127.0.0.1:0")
    assert code == 1
    assert "dpflow deploy fc" in said
