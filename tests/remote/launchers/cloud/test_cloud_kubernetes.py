"""A Kubernetes cluster itself: the suite of launchers, and batches of a loader. Not run yet by anybody."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from tests.contracts.launchers import LauncherContract
from tests.remote.launchers.cloud.account import check_batches, cloud, needed
from torch_dpflow.errors import PlatformError, RejectedError
from torch_dpflow.remote import Kubernetes
from torch_dpflow.remote.launchers.contract import Launcher
from torch_dpflow.remote.launchers.kubernetes import KubernetesLauncher
from torch_dpflow.remote.launchers.registry import resolve

pytestmark = cloud("kubernetes")


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Not of this process: the client keeps its connections."""


@pytest.fixture(scope="module")
def settings() -> Kubernetes:
    spec = resolve("kubernetes")
    assert isinstance(spec, Kubernetes)
    return replace(spec, image=needed("DPFLOW_TEST_IMAGE_KUBERNETES"))


class Make:
    """Makes launchers, in other processes too."""

    def __init__(self, spec: Kubernetes) -> None:
        self.spec = spec

    def __call__(self, module: str) -> KubernetesLauncher:
        return KubernetesLauncher(self.spec, module=module)


class TestKubernetesItself(LauncherContract):
    starter = multiprocessing.get_context("spawn")

    @pytest.fixture(autouse=True)
    def there(self, settings: Kubernetes) -> None:
        self.near = needed("DPFLOW_TEST_NEAR")
        self.new_launcher = Make(settings)  # type: ignore[method-assign]

    def refusing(self) -> Mapping[type[PlatformError], Callable[[], Launcher]]:
        spec = replace(self.new_launcher.spec, service_account="no-such-account")  # type: ignore[attr-defined]
        return {RejectedError: lambda: KubernetesLauncher(spec)}


def test_batches_equal_those_of_local_workers(settings: Kubernetes) -> None:
    check_batches(settings)
