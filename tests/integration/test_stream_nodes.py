"""The loader and the mapper as nodes of torchdata: torchdata's contract, at every position, below its own nodes."""

from __future__ import annotations

import importlib
import json
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loader_cases import Augmented, Indices, assert_same
from torch_dpflow import DPFlowDataLoader, LoaderOptions
from torch_dpflow.errors import MissingExtraError, OptionError, OptionTypeError, StateError, WorkerError

torchdata = pytest.importorskip("torchdata.nodes", reason="torchdata is not installed")

from tests.node_cases import (  # noqa: E402
    Counting,
    Unsized,
    check_contract,
    drawn,
    negative,
    unhurried,
)
from torch_dpflow.nodes import DPFlowNode, Mapper, StreamReader  # noqa: E402

SIZE = 9
SOURCES = {"counting": Counting, "unsized": Unsized}


@contextmanager
def ended(*nodes: Any) -> Iterator[Any]:
    yield nodes[0]
    for node in nodes:
        node.shutdown()


def mapper(workers: int, fn: Callable[[Any], Any] = negative, source: Any = Counting, **arguments: Any) -> Any:
    return Mapper(source(SIZE), fn, workers, **arguments)


def loader_node(workers: int, dataset: Any = None, **arguments: Any) -> Any:
    arguments = {"batch_size": 2, "shuffle": True, "num_workers": workers, "collate_fn": list} | arguments
    generator = torch.Generator().manual_seed(1)
    return DPFlowNode(DPFlowDataLoader(dataset or Indices(2 * SIZE), generator=generator, **arguments))


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_the_contract_is_that_of_torchdatas_own_mapper(source: Any) -> None:
    """With the sources of these tests, which are nodes like any other."""
    check_contract(lambda: torchdata.Mapper(source(SIZE), negative), SIZE)


@pytest.mark.parametrize("frequency", [1, 4, 100])
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_mapper_keeps_the_contract_in_this_process(source: Any, frequency: int) -> None:
    check_contract(lambda: mapper(0, source=source, snapshot_frequency=frequency), SIZE)


@pytest.mark.parametrize(("source", "frequency"), [(Counting, 1), (Unsized, 4)])
def test_a_mapper_keeps_the_contract_on_workers(source: Any, frequency: int) -> None:
    with ended(mapper(2, unhurried, source, snapshot_frequency=frequency)) as node:
        # Restored without workers: a state does not depend on them, and these tests start a hundred fewer.
        check_contract(lambda: node, SIZE, restored=lambda: mapper(0, source=source))


def test_a_mapper_on_workers_restores_any_state() -> None:
    node = mapper(0, source=Unsized)
    states = [node.state_dict()]
    items = []
    for item in node:
        items.append(item)
        states.append(node.state_dict())
    states.append(node.state_dict())
    with ended(mapper(2, source=Unsized)) as again:
        for position in (0, 4, SIZE, SIZE + 1):
            again.reset(states[position])
            assert list(again) == items[position:]
        again.reset()
        assert list(again) == [(1, -number) for number in range(SIZE)]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_keeps_the_contract(workers: int) -> None:
    with ended(loader_node(workers)) as node:
        check_contract(lambda: node, SIZE, restored=lambda: loader_node(0))


def test_the_loader_on_kept_workers_goes_on_from_a_state() -> None:
    with ended(loader_node(2, persistent_workers=True)) as node:
        first = [next(node) for _ in range(3)]
        state = node.state_dict()
        rest = list(node)
        node.reset()
        following = list(node)
        node.reset(state)
        assert list(node) == rest
        node.reset()
        assert list(node) == following
    assert len(first) + len(rest) == len(following) == SIZE


def test_random_numbers_do_not_depend_on_workers_or_on_a_resume() -> None:
    torch.manual_seed(5)
    with ended(mapper(1, drawn)) as one:
        expected = list(one)
    torch.manual_seed(5)
    with ended(mapper(3, drawn)) as node, ended(mapper(2, drawn)) as again:
        got = [next(node) for _ in range(4)]
        again.reset(node.state_dict())
        assert [*got, *again] == expected


def test_results_out_of_order_are_neither_lost_nor_repeated() -> None:
    with ended(mapper(3, unhurried, in_order=False)) as node:
        delivered: list[Any] = []
        for _ in range(SIZE + 1):
            rest = mapper(0)
            rest.reset(node.state_dict())
            assert sorted([*delivered, *rest]) == sorted((0, -number) for number in range(SIZE))
            delivered += [next(node)] if len(delivered) < SIZE else []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [mapper, loader_node])
def test_states_are_saved_as_json_and_pickle(make: Any, workers: int) -> None:
    with ended(make(workers)) as node:
        next(node)
        state = node.state_dict()
        rest = list(node)
    for saved in (json.loads(json.dumps(state)), pickle.loads(pickle.dumps(state))):
        again = make(0)
        again.reset(saved)
        assert list(again) == rest


@pytest.mark.parametrize("make", [mapper, loader_node])
def test_below_torchdatas_nodes(make: Any) -> None:
    """A `Prefetcher` resets a node in one thread and reads it in others."""
    with ended(make(2)) as node:
        pipeline = torchdata.Loader(torchdata.Prefetcher(torchdata.Batcher(node, 2, drop_last=False), 2))
        expected = list(pipeline)
        following = list(pipeline)
        assert [len(batch) for batch in expected] == [2, 2, 2, 2, 1]
        assert len(following) == 5
        with ended(make(0)) as other:
            again = torchdata.Loader(torchdata.Prefetcher(torchdata.Batcher(other, 2, drop_last=False), 2))
            first = iter(again)
            got = [next(first), next(first)]
            again.load_state_dict(again.state_dict())
            assert [*got, *again] == expected
            assert list(again) == following
        del pipeline, again, first


def test_mappers_in_a_row_and_a_mapper_of_the_loaders_samples() -> None:
    source = loader_node(0, batch_size=None, shuffle=False, collate_fn=None)
    first = Mapper(torchdata.Mapper(source, lambda number: (0, number)), negative, 2)
    with ended(Mapper(first, negative, 2), first) as node:
        expected = [(0, number) for number in range(2 * SIZE)]
        got = [next(node) for _ in range(5)]
        state = node.state_dict()
        assert [*got, *node] == expected
        node.reset(state)
        assert list(node) == expected[5:]


def test_tensors_arrays_and_objects_pass_unchanged() -> None:
    items = [
        torch.arange(40_000, dtype=torch.int16).reshape(200, 200),
        {"a": torch.zeros(3), "b": [b"x" * 100_000, None, 1.5]},
        torch.rand(3, 5).numpy(),
        "text",
    ]
    with ended(Mapper(torchdata.IterableWrapper(items), type_and_value, 2)) as node:
        for item, (kind, value) in zip(items, node, strict=True):
            assert kind == type(item).__name__
            assert_same(value, item)


def type_and_value(item: Any) -> Any:
    return type(item).__name__, item


def test_workers_stay_from_epoch_to_epoch() -> None:
    with ended(mapper(2, process)) as node:
        epochs = [set(node)]
        for _ in range(2):
            node.reset()
            epochs.append(set(node))
        assert node.loader.stats().samples == 3 * SIZE
        assert str(node.loader.explain())
    assert len(set.union(*epochs)) <= 2


def process(_item: Any) -> int:
    import os

    return os.getpid()


def test_a_node_that_was_shut_down_says_so_until_it_is_reset() -> None:
    node = mapper(2)
    next(node)
    state = node.state_dict()
    node.shutdown()
    with pytest.raises(WorkerError, match="reset"):
        next(node)
    assert node.state_dict() == state
    node.reset(state)
    assert len(list(node)) == SIZE - 1
    node.shutdown()


def test_states_of_the_source_are_dropped_once_no_state_needs_them() -> None:
    node = Mapper(Counting(300), negative, 0)
    assert len(list(node)) == 300
    assert len(node._items._snapshots) < 4


@settings(max_examples=60)
@given(st.data())
def test_a_reader_restores_any_state_that_is_still_needed(data: st.DataObject) -> None:
    size, frequency = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 5))
    failing = {number: ValueError(str(number)) for number in data.draw(st.sets(st.integers(0, 11)))}

    def reader() -> StreamReader:
        return StreamReader(Unsized(size, failing), frequency, encodes=False)

    def rest(items: Iterator[Any]) -> list[Any]:
        return [(item.number, item.open()) for item in items]

    first = reader()
    expected = rest(iter(first))
    assert [number for number, _ in expected] == [*range(size)]
    assert first.failures == {number: error for number, error in failing.items() if number < size}
    following = rest(iter(first))
    first = reader()
    items = iter(first)
    forgotten = 0
    for drawn_so_far in range(size + 2):
        forgotten = data.draw(st.integers(forgotten, min(drawn_so_far, size)))
        first.forget(forgotten)
        consumed = data.draw(st.integers(forgotten, min(drawn_so_far, size)))
        again = reader()
        again.load_state_dict(first.state_dict(consumed))
        is_end = consumed == size and drawn_so_far > size
        assert rest(iter(again)) == (following if is_end else expected[consumed:])
        next(items, None)


def test_arguments_that_are_wrong_are_refused_with_what_is_allowed() -> None:
    source = Counting(SIZE)
    for arguments, error, told in (
        (([1, 2], negative, 1), OptionTypeError, "IterableWrapper"),
        ((source, "negative", 1), OptionTypeError, "a function of one item"),
        ((source, negative, -1), OptionError, "num_workers"),
        ((source, negative, 1.5), OptionTypeError, "num_workers"),
    ):
        with pytest.raises(error, match=told):
            Mapper(*arguments)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="snapshot_frequency"):
        Mapper(source, negative, 1, snapshot_frequency=0)
    with pytest.raises(OptionError, match="nowhere"):
        Mapper(source, negative, 1, platform="nowhere")
    with pytest.raises(OptionTypeError, match="DPFlowDataLoader"):
        DPFlowNode(torch.utils.data.DataLoader(Indices(3)))  # type: ignore[arg-type]


@pytest.mark.parametrize("state", [{}, [], {"loader": {}, "ended": False}, {"it_state": 1}])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(StateError):
        mapper(0).reset(state)


def test_a_source_that_ends_elsewhere_than_it_did_is_refused() -> None:
    def reader(size: int) -> StreamReader:
        return StreamReader(Counting(size), 100, encodes=False)

    first = reader(SIZE)
    assert len(list(first)) == SIZE
    state = first.state_dict()
    reader(SIZE).load_state_dict(state)
    with pytest.raises(StateError, match="yields more"):
        reader(SIZE + 1).load_state_dict(state)
    with pytest.raises(StateError, match=f"ended after {SIZE - 1}"):
        reader(SIZE - 1).load_state_dict(state)


def test_a_source_without_a_state_is_mapped_and_cannot_be_saved() -> None:
    class Stateless(Counting):
        def get_state(self) -> dict[str, Any]:
            raise NotImplementedError("no state")

    node = Mapper(Stateless(SIZE), negative, 0)
    assert next(node) == (0, 0)
    with pytest.raises(StateError, match="Stateless"):
        node.state_dict()
    assert len(list(node)) == SIZE - 1


def test_options_reach_the_loader() -> None:
    node = mapper(2, options=LoaderOptions(poison_limit=1), prefetch_factor=3)
    assert node.loader.options == LoaderOptions(poison_limit=1)
    assert node.loader.prefetch_factor == 3
    assert DPFlowNode(DPFlowDataLoader(Augmented(3))).loader.num_workers == 0


def test_without_torchdata_the_import_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdata.nodes", None)
    monkeypatch.delitem(sys.modules, "torch_dpflow.nodes")
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'torch_dpflow[stateful]'")):
        importlib.import_module("torch_dpflow.nodes")
