"""A resume under Ray Train, with each sampler, at each size and epoch: each sample once, or an error at once."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.test_resume_under_frameworks import SIZE, Bare, is_read_once, numbers, ranks_of
from tests.remote.launchers.local_ray import needs_ray, ray_nodes
from torch_dpflow.errors import DPFlowError

pytestmark = [needs_ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray deprecates names that it uses
KINDS = ["DistributedSampler", "DynaGCSSampler", "MixtureSampler", "BudgetBatchSampler"]
#: Ranks before and after.
SIZES = [(2, 2), (2, 3), (3, 2), (2, 1), (1, 2)]


class Prepared(Bare):
    """As the page says: the loader has a sampler with ranks, and Ray's function moves batches only."""

    def __init__(self, loader: Any, replicas: int, rank: int) -> None:
        from ray.train.torch import prepare_data_loader

        super().__init__(loader, replicas, rank)
        self._prepared = prepare_data_loader(loader, add_dist_sampler=False)

    def epoch(self, number: int) -> Any:
        super().epoch(number)
        return iter(self._prepared)


def cases() -> Any:
    """Made within the training function, where the sampler has its ranks from Ray's process group, or by numbers."""
    return itertools.product([Bare, Prepared], KINDS, range(3))


def train(given: dict[str, Any]) -> None:
    """Read two batches of each case and save the states; or read the rest from the states of a run of another size."""
    import ray.train
    import torch.distributed as dist

    context, found = ray.train.get_context(), []
    ranks, rank = context.get_world_size(), context.get_world_rank()
    saved = torch.load(given["from"], weights_only=False) if given["from"] else itertools.repeat(None)
    for (framework, kind, epoch), states in zip(cases(), saved):
        loader = ranks_of(framework, kind, ranks, inside=True)[rank]
        for number in range(epoch if states is None else 0):
            numbers(loader.epoch(number))
        read: Any
        try:
            if states is not None:
                loader.loader.load_state_dict(states[0])
            batches = loader.epoch(epoch)
            read = numbers(batches, 2) if states is None else numbers(batches, 1)
        except DPFlowError as error:
            read = str(error)
        else:
            read += [] if states is None else numbers(batches)
        found.append((read, loader.loader.state_dict() if states is None else None))
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, found)
    if rank == 0:
        torch.save(every, given["to"])


def run(ranks: int, given: dict[str, Any]) -> list[Any]:
    """Return what each rank has read of each case, by case."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    scaling = ScalingConfig(num_workers=ranks, use_gpu=False, resources_per_worker={"CPU": 1})
    config = RunConfig(storage_path=str(Path(given["to"]).parent / "ray"))
    TorchTrainer(train, train_loop_config=given, scaling_config=scaling, run_config=config).fit()
    return list(zip(*torch.load(given["to"], weights_only=False), strict=True))


def test_each_sample_is_read_once_or_nothing_is(tmp_path: Path) -> None:
    with ray_nodes(4):
        begun, states = {}, {}
        for ranks in (1, 2, 3):
            begun[ranks] = run(ranks, {"from": "", "to": str(tmp_path / f"begun-{ranks}")})
            states[ranks] = str(tmp_path / f"states-{ranks}")
            torch.save([[state for _, state in case] for case in begun[ranks]], states[ranks])
        for before, after in SIZES:
            rest = run(after, {"from": states[before], "to": str(tmp_path / f"rest-{before}-{after}")})
            for case, first, last in zip(cases(), begun[before], rest, strict=True):
                parts = [read for read, _ in last]
                assert not [read for read in parts if isinstance(read, str)], (case, parts)
                counts = Counter(itertools.chain(*(read for read, _ in first), *parts))
                assert is_read_once(counts, after), (case, before, after, SIZE)
