"""Another number of ranks, another batch size, in mid-epoch: each sample once."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from tests.loader_cases import Augmented, Indices, StatefulSampler, Stream
from torch_dpflow import DynaGCSSampler
from torch_dpflow.errors import StateError
from torch_dpflow.options import LoaderOptions

SIZE = 103
RANKED: dict[str, Any] = {"DistributedSampler": DistributedSampler, "DynaGCSSampler": DynaGCSSampler}


def ranked(loader_class: Any, kind: str, replicas: int, rank: int, batch_size: Any, epoch: int = 0, **more: Any) -> Any:
    size, arguments = more.pop("size", SIZE), {name: more.pop(name) for name in ("seed", "shuffle") if name in more}
    sampler = RANKED[kind](
        Indices(size), num_replicas=replicas, rank=rank, drop_last=more.pop("even", False), **arguments
    )
    sampler.set_epoch(epoch)
    return loader_class(Indices(size), batch_size=batch_size, sampler=sampler, **more)


def flat(batches: Any) -> list[int]:
    return [index for batch in batches for index in batch.reshape(-1).tolist()]


def steps(loaders: list[Any], count: int) -> list[int]:
    """What all loaders deliver in so many steps."""
    return [index for loader in loaders for index in flat(batch for _, batch in zip(range(count), iter(loader)))]


@pytest.mark.parametrize("kind", RANKED)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.integers(1, 300),
    phases=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=4),
    last=st.tuples(st.integers(1, 8), st.integers(1, 9)),
    even=st.booleans(),
    epoch=st.integers(0, 2),
    drawn=st.data(),
)
def test_an_epoch_is_read_once_whatever_the_sizes(
    OurLoader: Any,
    kind: str,
    size: int,
    phases: list[tuple[int, int, int]],
    last: tuple[int, int],
    even: bool,
    epoch: int,
    drawn: st.DataObject,
) -> None:
    state, before, over = None, list[int](), False
    for replicas, batch_size, count in phases:
        if over:  # loaders with its state begin a whole epoch
            break
        # Whole batches, and something is left: an epoch that has ended is over at any size.
        count = min(count, max(0, (size - len(before) - 1) // (replicas * batch_size)))
        loaders = [
            ranked(OurLoader, kind, replicas, rank, batch_size, epoch, size=size, even=even) for rank in range(replicas)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        before += steps(loaders, count)
        over = even and size - len(before) < replicas
        state = drawn.draw(st.sampled_from(loaders)).state_dict()
    replicas, batch_size = last
    loaders = [
        ranked(OurLoader, kind, replicas, rank, batch_size, epoch, size=size, even=even) for rank in range(replicas)
    ]
    assert state is not None
    for loader in loaders:
        loader.load_state_dict(state)
    parts = [flat(loader) for loader in loaders]
    rest = [index for part in parts for index in part]
    assert len(set(before)) == len(before)
    assert len({len(part) for part in parts}) == 1
    if over:
        assert len(set(before + rest)) == len(before + rest), "what is left may have been dropped"
    elif even:
        assert len(set(before + rest)) == len(before + rest)
        assert size - len(before + rest) == (size - len(before)) % replicas
    else:
        assert set(before + rest) == set(range(size))
        assert len(before + rest) - size == -(size - len(before)) % replicas
    for rank, loader in enumerate(loaders):
        loader.sampler.set_epoch(epoch + 1)
        new = ranked(OurLoader, kind, replicas, rank, batch_size, epoch + 1, size=size, even=even)
        assert flat(loader) == flat(new), "the next epoch is that of a run that began at this size"


@pytest.mark.parametrize("kind", RANKED)
def test_the_state_of_every_position_resumes_at_another_size(OurLoader: Any, kind: str) -> None:
    """Before the first batch, in mid-epoch, after the last batch, and once the loop has seen the end."""
    begun = ranked(OurLoader, kind, 2, 0, 9)
    other = ranked(OurLoader, kind, 2, 1, 9)
    iterators = iter(begun), iter(other)
    before = list[int]()
    for position in range(8):
        state = begun.state_dict()
        rest = [index for rank in range(3) for index in flat(loaded(ranked(OurLoader, kind, 3, rank, 4), state))]
        if position == 7:
            assert state["fresh"]
            assert len(rest) == 105, "the next epoch, padded for three ranks"
        elif position == 6:
            assert not state["fresh"]
            assert rest == [], "the epoch is over, though the loop has not seen its end"
        else:
            assert sorted({*before, *rest}) == list(range(SIZE))
            assert len(before) + len(rest) - SIZE == -(SIZE - len(before)) % 3
        for iterator in iterators:
            before += [] if (batch := next(iterator, None)) is None else batch.tolist()


def loaded(loader: Any, state: Any) -> Any:
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("kind", RANKED)
def test_ranks_out_of_step_resume_from_the_states_of_all(OurLoader: Any, kind: str) -> None:
    loaders = [ranked(OurLoader, kind, 3, rank, 4) for rank in range(3)]
    before = [index for loader, count in zip(loaders, (2, 5, 4)) for index in steps([loader], count)]
    states = [loader.state_dict() for loader in loaders]
    for order in (states, states[::-1]):
        rest = [index for rank in range(2) for index in flat(loaded(ranked(OurLoader, kind, 2, rank, 7), order))]
        assert sorted(before + rest) == sorted([*range(SIZE), *[rest[-1]] * (len(before + rest) - SIZE)])
    with pytest.raises(StateError, match="give one state of each rank"):
        list(loaded(ranked(OurLoader, kind, 2, 0, 7), states[:2]))
    over = ranked(OurLoader, kind, 3, 0, 4)
    assert flat(over)
    with pytest.raises(StateError, match="differ in the epoch"):
        ranked(OurLoader, kind, 2, 0, 7).load_state_dict([over.state_dict(), *states[1:]])


@pytest.mark.parametrize("kind", RANKED)
@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("epochs", [0, 1])
def test_a_rank_that_has_read_nothing_counts(OurLoader: Any, kind: str, begun: bool, epochs: int) -> None:
    """Its iteration may have begun or not, in the first epoch or a later one."""
    loaders = [ranked(OurLoader, kind, 3, rank, 4) for rank in range(3)]
    for loader in loaders * epochs:
        flat(loader)
    for loader in loaders:
        loader.sampler.set_epoch(epochs)
    iterators = [iter(loader) for loader in loaders[: 3 if begun else 2]]
    before = [index for at in (0, 1) for _ in range(2) for index in next(iterators[at]).tolist()]
    states = [loader.state_dict() for loader in loaders]
    for order in (states, states[::-1]):
        rest = flat(loaded(ranked(OurLoader, kind, 1, 0, 7, epoch=epochs), order))
        assert sorted(before + rest) == list(range(SIZE))


@pytest.mark.parametrize("kind", RANKED)
def test_states_saved_again_before_the_first_batch_join(OurLoader: Any, kind: str) -> None:
    loaders = [ranked(OurLoader, kind, 4, rank, 5) for rank in range(4)]
    before = steps(loaders, 2)
    states = [loader.state_dict() for loader in loaders]
    for saved in (states[0], states):
        middle = [loaded(ranked(OurLoader, kind, 2, rank, 3), saved) for rank in range(2)]
        again = [loader.state_dict() for loader in middle]
        for other in (again, again[0]):
            rest = flat(loaded(ranked(OurLoader, kind, 1, 0, 7), other))
            assert sorted(before + rest) == list(range(SIZE))
        assert {*before, *(index for loader in middle for index in flat(loader))} == set(range(SIZE))


@pytest.mark.parametrize("kind", RANKED)
@pytest.mark.usefixtures("preloaded_workers")
@pytest.mark.parametrize("how", [{"num_workers": 2}, {"num_workers": 1, "platform": "processes"}], ids=str)
def test_workers_and_platforms_do_not_matter(OurLoader: Any, kind: str, how: dict[str, Any]) -> None:
    loaders = [ranked(OurLoader, kind, 2, rank, 5, **how) for rank in range(2)]
    before = steps(loaders, 4)
    state = loaders[1].state_dict()
    del loaders
    resumed = loaded(ranked(OurLoader, kind, 1, 0, 8, num_workers=1), state)
    first = next(iterator := iter(resumed)).tolist()
    again = loaded(ranked(OurLoader, kind, 1, 0, 3), resumed.state_dict())
    rest = flat(iterator)
    assert flat(again) == rest
    assert sorted([*before, *first, *rest]) == list(range(SIZE))


def test_the_same_size_reads_what_it_would_have_read(OurLoader: Any) -> None:
    """Padding included: torch's class pads with the beginning of the epoch."""
    for kind in RANKED:
        loader = ranked(OurLoader, kind, 4, 3, 5, epoch=3, seed=9)
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        assert flat(loaded(ranked(OurLoader, kind, 4, 3, 5, epoch=3, seed=9), state)) == flat(iterator)
    torchs = ranked(OurLoader, "DistributedSampler", 4, 3, 5, epoch=3, seed=9)
    assert flat(torchs) == flat(ranked(torch.utils.data.DataLoader, "DistributedSampler", 4, 3, 5, epoch=3, seed=9))


SAMPLERS: dict[str, Any] = {
    "shuffle": lambda own: {"shuffle": True, "generator": own},
    "random": lambda own: {"sampler": RandomSampler(Indices(SIZE), generator=own)},
    "replacement": lambda own: {
        "sampler": RandomSampler(Indices(SIZE), replacement=True, num_samples=150, generator=own)
    },
    "weighted": lambda own: {"sampler": WeightedRandomSampler([1.0] * SIZE, 90, generator=own)},
    "sequential": lambda own: {},
    "stateful": lambda own: {"sampler": StatefulSampler(SIZE)},
    "list": lambda own: {"sampler": list(range(SIZE, 0, -1))},
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("drop_last", [False, True])
def test_another_batch_size_reads_the_same_samples(OurLoader: Any, name: str, drop_last: bool) -> None:
    def made(batch_size: int, workers: int = 0) -> Any:
        own = torch.Generator().manual_seed(5)
        return OurLoader(
            Indices(SIZE), batch_size=batch_size, drop_last=drop_last, num_workers=workers, **SAMPLERS[name](own)
        )

    order = flat(OurLoader(Indices(SIZE), batch_size=1, **SAMPLERS[name](torch.Generator().manual_seed(5))))
    loader = made(4)
    seen = steps([loader], 6)
    for batch_size, count in ((7, 3), (1, 2), (7, 1)):
        loader = loaded(made(batch_size), loader.state_dict())
        more = steps([loader], count)
        assert len(more) == batch_size * count
        seen += more
    loader = loaded(made(5), loader.state_dict())
    last = list(loader)
    seen += flat(last)
    assert seen == order[: len(order) - (len(order) - 54) % 5 * drop_last]
    assert loader.state_dict()["fresh"]
    end = loaded(made(5), state_after(len(last), made, 54 // 2, order))
    assert flat(end) == [], "the state after the last batch, before its end was seen"


def state_after(batches: int, made: Any, size: int, order: list[int]) -> dict[str, Any]:
    first = made(size)
    assert steps([first], 2) == order[: 2 * size]
    loader = loaded(made(5), first.state_dict())
    steps([loader], batches)
    state: dict[str, Any] = loader.state_dict()
    assert not state["fresh"]
    return state


def test_batches_that_no_batch_size_counts_are_refused(OurLoader: Any) -> None:
    class Pairs:
        def __init__(self, size: int) -> None:
            self.size = size

        def __iter__(self) -> Any:
            return iter([list(range(i, i + self.size)) for i in range(0, 12, self.size)])

        def __len__(self) -> int:
            return 12 // self.size

    loader = OurLoader(Indices(12), batch_sampler=Pairs(2))
    steps([loader], 2)
    state = loader.state_dict()
    with pytest.raises(StateError, match="whose epoch has 6 batches, this one's has 4"):
        OurLoader(Indices(12), batch_sampler=Pairs(3)).load_state_dict(state)
    with pytest.raises(StateError, match="batch"):
        OurLoader(Indices(12), batch_size=4).load_state_dict(state)
    own = OurLoader(Indices(12), batch_sampler=BatchSampler(SequentialSampler(range(12)), 2, drop_last=False))
    steps([own], 2)
    assert flat(loaded(OurLoader(Indices(12), batch_size=3), own.state_dict())) == list(range(4, 12))
    iterable = OurLoader(Stream(12), batch_size=2)
    steps([iterable], 2)
    with pytest.raises(StateError, match="batch_size is 2, this one's is 3"):
        OurLoader(Stream(12), batch_size=3).load_state_dict(iterable.state_dict())


def test_a_subclass_with_an_order_of_its_own_is_refused_at_another_size(OurLoader: Any) -> None:
    class Backwards(DistributedSampler[int]):
        def __iter__(self) -> Any:
            return iter(list(super().__iter__())[::-1])

    def made(replicas: int) -> Any:
        sampler = Backwards(Indices(SIZE), num_replicas=replicas, rank=0)
        return OurLoader(Indices(SIZE), batch_size=4, sampler=sampler)

    loader = made(2)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    assert flat(loaded(made(2), state)) == flat(iterator)
    with pytest.raises(
        StateError, match="order of a Backwards cannot be divided again: use torch's DistributedSampler"
    ):
        made(3).load_state_dict(state)


@pytest.mark.parametrize(
    ("other", "hint"),
    [({"seed": 1}, "seed=0"), ({"shuffle": False}, "shuffle"), ({"epoch": 2}, r"call set_epoch\(0\)")],
    ids=["seed", "shuffle", "epoch"],
)
def test_another_order_is_refused(OurLoader: Any, other: dict[str, Any], hint: str) -> None:
    loader = ranked(OurLoader, "DistributedSampler", 2, 0, 4)
    steps([loader], 2)
    resumed = loaded(ranked(OurLoader, "DistributedSampler", 3, 0, 4, **other), loader.state_dict())
    with pytest.raises(StateError, match=hint):
        iter(resumed)


def test_batches_out_of_order_are_refused_at_another_size_and_counted_at_the_same(OurLoader: Any) -> None:
    loader = ranked(OurLoader, "DynaGCSSampler", 2, 0, 2)
    iterator = iter(loader)
    before = next(iterator).tolist()
    state = loader.state_dict()
    held = json.loads(state["state"])
    held |= {"ahead": [2, 3], "ahead_samples": [2, 2]}
    state["state"] = json.dumps(held)
    for other in (ranked(OurLoader, "DynaGCSSampler", 3, 0, 2), ranked(OurLoader, "DynaGCSSampler", 2, 0, 4)):
        with pytest.raises(StateError, match="out of order"):
            other.load_state_dict(state)
    with pytest.raises(StateError, match="in the same rank"):
        ranked(OurLoader, "DynaGCSSampler", 2, 1, 2).load_state_dict(state)
    resumed = loaded(ranked(OurLoader, "DynaGCSSampler", 2, 0, 2), state)
    second = next(iter(resumed)).tolist()
    after = resumed.state_dict()
    assert (after["position"], after["samples"]) == (4, 8), "both batches that came early are counted"
    whole = flat(ranked(OurLoader, "DynaGCSSampler", 2, 0, 2))
    assert before + second == whole[:4]
    assert flat(loaded(ranked(OurLoader, "DynaGCSSampler", 2, 0, 2), after)) == whole[8:]


def test_random_augmentation_does_not_depend_on_the_workers_of_a_resized_epoch(OurLoader: Any) -> None:
    def made(batch_size: int, workers: int) -> Any:
        own = torch.Generator().manual_seed(5)
        options = LoaderOptions() if workers else None
        return OurLoader(
            Augmented(40), batch_size=batch_size, shuffle=True, generator=own, num_workers=workers, options=options
        )

    loader = made(4, 2)
    next(iter(loader))
    state = loader.state_dict()
    one, other = (
        [[part.tolist() for part in batch] for batch in loaded(made(6, workers), state)] for workers in (1, 2)
    )
    assert one == other


class Drawn(Indices):
    """Yields random numbers."""

    def __getitem__(self, index: int) -> int:
        return int(torch.randint(1 << 40, ()))


@pytest.mark.parametrize("kind", RANKED)
@pytest.mark.parametrize("count", [0, 2])
def test_ranks_draw_different_random_numbers_after_a_resize(OurLoader: Any, kind: str, count: int) -> None:
    def made(replicas: int, rank: int) -> Any:
        sampler = RANKED[kind](Indices(SIZE), num_replicas=replicas, rank=rank)
        return OurLoader(Drawn(SIZE), batch_size=5, sampler=sampler, num_workers=1)

    states, rests = [], []
    for rank in range(2):
        torch.manual_seed(rank)
        loader = made(2, rank)
        iterator = iter(loader)
        for _ in range(count):
            next(iterator)
        states.append(loader.state_dict())
        rests.append(flat(iterator))
    for given_one in (states[0], states):
        read = [flat(loaded(made(3, rank), given_one)) for rank in range(3)]
        numbers = [number for rest in read for number in rest]
        assert len(set(numbers)) == len(numbers)
    for rank in range(2):
        assert flat(loaded(made(2, rank), states[rank])) == rests[rank]
        assert flat(loaded(made(2, rank), states[::-1])) == rests[rank]
        again = loaded(made(3, rank), states[0]).state_dict()
        assert flat(loaded(made(3, rank), again)) == flat(loaded(made(3, rank), states[0]))
