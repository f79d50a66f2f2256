"""The counters of a loader."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from typing import Any

import pytest

from tests.loader_cases import Failing, Indices, Rows, Stream
from torch_dpflow.errors import OptionError, OptionTypeError


@pytest.mark.parametrize("num_workers", [0, 2])
def test_counts_over_two_epochs(OurLoader: Any, num_workers: int) -> None:
    loader = OurLoader(Rows(10), batch_size=4, num_workers=num_workers)
    fresh = loader.stats()
    assert (fresh.epochs, fresh.batches, fresh.samples, fresh.stall_s) == (0, 0, 0, 0.0)
    assert fresh.time_to_first_batch_s is None
    for epoch in (1, 2):
        list(loader)
        stats = loader.stats()
        assert (stats.epochs, stats.batches, stats.samples) == (epoch, 3 * epoch, 10 * epoch)
        assert stats.restarts == 0
        assert stats.stall_s > 0
        assert 0 < stats.stall_share <= 1
        assert stats.time_to_first_batch_s is not None
        assert stats.time_to_first_batch_s > 0
        if num_workers:
            assert stats.bytes >= 10 * epoch * 3 * 4


def test_counts_in_mid_epoch(OurLoader: Any) -> None:
    loader = OurLoader(Indices(100), batch_size=5, num_workers=2)
    list(itertools.islice(loader, 3))
    assert loader.stats().batches == 3
    assert loader.stats().samples == 15


@pytest.mark.parametrize("batch_size", [None, 4])
def test_counts_of_a_stream(OurLoader: Any, batch_size: int | None) -> None:
    loader = OurLoader(Stream(10), batch_size=batch_size, num_workers=1)
    assert len(list(loader)) == loader.stats().batches


def test_an_error_is_no_batch(OurLoader: Any) -> None:
    loader = OurLoader(Failing(6, {2: ValueError()}), batch_size=None, num_workers=1)
    with pytest.raises(ValueError):
        list(loader)
    assert loader.stats().batches == 2


def test_a_snapshot_does_not_change(OurLoader: Any) -> None:
    loader = OurLoader(Indices(4), num_workers=1)
    before = loader.stats()
    list(loader)
    assert before.batches == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.batches = 1
    assert pickle.loads(pickle.dumps(loader.stats())) == loader.stats()


def test_counts_since_an_earlier_snapshot(OurLoader: Any) -> None:
    loader = OurLoader(Indices(100), batch_size=5, num_workers=2)
    before = loader.stats()
    for _ in range(2):
        list(loader)
        now = loader.stats()
        passed = now.since(before)
        assert (passed.epochs, passed.batches, passed.samples) == (1, 20, 100)
        assert passed.stall_s == now.stall_s - before.stall_s
        assert passed.stall_share == min(1.0, passed.stall_s / passed.iterating_s)
        assert passed.time_to_first_batch_s == now.time_to_first_batch_s
        before = now
    nothing = now.since(now)
    assert (nothing.batches, nothing.stall_s, nothing.stall_share) == (0, 0.0, 0.0)


def test_a_snapshot_of_another_loader_is_refused(OurLoader: Any) -> None:
    loader, other = (OurLoader(Indices(10), batch_size=5) for _ in range(2))
    list(other)
    with pytest.raises(OptionError, match=r"before\.epochs=1 is larger than 0 of this snapshot"):
        loader.stats().since(other.stats())
    with pytest.raises(OptionTypeError, match="give what an earlier call of stats"):
        loader.stats().since(other)
