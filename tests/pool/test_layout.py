"""Where records lie in a set, and what names it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.pool.planning.layout import ALIGNMENT, ArrayLayout, SampleLayout, identity

NAME = identity("files", {"dataset": "a"})


@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=50), per_stripe=st.integers(1, 20))
def test_files_lie_one_behind_the_other_at_cache_lines(lengths: list[int], per_stripe: int) -> None:
    files = SampleLayout(NAME, lengths, per_stripe)
    dealt = [one for stripe in range(files.stripes) for one in files.records_of(stripe)]
    assert dealt == [*range(len(lengths))]
    for stripe in range(files.stripes):
        end = 0
        for record, offset in zip(files.records_of(stripe), files.offsets(stripe).tolist(), strict=True):
            assert offset % ALIGNMENT == 0
            assert offset >= end
            end = offset + lengths[record]
        assert end <= files.stripe_bytes(stripe)
    padded = sum(-(-length // ALIGNMENT) * ALIGNMENT for length in lengths)
    assert sum(files.stripe_bytes(stripe) for stripe in range(files.stripes)) == padded


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
        SampleLayout(NAME, lengths, 1)  # type: ignore[arg-type]


def test_arrays_that_are_none() -> None:
    with pytest.raises(OptionTypeError, match="Python objects"):
        ArrayLayout(NAME, 1, "O", ())
    with pytest.raises(OptionError, match="no bytes"):
        ArrayLayout(NAME, 1, "float32", (0,))
    with pytest.raises(OptionError, match="records"):
        ArrayLayout(NAME, 0, "float32", ())
