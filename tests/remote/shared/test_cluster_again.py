"""A cluster that starts again where one was, and knows nothing of what that one knew."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from tests.shared_cluster import TestCluster, free_port, wait
from tests.shared_datasets import Numbers
from tests.workers import has_ended
from torch_dpflow.remote.client import JobOptions, open_job
from torch_dpflow.remote.cluster_address import find_cluster
from torch_dpflow.remote.transport.curve import create_cluster, write_connection_file

OPTIONS = JobOptions(patience_s=60.0, ready=1, asked=2)


def keys(batches: object) -> list[int]:
    return [int(key) for _, labels in batches for key in labels]  # type: ignore[attr-defined]


def test_a_job_registers_again_with_a_cluster_at_the_same_address_and_keys(tmp_path: Path, flow: str) -> None:
    write_connection_file(tmp_path / "keys", create_cluster(""))
    where = {"listen": f"tcp://127.0.0.1:{free_port()}", "keys": tmp_path / "keys"}
    first = TestCluster.start(tmp_path, **where)  # type: ignore[arg-type]
    try:
        known = find_cluster(first.address)
        with open_job(flow, Numbers(400), address=first.address, batch_size=4, options=OPTIONS) as job:
            batches = job.traverse(0)
            seen = keys(islice(batches, 3))
            first.stop()
            first = TestCluster.start(tmp_path, **where)  # type: ignore[arg-type]
            assert find_cluster(first.address) == known
            assert sorted(seen + keys(batches)) == list(range(400))
            assert sorted(keys(job.traverse(1))) == list(range(400))
    finally:
        first.stop()


def test_a_job_of_a_version_that_was_replaced_reads_on_when_its_router_dies(
    cluster: TestCluster, flow: str
) -> None:
    with open_job(flow, Numbers(400), address=cluster.address, batch_size=4, options=OPTIONS) as job:
        batches = job.traverse(0)
        seen = keys(islice(batches, 3))
        higher = open_job(flow, Numbers(8), version=2, address=cluster.address, batch_size=4, options=OPTIONS)
        with higher as other:
            assert sorted(keys(other.traverse(0))) == list(range(8))
            killed = cluster.kill(f"{flow}@1/router")
            wait(lambda: has_ended(killed), what="the router's end")
            assert sorted(seen + keys(batches)) == list(range(400))
