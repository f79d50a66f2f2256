"""Ray, a real one that this module starts: its adapter keeps the contract, and says what is wrong."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest

from tests.shared_cluster import wait
from torch_dpflow.errors import PlatformError, QuotaError, RejectedError
from torch_dpflow.platforms import Ray
from torch_dpflow.platforms.members import Adapter
from torch_dpflow.platforms.ray import RayAdapter
from torch_dpflow.testing.adapters import PROGRAM, AdapterContract

#: So that several fit on any machine.
SHARE = 0.1


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[Any]:
    """A cluster of one node, for the whole module."""
    directory = tempfile.mkdtemp(prefix="ray-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", "t" * 40)  # else one is written to the home directory
        patch.delenv("RAY_ADDRESS", raising=False)
        import ray

        context = ray.init(
            num_cpus=4, include_dashboard=False, object_store_memory=80 * 2**20, _temp_dir=directory
        )
        patch.setenv("RAY_ADDRESS", context.address_info["address"])
        yield ray
        ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(autouse=True)
def no_leaks(ray: Any) -> Iterator[None]:
    """Instead of the check of all tests: Ray keeps sockets and processes as it likes. Of ours nothing is left."""
    yield
    with closing(RayAdapter(Ray())) as adapter:
        wait(lambda: not adapter.list(""), what="the end of all members")
    wait(
        lambda: not [one for one in threading.enumerate() if one.name.startswith("dpflow")], what="no thread"
    )


class TestRay(AdapterContract):
    starter = multiprocessing.get_context("spawn")  # Ray does not survive a fork

    def new_adapter(self, module: str) -> Adapter:
        return RayAdapter(Ray(cpus=SHARE), module=module, detached=True)

    def refusing(self) -> Mapping[type[PlatformError], Callable[[], Adapter]]:
        nowhere = Ray(runtime_env={"working_dir": "/nowhere"})
        return {
            RejectedError: lambda: RayAdapter(nowhere, module=PROGRAM),
            QuotaError: lambda: RayAdapter(Ray(cpus=1000, wait_s=0.1), module=PROGRAM),
        }
