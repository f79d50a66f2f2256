"""Where records lie in a set, and what names it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.dataservice.planning.sets import ALIGNMENT, ArraySet, FileSet, RecordSet, identity
from torch_dpflow.errors import OptionError, OptionTypeError

NAME = identity("files", {"dataset": "a"})


def check_layout(records: RecordSet) -> None:
    seen: dict[int, int] = {}
    for index in range(records.records):
        slot = records.locate(index)
        assert index in records.records_of(slot.stripe)
        assert slot.offset >= seen.get(slot.stripe, 0)
        seen[slot.stripe] = slot.offset + slot.length
        assert seen[slot.stripe] <= records.stripe_bytes(slot.stripe)
        assert records.locate(index - records.records) == slot
    assert [one for stripe in range(records.stripes) for one in records.records_of(stripe)] == [
        *range(records.records)
    ]
    for wrong in (records.records, -records.records - 1):
        with pytest.raises(IndexError, match=f"record {wrong} of a set of {records.records}"):
            records.locate(wrong)


@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=50), per_stripe=st.integers(1, 20))
def test_files_lie_one_behind_the_other_at_cache_lines(lengths: list[int], per_stripe: int) -> None:
    files = FileSet(NAME, lengths, per_stripe)
    check_layout(files)
    assert all(files.locate(index).offset % ALIGNMENT == 0 for index in range(len(lengths)))
    assert [files.locate(index).length for index in range(len(lengths))] == lengths
    padded = sum(-(-length // ALIGNMENT) * ALIGNMENT for length in lengths)
    assert sum(files.stripe_bytes(stripe) for stripe in range(files.stripes)) == padded


@given(
    records=st.integers(1, 60),
    shape=st.lists(st.integers(1, 4), max_size=3),
    stripe_bytes=st.integers(256, 2000),
)
def test_rows_lie_at_their_number_times_their_bytes(
    records: int, shape: list[int], stripe_bytes: int
) -> None:
    rows = ArraySet(NAME, records, "float32", tuple(shape), stripe_bytes)
    check_layout(rows)
    assert all(rows.locate(index).length == rows.record_bytes for index in range(records))
    assert sum(rows.stripe_bytes(stripe) for stripe in range(rows.stripes)) == records * rows.record_bytes


def test_a_name_is_of_the_facts_alone() -> None:
    assert identity("files", {"a": 1, "b": 2}) == identity("files", {"b": 2, "a": 1})
    names = [
        identity("files", {"a": 1}),
        identity("files", {"a": 2}),
        identity("array", {"a": 1}),
        identity("files", {"a": "1"}),
    ]
    assert len({*names}) == 4


@pytest.mark.parametrize("lengths", [[], [-1], [1.5], [[1]]])
def test_lengths_that_are_none(lengths: object) -> None:
    with pytest.raises(OptionError):
        FileSet(NAME, lengths)  # type: ignore[arg-type]


def test_arrays_that_are_none() -> None:
    with pytest.raises(OptionTypeError, match="Python objects"):
        ArraySet(NAME, 1, "O", ())
    with pytest.raises(OptionError, match="no bytes"):
        ArraySet(NAME, 1, "float32", (0,))
    with pytest.raises(OptionError, match="records"):
        ArraySet(NAME, 0, "float32", ())
