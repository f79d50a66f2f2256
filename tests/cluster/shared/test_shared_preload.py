"""Modules that a cluster, or a flow's first worker of a host, imports once are there in every worker."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset

from examples.cluster import processes, started
from tests.new_process import ROOT
from torch_dpflow import DPFlowDataLoader, JobOptions
from torch_dpflow.cluster.services.local_cluster import ClusterOptions
from torch_dpflow.errors import OptionError


class Imported(Dataset[torch.Tensor]):
    """Which of some modules had been imported when a worker was asked."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([module in sys.modules for module in self._modules])


def test_workers_have_what_was_preloaded_and_no_more(eventually: Any) -> None:
    with started(preload=["wsgiref.util"]) as address:
        loader = DPFlowDataLoader(
            Imported("wsgiref.util", "wsgiref.validate"),
            batch_size=2,
            num_workers=1,
            flow="test/preload",
            address=address,
            job=JobOptions(idle_s=3.0),
        )
        (found,) = list(loader)
        del loader
        gc.collect()
        heartbeats = [thread for thread in threading.enumerate() if thread.name == "dpflow-heartbeat"]
        eventually(lambda: not any(thread.is_alive() for thread in heartbeats), what="the job's leave")
    assert found.tolist() == [[True, False]] * 2


class Parents(Dataset[torch.Tensor]):
    """The parents of workers, of which each loads a sample before it gets another."""

    def __init__(self) -> None:
        self.needs = psutil.Process

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([os.getpid(), os.getppid(), "psutil" in sys.modules])


def test_workers_of_a_flow_are_forked_from_one_process_with_its_modules() -> None:
    with started() as address:
        loader = DPFlowDataLoader(
            Parents(), batch_size=2, num_workers=2, flow="test/parents", address=address, job=JobOptions(idle_s=3.0)
        )
        found = torch.cat([*loader])
        workers, parents = found[:, 0].unique().tolist(), found[:, 1].unique().tolist()
        (shard,) = [view.pid for view in processes(address) if view.role == "shard"]
        assert len(workers) <= 2
        assert len(parents) == 1
        assert found[:, 2].all()
        fork_server = psutil.Process(shard).ppid()
        assert parents != [fork_server]
        assert psutil.Process(parents[0]).ppid() == fork_server
        del loader
        gc.collect()


@pytest.mark.parametrize("module", ["no_such_module", "no_such.module", "", "two words", "../path", "-c"])
def test_what_is_not_installed_is_refused(module: str) -> None:
    with pytest.raises(OptionError, match="no such module is installed"):
        ClusterOptions(preload=[module])


UNFIT = """
import sys
from torch_dpflow.cluster.services.local_cluster import ClusterOptions, LocalCluster
from torch_dpflow.errors import LaunchError

if __name__ == "__main__":
    try:
        LocalCluster(ClusterOptions(connection_file=sys.argv[1], preload=["unfit"])).serve()
    except LaunchError as error:
        sys.exit(str(error))
"""


@pytest.mark.parametrize(
    ("what", "how"), [("sys.exit(0)", "exited with code 0"), ("os.abort()", "was ended by SIGABRT")]
)
def test_a_cluster_whose_preloaded_module_ends_it_says_so(tmp_path: Path, what: str, how: str) -> None:
    (tmp_path / "unfit.py").write_text(f"import os, sys\n{what}\n")
    (tmp_path / "program.py").write_text(UNFIT)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "connection")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert f"the import of unfit has ended it: it {how}" in ended.stderr.splitlines()[-1]
