"""Digests of containers of plain values as a whole: equal exactly if the walk over each value finds them equal."""

from __future__ import annotations

import copy
import io
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dpflow.remote.shipping import canonical
from torch_dpflow.remote.shipping.content_pack import ScriptPickler
from torch_dpflow.remote.shipping.values import Bulk

NAN = float("nan")
HASHABLE = (
    st.sampled_from([None, True, False, 0, 1, 2, 1 << 70, -(1 << 70), 0.0, -0.0, 1.0, NAN, 1j, -1j, ...])
    | st.text("a\ud800\x8f]", max_size=2)
    | st.binary(max_size=2)
)
KEYS = st.recursive(HASHABLE, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2), max_leaves=3)
VALUES = st.recursive(
    HASHABLE | st.builds(bytearray, st.binary(max_size=2)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.sets(KEYS, max_size=3)
    ),
    max_leaves=8,
)
CONTAINERS = (
    st.lists(VALUES, max_size=3)
    | st.lists(VALUES, min_size=17, max_size=18)
    | st.lists(st.sampled_from([1, 2, 1 << 31, 1.0, True, np.int64(1)]), min_size=17, max_size=18)
    | st.dictionaries(KEYS, VALUES, max_size=3)
    | st.sets(KEYS, max_size=18)
)


def digest(value: Any) -> bytes:
    return canonical.Walk(ScriptPickler(io.BytesIO()), bulk=Bulk()).digest_apart(value).digest


def digest_of_each(value: Any) -> bytes:
    """Return the digest that a walk over each value finds."""
    with (
        mock.patch.object(Bulk, "of", return_value=None),
        mock.patch.object(canonical, "set_bytes", return_value=None),
        mock.patch.object(canonical, "columns_of", return_value=None),
    ):
        return digest(value)


@given(CONTAINERS, CONTAINERS)
@settings(max_examples=200, deadline=None)
def test_containers_are_equal_if_each_of_their_values_is(one: Any, other: Any) -> None:
    assert (digest(one) == digest(other)) is (digest_of_each(one) == digest_of_each(other))
    assert digest(one) == digest(copy.deepcopy(one))


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (1, 1 << 40),
        (1 << 31, 1 << 40),
        (1.0, 1 + 0j),
        (b"a", bytearray(b"a")),
        (b"a", "a"),
        ("\ud800", "\udc00"),
        ((1,), [1]),
        (((1,),), ((1.0,),)),
        ({1: 2}, {1: 2.0}),
        ({1: 2}, {1.0: 2}),
        ({(1,): 2}, {(True,): 2}),
        ({1: 1, 2: 2}, {2: 2, 1: 1}),
        ({1}, frozenset({1})),
        ({(1, "a")}, {(1, b"a")}),
        ({1, "a"}, {1.0, "a"}),
        ([[[[[1]]]]], [[[[[True]]]]]),
        ([{"a": [bytearray(b"a")]}], [{"a": [b"a"]}]),
    ],
)
def test_values_that_python_takes_for_equal_or_alike_differ(one: Any, other: Any, count: int) -> None:
    for made in (list, tuple, lambda values: dict(enumerate(values))):
        assert digest(made(copy.deepcopy(one) for _ in range(count))) != digest(
            made(copy.deepcopy(other) for _ in range(count))
        )


def test_one_mutable_value_twice_differs_from_two_and_another_reference_does_not_count() -> None:
    values: list[Any] = [{"a": [number]} for number in range(40)]
    before, others = digest(values), [*values, *(one["a"] for one in values)]
    assert digest(copy.deepcopy(values)) == before
    assert digest([*values[:39], values[0]]) != digest([*values[:39], copy.deepcopy(values[0])])
    same = [{"a": values[0]["a"]}, *values[1:], {"a": values[0]["a"]}]
    assert digest(same) != digest([{"a": [0]}, *values[1:], {"a": [0]}])
    assert digest([values[1]["a"], *values]) != digest([[1], *values])
    assert len(others) == 80


LAST: list[Any] = [True, 1.0, 1 << 31, b"", "", (), [], {}, None, np.int64(1), np.int32(1), np.zeros(1, np.uint8)]


@pytest.mark.parametrize("last", LAST, ids=repr)
@pytest.mark.parametrize("first", [1, 1.5])
def test_one_other_value_in_a_list_of_numbers_counts(first: Any, last: Any) -> None:
    for place in (0, 20, 39):
        values, others = [first] * 40, [first] * 40
        values[place] = last
        others[place] = copy.copy(last)
        assert digest(values) == digest(others) == digest([*values])
        assert digest(values) != digest([first] * 40)
        alike = [other for other in LAST if type(other) is not type(last) or other is last]
        assert len({digest([*values[:place], other, *values[place + 1 :]]) for other in alike}) == len(alike)


def test_sets_of_integers_differ_by_type_and_value() -> None:
    sets: list[Any] = [{1, 2}, {1, 3}, {True, 2}, {1.0, 2}, {1, 2, 1 << 70}, {1, 2, 1 << 71}, {1, 2, -(1 << 62)}, set()]
    assert len(set(map(digest, sets))) == len(sets)
    assert digest({*range(1000)}) == digest({*range(999, -1, -1)})


def test_small_arrays_that_are_alike_are_compared_by_value_shape_and_type() -> None:
    values = [np.arange(number, number + 6, dtype="i4").reshape(2, 3) for number in range(40)]
    others: list[Any] = [
        [one.astype("i2") for one in values],
        [one.astype(">i4") for one in values],
        [one.reshape(3, 2) for one in values],
        [one.view("f4") for one in values],
        [one.astype(np.dtype("i4", metadata={"a": 1})) for one in values],
        [*values[:39], values[39].astype(np.dtype("i4", metadata={"a": 1}))],
        [*values[:39], values[39] + 1],
        [*values[:39], values[39].reshape(-1)],
        [*values[:39], values[38].copy()],
        [*values[:39], values[38]],
        values[:39],
        values[::-1],
    ]
    assert len({digest(values), *map(digest, others)}) == len(others) + 1
    assert (
        digest(values) == digest([np.asfortranarray(one) for one in values]) == digest([one.copy() for one in values])
    )


@pytest.mark.parametrize("long", ["a" * 200_000, b"a" * 200_000])
def test_a_set_with_a_long_text_is_compared_by_value(long: Any) -> None:
    assert digest({long, 1}) == digest({1, long[:100_000] + long[100_000:]})
    assert digest({long, 1}) != digest({long, 2})
    assert digest({long, 1}) != digest({long[1:], 1})
