"""The counters of a loader."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import time
from typing import Any

import pytest

from tests.loader_cases import Failing, Indices, Rows, Stream
from torch_dpflow import LoaderOptions
from torch_dpflow._core.stage_clock import stage
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


class Staged(Rows):
    """Says which part of its time is reading; every tenth sample takes longer."""

    def __getitem__(self, index: int) -> Any:
        with stage("read"):
            time.sleep(0.02 if index % 10 == 0 else 0.001)
        return super().__getitem__(index)


class InBatches(Staged):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.usefixtures("preloaded_workers")
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Staged(40), {"num_workers": 0}),
        (Staged(40), {"num_workers": 2}),
        (Staged(40), {"num_workers": 2, "platform": "processes"}),
        (Staged(40), {"num_workers": 2, "persistent_workers": True}),
        (Staged(40), {"num_workers": 1, "options": LoaderOptions(read_threads=4)}),
        (InBatches(40), {"num_workers": 2}),
        (InBatches(40), {"num_workers": 0}),
    ],
)
def test_the_stages_of_loading_are_measured_wherever_workers_run(OurLoader: Any, dataset: Any, options: Any) -> None:
    loader = OurLoader(dataset, batch_size=8, **options)
    list(loader)
    first = loader.stats()
    list(loader)
    times = loader.stats().since(first).times
    assert times.samples in range(40, 80, 8)  # an idle worker may load a batch a second time
    assert times.read_s >= 4 * 0.02 + 36 * 0.001
    assert min(times.dataset_s, times.collate_s) > 0 == times.decode_s
    assert (times.hand_over_s > 0) is (options["num_workers"] > 0)
    assert times.p50_s >= 0.00095
    if type(dataset) is Staged:
        assert times.p99_s >= 0.019  # of the fastest of them, by the width of a bucket
    assert loader.stats().times.samples in range(80, 160, 8)
    assert f"A sample took p50 {loader.stats().times.shown()[0][4:8]}" in str(loader.explain())
    assert "of the workers' time: read " in str(loader.explain())
    assert "stages       read " in str(loader.stats())


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_what_a_dataset_does_not_say_is_its_own_time(OurLoader: Any, num_workers: int, drop_last: bool) -> None:
    for dataset in (Rows(10), Stream(10)):
        loader = OurLoader(dataset, batch_size=4, num_workers=num_workers, drop_last=drop_last)
        delivered = sum(len(batch[0]) if isinstance(batch, list) else len(batch) for batch in loader)
        times = loader.stats().times
        assert delivered <= times.samples <= 20  # an idle worker may load a batch a second time
        assert (times.read_s, times.decode_s) == (0.0, 0.0)
        assert times.dataset_s > 0
    single = OurLoader(Rows(10), batch_size=None, num_workers=num_workers)
    list(single)
    assert single.stats().times.samples in range(10, 21)


def test_a_loader_that_has_read_nothing_has_no_times(OurLoader: Any) -> None:
    stats = OurLoader(Rows(10)).stats()
    assert (stats.times.samples, stats.times.p99_s) == (0, 0.0)
    assert "a sample took" not in str(stats)
