"""Function Compute itself: the suite of launchers, and batches of a loader. Not run yet by anybody."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.contracts.launchers import PROGRAM, LauncherContract
from tests.remote.launchers.cloud.account import check_batches, cloud, needed
from torch_dpflow.errors import PlatformError, RejectedError
from torch_dpflow.remote import FunctionCompute
from torch_dpflow.remote.launchers.contract import Launcher
from torch_dpflow.remote.launchers.fc import FunctionComputeLauncher
from torch_dpflow.remote.launchers.fc_deploy import deploy, remove
from torch_dpflow.remote.launchers.registry import resolve

pytestmark = cloud("fc")


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Not of this process: the vendor's client keeps its connections."""


@pytest.fixture(scope="module")
def settings() -> FunctionCompute:
    spec = resolve("fc")
    assert isinstance(spec, FunctionCompute)
    return spec


def deployed(spec: FunctionCompute, **arguments: Any) -> Iterator[FunctionCompute]:
    """A function of the tests' own, while they run."""
    spec = replace(spec, function=f"{spec.function}-test", **arguments.pop("settings", {}))
    print(*deploy(spec, needed("DPFLOW_TEST_IMAGE_FC"), **arguments), sep="\n")
    yield spec
    print(*remove(spec), sep="\n")


class Make:
    """Makes launchers, in other processes too."""

    def __init__(self, spec: FunctionCompute) -> None:
        self.spec = spec

    def __call__(self, module: str = PROGRAM) -> FunctionComputeLauncher:
        return FunctionComputeLauncher(self.spec)


class TestFunctionComputeItself(LauncherContract):
    starter = multiprocessing.get_context("spawn")

    @pytest.fixture(scope="class")
    def function(self, settings: FunctionCompute) -> Iterator[FunctionCompute]:
        yield from deployed(settings, module=PROGRAM)

    @pytest.fixture(autouse=True)
    def there(self, function: FunctionCompute) -> None:
        self.near = needed("DPFLOW_TEST_NEAR")
        self.new_launcher = Make(function)  # type: ignore[method-assign]

    def refusing(self) -> Mapping[type[PlatformError], Callable[[], Launcher]]:
        return {RejectedError: lambda: Make(replace(self.new_launcher.spec, function="no-such-function"))()}  # type: ignore[attr-defined]


def test_batches_equal_those_of_local_workers(settings: FunctionCompute) -> None:
    for spec in deployed(settings):
        check_batches(spec)
