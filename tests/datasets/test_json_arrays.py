"""Streaming arrays out of JSON: equal to parsing the whole, in bounded memory."""

from __future__ import annotations

import io
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.datasets.importers import coco
from torch_dpflow.datasets.importers.coco import read_arrays


class Dribble(io.RawIOBase):
    """A file that gives a few bytes at a time, however many it is asked for. Counts what it gave."""

    def __init__(self, data: bytes, step: int) -> None:
        self._file = io.BytesIO(data)
        self._step = step
        self.given = 0

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(self._step)
        self.given += len(data)
        return data


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
documents = st.dictionaries(st.sampled_from(["a", "b", "c", "é"]), values | st.lists(values, max_size=4))


@given(documents, st.integers(1, 9), st.booleans(), st.sampled_from([None, 1]))
def test_as_if_the_whole_was_parsed(document: dict[str, Any], step: int, ascii: bool, indent: int | None) -> None:
    data = json.dumps(document, ensure_ascii=ascii, indent=indent).encode()
    found = list(read_arrays(Dribble(data, step), {"a", "é"}))
    expected = [
        (name, element)
        for name, value in document.items()
        if name in {"a", "é"} and isinstance(value, list)
        for element in value
    ]
    assert found == expected


@given(st.dictionaries(st.sampled_from(["a", "b"]), st.lists(values, max_size=3), min_size=1), st.data())
def test_every_cut_is_told(document: dict[str, Any], data: st.DataObject) -> None:
    encoded = json.dumps(document).encode()
    cut = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
    with pytest.raises(ValueError, match=r"ends in its middle|expected|Expecting|Invalid"):
        list(read_arrays(Dribble(cut, 3), {"a"}))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"[1]", "expected '{' at character 0"),
        (b'{"a": [1 2]}', "expected ']' at character 9"),
        (b'{"a": [1,]}', "Expecting value at character 9"),
        (b'{"a": [1]} x', "expected its end at character 11"),
        (b'{"a": [tru]}', "Expecting value at character 7"),
        (b'{"a" [1]}', "expected ':' at character 5"),
        (b"", "ends in its middle, after 0 characters"),
        (b'{"a": ["x', "ends in its middle, after 9 characters"),
        (b'{"a": [\xff]}', "utf-8"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(data: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        list(read_arrays(Dribble(data, 4), {"a"}))


def test_elements_come_before_the_file_was_read() -> None:
    data = b'{"a": [' + b",".join(b'{"n": %d}' % n for n in range(100_000)) + b"]}"
    file = Dribble(data, 1000)
    first = list(itertools.islice(read_arrays(file, {"a"}), 100))
    assert [element["n"] for _, element in first] == list(range(100))
    assert file.given <= 2000


def test_malformed_elements_do_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coco, "_MAX_ELEMENT", 5000)
    file = Dribble(b'{"a": ["' + b"x" * 10**6, 1000)
    with pytest.raises(ValueError, match="Unterminated string"):
        list(read_arrays(file, {"a"}))
    assert file.given < 10_000


def test_a_byte_order_mark_is_no_text() -> None:
    data = b"\xef\xbb\xbf" + json.dumps({"a": [1, "\ufeff"]}).encode()
    for step in (1, 2, 100):
        assert list(read_arrays(Dribble(data, step), {"a"})) == [("a", 1), ("a", "\ufeff")]
