"""`state_dict` of a loader over a map-style dataset: stop and resume anywhere, lose and repeat nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SubsetRandomSampler

from tests.loader_cases import (
    Augmented,
    Counted,
    EagerSampler,
    Gated,
    Indices,
    StatefulSampler,
    global_rng,
    seed_everything,
)
from tests.new_process import FORK, in_fork
from torch_dpflow.options import LoaderOptions

SIZE = 14
Arguments = dict[str, Any]


def generator() -> torch.Generator:
    """Seeded from the process's own, so that it differs in another process."""
    return torch.Generator().manual_seed(int(torch.randint(1 << 30, ())))


def shuffled() -> Arguments:
    return {"batch_size": 3, "shuffle": True, "generator": generator()}


def replaced() -> Arguments:
    own = generator()
    return {
        "batch_size": 3,
        "sampler": RandomSampler(range(SIZE), replacement=True, generator=own),
        "generator": own,
    }


#: Whose later epochs follow from the loader's state alone.
SELF_CONTAINED: dict[str, Callable[[], Arguments]] = {
    "sequential": lambda: {"batch_size": 4},
    "drop last": lambda: {"batch_size": 4, "drop_last": True},
    "unbatched": lambda: {"batch_size": None, "sampler": [3, 1, 4, 0, 5]},
    "shuffled": shuffled,
    "replaced": replaced,
    "list": lambda: {"batch_size": 3, "sampler": list(range(SIZE))[::-1]},
    "batches": lambda: {"batch_sampler": [[1, 2], [5], [0, 3, 4]]},
    "distributed": lambda: {"batch_size": 3, "sampler": DistributedSampler(range(SIZE), 2, 1)},
    "own generator": lambda: {"batch_size": 3, "sampler": RandomSampler(range(SIZE), generator=generator())},
    "own generator, a pass at a time": lambda: {
        "batch_sampler": BatchSampler(
            RandomSampler(range(SIZE), replacement=True, num_samples=70, generator=generator()), 10, False
        )
    },
    "own generator in a subset": lambda: {
        "batch_size": 3,
        "sampler": SubsetRandomSampler(range(SIZE), generator=generator()),
        "generator": generator(),
    },
    "stateful sampler": lambda: {"batch_size": 3, "sampler": StatefulSampler(SIZE)},
}
#: Whose later epochs are drawn from the process's generators, which are the user's to restore.
DRAWN_FROM_THE_PROCESS: dict[str, Callable[[], Arguments]] = {
    "shuffled": lambda: {"batch_size": 3, "shuffle": True},
    "replaced": lambda: {"batch_size": 3, "sampler": RandomSampler(range(SIZE), replacement=True)},
    "eager": lambda: {"batch_size": 3, "sampler": EagerSampler(SIZE)},
}
#: Saved without workers, which draw nothing ahead: one of each kind of sampler suffices.
SAVED_BY = [
    *((name, 2) for name in SELF_CONTAINED),
    *((name, 0) for name in ("shuffled", "unbatched", "own generator", "stateful sampler")),
]


def plain(batches: Any) -> list[Any]:
    """Batches as lists of numbers."""
    return [
        [column.tolist() for column in batch]
        if isinstance(batch, list)
        else batch.tolist()
        if isinstance(batch, torch.Tensor)
        else batch
        for batch in batches
    ]


def rest_and_next(loader: Any) -> tuple[list[Any], list[Any]]:
    return plain(loader), plain(loader)


def interrupted(loader: Any, after: int) -> tuple[dict[str, Any], tuple[list[Any], list[Any]]]:
    """The state after so many batches, and what came after it in this process."""
    iterator = iter(loader)
    for _ in range(after):
        next(iterator)
    state = loader.state_dict()
    return state, (plain(iterator), plain(loader))


def resumed(
    loader_class: Any, arguments: Callable[[], Arguments], states: list[Any], workers: list[int], dataset: Any
) -> list[tuple[list[Any], list[Any]]]:
    """In a process with other seeds: the rest of the epoch and the next one, for each state."""
    found = []
    seed_everything(999)
    for state, num_workers in zip(states, workers, strict=True):
        loader = loader_class(dataset, num_workers=num_workers, **arguments())
        loader.load_state_dict(state)
        found.append(rest_and_next(loader))
    return found


def every_position(
    loader_class: Any, arguments: Callable[[], Arguments], num_workers: int, dataset: Any, undisturbed: int = 0
) -> Any:
    """For each number of batches: the state and what followed. Saving changes neither epoch.

    undisturbed: the number of workers of the loader that is not saved, of which batches of `Indices` do not depend.
    """

    def loader(num_workers: int) -> Any:
        seed_everything(7)
        return loader_class(dataset, num_workers=num_workers, **arguments())

    saved = loader(num_workers)
    iterator = iter(saved)
    states, batches = [saved.state_dict()], []
    for batch in iterator:
        batches.append(batch)
        states.append(saved.state_dict())
    epoch, following = plain(batches), plain(saved)
    assert (epoch, following) == rest_and_next(loader(undisturbed))
    return states, [(epoch[after:], following) for after in range(len(states))]


def one_with_workers(name: str, states: int) -> list[int]:
    """Return the numbers of workers of loaders that go on: none but for one, whose position and number vary by name."""
    number = [*SELF_CONTAINED, *DRAWN_FROM_THE_PROCESS].index(name)
    return [(1, 3, 2)[number % 3] * (position == number % states) for position in range(states)]


@pytest.mark.parametrize(("name", "num_workers"), SAVED_BY)
def test_at_every_batch_with_any_number_of_workers(OurLoader: Any, name: str, num_workers: int) -> None:
    arguments = SELF_CONTAINED[name]
    states, expected = every_position(OurLoader, arguments, num_workers, Indices(SIZE))
    others = one_with_workers(name, len(states))
    assert in_fork(resumed, OurLoader, arguments, states, others, Indices(SIZE)) == expected


@pytest.mark.parametrize("num_workers", [1, 2])
def test_augmentation_goes_on_as_it_would_have(OurLoader: Any, num_workers: int) -> None:
    every = every_position(OurLoader, shuffled, num_workers, Augmented(SIZE), undisturbed=num_workers)
    states, expected = (found[::2] for found in every)
    others = list(itertools.islice(itertools.cycle([3, 1]), len(states)))
    assert in_fork(resumed, OurLoader, shuffled, states, others, Augmented(SIZE)) == expected


@pytest.mark.parametrize("num_workers", [1, 2])
def test_with_torchs_seeding_the_same_number_of_workers_goes_on(OurLoader: Any, num_workers: int) -> None:
    def arguments() -> Arguments:
        return {**shuffled(), "options": LoaderOptions(seeding="worker")}

    every = every_position(OurLoader, arguments, num_workers, Augmented(SIZE), undisturbed=num_workers)
    states, expected = (found[::2] for found in every)
    same = [num_workers] * len(states)
    assert in_fork(resumed, OurLoader, arguments, states, same, Augmented(SIZE)) == expected


@pytest.mark.parametrize(("name", "num_workers"), [*((name, 2) for name in DRAWN_FROM_THE_PROCESS), ("eager", 0)])
def test_the_epoch_is_exact_without_a_generator(OurLoader: Any, name: str, num_workers: int) -> None:
    arguments = DRAWN_FROM_THE_PROCESS[name]
    states, expected = every_position(OurLoader, arguments, num_workers, Indices(SIZE))
    others = one_with_workers(name, len(states))
    found = in_fork(resumed, OurLoader, arguments, states, others, Indices(SIZE))
    assert [rest for rest, _ in found] == [rest for rest, _ in expected]


@pytest.mark.parametrize(("name", "after"), [("shuffled", 0), ("replaced", 4), ("eager", 0), ("eager", 4)])
def test_later_epochs_are_exact_once_the_user_restores_the_process(OurLoader: Any, name: str, after: int) -> None:
    seed_everything(7)
    loader = OurLoader(Indices(SIZE), num_workers=2, **DRAWN_FROM_THE_PROCESS[name]())
    iterator = iter(loader)
    for _ in range(after):
        next(iterator)
    state, torch_state = loader.state_dict(), torch.get_rng_state()
    expected = plain(iterator), plain(loader), plain(loader)
    torch.manual_seed(123)
    again = OurLoader(Indices(SIZE), num_workers=1, **DRAWN_FROM_THE_PROCESS[name]())
    again.load_state_dict(state)
    torch.set_rng_state(torch_state)
    assert (plain(again), plain(again), plain(again)) == expected


@pytest.mark.parametrize(("num_workers", "persistent_workers"), [(0, False), (1, False), (2, True)])
def test_a_loader_can_be_taken_back_in_its_own_process(
    OurLoader: Any, num_workers: int, persistent_workers: bool
) -> None:
    loader = OurLoader(
        Augmented(SIZE) if num_workers else Indices(SIZE),
        num_workers=num_workers,
        persistent_workers=persistent_workers,
        **shuffled(),
    )
    for after in (0, 3, 5):
        state, expected = interrupted(loader, after)
        loader.load_state_dict(state)
        assert rest_and_next(loader) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_before_the_first_and_after_the_last_batch(OurLoader: Any, num_workers: int) -> None:
    def loader() -> Any:
        return OurLoader(Indices(SIZE), num_workers=num_workers, **shuffled())

    seed_everything(7)
    begun = loader()
    before = begun.state_dict()
    first, second = rest_and_next(begun)
    between = begun.state_dict()
    third = plain(begun)
    for state, expected in ((before, [first, second]), (between, [third])):
        again = loader()
        again.load_state_dict(state)
        assert [plain(again) for _ in expected] == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_snapshot_changes_nothing(OurLoader: Any, num_workers: int) -> None:
    def run(snapshots: int) -> list[Any]:
        seed_everything(7)
        loader = OurLoader(Augmented(SIZE), num_workers=num_workers, **shuffled())
        seen = []
        for _epoch in range(2):
            for batch in loader:
                seen.append(plain([batch]))
                before = global_rng()
                states = [loader.state_dict() for _ in range(snapshots)]
                assert global_rng() == before
                assert all(state == states[0] for state in states)
        return seen

    assert run(0) == run(2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loaded_state_can_be_saved_at_once(OurLoader: Any, num_workers: int) -> None:
    loader = OurLoader(Indices(SIZE), num_workers=num_workers, **shuffled())
    state, expected = interrupted(loader, 3)
    for _ in range(2):
        again = OurLoader(Indices(SIZE), num_workers=num_workers, **shuffled())
        again.load_state_dict(state)
        state = again.state_dict()
    assert rest_and_next(again) == expected


def test_resuming_twice_in_one_epoch(OurLoader: Any) -> None:
    loader = OurLoader(Augmented(SIZE), num_workers=2, **shuffled())
    first, (rest, following) = interrupted(loader, 2)
    again = OurLoader(Augmented(SIZE), num_workers=1, **shuffled())
    again.load_state_dict(first)
    second, expected = interrupted(again, 3)
    assert expected == (rest[3:], following)
    once_more = OurLoader(Augmented(SIZE), num_workers=3, **shuffled())
    once_more.load_state_dict(second)
    assert rest_and_next(once_more) == expected


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_nothing_that_was_delivered_is_loaded_again(OurLoader: Any, num_workers: int, tmp_path: Any) -> None:
    state, (rest, _following) = interrupted(OurLoader(Indices(SIZE), num_workers=1, **shuffled()), 3)
    dataset = Counted(SIZE, str(tmp_path / "log"))
    loader = OurLoader(dataset, num_workers=num_workers, **shuffled())
    loader.load_state_dict(state)
    assert plain(loader) == rest
    # As a set: a batch that is taken over may be loaded twice.
    assert set(dataset.loaded()) == {index for batch in rest for index in batch}


def test_a_sampler_with_a_state_is_asked_for_it(OurLoader: Any) -> None:
    """It begins where it was, instead of being drawn from the start and thrown away."""
    loader = OurLoader(Indices(SIZE), batch_size=3, sampler=StatefulSampler(SIZE), num_workers=2)
    state, expected = interrupted(loader, 4)
    sampler = StatefulSampler(SIZE)
    again = OurLoader(Indices(SIZE), batch_size=3, sampler=sampler, num_workers=1)
    again.load_state_dict(state)
    assert rest_and_next(again) == expected
    assert sampler.resumed_at == 12


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sampler_with_a_state_inside_a_batch_sampler_is_asked_for_it(OurLoader: Any, num_workers: int) -> None:
    """torch's own batch sampler, which the user has made, as well as the one that the loader makes."""

    def made() -> Any:
        batches = BatchSampler(StatefulSampler(SIZE), 3, drop_last=False)
        return OurLoader(Indices(SIZE), batch_sampler=batches, num_workers=num_workers)

    loader, again = made(), made()
    list(loader)  # the sampler's order is another one in each epoch
    state, expected = interrupted(loader, 2)
    again.load_state_dict(state)
    assert rest_and_next(again) == expected


@pytest.mark.parametrize(("persistent_workers", "positions"), [(False, (7,)), (True, (0, 29))])
def test_out_of_order_delivery_goes_on_with_what_is_missing(
    OurLoader: Any, persistent_workers: bool, positions: tuple[int, ...]
) -> None:
    def loader(num_workers: int) -> Any:
        return OurLoader(
            Indices(60),
            batch_size=2,
            num_workers=num_workers,
            in_order=False,
            persistent_workers=persistent_workers,
        )

    for after in positions:
        begun = loader(3)
        iterator = iter(begun)
        seen = [int(index) for _ in range(after) for index in next(iterator)]
        state = begun.state_dict()
        again = loader(2)
        again.load_state_dict(state)
        rest = [int(index) for batch in again for index in batch]
        assert sorted(seen + rest) == list(range(60))
        assert sorted(int(index) for batch in again for index in batch) == list(range(60))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_delivered_ahead_of_the_first_one_are_left_out(OurLoader: Any, num_workers: int) -> None:
    gate = FORK.Event()

    def loader(num_workers: int) -> Any:
        return OurLoader(Gated(8, {0: gate}), batch_size=None, num_workers=num_workers, in_order=False)

    begun = loader(2)
    iterator = iter(begun)
    ahead = [next(iterator) for _ in range(3)]
    state = begun.state_dict()
    gate.set()
    again, rest = loader(num_workers), []
    again.load_state_dict(state)
    for index in again:
        rest.append(index)
        again.state_dict()
    assert sorted([*ahead, *rest]) == [*range(8)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_set_epoch_of_the_users_is_theirs(OurLoader: Any, num_workers: int) -> None:
    """DistributedSampler's order depends on `set_epoch`, which the training script calls on resuming too."""

    def loader() -> tuple[Any, DistributedSampler[int]]:
        sampler: DistributedSampler[int] = DistributedSampler(range(SIZE), num_replicas=2, rank=0)
        return OurLoader(Indices(SIZE), batch_size=2, sampler=sampler, num_workers=num_workers), sampler

    begun, sampler = loader()
    sampler.set_epoch(5)
    state, (rest, _) = interrupted(begun, 3)
    again, sampler = loader()
    sampler.set_epoch(5)
    again.load_state_dict(state)
    assert plain(again) == rest
