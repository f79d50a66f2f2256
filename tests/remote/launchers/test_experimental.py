"""Platforms that have never been run on their cloud say so when they are used."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from torch_dpflow.cli.main import root
from torch_dpflow.remote import FunctionCompute, Lambda, Processes
from torch_dpflow.remote.launchers import registry


@pytest.fixture(autouse=True)
def not_logged_yet() -> Iterator[None]:
    registry.warn_experimental.cache_clear()
    yield
    registry.warn_experimental.cache_clear()


@pytest.mark.parametrize(("name", "given"), [("fc", FunctionCompute()), ("lambda", Lambda())])
def test_an_experimental_platform_is_logged_once_a_process(
    name: str, given: FunctionCompute | Lambda, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        registry.resolve(given)
        registry.resolve(name)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"platform {name} is experimental" in record.getMessage()


def test_other_platforms_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    registry.resolve(Processes())
    registry.resolve("kubernetes")
    assert caplog.records == []


def test_nodes_on_eci_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    CliRunner().invoke(root, ["deploy", "eci", "--remove", "--list"])
    assert [record.getMessage() for record in caplog.records if "experimental" in record.getMessage()] == [
        "platform eci is experimental: tested against test doubles, never on its cloud"
    ]


def test_a_script_without_logging_shows_it() -> None:
    code = "from torch_dpflow.remote.launchers.registry import resolve; resolve('fc')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("platform fc is experimental") == 1
