"""Orders that depend on what a sampler keeps between epochs: resumed exactly, or refused before the first batch."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Sampler

from tests.loader_cases import Indices, seed_everything
from torch_dpflow import BudgetBatchSampler, DynaGCSSampler, MixtureSampler
from torch_dpflow.epoch.rng import encode_generator, restore_generator
from torch_dpflow.errors import StateError

SIZE, EPOCHS = 13, 3
#: Epochs and batches after which a state is saved: in each of two epochs, and at the end of it.
POINTS = [(0, 0), (0, 2), (0, None), (1, 1), (1, None)]


class Shuffled(Sampler[int]):
    """Shuffles all samples by a generator that it holds."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __iter__(self) -> Iterator[int]:
        order = list(range(SIZE))
        self.rng.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return SIZE


class Counting(Sampler[int]):
    """Counts its iterations, and has no state."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(random.Random(self.epoch).sample(range(SIZE), SIZE))


def batches_of(loader: Any) -> list[Any]:
    return [np.asarray(batch).tolist() for batch in loader]


def saved(make: Any, epoch: int, batches: int | None) -> tuple[Any, list[Any]]:
    """The state after so many batches of an epoch, None: at its end; and what a run that goes on reads after it."""
    seed_everything(7)
    loader = make()
    for _ in range(epoch):
        batches_of(loader)
    iterator = iter(loader)
    for _ in itertools.islice(iterator, batches):
        pass
    state = json.loads(json.dumps(loader.state_dict()))
    first = [batches_of(iterator)] if batches is not None else []
    return state, first + [batches_of(loader) for _ in range(epoch + 1, EPOCHS)]


def test_all_generators_are_saved_as_text_and_restored() -> None:
    kinds = [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64]
    samples = [(one, lambda one=one: one.integers(9, size=3, dtype=np.int32).tolist()) for one in
               [np.random.Generator(kind(3)) for kind in kinds]]  # fmt: skip
    legacy, python = np.random.RandomState(3), random.Random(3)
    samples += [(legacy, lambda: legacy.standard_normal(3).tolist()), (python, lambda: python.gauss(0, 1))]
    for generator, draw in samples:
        draw()
        state = encode_generator(generator)
        due = [draw(), draw()]
        restore_generator(generator, state)
        assert [draw(), draw()] == due
        for damaged in ("{}", "[3, [1], null]", "x"):
            with pytest.raises(StateError, match="generator cannot be restored"):
                restore_generator(generator, damaged)


@pytest.mark.parametrize("batch_size", [3, None])
@pytest.mark.parametrize("make_rng", [np.random.default_rng, np.random.RandomState, random.Random])
def test_a_generator_that_a_sampler_holds_is_restored(OurLoader: Any, make_rng: Any, batch_size: Any) -> None:
    def make() -> Any:
        return OurLoader(Indices(SIZE), batch_size, sampler=Shuffled(make_rng(3)))

    for epoch, batches in POINTS:
        state, due = saved(make, epoch, batches)
        seed_everything(999)
        resumed = make()
        resumed.load_state_dict(state)
        assert [batches_of(resumed) for _ in due] == due, (epoch, batches)


@pytest.mark.parametrize("of_process", [np.random.mtrand._rand, random._inst])  # type: ignore[attr-defined]
def test_the_generators_of_the_process_stay_the_users(OurLoader: Any, of_process: Any) -> None:
    """A sampler may hold numpy's or Python's own, as scikit-learn's `check_random_state` returns."""
    for epoch, batches in POINTS:
        state, due = saved(lambda: OurLoader(Indices(SIZE), 3, sampler=Shuffled(of_process)), epoch, batches)
        resumed = OurLoader(Indices(SIZE), 3, sampler=Shuffled(of_process))
        resumed.load_state_dict(state)
        seed_everything(999)
        iterator = iter(resumed)
        numbers = np.random.random(), random.random()
        seed_everything(999)
        assert (np.random.random(), random.random()) == numbers
        if batches is not None:
            assert batches_of(iterator) == due[0]


@pytest.mark.parametrize("batch_size", [3, None])
def test_a_sampler_that_counts_its_iterations_begins_the_next_epoch(OurLoader: Any, batch_size: Any) -> None:
    """torch calls a sampler before its first batch where `batch_size` is None."""
    for epoch in range(2):
        state, due = saved(lambda: OurLoader(Indices(SIZE), batch_size, sampler=Counting()), epoch, None)
        resumed = OurLoader(Indices(SIZE), batch_size, sampler=Counting())
        resumed.load_state_dict(state)
        assert [batches_of(resumed) for _ in due] == due


@pytest.mark.parametrize("ranks", [{}, {"num_replicas": 3, "rank": 1}])
@pytest.mark.parametrize("kind", ["DynaGCSSampler", "MixtureSampler"])
def test_what_drop_last_drops_is_no_epoch(OurLoader: Any, kind: str, ranks: dict[str, Any]) -> None:
    """Saved at the last batch: 13 samples, or 5 of each rank, in batches of 4."""

    def make() -> Any:
        dyna = kind == "DynaGCSSampler"
        sampler = DynaGCSSampler(range(SIZE), **ranks) if dyna else MixtureSampler([5, 8], [5, 8], **ranks)
        return OurLoader(Indices(SIZE), 4, sampler=sampler, drop_last=True)

    for epoch in range(2):
        state, due = saved(make, epoch, 1 if ranks else 3)
        assert due[0] == []
        resumed = make()
        resumed.load_state_dict(state)
        assert [batches_of(resumed) for _ in due] == due


class InPlace(Sampler[int]):
    """Shuffles its list again and again, as many scripts do: an order depends on the orders before."""

    def __init__(self) -> None:
        self.order = list(range(SIZE))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter(self.order)


class Hidden(Shuffled):
    """Its generator is where the loader does not look."""

    def __init__(self) -> None:
        super().__init__(None)
        self.held = [random.Random(3)]

    def __iter__(self) -> Iterator[int]:
        self.rng = self.held[0]
        order = [*super().__iter__()]
        self.rng = None
        return iter(order)


class Drawing(Sampler[int]):
    """Draws each index from the process's generator, when it is read."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(SIZE))
        while left:
            yield left.pop(random.randrange(len(left)))


class Bucketed(InPlace):
    """A batch sampler with batches of several types."""

    def __iter__(self) -> Iterator[Any]:
        order = [*super().__iter__()]
        yield tuple(order[:2])
        yield np.array(order[2:7])
        yield order[7:]


@pytest.mark.parametrize(
    ("kind", "num_workers"), [(InPlace, 0), (InPlace, 1), (Hidden, 0), (Drawing, 0), (Bucketed, 0), (Bucketed, 1)]
)
def test_a_sampler_that_draws_other_samples_again_is_refused(OurLoader: Any, kind: Any, num_workers: int) -> None:
    def make(batch_size: int | None = 3) -> Any:
        how = {"batch_sampler": kind()} if kind is Bucketed else {"batch_size": batch_size, "sampler": kind()}
        return OurLoader(Indices(SIZE), num_workers=num_workers, **how)

    def state_after(epoch: int) -> Any:
        seed_everything(7)
        loader = make()
        for _ in range(epoch):
            batches_of(loader)
        for _ in zip(range(2), loader):
            random.random()  # as of a training loop
        return loader.state_dict()

    for batch_size in (3,) if kind is Bucketed else (3, 2):  # counted in samples
        resumed = make(batch_size)
        resumed.load_state_dict(state_after(1))
        with pytest.raises(StateError, match=f"the {kind.__name__} has drawn other samples again"):
            iter(resumed)
        assert sorted(itertools.chain(*batches_of(resumed))) == list(range(SIZE)), "the state is dropped"
        if kind is not Drawing:  # in the first epoch nothing was kept
            again = make(batch_size)
            again.load_state_dict(state_after(0))
            assert len([*itertools.chain(*batches_of(again))]) in (SIZE - 6, SIZE - 7)


@pytest.mark.parametrize("ranks", [{}, {"num_replicas": 2, "rank": 1}])
@pytest.mark.parametrize("kind", ["DynaGCSSampler", "MixtureSampler", "BudgetBatchSampler"])
def test_an_epoch_that_follows_a_break_is_whole(OurLoader: Any, kind: str, ranks: dict[str, Any]) -> None:
    """Saved before its first batch; or resumed where the loop broke, and nothing read."""

    def make() -> tuple[Any, Any]:
        sampler: Any = {
            "DynaGCSSampler": lambda: DynaGCSSampler(range(SIZE), **ranks),
            "MixtureSampler": lambda: MixtureSampler([5, 8], [5, 8], **ranks),
            "BudgetBatchSampler": lambda: BudgetBatchSampler([1] * SIZE, 3, **ranks),
        }[kind]()
        how = {"batch_sampler": sampler} if kind == "BudgetBatchSampler" else {"sampler": sampler, "batch_size": 3}
        return OurLoader(Indices(SIZE), **how), sampler

    loader, sampler = make()
    next(iter(loader))
    states = [loader.state_dict()]
    sampler.set_epoch(1)
    iterator = iter(loader)
    states.append(loader.state_dict())
    due = batches_of(iterator)
    assert sum(map(len, due)) == (7 if ranks else SIZE)
    for at, state in enumerate(states):
        loader, sampler = make()
        loader.load_state_dict(state)
        if not at:
            iter(loader)
        sampler.set_epoch(1)
        assert batches_of(loader) == due
