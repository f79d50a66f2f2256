"""`state_dict` of a loader over an iterable dataset."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from tests.loader_cases import StatefulStream, Stream, Uneven, seed_everything
from tests.new_process import in_fork
from torch_dpflow.errors import StateError

SIZE = 14


def plain(batches: Any) -> list[Any]:
    """Batches as lists of numbers."""
    return [[column.tolist() for column in batch] if isinstance(batch, list) else batch.tolist() for batch in batches]


def interrupted(loader: Any, after: int) -> tuple[Any, tuple[list[Any], list[Any]]]:
    iterator = iter(loader)
    for _ in range(after):
        next(iterator)
    state = loader.state_dict()
    return state, (plain(iterator), plain(loader))


def every_position(make: Any) -> tuple[list[Any], list[tuple[list[Any], list[Any]]]]:
    """For each number of batches: the state and what followed. Saving changes neither epoch."""
    saved = make()
    iterator = iter(saved)
    states, batches = [saved.state_dict()], []
    for batch in iterator:
        batches.append(batch)
        states.append(saved.state_dict())
    epoch, following = plain(batches), plain(saved)
    undisturbed = make()
    assert (epoch, following) == (plain(undisturbed), plain(undisturbed))
    return states, [(epoch[after:], following) for after in range(len(states))]


def resumed(make: Any, states: list[Any]) -> list[list[Any]]:
    """For each state the rest of its epoch, and for the first, a middle and the last one the next epoch, too."""
    seed_everything(999)
    found = []
    for number, state in enumerate(states):
        loader = make()
        loader.load_state_dict(state)
        rest = plain(loader)
        found.append([rest, plain(loader)] if number in epoch_follows(states) else [rest])
    return found


def epoch_follows(states: list[Any]) -> tuple[int, int, int]:
    return 0, len(states) // 2, len(states) - 1


def check(make: Any) -> None:
    """Save a loader at every batch, and resume each state in another process."""
    states, expected = every_position(make)
    due = [[*each] if number in epoch_follows(states) else [each[0]] for number, each in enumerate(expected)]
    assert in_fork(resumed, make, states) == due


@pytest.mark.parametrize("num_workers", [0, 2])
def test_at_every_batch_without_a_state_of_the_dataset(OurLoader: Any, num_workers: int) -> None:
    def make() -> Any:
        return OurLoader(Stream(SIZE), batch_size=3, num_workers=num_workers)

    check(make)


@pytest.mark.parametrize(("sizes", "drop_last"), [([0, 3, 6], False), ([5, 0], True)])
def test_at_every_batch_of_uneven_shares(OurLoader: Any, sizes: list[int], drop_last: bool) -> None:
    def make() -> Any:
        return OurLoader(Uneven(sizes), batch_size=2, num_workers=len(sizes), drop_last=drop_last)

    check(make)


@pytest.mark.parametrize(("num_workers", "persistent_workers"), [(0, False), (1, False), (3, True)])
def test_at_every_batch_with_a_state_of_the_dataset(
    OurLoader: Any, num_workers: int, persistent_workers: bool, tmp_path: Any
) -> None:
    def make() -> Any:
        dataset = StatefulStream(SIZE, str(tmp_path / "log"))
        return OurLoader(dataset, batch_size=3, num_workers=num_workers, persistent_workers=persistent_workers)

    check(make)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_with_a_state_produces_nothing_again(OurLoader: Any, num_workers: int, tmp_path: Any) -> None:
    def make(log: str) -> tuple[Any, StatefulStream]:
        dataset = StatefulStream(SIZE, str(tmp_path / log))
        return OurLoader(dataset, batch_size=3, num_workers=num_workers), dataset

    begun, _ = make("first")
    state, (rest, _following) = interrupted(begun, 3)
    again, dataset = make("second")
    again.load_state_dict(state)
    assert plain(again) == rest
    assert sorted(dataset.produced()) == sorted(number for batch in rest for number in batch)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_random_draws_of_the_stream_go_on(OurLoader: Any, num_workers: int) -> None:
    def make() -> Any:
        return OurLoader(Stream(SIZE, augment=True), batch_size=3, num_workers=num_workers)

    seed_everything(7)
    loader = make()
    state, (rest, _following) = interrupted(loader, 3)
    ((again, _next),) = in_fork(resumed, make, [state])
    assert again == rest


def test_another_number_of_workers_is_refused(OurLoader: Any) -> None:
    """Each worker reads a share of its own, so the shares of other workers cannot be found again."""
    state, _ = interrupted(OurLoader(Stream(SIZE), batch_size=3, num_workers=2), 3)
    for num_workers in (0, 1, 3):
        loader = OurLoader(Stream(SIZE), batch_size=3, num_workers=num_workers)
        with pytest.raises(StateError, match="2"):
            loader.load_state_dict(state)
        assert sorted(number for batch in plain(loader) for number in batch) == list(range(SIZE))


def test_between_epochs_the_number_of_workers_may_change(OurLoader: Any) -> None:
    begun = OurLoader(Stream(SIZE), batch_size=3, num_workers=2)
    list(begun)
    again = OurLoader(Stream(SIZE), batch_size=3, num_workers=3)
    again.load_state_dict(begun.state_dict())
    assert sorted(number for batch in plain(again) for number in batch) == list(range(SIZE))


class ShuffledFiles(IterableDataset[int]):
    """Shuffles when it is iterated, or at its first sample, and has no state."""

    def __init__(self, *, at_iter: bool) -> None:
        self.at_iter = at_iter

    def __iter__(self) -> Iterator[int]:
        return iter(self._order()) if self.at_iter else self._later()

    def _later(self) -> Iterator[int]:
        yield from self._order()

    def _order(self) -> list[int]:
        order = torch.randperm(SIZE).tolist()
        random.shuffle(order)
        return order


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("at_iter", [True, False])
@pytest.mark.parametrize("draws", [0, 1])
def test_a_dataset_that_shuffles_itself_is_read_again_in_its_order(
    OurLoader: Any, num_workers: int, at_iter: bool, draws: int
) -> None:
    """draws: of the training loop, between the beginning and the first batch."""

    def make() -> Any:
        return OurLoader(ShuffledFiles(at_iter=at_iter), batch_size=3, num_workers=num_workers)

    seed_everything(7)
    saved = make()
    states, epochs = [], []
    for _ in range(2):
        iterator = iter(saved)
        torch.rand(draws)
        next(iterator)
        states.append(saved.state_dict())
        epochs.append(plain(iterator))
    for seed in (7, 999):
        for state, rest in zip(states, epochs):
            seed_everything(seed)
            resumed = make()
            resumed.load_state_dict(state)
            assert plain(resumed) == rest
