"""Mappers of quick items, which travel in groups. States, errors, deaths and random numbers are as of single items."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker_cases import kill, worker_pids
from torch_dpflow import LoaderOptions
from torch_dpflow.errors import PoisonTaskError
from torch_dpflow.loader import stream_shard
from torch_dpflow.loader.batch_planner import GROWTH_BYTES
from torch_dpflow.loader.private_shard import WINDOW
from torch_dpflow.loader.stream_shard import MAX_WINDOW, WINDOW_S, ItemPace

pytest.importorskip("torchdata.nodes", reason="torchdata is not installed")

from tests.node_cases import Counting, drawn, negative, results_of
from torch_dpflow.nodes import Mapper

SIZE = 120


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """Every item counts as quick, also on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_shard, "WINDOW_S", 1e9)
        yield


def windows(node: Any) -> set[int]:
    return set(node.loader._iterator._shard._windows.values())


@settings(max_examples=5, deadline=None)
@given(
    workers=st.integers(1, 3),
    frequency=st.sampled_from([1, 3, 50]),
    in_order=st.booleans(),
    deaths=st.sets(st.integers(1, SIZE - 1), max_size=3),
    left_at=st.integers(0, SIZE),
)
def test_states_at_each_item(workers: int, frequency: int, in_order: bool, deaths: set[int], left_at: int) -> None:
    draw = random.Random(sum(deaths))
    node = Mapper(Counting(SIZE), negative, workers, snapshot_frequency=frequency, in_order=in_order)
    node.reset()
    first = [next(node) for _ in range(left_at)]
    node.reset()  # in mid-epoch: what is in flight is dropped
    assert set(first) <= {(0, -number) for number in range(SIZE)}
    expected = [(1, -number) for number in range(SIZE)]
    states, got = [node.state_dict()], []
    for result in node:
        got.append(result)
        states.append(node.state_dict())
        if len(got) in deaths and (pids := worker_pids()):
            kill(draw.choice(pids))
    assert (got if in_order else sorted(got, reverse=True)) == expected
    assert MAX_WINDOW in windows(node) or deaths
    node.shutdown()
    again = Mapper(Counting(SIZE), negative, 0)
    for position, state in enumerate(states):
        again.reset(state)
        assert sorted([*got[:position], *again], reverse=True) == expected, f"restored at {position}"


def test_a_mapper_of_groups_continues_a_state_from_the_middle_of_one() -> None:
    node = Mapper(Counting(SIZE), negative, 2)
    got = [next(node) for _ in range(SIZE // 2 + 3)]
    state = node.state_dict()
    node.shutdown()
    node = Mapper(Counting(SIZE), negative, 3)
    node.reset(state)
    assert [*got, *node] == [(0, -number) for number in range(SIZE)]
    node.shutdown()


def test_errors_and_deaths_in_groups_are_those_of_single_items() -> None:
    source = Counting(SIZE, {110: OSError(5, "the source")})
    node = Mapper(source, awkward_later, 2, options=LoaderOptions(poison_limit=2))
    results = dict(enumerate(results_of(node)))
    assert MAX_WINDOW in windows(node)
    assert node.loader.stats().restarts == 2
    node.shutdown()
    failed = [results.pop(number) for number in (70, 71, 90, 110)]
    assert [type(error) for error in failed] == [KeyError, RuntimeError, PoisonTaskError, OSError]
    for number, error in zip((70, 71, 90), failed):
        assert f"item {number} of the stream" in str(error)
    assert "took down 2 workers" in str(failed[2])
    assert results == {number: (0, -number) for number in range(SIZE) if number not in (70, 71, 90, 110)}


def awkward_later(item: tuple[int, int]) -> tuple[int, int]:
    match item[1]:
        case 70:
            raise KeyError("no such row")
        case 71:
            next(iter(()))  # raises StopIteration
        case 90:
            os.kill(os.getpid(), signal.SIGKILL)
    return negative(item)


def test_random_numbers_do_not_depend_on_groups() -> None:
    results = []
    for prefetch_factor in (1, None):
        torch.manual_seed(5)
        node = Mapper(Counting(SIZE), drawn, 2, prefetch_factor=prefetch_factor)
        results.append(list(node))
        assert (MAX_WINDOW in windows(node)) == (prefetch_factor is None)
        node.shutdown()
    assert results[0] == results[1]


def test_the_last_items_are_mapped_at_once_although_one_worker_could_hold_them() -> None:
    """By four workers: an item that is stolen as it begins occupies two."""
    context = multiprocessing.get_context("fork")
    begun = [context.Event() for _ in range(2)]

    def meet(item: tuple[int, int]) -> int:
        if item[1] >= SIZE:
            begun[item[1] - SIZE].set()
            for event in begun:
                assert event.wait(60)
        return item[1]

    node = Mapper(Counting(SIZE + 2), meet, 4, multiprocessing_context=context)
    assert list(node) == list(range(SIZE + 2))
    assert MAX_WINDOW in windows(node)
    node.shutdown()


_TIMES = st.floats(0, 10)


@given(st.integers(1, 64), st.lists(st.tuples(_TIMES, st.integers(1, 64), _TIMES, st.integers(0, 1 << 30)), min_size=1))
def test_few_items_that_are_slow_or_large_are_in_flight(
    workers: int, items: list[tuple[float, int, float, int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_shard, "WINDOW_S", WINDOW_S)
        pace = ItemPace(workers, None)
        assert pace.window == WINDOW
        for map_s, count, read_s, nbytes in items:
            pace.read(read_s, nbytes)
            pace.mapped(map_s * count, count)
        assert WINDOW <= pace.window <= MAX_WINDOW
        fewest_s = max(min(one[0] for one in items), workers * min(one[2] for one in items))
        assert pace.window == WINDOW or pace.window * fewest_s <= WINDOW_S * 1.001
        ahead = pace.ahead(0)
        assert ahead is not None
        assert ahead <= 2 * pace.window * workers
        assert ahead * max(one[3] for one in items) <= GROWTH_BYTES


def test_a_prefetch_factor_limits_items_in_flight() -> None:
    pace = ItemPace(2, 2 * 40)
    pace.read(0.0, 1)
    pace.mapped(0.0, 1)
    assert (pace.window, pace.ahead(1)) == (20, None)
