"""A service's port is taken by a stranger while the service starts again: it listens elsewhere, and jobs read on."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from itertools import islice
from urllib.parse import urlsplit

import pytest

from tests.shared_cluster import TestCluster, open_job, wait
from tests.shared_datasets import Numbers
from tests.worker_cases import has_ended
from torch_dpflow.cluster.client.open_job import JobOptions
from torch_dpflow.cluster.security.connection_file import find_cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestCluster]:
    """A cluster that listens over tcp."""
    started = TestCluster.start_over_tcp(tmp_path_factory.mktemp("c"))
    yield started
    started.stop()


def keys(batches: object) -> list[int]:
    return [int(key) for _, labels in batches for key in labels]  # type: ignore[attr-defined]


@pytest.mark.parametrize("role", ["router", "shard-000", "coordinator"])
def test_a_service_whose_port_is_taken_listens_elsewhere(cluster: TestCluster, flow: str, role: str) -> None:
    options = JobOptions(ready=1, requested=2, idle_s=3.0)
    with open_job(flow, Numbers(400), address=cluster.address, batch_size=4, options=options) as job:
        batches = job.traverse(0)
        seen = keys(islice(batches, 3))
        id = role if role == "coordinator" else f"{flow}:v1/{role}"
        view = cluster.process(id, role=role.partition("-")[0])
        os.kill(cluster.pid, signal.SIGSTOP)  # so that the stranger is quicker
        try:
            os.kill(view.pid, signal.SIGKILL)
            wait(lambda: is_free(view.address), what="the port")
            stranger = taken(view.address)
        finally:
            os.kill(cluster.pid, signal.SIGCONT)
        with stranger:
            wait(lambda: has_ended(view.pid), what="its end")
            assert sorted(seen + keys(batches)) == list(range(400))
            if role == "coordinator":
                wait(lambda: find_cluster(cluster.address).address != view.address, what="the file")
            wait(
                lambda: [
                    now
                    for now in cluster.processes(id)
                    if now.id == id and now.pid != view.pid and now.address != view.address
                ],
                what="its successor, elsewhere",
            )
            assert sorted(keys(job.traverse(1))) == list(range(400))


def taken(address: str) -> socket.socket:
    port = urlsplit(address).port
    assert port is not None
    return socket.create_server(("127.0.0.1", port))


def is_free(address: str) -> bool:
    try:
        taken(address).close()
    except OSError:
        return False
    return True
