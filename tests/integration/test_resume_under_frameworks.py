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
from torch.utils.data import DistributedSampler, RandomSampler

from tests.later import Later
from tests.loader_cases import Indices
from torch_dpflow import BudgetBatchSampler, DPFlowDataLoader, DynaGCSSampler, MixtureSampler
from torch_dpflow.errors import DPFlowError

pytestmark = pytest.mark.skipif(
    find_spec("lightning") is None or find_spec("accelerate") is None, reason="Lightning or accelerate is not installed"
)
accelerate = Later("accelerate")
SIZE, BATCH = 24, 2
#: Ranks before and after.
SIZES = [(2, 2), (2, 3), (3, 2), (1, 2), (2, 1)]
SAMPLERS: dict[str, Any] = {
    "shuffle": lambda **_: {"shuffle": True},
    "DistributedSampler": lambda **ranks: {"sampler": DistributedSampler(Indices(SIZE), seed=3, **ranks)},
    "DynaGCSSampler": lambda **ranks: {"sampler": DynaGCSSampler(Indices(SIZE), seed=3, **ranks)},
    "MixtureSampler": lambda **ranks: {"sampler": MixtureSampler([8, 16], [8, 16], seed=3, **ranks)},
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
            loader,
            num_processes=replicas,
            process_index=rank,
            put_on_device=False,
            even_batches=loader.batch_size,
            use_seedable_sampler=True,
            data_seed=5,
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
    if isinstance(loader.sampler, RandomSampler):
        return _update_dataloader(loader, DistributedSampler(loader.dataset, seed=0, **ranks))
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


def resumed(
    framework: Any, kind: str, sizes: tuple[int, int], epoch: int, *, inside: bool, whole: bool, count: int | None
) -> Any:
    """Read so many batches of an epoch, and the rest in new loaders; return all, or the error before the first batch.

    After a whole epoch, read the next one, and return what each rank has read before and now.
    """
    before, after = sizes
    try:
        loaders = ranks_of(framework, kind, before, inside=inside)
    except (DPFlowError, TypeError) as error:
        return error
    for number, loader in itertools.product(range(epoch), loaders):
        numbers(loader.epoch(number))
    iterators = [loader.epoch(epoch) for loader in loaders]
    seen = [index for iterator in iterators for index in numbers(iterator, count)]
    states = [loader.loader.state_dict() for loader in loaders]
    epoch += count is None
    try:
        again = ranks_of(framework, kind, after, inside=inside)
        for loader in again:
            loader.loader.load_state_dict(states if whole and len(states) > 1 else states[0])
        iterators = [loader.epoch(epoch) for loader in again]
        parts = [numbers(iterator, 1) for iterator in iterators]
    except (DPFlowError, TypeError) as error:
        return error
    parts = [part + numbers(iterator) for part, iterator in zip(parts, iterators)]
    if count is None:
        return parts, [numbers(loader.epoch(epoch)) for loader in loaders]
    return Counter(itertools.chain(seen, *parts))


def is_read_once(counts: Counter[int], ranks: int) -> bool:
    return set(counts) == set(range(SIZE)) and counts.total() - SIZE < BATCH * ranks


@pytest.mark.parametrize("framework", [Bare, Lightning, Fabric, Accelerate])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_each_sample_is_read_once_or_nothing_is(framework: Any, kind: str) -> None:
    right, wrong, refused = 0, [], []
    for sizes, epoch, inside, whole in itertools.product(SIZES, (0, 2), (True, False), (False, True)):
        if not inside and (framework is Bare or kind in ("shuffle", "DistributedSampler")):
            continue  # these are made with their ranks
        if framework is Bare and kind == "shuffle":
            sizes = (1, 1)
        case = (sizes, epoch, "inside" if inside else "outside", "all" if whole else "one")
        outcome = resumed(framework, kind, sizes, epoch, inside=inside, whole=whole, count=2)
        if isinstance(outcome, Exception):
            refused.append(case)
        elif is_read_once(outcome, sizes[1]):
            right += 1
        else:
            wrong.append(case)
    assert not wrong
    is_refused = framework is not Bare and kind == "BudgetBatchSampler"
    assert right or is_refused or (framework, kind) == (Accelerate, "DistributedSampler")
    if framework is Fabric and not is_refused:
        assert not [case for case in refused if (case[0], case[2]) == ((2, 2), "inside")]


@pytest.mark.parametrize("framework", [Bare, Lightning, Fabric, Accelerate])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_next_epoch_is_that_of_a_run_that_was_not_interrupted(framework: Any, kind: str) -> None:
    for sizes, epoch in itertools.product([(2, 2), (2, 3), (1, 2), (2, 1)], range(2)):
        if framework is Bare and kind == "shuffle":
            sizes = (1, 1)
        inside = framework is not Accelerate
        outcome = resumed(framework, kind, sizes, epoch, inside=inside, whole=False, count=None)
        if isinstance(outcome, Exception):
            assert (framework is not Bare and kind == "BudgetBatchSampler") or framework is Accelerate, outcome
            continue
        now, uninterrupted = outcome
        assert is_read_once(Counter(itertools.chain(*now)), sizes[1])
        if sizes[0] == sizes[1] and (kind, sizes) != ("shuffle", (1, 1)):  # that one draws from the process's generator
            assert now == uninterrupted
