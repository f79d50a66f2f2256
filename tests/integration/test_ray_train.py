"""A resume under Ray Train, with each sampler, on 1 to 4 ranks: each sample once, or an error before the first batch.

One run of two workers reads two batches of every case and saves. One run of four workers continues all of them; for
smaller sizes its first workers form a process group of that size, so that the samplers find their ranks there.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integration.test_resume_under_frameworks import BATCH, SIZE, is_read_once, numbers
from tests.loader_cases import Indices
from tests.remote.launchers.local_ray import needs_ray, ray_of, start_node
from torch_dpflow import BudgetBatchSampler, DPFlowDataLoader, DynaGCSSampler, MixtureSampler
from torch_dpflow.errors import DPFlowError

pytestmark = [needs_ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray deprecates names that it uses
KINDS = ["DistributedSampler", "DynaGCSSampler", "MixtureSampler", "BudgetBatchSampler"]
AFTER = [4, 3, 2, 1]
CASES = [*itertools.product([False, True], KINDS, range(2))]


def loader_of(kind: str, workers: int) -> Any:
    """Make a loader whose sampler takes its ranks from the process group."""
    if kind == "BudgetBatchSampler":
        batches = BudgetBatchSampler([1] * SIZE, BATCH, seed=3)
        return DPFlowDataLoader(Indices(SIZE), batch_sampler=batches, num_workers=workers)
    sampler = {
        "DistributedSampler": lambda: torch.utils.data.DistributedSampler(Indices(SIZE), seed=3),
        "DynaGCSSampler": lambda: DynaGCSSampler(Indices(SIZE), seed=3),
        "MixtureSampler": lambda: MixtureSampler([16, 32], [16, 32], seed=3),
    }[kind]()
    return DPFlowDataLoader(Indices(SIZE), batch_size=BATCH, sampler=sampler, num_workers=workers)


def epoch_of(loader: Any, number: int, *, prepared: bool) -> Iterator[Any]:
    """Begin an epoch; `prepared`: through the wrapper of Ray's `prepare_data_loader`."""
    from ray.train.torch import prepare_data_loader

    for sampler in (loader.sampler, loader.batch_sampler):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(number)
    return iter(prepare_data_loader(loader, add_dist_sampler=False) if prepared else loader)


def begin(case: tuple[bool, str, int]) -> tuple[list[int], Any]:
    prepared, kind, epoch = case
    loader = loader_of(kind, workers=0)
    for number in range(epoch):
        numbers(epoch_of(loader, number, prepared=prepared))
    return numbers(epoch_of(loader, epoch, prepared=prepared), 2), loader.state_dict()


def finish(case: tuple[bool, str, int], states: list[Any]) -> list[int] | str:
    """Read the rest of the epoch from the state of one rank, or of all."""
    prepared, kind, epoch = case
    loader = loader_of(kind, workers=int(prepared and not epoch))
    try:
        loader.load_state_dict(states if prepared else states[0])
        batches = epoch_of(loader, epoch, prepared=prepared)
        first = numbers(batches, 1)
    except DPFlowError as error:
        return str(error)
    return first + numbers(batches)


def train(given: dict[str, Any]) -> None:
    """Begin the cases and save what was read, with the states; or continue them at each size."""
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    if not given["begun"]:
        save([begin(case) for case in CASES], given["to"])
        return
    begun = torch.load(given["begun"], weights_only=False)
    for size in AFTER:
        dist.barrier()
        dist.destroy_process_group()
        if rank < size:
            store = f"file://{given['to']}.{size}.store"
            dist.init_process_group("gloo", init_method=store, world_size=size, rank=rank)
            rest = [finish(case, [state for _, state in ranks]) for case, ranks in zip(CASES, begun, strict=True)]
            save(rest, f"{given['to']}.{size}")
            dist.destroy_process_group()
        everyone = f"file://{given['to']}.{size}.all"
        dist.init_process_group("gloo", init_method=everyone, world_size=AFTER[0], rank=rank)


def save(found: list[Any], to: str) -> None:
    """Write what each rank has found for each case, in the order of ranks."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        torch.save([*zip(*every, strict=True)], to)


def run(workers: int, **given: str) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    scaling = ScalingConfig(num_workers=workers, use_gpu=False, resources_per_worker={"CPU": 1})
    config = RunConfig(storage_path=str(Path(given["to"]).parent / "ray"))
    TorchTrainer(train, train_loop_config=given, scaling_config=scaling, run_config=config).fit()


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[Any]:
    with ray_of(start_node(AFTER[0])) as ray:
        yield ray


@pytest.fixture(autouse=True)
def no_leaks(ray: Any) -> None:
    """Instead of the check of all tests: Ray keeps sockets and processes, and this process reads nothing itself."""


def test_each_sample_is_read_once_or_nothing_is(tmp_path: Path) -> None:
    begun, to = str(tmp_path / "begun"), str(tmp_path / "rest")
    run(2, begun="", to=begun)
    run(AFTER[0], begun=begun, to=to)
    for size in AFTER:
        rest = torch.load(f"{to}.{size}", weights_only=False)
        for case, before, after in zip(CASES, torch.load(begun, weights_only=False), rest, strict=True):
            assert not [part for part in after if isinstance(part, str)], (case, size, after)
            counts = Counter(itertools.chain(*(read for read, _ in before), *after))
            assert is_read_once(counts, size), (case, size, counts)
