"""Mappers whose workers are killed, whose functions and sources fail, and whose items cannot be sent."""

from __future__ import annotations

import multiprocessing
import random
import threading
from typing import Any

import pytest

from tests.worker_cases import kill, worker_pids
from torch_dpflow import LoaderOptions
from torch_dpflow.errors import NotPicklableError, PoisonTaskError

torchdata = pytest.importorskip("torchdata.nodes", reason="torchdata is not installed")

from tests.node_cases import Counting, awkward, negative, results_of, unhurried  # noqa: E402
from torch_dpflow.nodes import Mapper  # noqa: E402


@pytest.mark.parametrize("in_order", [True, False])
def test_killed_workers_lose_and_repeat_no_item_whenever_a_state_was_saved(in_order: bool) -> None:
    size, draw = 60, random.Random(3)
    node = Mapper(Counting(size), unhurried, 2, in_order=in_order)
    expected = [(0, -number) for number in range(size)]
    got: list[Any] = []
    for result in node:
        got.append(result)
        rest = Mapper(Counting(size), negative, 0)
        rest.reset(node.state_dict())
        assert sorted([*got, *rest]) == sorted(expected)
        if len(got) % 10 == 5 and (pids := worker_pids()):
            kill(draw.choice(pids))
    assert (got if in_order else sorted(got, reverse=True)) == expected
    assert node.loader.stats().restarts > 0
    node.shutdown()


def test_a_mapper_goes_on_after_its_forerunner_was_killed_with_its_workers() -> None:
    """Saved at random positions, and each time restored on other workers, some of which are killed too."""
    size, draw = 40, random.Random(4)
    got: list[Any] = []
    state = None
    while len(got) < size:
        node = Mapper(Counting(size), unhurried, draw.randint(1, 3))
        node.reset(state)
        for _ in range(draw.randint(5, 15)):
            if (result := next(node, None)) is not None:
                got.append(result)
            if draw.random() < 0.1 and (pids := worker_pids()):
                kill(draw.choice(pids))
        state = node.state_dict()
        node.shutdown()
    assert got == [(0, -number) for number in range(size)]


def test_an_idle_worker_takes_over_what_waits_behind_a_slow_item() -> None:
    gate = multiprocessing.get_context("fork").Event()

    def wait_for_gate(item: tuple[int, int]) -> int:
        if item[1] == 0:
            gate.wait()
        return item[1]

    context = multiprocessing.get_context("fork")
    node = Mapper(Counting(6), wait_for_gate, 2, prefetch_factor=3, in_order=False, multiprocessing_context=context)
    assert sorted(next(node) for _ in range(5)) == [1, 2, 3, 4, 5]
    gate.set()
    assert list(node) == [0]
    assert node.loader.stats().steals > 0
    node.shutdown()


def test_errors_and_deaths_come_in_the_places_of_their_items() -> None:
    node = Mapper(Counting(8, {6: OSError(5, "the source")}), awkward, 2, options=LoaderOptions(poison_limit=2))
    states, results = [], []
    for result in results_of(node):
        results.append(result)
        states.append(node.state_dict())
    assert [result for result in results if isinstance(result, tuple)] == [(0, 0), (0, -1), (0, -4), (0, -7)]
    assert type(results[2]) is KeyError
    assert type(results[3]) is RuntimeError
    assert type(results[5]) is PoisonTaskError
    assert type(results[6]) is OSError
    assert results[6].args == (5, "the source")
    assert "item 2 of the stream" in str(results[2])
    assert "no such row" in str(results[2])
    assert "raised StopIteration at item 3 of the stream" in str(results[3])
    assert "item 5 of the stream took down 2 workers" in str(results[5])
    node.shutdown()
    for position, state in enumerate(states, 1):
        rest = Mapper(Counting(8), negative, 0)
        rest.reset(state)
        assert [number for _, number in rest] == [-number for number in range(position, 8)]


def test_errors_in_this_process() -> None:
    node = Mapper(Counting(5, {1: OSError("the source")}), awkward, 0)
    kinds = [type(result) for result in results_of(node)]
    assert kinds == [tuple, OSError, KeyError, RuntimeError, tuple]


def test_items_and_results_that_cannot_be_sent_are_named() -> None:
    items = [1, threading.Lock(), 3]
    node = Mapper(torchdata.IterableWrapper(items), lock_of_three, 2)
    first, second, third = results_of(node)
    assert first == 1
    assert type(second) is NotPicklableError
    assert "item 1 of the stream: item of type _thread.lock cannot be pickled" in str(second)
    assert type(third) is NotPicklableError
    assert "item 2 of the stream" in str(third)
    assert "result of type _thread.lock cannot be pickled" in str(third)
    node.shutdown()


def lock_of_three(item: int) -> Any:
    return threading.Lock() if item == 3 else item


def test_an_item_that_cannot_be_opened_in_a_worker_fails_with_its_number() -> None:
    node = Mapper(torchdata.IterableWrapper([1, Closed(), 3]), repr, 2)
    first, second, third = results_of(node)
    assert (first, third) == ("1", "3")
    assert "item 1 of the stream" in str(second)
    assert "cannot be opened here" in str(second)
    node.shutdown()


class Closed:
    """Can be pickled and not unpickled."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("cannot be opened here")
