"""Ray with nodes that come and go, and Ray Train: the epoch goes on. Run by `make test-slow`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.holdings import own_threads
from tests.loader_cases import Augmented, assert_same
from tests.remote.launchers.local_ray import add_node, names_in, needs_ray, ray_nodes, workers
from tests.shared_cluster import wait
from torch_dpflow import DPFlowDataLoader, LoaderOptions
from torch_dpflow.remote import Ray
from torch_dpflow.remote.launchers.ray import RayLauncher

pytestmark = [pytest.mark.slow, needs_ray]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    """A head with room for half of a loader's workers."""
    with ray_nodes(2) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """As in `test_ray`."""
    before = own_threads()
    yield
    wait(lambda: not names_in(RayLauncher(Ray())) and not workers(), what="the end of all workers")
    wait(lambda: not own_threads() - before, what="the end of the test's threads")


def remove(cluster: Any, node: Any) -> None:
    cluster.remove_node(node, allow_graceful=False)


def kill_raylet(cluster: Any, node: Any) -> None:
    node.kill_raylet()


@pytest.mark.parametrize("lose", [remove, kill_raylet])
def test_an_epoch_goes_on_when_a_node_goes(cluster: Any, lose: Callable[[Any, Any], None]) -> None:
    node = add_node(cluster, 2)
    cluster.wait_for_nodes()

    def shuffled(**arguments: Any) -> DPFlowDataLoader[Any]:
        generator = torch.Generator().manual_seed(7)
        options = LoaderOptions(seeding="batch")
        return DPFlowDataLoader(
            Augmented(400), batch_size=2, shuffle=True, generator=generator, options=options, **arguments
        )

    remote = shuffled(num_workers=4, platform=Ray(cpus=1))
    expected = list(shuffled(num_workers=2))
    iterator = iter(remote)
    seen = [next(iterator)]
    wait(lambda: iterator._shard.processes.working == 4, what="four workers, on two nodes")
    lose(cluster, node)
    assert_same([*seen, *iterator], expected)
    if lose is kill_raylet:
        remove(cluster, node)


#: Loses the Ray node to which it is connected, while the cluster lives, and then starts an actor.
LOST = """
import sys, time
import ray
from ray.cluster_utils import Cluster
from torch_dpflow.remote import Ray
from torch_dpflow.remote.launchers.ray import RayLauncher

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
ray.init(cluster.address, logging_level="ERROR", log_to_driver=False)
launcher = RayLauncher(Ray(address=cluster.address), owns_process=sys.argv[1] == "service")
mine = ray.get_runtime_context().get_node_id()
next(node for node in cluster.list_all_nodes() if node.node_id == mine).kill_raylet()
while any(node["NodeID"] == mine for node in ray.nodes() if node["Alive"]):
    time.sleep(0.1)
try:
    launcher.start("dpf-1-1", b"", deadline_s=10.0)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("process", ["service", "script"])
def test_a_process_whose_ray_node_has_ended_starts_nothing(process: str) -> None:
    """A service ends: the process in its place is connected to another node."""
    env = {name: text for name, text in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run([sys.executable, "-c", LOST, process], env=env, capture_output=True, text=True, check=False)
    if process == "service":
        assert done.returncode == 1
        assert "the Ray node to which this process is connected has ended; connecting again" in done.stderr
    else:
        assert "RejectedError the Ray node to which this process is connected has ended: call" in done.stdout


@pytest.mark.filterwarnings("ignore")  # of Ray, of its own settings
def test_the_example_trains_with_ray_train(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from examples import train_on_ray

    node = add_node(cluster, 2)
    cluster.wait_for_nodes()
    monkeypatch.setattr(sys, "argv", ["train_on_ray", "--trainers", "2", "--loaders", "1"])
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    train_on_ray.main()  # raises what a trainer raises
    remove(cluster, node)
