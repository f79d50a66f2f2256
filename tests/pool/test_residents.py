"""Which records stay: as many as fit, a uniform part of any order, and the same for all who ask."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.pool.planning.layout import ALL, SampleLayout, cut_that_fits, resident, resident_layout


@given(
    name=st.binary(min_size=16, max_size=16),
    lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=80),
    share=st.floats(0, 1.2),
)
def test_as_many_stay_as_fit(name: bytes, lengths: list[int], share: float) -> None:
    records = SampleLayout(name, lengths, per_stripe=7)
    total = sum(records.stripe_bytes(stripe) for stripe in range(records.stripes))
    room = int(share * total)
    cut = cut_that_fits(records, room, room)
    part = resident_layout(records, cut)
    assert sum(part.stripe_bytes(stripe) for stripe in range(part.stripes)) <= room
    stays = resident(name, len(lengths), cut)
    assert (cut == ALL) == (room >= total)
    assert part.lengths.tolist() == [length * bool(stay) for length, stay in zip(lengths, stays)]
    less = resident(name, len(lengths), cut_that_fits(records, room // 2, room))
    assert not (less & ~stays).any()
    of_each = cut_that_fits(records, room, total // 9)
    part = resident_layout(records, of_each)
    assert of_each <= cut
    assert max(part.stripe_bytes(stripe) for stripe in range(part.stripes)) <= total // 9


def test_every_batch_has_the_same_share_in_memory() -> None:
    records = SampleLayout(b"a set of 16 byte", np.full(100_000, 64), per_stripe=1000)
    stays = resident(records.identity, records.records, cut_that_fits(records, 64 * 30_000, 1 << 30))
    assert stays.sum() == 30_000
    order = np.random.default_rng(0).permutation(records.records)
    for batches in (stays[order].reshape(-1, 1000), stays.reshape(-1, 1000)):
        assert np.abs(batches.mean(axis=1) - 0.3).max() < 0.08
