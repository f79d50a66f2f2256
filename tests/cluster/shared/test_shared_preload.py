"""Modules that a cluster imports once are there in every worker before its dataset is."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from examples.cluster import started
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


@pytest.mark.parametrize("module", ["no_such_module", "no_such.module", "", "two words", "../path", "-c"])
def test_what_is_not_installed_is_refused(module: str) -> None:
    with pytest.raises(OptionError, match="no such module is installed"):
        ClusterOptions(preload=[module])
