"""Frameworks divide among ranks what our samplers have divided already: each sample once, or an error at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DistributedSampler, Sampler, SequentialSampler

from tests.later import Later
from tests.loader_cases import Indices
from torch_dpflow import BudgetBatchSampler, DynaGCSSampler, MixtureSampler, ShardedIterableDataset
from torch_dpflow.errors import OptionError

lightning = Later("lightning.fabric.utilities.distributed")
accelerate = Later("accelerate.data_loader")
pytestmark = pytest.mark.skipif(
    find_spec("lightning") is None or find_spec("accelerate") is None, reason="Lightning or accelerate is not installed"
)
SIZE = 40


class Proxy(DistributedSampler[int]):
    """As other libraries do it: a sampler is the dataset of a DistributedSampler, under a name."""

    def __init__(self, sampler: Any, **ranks: Any) -> None:
        super().__init__(sampler, shuffle=False, **ranks)
        self.sampler = sampler

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.sampler)[self.rank : self.total_size : self.num_replicas])


SAMPLERS: dict[str, Any] = {
    "DynaGCSSampler": lambda **ranks: DynaGCSSampler(Indices(SIZE), seed=1, **ranks),
    "MixtureSampler": lambda **ranks: MixtureSampler([10, 30], [10, 30], seed=1, **ranks),
    "plain": lambda **_: SequentialSampler(Indices(SIZE)),
}
WRAPPERS: dict[str, Any] = {
    "Lightning": lambda sampler, **ranks: lightning.DistributedSamplerWrapper(sampler, shuffle=False, **ranks),
    "proxy": Proxy,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_sampler_that_is_divided_again_is_divided_once(OurLoader: Any, kind: str, wrapper: str) -> None:
    """Made with ranks, as within a hook of the framework, or for one rank, as before the framework has begun."""
    for own in ({}, {"num_replicas": 1, "rank": 0}):
        seen = Counter[int]()
        for rank in range(2):
            ranks = {"num_replicas": 2, "rank": rank}
            given = WRAPPERS[wrapper](SAMPLERS[kind](**(own or ranks)), **ranks)
            loader = OurLoader(Indices(SIZE), batch_size=4, sampler=given)
            assert len(loader) == 5
            seen.update(int(index) for batch in loader for index in batch)
        assert seen == Counter(range(SIZE))


def shard(inner: Any, replicas: int) -> Any:
    batches = inner if isinstance(inner, BudgetBatchSampler) else BatchSampler(inner, 4, drop_last=False)
    return accelerate.BatchSamplerShard(batches, num_processes=replicas, process_index=0, even_batches=False)


@pytest.mark.parametrize("kind", [*SAMPLERS, "DistributedSampler", "BudgetBatchSampler"])
def test_a_batch_sampler_that_is_divided_again_is_refused(OurLoader: Any, kind: str) -> None:
    samplers = SAMPLERS | {
        "DistributedSampler": lambda **ranks: DistributedSampler(Indices(SIZE), **ranks),
        "BudgetBatchSampler": lambda **ranks: BudgetBatchSampler([1] * SIZE, 4, **ranks),
    }

    def made(sampler: Any, replicas: int) -> Any:
        return OurLoader(Indices(SIZE), batch_sampler=shard(sampler, replicas))

    assert len(made(samplers[kind](num_replicas=1, rank=0), 2)) == 5
    assert len(made(samplers[kind](num_replicas=2, rank=0), 1)) == (10 if kind == "plain" else 5)
    if kind != "plain":
        with pytest.raises(OptionError, match=f"BatchSamplerShard divides among 2 ranks what {kind} has divided"):
            made(samplers[kind](num_replicas=2, rank=0), 2)


def test_other_ranks_than_those_of_the_wrapper_are_refused(OurLoader: Any) -> None:
    inner = SAMPLERS["DynaGCSSampler"](num_replicas=2, rank=0)
    with pytest.raises(OptionError, match="Proxy divides among 4 ranks what DynaGCSSampler has divided among 2"):
        OurLoader(Indices(SIZE), sampler=Proxy(inner, num_replicas=4, rank=1))


class Shards(ShardedIterableDataset):
    def read_shard(self, number: int, start: int) -> Iterator[int]:
        return iter(range(number * 10 + start, number * 10 + 10))


def test_shards_that_are_divided_again_are_refused(OurLoader: Any) -> None:
    def made(own: int) -> Any:
        dataset = Shards(4, num_replicas=own, rank=0)
        divided = accelerate.IterableDatasetShard(dataset, batch_size=2, num_processes=2, process_index=0)
        return OurLoader(divided, batch_size=2)

    assert sum(len(batch) for batch in made(1)) == 20
    with pytest.raises(OptionError, match="IterableDatasetShard divides among 2 ranks what Shards has divided"):
        made(2)


def test_a_sampler_that_passes_on_the_ranks_of_another_is_left_alone(OurLoader: Any) -> None:
    class Backwards(Sampler[int]):
        def __init__(self, sampler: Any) -> None:
            self.sampler, self.num_replicas, self.rank = sampler, sampler.num_replicas, sampler.rank

        def __iter__(self) -> Iterator[int]:
            return iter([*self.sampler][::-1])

    given = Backwards(SAMPLERS["DynaGCSSampler"](num_replicas=2, rank=0))
    assert len([*OurLoader(Indices(SIZE), batch_size=4, sampler=given)]) == 5
