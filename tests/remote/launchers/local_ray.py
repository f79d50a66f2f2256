"""A Ray cluster for the tests of one module."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from torch_dpflow.remote.launchers.ray import RayLauncher

#: For all tests that start it.
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'torch_dpflow[ray]'")
#: A node's memory for Ray's objects: the least that it takes.
STORE = 80 * 2**20

#: Environment variables that Ray sets in its driver.
OF_RAY = ("RAY_AUTH_MODE", "RAY_CLIENT_MODE", "PYTHONBREAKPOINT")

#: How the processes are called that run workers, in their command lines.
MEMBER = "torch_dpflow.remote.launchers.ray_cluster"


@contextmanager
def ray_of(start: Callable[[Any, str], str]) -> Iterator[Any]:
    """Ray, as `start` starts it, given the module and a directory; it returns the address, and `RAY_ADDRESS` is it."""
    with (
        tempfile.TemporaryDirectory(prefix="r-", ignore_cleanup_errors=True) as directory,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", "t" * 40)  # else one is written to the home directory
        patch.setenv("RAY_worker_niceness", "0")  # else 15: what Ray runs waits for all other tests
        patch.delenv("RAY_ADDRESS", raising=False)
        for name in OF_RAY:
            patch.setenv(name, "")
            patch.delenv(name)
        patch.setattr(sys, "excepthook", sys.excepthook)
        import ray

        before = signal.getsignal(signal.SIGTERM)
        patch.setenv("RAY_ADDRESS", start(ray, directory))
        signal.signal(signal.SIGTERM, before)  # else Ray's handler stays for all tests of this process
        yield ray
        ray.shutdown()


def start_node(cpus: float) -> Callable[[Any, str], str]:
    """Starts a cluster of one node, for `ray_of`."""

    def start(ray: Any, directory: str) -> str:
        context = ray.init(num_cpus=cpus, include_dashboard=False, object_store_memory=STORE, _temp_dir=directory)
        return str(context.address_info["address"])

    return start


@contextmanager
def ray_nodes(*cpus: float) -> Iterator[Any]:
    """Ray's `Cluster` of several nodes on this host, with so many processors each; `RAY_ADDRESS` is the first one's."""
    from ray.cluster_utils import Cluster

    clusters: list[Any] = []

    def start(ray: Any, directory: str) -> str:
        Path(tempfile.gettempdir(), "ray").mkdir(exist_ok=True)
        head = {"num_cpus": cpus[0], "include_dashboard": False, "object_store_memory": STORE}
        clusters.append(Cluster(initialize_head=True, head_node_args=head))
        for share in cpus[1:]:
            add_node(clusters[0], share)
        ray.init(clusters[0].address)
        return str(clusters[0].address)

    with ray_of(start):
        yield clusters[0]
    clusters[0].shutdown()


def add_node(cluster: Any, cpus: float) -> Any:
    return cluster.add_node(num_cpus=cpus, object_store_memory=STORE)


def workers() -> dict[int, int]:
    """The processes that run workers in the clusters of this process, and their actors'."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            # One whose actor is gone ends soon, and is its raylet's child until then.
            if MEMBER in process.cmdline() and process.parent().name().startswith("ray::"):
                found[process.pid] = process.ppid()
    return found


def names_in(launcher: RayLauncher) -> list[str]:
    """The workers of all that Ray has."""
    return [*launcher.list("")]
