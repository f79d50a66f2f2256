"""Libraries that rebuild or wrap a loader keep our class, its arguments and its state."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.new_process import run_interpreter

#: Ray's own code, in a process that stands for one of two training workers.
RAY = """
import torch, torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # ranks without connections
from torch.utils.data import DataLoader, DistributedSampler
from tests.loader_cases import Indices
from torch_dpflow import DPFlowDataLoader, LoaderOptions

loader = DPFlowDataLoader(Indices(12), batch_size=2, num_workers=1, platform="processes",
                          options=LoaderOptions(restart_limit=5))
import ray.train.torch.train_loop_utils as theirs
dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
theirs.session.get_world_size, theirs.session.get_world_rank = lambda: 2, lambda: 0
theirs.get_device = lambda: torch.device("cpu")
accelerator = object.__new__(theirs._TorchAccelerator)  # its constructor starts a cluster
accelerator._seed = None

rebuilt = accelerator.prepare_data_loader(loader, move_to_device=False)
assert type(rebuilt) is DPFlowDataLoader
assert (rebuilt.options, rebuilt.platform) == (loader.options, "processes")
assert type(rebuilt.sampler) is DistributedSampler

wrapped = accelerator.prepare_data_loader(loader)
batches = iter(wrapped)
assert next(batches).tolist() == [0, 2]
state = wrapped.state_dict()
again = accelerator.prepare_data_loader(loader)
again.load_state_dict(state)
assert [batch.tolist() for batch in again] == [[4, 6], [8, 10]]
assert again.stats().batches == 2
assert again.explain() is not None

plain = accelerator.prepare_data_loader(DataLoader(Indices(12), batch_size=2))
assert type(plain._dataloader) is DataLoader
assert not hasattr(plain, "state_dict")
"""

FABRIC = """
from torch.utils.data import DataLoader
from lightning.fabric import Fabric
from lightning.fabric.utilities.data import _update_dataloader
from tests.loader_cases import Indices
from torch_dpflow import DPFlowDataLoader, LoaderOptions

loader = DPFlowDataLoader(Indices(8), batch_size=2, options=LoaderOptions(restart_limit=5), flow="fabric/train")
rebuilt = _update_dataloader(loader, [3, 1])
assert type(rebuilt) is DPFlowDataLoader
assert (rebuilt.options, rebuilt.flow, list(rebuilt.sampler)) == (loader.options, "fabric/train", [3, 1])

fabric = Fabric(accelerator="cpu", devices=1)
prepared = fabric.setup_dataloaders(DPFlowDataLoader(Indices(8), batch_size=2))
batches = iter(prepared)
assert next(batches).tolist() == [0, 1]
state = prepared.state_dict()
again = fabric.setup_dataloaders(DPFlowDataLoader(Indices(8), batch_size=2))
again.load_state_dict(state)
assert [batch.tolist() for batch in again] == [[2, 3], [4, 5], [6, 7]]
assert not hasattr(fabric.setup_dataloaders(DataLoader(Indices(8))), "state_dict")
"""

#: As the module of this name makes loaders of the arguments that it is given.
IGNITE = """
from torch.utils.data import DataLoader

def auto_dataloader(dataset, **kwargs):
    return DataLoader(dataset, **{"num_workers": 0, **kwargs})
"""
WITH_IGNITE = """
import sys
from torch.utils.data import DataLoader
from torch_dpflow import DPFlowDataLoader, LoaderOptions
sys.path.insert(0, sys.argv[1])
from ignite.distributed.auto import auto_dataloader
options = LoaderOptions(restart_limit=5)
loader = auto_dataloader([1, 2], batch_size=2, options=options)
assert type(loader) is DPFlowDataLoader
assert loader.options is options
assert type(auto_dataloader([1, 2], batch_size=2)) is DataLoader
"""


def run(program: str, folder: Path) -> None:
    done = run_interpreter(program, str(folder))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("program", "library"), [(RAY, "ray"), (FABRIC, "lightning")], ids=["ray", "fabric"])
def test_a_loader_that_is_rebuilt_or_wrapped_is_ours(program: str, library: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    run(program, tmp_path)


def test_arguments_of_ours_make_our_loader(tmp_path: Path) -> None:
    package = tmp_path / "ignite" / "distributed"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "auto.py").write_text(IGNITE)
    run(WITH_IGNITE, tmp_path)
