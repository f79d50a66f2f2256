"""How many batches a job fetches by one call."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.cluster.client.shard_link import (
    FETCHED_TOGETHER,
    MAX_TOGETHER,
    TOGETHER_BYTES,
    TOGETHER_S,
    batches_ahead,
    batches_together,
)
from torch_dpflow.cluster.messages.shard import MAX_WANTS


def test_no_more_batches_are_requested_ahead_than_shards_take() -> None:
    assert [batches_ahead(size, at_most=8) for size in (0, 1, MAX_WANTS // 8, MAX_WANTS // 4)] == [8, 8, 8, 4]
    assert [batches_ahead(size, at_most=8) for size in (MAX_WANTS // 2 + 1, MAX_WANTS, 2 * MAX_WANTS)] == [1, 1, 1]


def test_small_batches_that_come_quickly_are_fetched_together() -> None:
    assert batches_together(4, 1e6, 0.0, at_most=4) == 4
    assert batches_together(8, 1e6, 0.0, at_most=100) == FETCHED_TOGETHER // 8
    assert batches_together(FETCHED_TOGETHER, 1e6, 0.0, at_most=4) == 1


def test_more_of_small_samples_are_fetched_together() -> None:
    assert batches_together(8, 100, 0.0, at_most=100) == MAX_TOGETHER // 8
    assert batches_together(8, TOGETHER_BYTES / 64, 0.0, at_most=100) == 64 // 8
    assert batches_together(MAX_TOGETHER, 100, 0.0, at_most=4) == 1


def test_a_batch_does_not_wait_for_slow_ones() -> None:
    assert batches_together(4, 1e6, 2.0, at_most=4) == 1
    assert batches_together(4, 1e6, TOGETHER_S / 2, at_most=4) == 2


@given(samples=st.floats(0.01, 1e4), nbytes=st.floats(0, 1e9), wait_s=st.floats(0, 1e3), at_most=st.integers(1, 64))
def test_bounds(samples: float, nbytes: float, wait_s: float, at_most: int) -> None:
    together = batches_together(samples, nbytes, wait_s, at_most=at_most)
    assert 1 <= together <= at_most
    assert together == 1 or together * wait_s <= TOGETHER_S * (1 + 1e-9)
