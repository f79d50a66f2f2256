"""A resume under each framework, with each sampler, at each size and epoch: each sample once, or an error at once.

The frameworks' own functions rebuild and wrap the loaders; ranks are taken in turns, in one process.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from tests.later import Later
from tests.loader_cases import Indices
from torch_dpflow import BudgetBatchSampler, DPFlowDataLoader, DynaGCSSampler, MixtureSampler
from torch_dpflow.errors import DPFlowError

pytestmark = pytest.mark.skipif(
    find_spec("lightning") is None or find_spec("accelerate") is None, reason="Lightning or accelerate is not installed"
)
accelerate = Later("accelerate")
SIZE, BATCH = 48, 2
#: Ranks before and after.
SIZES = [(2, 2), (2, 3), (3, 2), (1, 2), (2, 1)]
SAMPLERS: dict[str, Any] = {
    "DistributedSampler": lambda **ranks: {"sampler": DistributedSampler(Indices(SIZE), seed=3, **ranks)},
    "DynaGCSSampler": lambda **ranks: {"sampler": DynaGCSSampler(Indices(SIZE), seed=3, **ranks)},
    "MixtureSampler": lambda **ranks: {"sampler": MixtureSampler([16, 32], [16, 32], seed=3, **ranks)},
    "BudgetBatchSampler": lambda **ranks: {"batch_sampler": BudgetBatchSampler([1] * SIZE, BATCH, seed=3, **ranks)},
}


class Lightning:
    """As the Trainer: it puts a DistributedSampler in, sets epochs, reads the length, and counts up to it."""

    def __init__(self, loader: Any, replicas: int, rank: int) -> None:
        self.loader = divided(loader, replicas, rank)
        self.length = len(self.loader)

    def epoch(self, number: int) -> Iterator[Any]:
        from lightning.fabric.utilities.data import _set_sampler_epoch

        _set_sampler_epoch(self.loader, number)
        return iter(self.loader)


class Fabric:
    """Its wrapper counts the epochs itself."""

    def __init__(self, loader: Any, replicas: int, rank: int) -> None:
        from lightning.fabric.wrappers import _FabricDataLoader

        self.loader = divided(loader, replicas, rank)
        self._wrapped = _FabricDataLoader(self.loader)

    def epoch(self, _number: int) -> Iterator[Any]:
        return iter(self._wrapped)


class Bare:
    """Without a framework: the script sets the epoch."""

    def __init__(self, loader: Any, replicas: int, rank: int) -> None:
        self.loader = loader

    def epoch(self, number: int) -> Iterator[Any]:
        for sampler in (self.loader.sampler, self.loader.batch_sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(number)
        return iter(self.loader)


class Accelerate:
    """Divides batches among the ranks."""

    def __init__(self, loader: Any, replicas: int, rank: int) -> None:
        accelerate.PartialState(cpu=True)
        self.loader = accelerate.data_loader.prepare_data_loader(
            loader, num_processes=replicas, process_index=rank, put_on_device=False, even_batches=loader.batch_size
        )

    def epoch(self, number: int) -> Iterator[Any]:
        self.loader.set_epoch(number)
        return iter(self.loader)


def divided(loader: Any, replicas: int, rank: int) -> Any:
    from lightning.fabric.utilities.data import _update_dataloader
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper

    if replicas == 1 or isinstance(loader.sampler, DistributedSampler):
        return loader
    ranks = {"num_replicas": replicas, "rank": rank}
    sampler = DistributedSamplerWrapper(loader.sampler, shuffle=False, **ranks)
    return _update_dataloader(loader, sampler)


def ranks_of(framework: Any, kind: str, replicas: int, *, inside: bool) -> list[Any]:
    """Make the loaders of all ranks: within a hook of the framework, where they have ranks, or before it began."""
    found = []
    for rank in range(replicas):
        given = SAMPLERS[kind](
            **({"num_replicas": replicas, "rank": rank} if inside else {"num_replicas": 1, "rank": 0})
        )
        size = {} if "batch_sampler" in given else {"batch_size": BATCH}
        found.append(framework(DPFlowDataLoader(Indices(SIZE), **size, **given), replicas, rank))
    return found


def numbers(batches: Iterator[Any], count: int | None = None) -> list[int]:
    return [int(index) for batch in itertools.islice(batches, count) for index in batch]


def resumed(framework: Any, kind: str, sizes: tuple[int, int], epoch: int, *, inside: bool, whole: bool) -> Any:
    """Read two batches of an epoch, and the rest in new loaders; return all, or the error before the first batch."""
    before, after = sizes
    try:
        loaders = ranks_of(framework, kind, before, inside=inside)
    except (DPFlowError, TypeError) as error:
        return error
    for number, loader in itertools.product(range(epoch), loaders):
        numbers(loader.epoch(number))
    iterators = [loader.epoch(epoch) for loader in loaders]
    seen = [index for iterator in iterators for index in numbers(iterator, 2)]
    states = [loader.loader.state_dict() for loader in loaders]
    try:
        again = ranks_of(framework, kind, after, inside=inside)
        for loader in again:
            loader.loader.load_state_dict(states if whole and len(states) > 1 else states[0])
        iterators = [loader.epoch(epoch) for loader in again]
        firsts = [numbers(iterator, 1) for iterator in iterators]
    except (DPFlowError, TypeError) as error:
        return error
    rest = [index for iterator in iterators for index in numbers(iterator)]
    return Counter(seen + [index for first in firsts for index in first] + rest)


@pytest.mark.parametrize("framework", [Bare, Lightning, Fabric, Accelerate])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_each_sample_is_read_once_or_nothing_is(framework: Any, kind: str) -> None:
    right, wrong = 0, []
    for sizes, epoch, inside, whole in itertools.product(SIZES, range(3), (True, False), (False, True)):
        if not inside and (framework is Bare or kind == "DistributedSampler"):
            continue  # these are made with their ranks
        outcome = resumed(framework, kind, sizes, epoch, inside=inside, whole=whole)
        if isinstance(outcome, Exception):
            continue
        right += 1
        if set(outcome) != set(range(SIZE)) or sum(outcome.values()) - SIZE >= BATCH * sizes[1]:
            wrong.append((sizes, epoch, "inside" if inside else "outside", "all" if whole else "one"))
    assert not wrong
    is_refused = framework is not Bare and kind == "BudgetBatchSampler"
    assert right or is_refused or (framework, kind) == (Accelerate, "DistributedSampler")
