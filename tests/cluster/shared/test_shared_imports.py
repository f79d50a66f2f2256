"""One process imports for the workers of a flow; a cluster whose torch cannot be imported says so."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import Dataset

from tests.new_process import ROOT
from tests.shared_cluster import TestCluster
from torch_dpflow import DPFlowDataLoader, JobOptions


class Parents(Dataset[torch.Tensor]):
    """The parents of workers, of which each loads a sample before it gets another."""

    def __init__(self) -> None:
        self.needs = psutil.Process

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([os.getpid(), os.getppid(), "psutil" in sys.modules])


def test_workers_of_a_flow_are_forked_from_one_process_with_its_modules(cluster: TestCluster, flow: str) -> None:
    loader = DPFlowDataLoader(
        Parents(), batch_size=2, num_workers=2, flow=flow, address=cluster.address, job=JobOptions(idle_s=3.0)
    )
    found = torch.cat([*loader])
    workers, parents = found[:, 0].unique().tolist(), found[:, 1].unique().tolist()
    assert len(workers) <= 2
    assert len(parents) == 1
    assert found[:, 2].all()
    fork_server = psutil.Process(cluster.process(f"{flow}:v1/", role="shard").pid).ppid()
    assert parents != [fork_server]
    assert psutil.Process(parents[0]).ppid() == fork_server
    del loader
    gc.collect()


UNFIT = """
import sys
from torch_dpflow.cluster.services.local_cluster import ClusterOptions, LocalCluster
from torch_dpflow.errors import LaunchError

if __name__ == "__main__":
    try:
        LocalCluster(ClusterOptions(connection_file=sys.argv[1])).serve()
    except LaunchError as error:
        sys.exit(str(error))
"""


@pytest.mark.parametrize(
    ("what", "how"), [("sys.exit(0)", "exited with code 0"), ("os.abort()", "was ended by SIGABRT")]
)
def test_a_cluster_whose_torch_ends_it_says_so(tmp_path: Path, what: str, how: str) -> None:
    (tmp_path / "torch.py").write_text(f"import os, sys\n{what}\n")
    (tmp_path / "program.py").write_text(UNFIT)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "connection")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert f"the import of torch has ended it: it {how}" in ended.stderr.splitlines()[-1]
