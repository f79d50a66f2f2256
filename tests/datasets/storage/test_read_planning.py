"""The plan of a batch answers every range; retries pause within their limits."""

from __future__ import annotations

import itertools
import logging
import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.datasets.storage import ByteRange, ReadOptions, failures
from torch_dpflow.datasets.storage.batch_reads import plan_reads
from torch_dpflow.datasets.storage.failures import with_retries
from torch_dpflow.errors import (
    ChecksumError,
    ObjectMissingError,
    StorageError,
    StorageTimeoutError,
    StorageUnavailableError,
    TruncatedObjectError,
)

CONTENT = bytes(range(200))
SPANS = st.builds(
    lambda name, start, length: ByteRange(name, start, None if length is None else start + length),
    st.sampled_from(["a/1", "a/2", "b/1"]),
    st.integers(0, 100),
    st.none() | st.integers(1, 100),
)


@given(wanted=st.lists(SPANS, max_size=12), gap=st.integers(0, 50))
def test_every_range_is_answered_with_its_bytes(wanted: list[ByteRange], gap: int) -> None:
    reads = plan_reads(dict(enumerate(wanted)), node=node_of, merge_gap=gap)
    answered = sorted(position for read in reads for position in read.positions)
    assert answered == list(range(len(wanted)))
    for read in reads:
        data = CONTENT[read.span.start : read.span.stop]
        for position in read.positions:
            span = wanted[position]
            assert read.cut(span, data) == CONTENT[span.start : span.stop]


@given(wanted=st.lists(SPANS, max_size=12), gap=st.integers(0, 50))
def test_what_is_left_apart_is_further_apart_than_the_gap(wanted: list[ByteRange], gap: int) -> None:
    reads = [read.span for read in plan_reads(dict(enumerate(wanted)), node=node_of, merge_gap=gap)]
    for one, other in itertools.combinations(sorted(reads, key=lambda span: (span.url, span.start)), 2):
        if one.url == other.url and one.stop is not None and other.stop is not None:
            assert other.start > one.stop + gap


def test_nodes_take_turns_and_each_keeps_its_order() -> None:
    wanted = [ByteRange(name) for name in ("a/1", "a/2", "a/3", "b/1", "b/2", "c/1")]
    reads = plan_reads(dict(enumerate(wanted)), node=node_of, merge_gap=0)
    assert [read.span.url for read in reads] == ["a/1", "b/1", "c/1", "a/2", "b/2", "a/3"]


def test_merged_ranges_stay_below_their_limit() -> None:
    wanted = [ByteRange("a/1", start << 20, (start + 1) << 20) for start in range(20)]
    reads = plan_reads(dict(enumerate(wanted)), node=node_of, merge_gap=0)
    assert [read.span.length for read in reads] == [8 << 20, 8 << 20, 4 << 20]
    reads = plan_reads(dict(enumerate(wanted)), node=node_of, merge_gap=0, max_merged=1 << 20)
    assert [read.span for read in reads] == wanted


def node_of(url: str) -> str:
    return url[0]


class Failing:
    """A storage whose reads raise what they are told to, until nothing is left; each takes a second."""

    is_remote = True

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.reads = 0
        self.slept: list[float] = []
        self.time = 100.0

    def fetch(self, span: ByteRange, deadline: float) -> bytes:
        self.reads += 1
        self.time += 1.0
        if self.errors:
            raise self.errors.pop(0)
        return b"done"

    def read(self, **options: float) -> bytes:
        limits = ReadOptions(**options)  # type: ignore[arg-type]
        attempt = partial(self.fetch, ByteRange("x"))
        return with_retries(attempt, limits, is_remote=self.is_remote, sleep=self.sleep, clock=lambda: self.time)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds


def test_tries_until_it_succeeds() -> None:
    storage = Failing(StorageUnavailableError("reset"), StorageTimeoutError("slow"))
    assert storage.read(attempts=3) == b"done"
    assert len(storage.slept) == 2


def test_gives_up_after_its_attempts() -> None:
    storage = Failing(*[StorageUnavailableError("x: reset")] * 9)
    with pytest.raises(StorageUnavailableError, match=r"x: reset \(attempt 4 of 4"):
        storage.read(attempts=4)
    assert storage.reads == 4


def test_gives_up_when_the_deadline_leaves_no_time() -> None:
    storage = Failing(*[StorageUnavailableError("x: reset")] * 9)
    with pytest.raises(StorageUnavailableError, match=r"attempt 3 of 100"):
        storage.read(attempts=100, deadline_s=2.5, backoff_s=0.0)


def test_attempts_fill_the_deadline() -> None:
    storage = Failing(*[StorageUnavailableError("x: reset")] * 1000)
    with pytest.raises(StorageUnavailableError, match=r"x: reset \(attempt \d+, 1\d\d\.\d s\)"):
        storage.read(deadline_s=120.0)
    assert storage.time > 100.0 + 119.0
    assert max(storage.slept) <= 10.0


def test_five_seconds_without_a_server_are_waited_for_and_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(failures, "_reported_at", -math.inf)
    storage = Failing(*[StorageUnavailableError("x: refused")] * 8)
    with caplog.at_level(logging.WARNING, logger="torch_dpflow"):
        assert storage.read() == b"done"
    (record,) = caplog.records
    assert "x: refused (attempt " in record.getMessage()
    assert "(ReadOptions.deadline_s)" in record.getMessage()


@pytest.mark.parametrize("kind", [TruncatedObjectError, ChecksumError])
def test_another_length_is_tried_again_some_times(kind: type[StorageError]) -> None:
    storage = Failing(kind("x: short"), kind("x: short"))
    assert storage.read() == b"done"
    storage = Failing(*[kind("x: short")] * 9)
    with pytest.raises(kind, match=r"x: short \(attempt 5 of 5"):
        storage.read()
    local = Failing(kind("x: short"))
    local.is_remote = False
    with pytest.raises(kind, match=r"^x: short$"):
        local.read()


def test_does_not_try_again_what_cannot_pass() -> None:
    storage = Failing(ObjectMissingError("x: gone"))
    with pytest.raises(ObjectMissingError, match=r"^x: gone$"):
        storage.read()
    assert storage.slept == []
