"""Ranks of every sampler and batch sampler, as `load_state_dict` reads them from the sampler or the state."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, Sampler, SequentialSampler

from tests.loader_cases import Indices
from torch_dpflow import BudgetBatchSampler, DynaGCSSampler, MixtureSampler
from torch_dpflow._core.ranks import Ranks, ranks_of
from torch_dpflow.errors import StateError

SIZE = 60
EPOCH = 1


class Divided(Sampler[list[int]]):
    """A batch sampler of a user's, which divides by itself and has no state; ranks under the names of a library."""

    def __init__(self, replicas: int, rank: int, names: tuple[str, str] = ("num_replicas", "rank")) -> None:
        self.__dict__.update(zip(names, (replicas, rank)))
        self._batches = [[*range(at, at + 2)] for at in range(2 * rank, SIZE, 2 * replicas)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def set_epoch(self, epoch: int) -> None:
        """Has one order."""


def made(loader_class: Any, kind: str, replicas: int, rank: int, data: Any = None, **options: Any) -> Any:
    own = {"num_replicas": replicas, "rank": rank, "seed": 3}
    data = Indices(SIZE) if data is None else data
    samplers: dict[str, Any] = {
        "DistributedSampler": lambda: {"sampler": DistributedSampler(data, **own), "batch_size": 2},
        "DynaGCSSampler": lambda: {"sampler": DynaGCSSampler(data, **own), "batch_size": 2},
        "MixtureSampler": lambda: {"sampler": MixtureSampler([20, 40], [20, 40], **own), "batch_size": 2},
        "BudgetBatchSampler": lambda: {
            "batch_sampler": BudgetBatchSampler([1 + at % 3 for at in range(SIZE)], 6, **own)
        },
        "own": lambda: {"batch_sampler": Divided(replicas, rank)},
    }
    given = samplers[kind]()
    (given.get("sampler") or given["batch_sampler"]).set_epoch(EPOCH)
    return loader_class(data, **given, **options)


RESIZED = ["DistributedSampler", "DynaGCSSampler", "MixtureSampler", "BudgetBatchSampler"]
KINDS = [*RESIZED, "own"]


def read(loader: Any, batches: int = 10**6) -> list[int]:
    return [int(index) for batch in itertools.islice(iter(loader), batches) for index in batch]


def loaded(loader: Any, state: Any) -> Any:
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("kind", RESIZED)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("is_list", [False, True])
def test_a_state_saved_again_before_its_first_batch_resumes(
    OurLoader: Any, kind: str, steps: int, is_list: bool
) -> None:
    for first, middle, last in ((2, 3, 1), (4, 4, 2), (1, 2, 4), (3, 2, 2)):
        begun = [made(OurLoader, kind, first, rank) for rank in range(first)]
        seen = Counter(index for loader in begun for index in read(loader, steps)) if steps else Counter[int]()
        states = [loader.state_dict() for loader in begun]
        if not steps:
            for loader in begun:
                iter(loader)
            states = [loader.state_dict() for loader in begun]
        again = [made(OurLoader, kind, middle, rank) for rank in range(middle)]
        states = [loaded(loader, states if is_list else states[0]).state_dict() for loader in again]
        ends = [made(OurLoader, kind, last, rank) for rank in range(last)]
        seen.update(index for one in ends for index in read(loaded(one, states if is_list else states[-1])))
        assert set(seen) == set(range(SIZE)), (first, middle, last)
        assert sum(seen.values()) - SIZE < 6 * last, "no more than what evens out the ranks"


class Drawn(Indices):
    def __getitem__(self, index: int) -> int:
        return int(torch.randint(1 << 40, ()))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_load_one_state_draw_different_numbers(OurLoader: Any, kind: str) -> None:
    begun = made(OurLoader, kind, 2, 0, Drawn(SIZE), num_workers=1)
    iterator = iter(begun)
    next(iterator)
    state = begun.state_dict()
    rests = [read(loaded(made(OurLoader, kind, 2, rank, Drawn(SIZE), num_workers=1), state)) for rank in range(2)]
    assert rests[0] == [int(index) for batch in iterator for index in batch], "the rank that saved it goes on"
    assert not set(rests[0]) & set(rests[1])


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_delivered_out_of_order_is_its_ranks_own(OurLoader: Any, kind: str) -> None:
    begun = made(OurLoader, kind, 2, 0)
    read(begun, 1)
    state = begun.state_dict()
    values = json.loads(state["state"]) | {"ahead": [3], "ahead_samples": [2]}
    state |= {"state": json.dumps(values)}
    with pytest.raises(StateError, match="in the same rank"):
        made(OurLoader, kind, 2, 1).load_state_dict(state)
    made(OurLoader, kind, 2, 0).load_state_dict(state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_without_all_ranks_is_refused(OurLoader: Any, kind: str) -> None:
    begun = made(OurLoader, kind, 3, 0)
    read(begun, 2)
    state = begun.state_dict()
    for replicas in (3, 1):
        other = made(OurLoader, kind, replicas, 0)
        before = other.state_dict()
        for given in ([state], [state, state]):
            with pytest.raises(StateError, match=r"one state of|does not say what each rank"):
                read(loaded(other, given))
        assert other.state_dict() == before
    alone = made(OurLoader, kind, 1, 0)
    rest = read(alone, 2)
    assert sorted(rest + read(loaded(made(OurLoader, kind, 1, 0), [alone.state_dict()]))) == list(range(SIZE))


@pytest.mark.parametrize("kind", RESIZED)
def test_a_rank_that_has_looked_at_a_batch_is_one_of_the_others(OurLoader: Any, kind: str) -> None:
    """It has begun an iteration more than they have, and saves the epoch that its sampler says."""
    begun = [made(OurLoader, kind, 2, rank) for rank in range(2)]
    next(iter(begun[0]))
    seen = [index for loader in begun for index in read(loader, 2)]
    states = [loader.state_dict() for loader in begun]
    mixed = states[0] | {name: value for name, value in states[1].items() if name != "state"}
    for given in (states, mixed):
        rest = [index for rank in range(3) for index in read(loaded(made(OurLoader, kind, 3, rank), given))]
        assert set(seen + rest) == set(range(SIZE))
    other = made(OurLoader, kind, 2, 1)
    read(other, 3)
    with pytest.raises(StateError, match="put together from the states of several ranks"):
        made(OurLoader, kind, 2, 0).load_state_dict(states[0] | {"position": other.state_dict()["position"]})


class Part(IterableDataset[int]):
    def __init__(self, replicas: int, rank: int) -> None:
        self.num_replicas, self.rank = replicas, rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, SIZE, self.num_replicas))


class Unranked(Part):
    def __init__(self, replicas: int, rank: int) -> None:
        self._part = range(rank, SIZE, replicas)

    def __iter__(self) -> Iterator[int]:
        return iter(self._part)


def test_each_rank_of_an_iterable_dataset_takes_its_own_state_of_a_list(OurLoader: Any) -> None:
    begun = [OurLoader(Part(2, rank), 2) for rank in range(2)]
    seen = [index for rank, loader in enumerate(begun) for index in read(loader, 2 + rank)]
    states = [loader.state_dict() for loader in begun]
    for given in (states, states[::-1]):
        rest = [index for rank in range(2) for index in read(loaded(OurLoader(Part(2, rank), 2), given))]
        assert sorted(seen + rest) == list(range(SIZE))
    with pytest.raises(StateError, match="each rank continues its own state"):
        OurLoader(Part(3, 2), 2).load_state_dict(states)
    unranked = [OurLoader(Unranked(2, rank), 2) for rank in range(2)]
    for loader in unranked:
        read(loader, 2)
    with pytest.raises(StateError, match="each rank continues its own state"):
        OurLoader(Unranked(2, 1), 2).load_state_dict([loader.state_dict() for loader in unranked])


def test_ranks_are_found_in_every_sampler_that_names_them() -> None:
    data = Indices(SIZE)
    ours = DynaGCSSampler(data, num_replicas=2, rank=1)
    for names in (
        ("num_replicas", "rank"),
        ("num_processes", "process_index"),
        ("world_size", "rank"),
        ("data_parallel_size", "data_parallel_rank"),
    ):
        assert ranks_of(Divided(4, 3, names)) == Ranks(4, 3), names
    assert ranks_of(ours) == Ranks(2, 1)
    assert ranks_of(SequentialSampler(data), BudgetBatchSampler([1] * 9, 3, num_replicas=3, rank=2)) == Ranks(3, 2)
    assert ranks_of(BatchSampler(BatchSampler(ours, 2, False), 2, False)) == Ranks(2, 1)  # type: ignore[arg-type]
    assert ranks_of(SequentialSampler(data), BatchSampler(SequentialSampler(data), 2, False)) is None
    alone = DynaGCSSampler(data, num_replicas=1, rank=0)
    assert ranks_of(alone) == Ranks(1, 0)
    whole: Any = DistributedSampler(data, num_replicas=4, rank=2)
    whole.sampler = alone
    assert ranks_of(whole) == Ranks(4, 2)


def test_an_object_that_has_every_attribute_is_asked_for_a_few() -> None:
    class Anything:
        def __getattr__(self, name: str) -> Any:
            return Anything()

    assert ranks_of(Anything()) is None


@pytest.mark.parametrize("kind", RESIZED)
def test_a_loop_that_counts_to_the_length_reads_what_is_left(OurLoader: Any, kind: str) -> None:
    """From the step of the state, as trainers do that save the number of the batch."""
    for before, after, steps in ((2, 3, 4), (4, 2, 3), (1, 3, 5), (3, 3, 2), (2, 1, 0)):
        loaders = [made(OurLoader, kind, before, rank) for rank in range(before)]
        iterators = [iter(loader) for loader in loaders]
        seen = [int(index) for own in iterators for batch in itertools.islice(own, steps) for index in batch]
        state = loaders[-1].state_dict()
        for rank in range(after):
            loader = loaded(made(OurLoader, kind, after, rank), state)
            end, iterator = len(loader), iter(loader)
            for step in range(steps, end):
                assert len(loader) == end, step
                seen += [int(index) for index in next(iterator)]
            assert next(iterator, None) is None
            assert len(loader) == len(made(OurLoader, kind, after, rank)), "the next epoch is a whole one"
        assert set(seen) == set(range(SIZE)), (before, after)


@pytest.mark.parametrize("drop_last", [False, True])
def test_another_batch_size_changes_the_length_of_the_epoch(OurLoader: Any, drop_last: bool) -> None:
    loader = OurLoader(Indices(SIZE), batch_size=4, drop_last=drop_last)
    read(loader, 5)
    state = loader.state_dict()
    resumed = loaded(OurLoader(Indices(SIZE), batch_size=7, drop_last=drop_last), state)
    assert len(resumed) == 5 + (5 if drop_last else 6)
    assert len([*resumed]) == len(range(5, 10 if drop_last else 11))
    assert len(resumed) == (8 if drop_last else 9)


@pytest.mark.parametrize("kind", RESIZED)
def test_a_length_that_was_read_before_the_state_must_hold(OurLoader: Any, kind: str) -> None:
    """Lightning's Trainer reads it first, and would drop the rest of the epoch."""
    loader = made(OurLoader, kind, 2, 0)
    read(loader, 4)
    state = loader.state_dict()
    same, other = made(OurLoader, kind, 2, 0), made(OurLoader, kind, 3, 0)
    assert len(same) > len(other)
    whole = read(made(OurLoader, kind, 3, 0))
    with pytest.raises(StateError, match=r"ends after \d+ batches .* len\(\) of this loader was read before"):
        other.load_state_dict(state)
    assert read(other) == whole, "nothing was changed"
    same.load_state_dict(state)
    assert len(same) == len(made(OurLoader, kind, 2, 0))
