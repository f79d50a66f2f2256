"""Stages of loading: the histogram by itself, and what a clock measures of each kind of fetcher."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow._core import stage_clock
from torch_dpflow._core.stage_clock import StageClock, stage, timed
from torch_dpflow._core.stage_times import BUCKETS, StageTimes, bucket_of, total_of

seconds = st.floats(0, 1e5, allow_subnormal=False)


def times_of(samples: list[float]) -> StageTimes:
    clock = StageClock()
    for one in samples:
        clock.add_sample(one, one / 4, one / 2)
    return clock.take() or StageTimes()


@given(st.lists(seconds, min_size=1, max_size=200), st.integers(1, 100))
def test_a_percentile_is_within_five_percent_of_that_of_the_samples(samples: list[float], percent: int) -> None:
    within = [min(max(one, 2.0**-20), 2.0**12) for one in samples]
    exact = sorted(within)[math.ceil(percent / 100 * len(samples)) - 1]
    assert times_of(samples).percentile(percent / 100) == pytest.approx(exact, rel=0.05)


@given(st.lists(st.lists(seconds, max_size=50), max_size=6))
def test_records_of_workers_add_up_to_that_of_all_samples(of_workers: list[list[float]]) -> None:
    total = total_of([times_of(samples) for samples in of_workers])
    together = times_of([one for samples in of_workers for one in samples])
    assert total.counts == together.counts
    assert list(total.stages.values()) == pytest.approx(list(together.stages.values()))


@given(st.lists(seconds, max_size=50), st.lists(seconds, max_size=50))
def test_the_time_between_two_records_is_that_of_what_was_added(first: list[float], second: list[float]) -> None:
    now = before = times_of(first)
    now = before.copy()
    now.add(times_of(second))
    assert now.since(before).counts == times_of(second).counts
    assert before.counts == times_of(first).counts  # a copy shares nothing
    again = before.since(now)  # the workers' shards were started again
    assert again.counts == {} or all(again.counts.values())
    assert all(value >= 0 for value in again.stages.values())


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_buckets_are_in_order_and_bounded(one: float, other: float) -> None:
    assert 0 <= bucket_of(min(one, other)) <= bucket_of(max(one, other)) < BUCKETS
    record = times_of([one, other])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=StageTimes) == record
    bounds = record.cumulative()
    assert bounds[-1] == ("+Inf", 2)
    assert [count for _, count in bounds] == sorted(count for _, count in bounds)


def test_a_record_of_a_peer_is_checked() -> None:
    for counts in ({BUCKETS: 1}, {-1: 1}, {0: -1}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert([0.0, 0.0, 0.0, 0.0, 0.0, counts], StageTimes)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert([-1.0], StageTimes)
    with pytest.raises(ValueError, match="share=2: give a number from 0 to 1"):
        StageTimes().percentile(2)


class Clock:
    """Stands for `time.perf_counter`; each sample of `load` moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def load(self, index: int) -> int:
        with stage("decode"):
            with stage("read"):
                self.now += 0.5
            self.now += 0.25
        self.now += 0.125
        return index


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    moved = Clock()
    monkeypatch.setattr(stage_clock, "perf_counter", moved)
    return moved


def test_a_stage_within_another_counts_once(clock: Clock) -> None:
    value, *times = timed(clock.load, 3)
    assert (value, times) == (3, [0.875, 0.5, 0.25])
    assert timed(str, 1) == ("1", 0.0, 0.0, 0.0)  # nothing is left of the sample before


class Fetcher:
    def __init__(self, clock: Clock, collate: Any) -> None:
        self.clock, self.collate = clock, collate

    def fetch(self, index: Any) -> Any:
        return self.collate([self.clock.load(one) for one in index])


@pytest.mark.parametrize("one_by_one", [True, False])
def test_a_batch_is_divided_among_its_stages(clock: Clock, one_by_one: bool) -> None:
    def collate(batch: list[int]) -> int:
        clock.now += 3.0
        return sum(batch)

    measured = StageClock()
    fetcher = Fetcher(clock, measured.collating(collate))
    assert measured.fetch(fetcher.fetch, [1, 2, 3], one_by_one=one_by_one, samples=3) == 6
    times = measured.take()
    assert times is not None
    assert times.stages == {"read": 1.5, "decode": 0.75, "dataset": 0.375, "collate": 3.0, "hand-over": 0.0}
    assert times.counts == {bucket_of(0.875): 3}
    assert measured.take() is None


def test_a_batch_that_fails_counts_the_samples_before_the_error(clock: Clock) -> None:
    def load(index: int) -> int:
        if index == 2:
            with stage("read"):
                clock.now += 9.0
                raise ValueError
        return Clock.load(clock, index)

    measured = StageClock()
    fetcher = Fetcher(clock, measured.collating(sum))
    clock.load = load  # type: ignore[method-assign]
    with pytest.raises(ValueError):
        measured.fetch(fetcher.fetch, [0, 1, 2, 3], one_by_one=True, samples=4)
    times = measured.take()
    assert times is not None
    assert (times.samples, times.read_s, times.dataset_s) == (2, 1.0, 0.25)


def test_stages_belong_to_their_thread() -> None:
    def other() -> None:
        with stage("read"):
            time.sleep(0.001)

    def load(_: int) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    assert timed(load, 0)[2:] == (0.0, 0.0)


@pytest.mark.parametrize("scale", [1.0, 5e-6], ids=["each-by-itself", "short-ones-evenly"])
def test_samples_loaded_one_by_one_are_added_up_when_their_times_are_taken(clock: Clock, scale: float) -> None:
    measured = StageClock()
    with stage("read"):
        clock.now += 10.0  # before the first sample, as when a dataset is opened

    def load(index: int) -> int:
        with stage("read"):
            clock.now += index * scale / 2
        clock.now += index * scale / 2
        return index

    for index in (7, 1, 1, 7, 2, 7):
        assert measured.load_sample(load, index) == index
        clock.now += 0.5
        measured.handed_over()
        if index == 7:
            measured.drop_sample()
    times = measured.take()
    assert times is not None
    if scale == 1.0:
        assert times.counts == {bucket_of(1.0): 2, bucket_of(2.0): 1}
    else:
        assert times.counts == {bucket_of(2e-5 / 3): 3}
    assert times.hand_over_s == pytest.approx(3.0)
    assert (times.read_s, times.dataset_s) == pytest.approx((scale * 2, scale * 2))
    assert measured.take() is None
