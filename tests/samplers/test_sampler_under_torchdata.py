"""DynaGCSSampler keeps its place in torchdata's StatefulDataLoader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from torch_dpflow.errors import StateError
from torch_dpflow.samplers import BudgetBatchSampler, DynaGCSSampler, MixtureSampler
from torch_dpflow.samplers.epoch_sampler import SamplerIterator


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_loader_resumes_in_the_middle_of_an_epoch() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def new_loader() -> Any:
        return stateful.StatefulDataLoader(range(40), batch_size=4, sampler=DynaGCSSampler(range(40), seed=1))

    loader = new_loader()
    batches = iter(loader)
    first = [next(batches).tolist() for _ in range(3)]
    state = loader.state_dict()
    rest = [batch.tolist() for batch in batches]
    resumed = new_loader()
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == rest
    assert sorted(index for batch in first + rest for index in batch) == list(range(40))
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in loader]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_loader_saved_between_epochs_leaves_none_out() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def new_loader() -> Any:
        return stateful.StatefulDataLoader(range(40), batch_size=4, sampler=DynaGCSSampler(range(40), seed=1))

    loader, resumed = new_loader(), new_loader()
    list(loader)
    resumed.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in loader]


KINDS: dict[str, Callable[..., dict[str, Any]]] = {
    "dynagcs": lambda **ranked: {"batch_size": 5, "sampler": DynaGCSSampler(range(40), **ranked)},
    "mixture": lambda **ranked: {"batch_size": 5, "sampler": MixtureSampler([40], [1], **ranked)},
    "budget": lambda **ranked: {"batch_sampler": BudgetBatchSampler([1] * 40, 5, **ranked)},
}


def made(kind: str, workers: int = 0, **ranked: Any) -> tuple[Any, Any]:
    """The sampler, and a loader that reads it."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    given = KINDS[kind](**ranked)
    loader = stateful.StatefulDataLoader(range(40), num_workers=workers, **given)
    return given.get("sampler") or given["batch_sampler"], loader


def batches_of(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_the_next_epoch_follows_one_that_was_saved_at_its_end(kind: str, workers: int) -> None:
    _, plain = made(kind)
    expected = [batches_of(plain) for _ in range(3)]
    _, loader = made(kind, workers)
    assert batches_of(loader) == expected[0]
    _, resumed = made(kind, workers)
    resumed.load_state_dict(loader.state_dict())
    again = made(kind, workers)[1]
    again.load_state_dict(resumed.state_dict())  # before it has read anything
    for one in (resumed, again):
        assert [batches_of(one), batches_of(one)] == expected[1:]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replicas", [None, 2])
def test_a_loader_saved_after_its_last_batch_has_nothing_left(kind: str, replicas: int | None) -> None:
    """The training loop has not seen the end; the next epoch is whole."""
    ranked = {} if replicas is None else {"num_replicas": replicas, "rank": 0}
    sampler, loader = made(kind, **ranked)
    iterator = iter(loader)
    for _ in range(8 // (replicas or 1)):
        next(iterator)
    state = loader.state_dict()
    resumed_sampler, resumed = made(kind, **ranked)
    resumed.load_state_dict(state)
    assert batches_of(resumed) == []
    assert list(iterator) == []
    for one in (sampler, resumed_sampler) if replicas else ():
        one.set_epoch(1)
    assert batches_of(resumed) == batches_of(loader)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_set_after_a_first_state_is_saved_where_it_is(kind: str, workers: int) -> None:
    sampler, loader = made(kind, workers, num_replicas=2, rank=0)
    loader.state_dict()
    sampler.set_epoch(0)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    _, resumed = made(kind, workers, num_replicas=2, rank=0)
    resumed.load_state_dict(loader.state_dict())
    assert batches_of(resumed) == [batch.tolist() for batch in iterator]


@pytest.mark.parametrize("state", [None, {}, {"has_begun": 1, "has_ended": False}])
def test_an_iterator_refuses_other_states(state: Any) -> None:
    with pytest.raises(StateError, match="is no state of a sampler's iterator"):
        SamplerIterator(iter([1]), is_over=False).load_state_dict(state)
