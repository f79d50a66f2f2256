"""The bound on nesting is ours, and exact, whatever the decoder would take."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torch_dpflow._core.checks import MAX_DEPTH, check_json, check_msgpack, is_too_deep, load_json

values = st.recursive(
    st.none() | st.integers(-(2**63), 2**63) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=60,
)


def nested(inner: Any, levels: int, kind: str) -> Any:
    for level in range(levels):
        inner = {"a": inner, "b": 2} if kind == "dicts" or (kind == "both" and level % 2) else [1, inner, "[[{"]
    return inner


def depth(value: Any) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if parts is None else 1 + max(map(depth, parts), default=0)


@pytest.mark.parametrize("kind", ["lists", "dicts", "both"])
def test_the_bound_is_exact(kind: str) -> None:
    for levels in (1, MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 1, 3 * MAX_DEPTH):
        value = nested(0, levels, kind)
        text, packed = json.dumps(value), msgspec.msgpack.encode(value)
        if levels <= MAX_DEPTH:
            check_json(text.encode())
            check_msgpack(packed)
            assert load_json(text) == value
            assert not is_too_deep(value)
            continue
        with pytest.raises(RecursionError, match="nested deeper than 100 levels"):
            check_json(text.encode())
        with pytest.raises(RecursionError, match="nested deeper than 100 levels"):
            check_msgpack(packed)
        with pytest.raises(ValueError, match="nested deeper than 100 levels"):
            load_json(text)


@pytest.mark.parametrize("levels", [5_000, 200_000])
def test_what_no_decoder_takes_is_refused_alike(levels: int) -> None:
    text = "[" * levels + "]" * levels
    for check, data in ((check_json, text.encode()), (check_msgpack, b"\x91" * levels + b"\x00")):
        with pytest.raises(RecursionError, match="nested deeper than 100 levels"):
            check(data)
    with pytest.raises(ValueError, match="nested deeper than 100 levels"):
        load_json(text)


@given(values, st.integers(0, 2 * MAX_DEPTH))
@example([], MAX_DEPTH)
@example({}, MAX_DEPTH)
@example([], MAX_DEPTH - 1)
def test_any_value_is_refused_where_it_is_deeper(value: Any, levels: int) -> None:
    value = nested(value, levels, "both")
    assert is_too_deep(value) == (depth(value) > MAX_DEPTH)
    packed = msgspec.msgpack.encode(value)
    if depth(value) > MAX_DEPTH:
        with pytest.raises(RecursionError):
            check_msgpack(packed)
    else:
        check_msgpack(packed)


@given(st.binary(max_size=400))
def test_what_is_not_understood_is_left_to_its_decoder(data: bytes) -> None:
    check_json(data)
    check_msgpack(data)
