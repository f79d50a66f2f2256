"""Counts of the jobs that need each key equal those of a plain count, while ended epochs are counted back in pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow._core import need_counts
from torch_dpflow._core.need_counts import NEEDED, READ, NeedCounts

SIZE = 30


def test_an_epoch_that_has_ended_is_counted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(need_counts, "_PIECE", 7)
    counts, everything, states = NeedCounts(SIZE), np.arange(SIZE), np.zeros(SIZE, np.uint8)
    counts.begin(states, np.array([3]), whole=True)
    counts.on_read(np.array([1, 20, 29]))
    counts.begin(np.zeros(SIZE, np.uint8), np.array([], np.int64), whole=True)  # of another job
    states[[3, 1, 20, 29]] = READ
    counts.end(states, whole=True)
    pieces = []
    for _ in range(6):
        assert counts.of(everything).tolist() == [1] * SIZE
        pieces.append(int(np.count_nonzero(counts.extra == 0)))
        counts.count_ended()
    assert pieces == [28, 28, 29, 29, 30, 30]


Sets = st.one_of(st.none(), st.sets(st.integers(0, SIZE - 1)))


@given(st.lists(st.tuples(Sets, st.sets(st.integers(0, SIZE - 1)), st.booleans()), max_size=14), st.integers(1, 40))
def test_counts_are_those_of_the_jobs_that_have_not_ended(
    epochs: list[tuple[set[int] | None, set[int], bool]], piece: int
) -> None:
    """epochs: the keys of a job, None for all; which of them it reads; and whether it ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(need_counts, "_PIECE", piece)
        counts, expected, size = NeedCounts(SIZE), np.zeros(SIZE, np.int64), SIZE
        for members, read, ends in epochs:
            states = np.full(size, NEEDED if members is None else READ, np.uint8)
            states[[*(members or ())]] = NEEDED
            counts.begin(states, np.array([], np.int64), whole=members is None)
            needed = states != READ
            taken = np.array([key for key in sorted(read) if needed[key]], np.int64)
            counts.on_read(taken)
            states[taken] = READ
            if ends:
                counts.end(states, whole=members is None)
            else:
                expected += states != READ
            assert counts.of(np.arange(size)).tolist() == expected.tolist()
            assert [counts.of_one(key) for key in range(size)] == expected.tolist()
        counts.grow(size + 3)
        whole = sum(members is None and not ends for members, _, ends in epochs)
        assert counts.of(np.arange(size + 3)).tolist() == [*expected.tolist(), *[whole] * 3]
