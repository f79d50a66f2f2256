"""AWS Lambda itself: the suite of launchers, and batches of a loader. Not run yet by anybody."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.contracts.launchers import PROGRAM, LauncherContract
from tests.remote.launchers.cloud.account import check_batches, cloud, needed
from torch_dpflow.errors import PlatformError, RejectedError
from torch_dpflow.remote import Lambda
from torch_dpflow.remote.launchers.aws_lambda import LambdaLauncher
from torch_dpflow.remote.launchers.contract import Launcher
from torch_dpflow.remote.launchers.lambda_deploy import deploy, remove
from torch_dpflow.remote.launchers.registry import resolve

pytestmark = cloud("lambda")


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Not of this process: the vendor's client keeps its connections."""


@pytest.fixture(scope="module")
def settings() -> Lambda:
    spec = resolve("lambda")
    assert isinstance(spec, Lambda)
    return spec


def deployed(spec: Lambda, **arguments: Any) -> Iterator[Lambda]:
    """A function of the tests' own, while they run."""
    spec = replace(spec, function=f"{spec.function}-test")
    print(*deploy(spec, needed("DPFLOW_TEST_IMAGE_LAMBDA"), **arguments), sep="\n")
    yield spec
    print(*remove(spec), sep="\n")


class Make:
    """Makes launchers, in other processes too."""

    def __init__(self, spec: Lambda) -> None:
        self.spec = spec

    def __call__(self, module: str = PROGRAM) -> LambdaLauncher:
        return LambdaLauncher(self.spec)


class TestLambdaItself(LauncherContract):
    starter = multiprocessing.get_context("spawn")

    @pytest.fixture(scope="class")
    def function(self, settings: Lambda) -> Iterator[Lambda]:
        yield from deployed(settings, handler="tests.contracts.processes.handler")

    @pytest.fixture(autouse=True)
    def there(self, function: Lambda) -> None:
        self.near = needed("DPFLOW_TEST_NEAR")
        self.new_launcher = Make(function)  # type: ignore[method-assign]

    def refusing(self) -> Mapping[type[PlatformError], Callable[[], Launcher]]:
        return {RejectedError: lambda: Make(replace(self.new_launcher.spec, function="no-such-function"))()}  # type: ignore[attr-defined]


def test_batches_equal_those_of_local_workers(settings: Lambda) -> None:
    for spec in deployed(settings):
        check_batches(spec)
