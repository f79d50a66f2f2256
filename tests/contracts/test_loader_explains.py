"""`explain()`: the deciding part by itself, and each verdict of a loader that is really read.

How long anything takes is not asserted: what is read is of one kind for as long as it takes to be told so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from tests.loader_cases import Indices
from torch_dpflow import LoaderOptions, LoaderStats
from torch_dpflow._core.processor_time import taken_by
from torch_dpflow.loader.explanation import (
    MAX_THREADS,
    MIN_BATCHES,
    MIN_S,
    Explanation,
    Observed,
    explain,
)

MANY = 100_000
seconds = st.floats(0, 1e5)


def stats_of(**figures: Any) -> LoaderStats:
    nothing = dict.fromkeys(
        ["stall_share", "epochs", "batches", "samples", "bytes", "restarts", "duplicates", "steals"], 0
    )
    return LoaderStats(**{**nothing, "stall_s": 0.0, "time_to_first_batch_s": None, **figures})


def seen(
    *, stall_s: float = 5.0, turns_s: float = 0.1, limited_by: str = "", sharing: str = "", **known: Any
) -> Observed:
    stats = stats_of(
        stall_s=stall_s,
        stall_share=min(1.0, stall_s / 10),
        epochs=2,
        batches=200,
        samples=6400,
        bytes=10**9,
        limited_by=limited_by,
        sharing=sharing,
        flow_served=6400,
        flow_decodes=6400,
    )
    usual = {"iterating_s": 10.0, "num_workers": 2, "processors": 4, "watched_s": 10.0}
    return Observed(stats=stats, turns_s=turns_s, turn_stall_s=0.1, **{**usual, **known})


@st.composite
def observed(draw: st.DrawFn) -> Observed:
    stats = stats_of(
        stall_s=draw(seconds),
        stall_share=draw(st.floats(0, 1)),
        epochs=draw(st.integers(0, 9)),
        batches=draw(st.integers(0, MANY)),
        samples=draw(st.integers(0, MANY)),
        bytes=draw(st.integers(0, 2**50)),
        limited_by=draw(st.sampled_from(["", "workers", "storage", "network", "shard", "job", "budget", "gpus"])),
        sharing=draw(st.sampled_from(["", "its caches are too small"])),
    )
    return Observed(
        stats=stats,
        iterating_s=draw(seconds),
        turns_s=draw(seconds),
        longest_start_s=draw(seconds),
        turn_stall_s=draw(seconds),
        num_workers=draw(st.integers(0, 300)),
        persistent=draw(st.booleans()),
        read_threads=draw(st.integers(1, 64)),
        processors=draw(st.integers(1, 256)),
        watched_s=draw(seconds),
        cpu_s=draw(seconds),
        queued_s=draw(seconds),
        flow=draw(st.sampled_from(["", "images/train:v2"])),
        platform=draw(st.sampled_from(["", "ray"])),
        working=draw(st.integers(0, 300)),
        refused=draw(st.sampled_from(["", "quota"])),
    )


@given(observed())
def test_it_is_three_lines_whatever_is_known(one: Observed) -> None:
    told = explain(one)
    measured, limit, change = str(told).split("\n")
    assert measured.startswith("Measured: ")
    assert limit.startswith("Limit: ")
    assert change.startswith("Change: ")


@given(observed())
def test_nothing_is_said_of_little_and_no_change_advised_to_who_does_not_wait(one: Observed) -> None:
    told = explain(one)
    if one.stats.batches - one.stats.epochs < MIN_BATCHES or one.iterating_s < MIN_S:
        assert told.limited_by == ""
        assert "too little" in told.meaning
    elif not one.stats.stall_s and not one.turns_s:
        assert told.limited_by == "job"
        assert told.change == "Change: nothing; loading keeps up."


@given(st.integers(1, 64), st.integers(1, 64), st.floats(0, 1), st.floats(0, 0.5), st.integers(1, 64))
def test_what_workers_of_this_host_took_decides(
    workers: int, processors: int, share: float, queued: float, threads: int
) -> None:
    cpu_s = 10 * share * min(workers, processors)
    one = seen(
        num_workers=workers,
        processors=processors,
        cpu_s=cpu_s,
        queued_s=queued * cpu_s,
        read_threads=threads,
    )
    told = explain(one)
    if not cpu_s:
        assert told.limited_by == ""
    elif told.limited_by == "processors":
        assert cpu_s * (1 + queued) >= 10 * 0.8 * processors
        assert "torch_dpflow.vision" in told.change
    elif told.limited_by == "storage":
        assert cpu_s * (1 + queued) < 10 * 0.5 * workers
        assert ("read_threads" in told.change) is (threads < MAX_THREADS)
    else:
        assert told.limited_by == "workers"
        assert int(told.change.partition("=")[2][:-1]) > workers


@pytest.mark.parametrize(
    ("known", "limited_by", "change"),
    [
        ({"stall_s": 0.2}, "job", "nothing"),
        ({"turns_s": 5.0}, "start", "persistent_workers"),
        ({"turns_s": 5.0, "persistent": True}, "start", "longer epochs"),
        ({"turns_s": 5.0, "longest_start_s": 4.9}, "start", "persistent_workers"),
        ({"turns_s": 5.0, "longest_start_s": 2.6, "flow": "a"}, "start", "longer epochs"),
        ({"turns_s": 5.0, "longest_start_s": 4.9, "flow": "a"}, "start", "once"),
        ({"num_workers": 0}, "workers", "num_workers=4"),
        ({"cpu_s": 19.0}, "workers", "num_workers=5"),
        ({"cpu_s": 19.0, "num_workers": 4, "processors": 2}, "processors", "torch_dpflow.vision"),
        ({"cpu_s": 6.0, "queued_s": 5.0}, "processors", "platform="),
        ({"cpu_s": 1.0}, "storage", "read_threads=4"),
        ({"cpu_s": 1.0, "read_threads": 16}, "storage", "num_workers=4"),
        ({}, "", "during an iteration"),
        ({"platform": "ray", "working": 1, "refused": "quota"}, "quota", "platform"),
        ({"platform": "ray", "working": 1}, "cold start", "nothing yet"),
        ({"platform": "ray", "working": 2}, "workers", "num_workers"),
        ({"flow": "a/b:v2", "limited_by": "workers"}, "workers", "dpflow flow scale a/b --workers"),
        ({"flow": "a", "limited_by": "storage"}, "storage", "ALSDCache"),
        ({"flow": "a", "limited_by": "storage", "sharing": "start them together"}, "storage", "together"),
        ({"flow": "a", "limited_by": "gpus"}, "gpus", "platform"),
        ({"flow": "a"}, "", "within some seconds"),
    ],
)
def test_the_verdict_of_figures(known: dict[str, Any], limited_by: str, change: str) -> None:
    told = explain(seen(**known))
    assert (told.limited_by, change in told.change) == (limited_by, True), told


class Burning(Indices):
    """A sample takes some thousandths of a second of a processor."""

    def __getitem__(self, index: int) -> int:
        until = time.process_time() + 0.005
        while time.process_time() < until:
            pass
        return index


class Reading(Indices):
    """A sample is waited for, as for a storage."""

    def __getitem__(self, index: int) -> int:
        time.sleep(0.03)
        return index


@pytest.fixture
def one_processor() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(before)])
    yield
    os.sched_setaffinity(0, before)


def read_until_told(loader: Any, limited_by: str, work: Callable[[Any], None] = lambda batches: None) -> Any:
    """Read until this is what limits; fails with what is said at the epoch's end."""
    batches = iter(loader)
    for _ in batches:
        work(batches)
        if loader.explain().limited_by == limited_by:
            break
    told: Explanation = loader.explain()
    assert told.limited_by == limited_by, told
    return told


def test_a_loader_of_which_nothing_was_read_is_not_judged(OurLoader: Any) -> None:
    assert "too little was read" in str(OurLoader(Indices(10), num_workers=2).explain())


def test_a_loop_without_workers_is_told_to_have_some(OurLoader: Any) -> None:
    told = read_until_told(OurLoader(Burning(MANY)), "workers")
    assert f"num_workers={len(os.sched_getaffinity(0))}" in told.change


def test_workers_that_wait_for_their_storage_are_told_to_read_side_by_side(OurLoader: Any) -> None:
    options = LoaderOptions(read_threads=2)
    told = read_until_told(OurLoader(Reading(MANY), num_workers=1, options=options), "storage")
    assert "read_threads=8" in told.change


def test_workers_that_fill_the_processors_are_told_to_take_less_of_them(OurLoader: Any, one_processor: None) -> None:
    told = read_until_told(OurLoader(Burning(MANY), num_workers=2), "processors")
    assert "of 1 processor" in told.meaning


def test_short_epochs_are_told_to_keep_their_workers(OurLoader: Any) -> None:
    loader = OurLoader(Indices(MIN_BATCHES), num_workers=2)
    for _ in range(300):
        list(loader)
        if (told := loader.explain()).limited_by == "start":
            break
    assert "persistent_workers=True" in told.change, told


def test_training_that_takes_longer_than_loading_is_told_to_change_nothing(
    OurLoader: Any, eventually: Callable[..., None]
) -> None:
    def train(batches: Any) -> None:
        eventually(lambda: batches._in_flight.due() is not None or batches._shard.poll() is not None)
        time.sleep(0.05)

    told = read_until_told(OurLoader(Indices(MANY), num_workers=1), "job", train)
    assert told.change == "Change: nothing; loading keeps up."


def test_what_workers_took_is_known_after_the_epoch_and_of_persistent_ones(OurLoader: Any) -> None:
    for persistent in (False, True):
        loader = OurLoader(Burning(10), num_workers=2, persistent_workers=persistent)
        for _ in range(2):
            before = loader._runtime.workload.cpu_s
            list(loader)
            loader.explain()
            assert loader._runtime.workload.cpu_s > before
        assert 0 < loader._runtime.workload.watched_s <= loader._runtime.meter.iterating_s


def test_a_process_that_is_gone_took_nothing_more() -> None:
    assert taken_by(2**22 + 1) == (0.0, 0.0)
    assert taken_by(os.getpid())[0] > 0


def test_figures_read_well_in_terminals_notebooks_and_progress_bars(
    OurLoader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # starts no thread
    loader = OurLoader(Indices(100), batch_size=5, num_workers=1)
    bar = tqdm(loader, leave=False)
    assert bar.total == len(loader) == 20
    assert len(list(bar)) == 20
    lines = str(loader.stats()).splitlines()
    assert lines[0] == "read         100 samples in 20 batches, 1 epochs"
    assert repr(loader.stats()).splitlines() == str(loader.stats()).splitlines()
    shared = stats_of(flow_served=400, flow_decodes=100, sharing="<none>", limited_by="job")
    assert "400 samples given to all jobs, 100 loaded" in str(shared)
    assert repr(shared) == str(shared)
    assert str(shared).endswith("limited by   job")
