"""Processes of a cluster that are stopped at the moment at which the cluster is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.shared_cluster import TestCluster, open_job, wait
from tests.shared_datasets import Numbers
from tests.worker_cases import has_ended, stop_descendants
from torch_dpflow.cluster.client.open_job import JobOptions
from torch_dpflow.cluster.security.connection_file import find_cluster


def test_none_outlives_a_killed_cluster(tmp_path: Path, flow: str) -> None:
    cluster = TestCluster.start(tmp_path)
    directory = Path(find_cluster(cluster.address).address.removeprefix("ipc://")).parent
    options = JobOptions(idle_s=3.0, reconnect_timeout_s=1.0)
    with open_job(flow, Numbers(400), address=cluster.address, batch_size=4, options=options) as job:
        next(job.traverse(0))
        pids = stop_descendants(cluster.pid)
        assert len(pids) >= 5, "the fork server, the coordinator, the router, a shard, a worker"
        os.kill(cluster.pid, signal.SIGKILL)
        wait(lambda: all(map(has_ended, pids)), what="the end of the stopped processes")
        wait(lambda: not directory.exists(), what="the removal of the cluster's directory")
