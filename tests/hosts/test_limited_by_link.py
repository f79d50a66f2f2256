"""Where a link is what keeps jobs from reading faster, their cluster says so: real links that are made slow."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch.utils.data import Dataset

from tests.cluster_command import CommandedCluster
from tests.new_process import ROOT
from tests.shared_cluster import TestCluster, wait
from tests.support.hosts import Hosts, OnHosts, member_python
from torch_dpflow import DPFlowDataLoader
from torch_dpflow.cli.main import root

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

FLOW = "narrow"
#: A job that reads 100 kB a sample, which no compression makes less of, until it is told that it is enough.
JOB = """
import os, sys, threading
import numpy as np
from torch_dpflow import DPFlowDataLoader

class Noise:
    def __len__(self):
        return 1_000_000
    def __getitem__(self, index):
        return np.random.default_rng(index).integers(0, 256, 100_000, np.uint8)

workers = int(sys.argv[3])
loader = DPFlowDataLoader(
    Noise(), batch_size=8, shuffle=True, num_workers=workers, flow=sys.argv[1], address=sys.argv[2]
)

def leave():
    sys.stdin.read()
    os._exit(0)

threading.Thread(target=leave, daemon=True).start()
for batch in loader:
    print(loader.stats().limited_by or "-", flush=True)
"""
LINK_BITS = 20e6
#: Of a link that carries two and a half samples a second, and how many workers are behind it.
VERY_SLOW_BITS, MANY = 2e6, 8


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(1) as hosts:
        yield hosts


def reading(cluster: TestCluster, *prefix: str, workers: int = 2) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-c", JOB, FLOW, cluster.address, str(workers)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={"PYTHONPATH": str(ROOT)})


def test_of_workers_whose_link_is_free_nothing_is_said(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPFLOW_PLATFORM_PROCESSES_PYTHON", str(member_python(hosts[0], tmp_path)))
    given = ["--platform", "processes", "--worker-listen", f"tcp://{hosts.address}:0"]
    cluster = CommandedCluster.up(tmp_path, *given)
    try:
        with reading(cluster) as job:
            assert job.stdout is not None
            told = iter(job.stdout.readline, "")
            assert any(line in ("workers\n", "job\n") for line in told), "the job has ended"
            after = {line for line, _ in zip(told, range(500), strict=False)}
            job.kill()
        assert "network\n" not in after
    finally:
        cluster.stop()


class Noise(Dataset[torch.Tensor]):
    """100 kB a sample, for a loader of one's own."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(256, (100_000,), dtype=torch.uint8)


def test_of_a_loader_whose_workers_have_a_slow_link_until_it_is_fast(hosts: Hosts) -> None:
    loader = DPFlowDataLoader(Noise(), batch_size=8, num_workers=2, platform=OnHosts.of(hosts))
    batches = iter(loader)
    next(batches)
    hosts[0].limit(LINK_BITS)
    assert any(loader.stats().limited_by == "network" for _ in batches)
    hosts[0].limit(None)
    assert any(loader.stats().limited_by in ("workers", "job") for _ in batches)


def test_of_a_loader_with_many_workers_behind_a_link_that_carries_a_batch_in_seconds(hosts: Hosts) -> None:
    """What one of them has sent keeps all others' words waiting."""
    loader = DPFlowDataLoader(Noise(), batch_size=8, num_workers=MANY, platform=OnHosts.of(hosts))
    batches = iter(loader)
    next(batches)
    hosts[0].limit(VERY_SLOW_BITS)
    assert any(loader.stats().limited_by == "network" for _ in batches)
    assert loader.stats().restarts == 0, "who waits for the link is not taken for dead"
    hosts[0].limit(None)


def until_told(job: subprocess.Popen[str], cluster: TestCluster) -> None:
    """Read on until the job and `dpflow workers` both name the network."""
    with job:
        assert job.stdout is not None
        try:
            told = iter(job.stdout.readline, "")
            assert any(line == "network\n" for line in told), "the job has ended"
            wait(lambda: limit_of(cluster) == "network", what="what dpflow workers say")
        finally:
            job.kill()


def limit_of(cluster: TestCluster) -> str:
    result = CliRunner().invoke(root, ["workers", "--json", "--address", cluster.address])
    assert result.exit_code == 0, result.output
    (flow,) = json.loads(result.output)["flows"]
    return str(flow["limited_by"])


def test_of_a_job_whose_own_link_is_slow(hosts: Hosts, tmp_path: Path) -> None:
    hosts[0].limit(LINK_BITS)
    cluster = TestCluster.start_over_tcp(tmp_path, hosts.address)
    try:
        until_told(reading(cluster, *hosts[0].network_prefix), cluster)
    finally:
        cluster.stop()


@pytest.mark.parametrize(("bits", "workers"), [(LINK_BITS, 2), (VERY_SLOW_BITS, MANY)])
def test_of_workers_whose_link_is_slow(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: float, workers: int
) -> None:
    python = member_python(hosts[0], tmp_path)
    monkeypatch.setenv("DPFLOW_PLATFORM_PROCESSES_PYTHON", str(python))
    given = ["--platform", "processes", "--worker-listen", f"tcp://{hosts.address}:0"]
    cluster = CommandedCluster.up(tmp_path, *given)
    try:
        job = reading(cluster, workers=workers)
        assert job.stdout is not None
        assert job.stdout.readline()  # what members load came fast; so does the first batch
        hosts[0].limit(bits)
        until_told(job, cluster)
    finally:
        cluster.stop()
