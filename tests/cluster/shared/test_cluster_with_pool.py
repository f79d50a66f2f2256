"""`dpflow up --pool-memory`: a server of the pool beside the services, which is started again when it is killed."""

from __future__ import annotations

import signal
from contextlib import closing
from pathlib import Path

import pytest

from tests.cluster_command import CommandedCluster
from tests.datasets.samples_source import Numbered, numbers, publish
from tests.shared_cluster import PATIENCE_S, wait
from torch_dpflow import PooledDataset
from torch_dpflow.datasets import DatasetStore
from torch_dpflow.errors import PeerLostError
from torch_dpflow.pool import DataClient


def test_a_server_of_the_pool_runs_beside_the_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFLOW_POOL", str(tmp_path / "p"))
    stored = publish(DatasetStore.create(str(tmp_path / "datasets")), Numbered(12))
    cluster = CommandedCluster.up(tmp_path, "--pool-memory", "4MiB")
    try:
        assert cluster.facts["pool"] == str(tmp_path / "p")

        def answers() -> bool:
            try:
                return DataClient(silence_s=PATIENCE_S).preload(stored).loaded == 12
            except PeerLostError:
                return False

        wait(answers, what="the server")
        killed = cluster.kill("pool", signal.SIGKILL)
        wait(answers, what="another one")
        assert cluster.process("pool").pid != killed
        with closing(PooledDataset(stored, silence_s=PATIENCE_S)) as dataset:
            assert dataset.read_each(range(12)) == numbers(12)
            assert dataset.hits == 12
    finally:
        cluster.stop()
