"""Windows in every order of events: bounded, never stuck; and what Algorithm 1 comes to by hand."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.staged_window import StagedWindow, Unbounded
from torch_dpflow.dataservice.planning.window import LEAST, MOST, BatchWindow, FixedWindow, MeasuredWindow
from torch_dpflow.errors import OptionError


def run(window: BatchWindow, lengths: list[int], chance: random.Random) -> None:
    """Read a batch whose records come in any order; checks that somebody is always under way."""
    waiting, under_way, now = deque(lengths), list[object](), 0.0
    while waiting or under_way:
        granted = window.grant(list(waiting), now)
        assert 0 <= granted <= len(waiting)
        assert granted or under_way or not waiting
        for _ in range(granted):
            under_way.append(window.asked(waiting.popleft(), now))
        now += chance.random() / 10
        if under_way:
            window.arrived(under_way.pop(chance.randrange(len(under_way))), now)
    assert (window.bytes_out, window.records_out) == (0, 0)


lengths = st.lists(st.integers(0, 1 << 20), max_size=40)


@given(lengths=lengths, seed=st.integers(0, 1 << 30))
def test_ours_ends_every_batch_and_stays_within_its_bounds(lengths: list[int], seed: int) -> None:
    window, chance = MeasuredWindow(), random.Random(seed)
    for _ in range(3):
        waiting, under_way, now = deque(lengths), deque[object](), 0.0
        while waiting or under_way:
            for _ in range(window.grant(list(waiting), now)):
                under_way.append(window.asked(waiting.popleft(), now))
            assert window.bytes_out <= max(MOST, 1 << 20)
            assert under_way
            now += chance.random() / 100
            window.arrived(under_way.popleft(), now)
            assert LEAST <= window.size(now) <= MOST


@given(
    lengths=lengths, seed=st.integers(0, 1 << 30), record=st.integers(1, 1 << 20), stages=st.integers(1, 8)
)
def test_every_window_ends_every_batch(lengths: list[int], seed: int, record: int, stages: int) -> None:
    chance = random.Random(seed)
    staged = StagedWindow(bytes_per_s=1e7, latency_s=1e-3, record_bytes=record, stages=stages)
    for window in (Unbounded(), FixedWindow(record, stages=stages), MeasuredWindow(stages=stages), staged):
        run(window, lengths, chance)


def test_a_fixed_window_is_filled_by_stages() -> None:
    window = FixedWindow(1_000, stages=4)
    assert window.grant([400, 400, 400], 0.0) == 2
    tokens = [window.asked(400, 0.0) for _ in range(2)]
    assert window.grant([200], 0.0) == 0  # less than a stage is free
    window.arrived(tokens.pop(), 0.0)
    assert window.grant([600, 1], 0.0) == 1
    window.given_up(tokens.pop())
    assert window.grant([2_000, 1], 0.0) == 1  # never less than one record


@given(
    rate=st.floats(1e5, 1e10),
    latency=st.floats(1e-5, 1e-1),
    record=st.integers(1, 1 << 20),
    stages=st.integers(1, 8),
)
def test_algorithm_1_never_has_more_than_its_limit_out(
    rate: float, latency: float, record: int, stages: int
) -> None:
    window = StagedWindow(bytes_per_s=rate, latency_s=latency, record_bytes=record, stages=stages)
    assert window.limit >= 1
    assert window.limit * record >= rate * latency * (1 - 1e-9)
    granted = window.grant([record] * 50, 0.0)
    assert 1 <= granted <= min(50, window.limit)


def test_algorithm_1_dispatches_in_stages() -> None:
    window = StagedWindow(bytes_per_s=1e6, latency_s=8e-3, record_bytes=1000, stages=4)
    assert window.limit == 8
    assert window.grant([1000] * 20, 0.0) == 8
    tokens = [window.asked(1000, 0.0) for _ in range(8)]
    window.arrived(tokens[0], 1.0)
    assert window.grant([1000] * 12, 1.0) == 0  # a stage is two records
    window.arrived(tokens[1], 1.0)
    assert window.grant([1000] * 12, 1.0) == 2


def test_ours_probes_alone_then_takes_half_more_than_the_line_holds() -> None:
    window = MeasuredWindow()
    assert window.grant([1000] * 10, 0.0) == 1
    probe = window.asked(1000, 0.0)
    assert window.grant([1000] * 9, 0.0) == 0
    window.arrived(probe, 0.1)
    token = window.asked(1_000_000, 0.1)
    for number in range(1, 9):  # 10 MB/s, 0.1 s
        following = window.asked(1_000_000, 0.1 * number)
        window.arrived(token, 0.1 * (number + 1))
        token = following
    assert window.size(0.9) == pytest.approx(1_500_000, rel=0.15)


def test_what_does_not_come_says_nothing_of_the_line() -> None:
    window = MeasuredWindow()
    assert window.grant([1000] * 10, 0.0) == 1
    window.given_up(window.asked(1000, 0.0))
    assert window.grant([1000] * 10, 0.1) == 1  # another probe
    window.arrived(window.asked(1000, 0.1), 0.2)
    tokens = [window.asked(1 << 20, 0.2) for _ in range(20)]
    for token in tokens:
        window.given_up(token)
    assert (window.bytes_out, window.size(2.0)) == (0, LEAST)


def test_ours_halves_once_for_a_slow_round_trip() -> None:
    window = MeasuredWindow()
    window.arrived(window.asked(1_000_000, 0.0) if window.grant([1], 0.0) else None, 0.1)
    for number in range(1, 10):  # 10 MB/s
        window.arrived(window.asked(1_000_000, 0.1 * number), 0.1 * (number + 1))
    before = window.size(1.0)
    assert before > 2 * LEAST
    tokens = [window.asked(100_000, 1.0) for _ in range(4)]
    for token in tokens:
        window.arrived(token, 1.9)  # nine times the least round trip, all of one cause
    assert before / 2 <= window.size(1.9) < before * 0.75


def test_numbers_that_are_none() -> None:
    with pytest.raises(OptionError, match="latency_s"):
        StagedWindow(bytes_per_s=1.0, latency_s=0.0, record_bytes=1)
