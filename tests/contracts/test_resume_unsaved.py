"""Parts whose own `state_dict` cannot be had: iterating does not depend on it, and whoever saves is told why."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.loader_cases import Indices, StatefulSampler, Stream
from tests.worker_cases import kill, worker_pids
from torch_dpflow.errors import StateError

SIZE = 20


class Unopenable:
    """Pickles, and fails to unpickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


class OwnError(Exception):
    """Cannot be made from a text."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def raising() -> Any:
    raise OwnError(1, 2)


def raising_unknown() -> Any:
    raise type("Unknown", (Exception,), {})("nobody can import this class")


FAILURES: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (raising, "1 and 2"),
    "raises a class that cannot travel": (raising_unknown, "nobody can import"),
    "cannot be pickled": (threading.Lock, "pickle"),
    "cannot be opened": (Unopenable, "no number"),
}


class Unsaved(Stream):
    """A stream that cannot say where it is."""

    def __init__(self, size: int, failure: str) -> None:
        super().__init__(size)
        self.failure = failure

    def state_dict(self) -> Any:
        return FAILURES[self.failure][0]()

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("it has given no state")


class Asking(Stream):
    """As some libraries' datasets: says where it is only to whom tells it more."""

    def state_dict(self, num_samples: int, num_workers: int) -> dict[str, int]:
        return {"position": num_samples}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("it has given no state")


class UnsavedSampler(StatefulSampler):
    """A sampler that cannot say where it is."""

    def state_dict(self, *, epoch: int) -> dict[str, int]:
        return super().state_dict() | {"epoch": epoch}


def plain(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def refused(loader: Any) -> StateError:
    with pytest.raises(StateError) as raised:
        loader.state_dict()
    assert raised.value.__cause__ is not None
    return raised.value


@pytest.mark.parametrize(
    ("num_workers", "failure"),
    [*itertools.product([2], FAILURES), (0, "raises"), (0, "raises a class that cannot travel")],
)
def test_a_dataset_that_cannot_say_where_it_is_is_read(OurLoader: Any, num_workers: int, failure: str) -> None:
    loader = OurLoader(Unsaved(SIZE, failure), batch_size=3, num_workers=num_workers)
    expected = plain(OurLoader(Stream(SIZE), batch_size=3, num_workers=num_workers))
    iterator = iter(loader)
    seen = plain([next(iterator)])
    error = refused(loader)
    assert "Unsaved" in str(error)
    assert FAILURES[failure][1] in str(error.__cause__)
    assert [*seen, *plain(iterator)] == expected
    assert plain(loader) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_that_wants_arguments_is_read(OurLoader: Any, num_workers: int) -> None:
    loader = OurLoader(Asking(SIZE), batch_size=3, num_workers=num_workers)
    expected = plain(OurLoader(Stream(SIZE), batch_size=3, num_workers=num_workers))
    iterator = iter(loader)
    seen = plain([next(iterator)])
    assert isinstance(refused(loader).__cause__, TypeError)
    assert [*seen, *plain(iterator)] == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_has_not_been_read_needs_no_state(OurLoader: Any, num_workers: int) -> None:
    """At its beginning nothing has to be said of where it is."""
    loader = OurLoader(Asking(SIZE), batch_size=3, num_workers=num_workers)
    states = [loader.state_dict()]
    iterator = iter(loader)
    states.append(loader.state_dict())
    expected = plain(iterator)
    for state in states:
        again = OurLoader(Asking(SIZE), batch_size=3, num_workers=num_workers)
        again.load_state_dict(state)
        assert plain(again) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sampler_that_cannot_say_where_it_is_is_used(OurLoader: Any, num_workers: int) -> None:
    loader = OurLoader(Indices(SIZE), batch_size=3, sampler=UnsavedSampler(SIZE), num_workers=num_workers)
    expected = [plain(loader) for _ in range(2)]
    loader = OurLoader(Indices(SIZE), batch_size=3, sampler=UnsavedSampler(SIZE), num_workers=num_workers)
    iterator: Iterator[Any] = iter(loader)
    seen = plain([next(iterator)])
    error = refused(loader)
    assert isinstance(error.__cause__, TypeError)
    assert "UnsavedSampler" in str(error)
    assert [[*seen, *plain(iterator)], plain(loader)] == expected


def test_a_workers_death_does_not_ask_for_it(OurLoader: Any) -> None:
    """Its successor passes over what was delivered, as with a dataset that has no state."""
    loader = OurLoader(Unsaved(60, "raises"), batch_size=3, num_workers=2)
    iterator = iter(loader)
    seen = plain([next(iterator) for _ in range(6)])
    kill(worker_pids()[0])
    assert sorted(number for batch in seen + plain(iterator) for number in batch) == list(range(60))
    assert loader.stats().restarts == 1
