"""Windows in every order of events: bounded, never stuck; and what Algorithm 1 comes to by hand."""

from __future__ import annotations

import heapq
import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.pool.planning.request_window import (
    MAX_WINDOW,
    MIN_WINDOW,
    ConnectionQueues,
    FixedWindow,
    MeasuredWindow,
)


def run(window: FixedWindow, lengths: list[int], chance: random.Random) -> None:
    """Read a batch whose records come in any order; checks that somebody is always under way."""
    waiting, under_way, now = deque(lengths), list[object](), 0.0
    while waiting or under_way:
        granted = window.grant(list(waiting), now)
        assert 0 <= granted <= len(waiting)
        assert granted or under_way or not waiting
        for _ in range(granted):
            under_way.append(window.requested(waiting.popleft(), now))
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
                under_way.append(window.requested(waiting.popleft(), now))
            assert window.bytes_out <= max(MAX_WINDOW, 1 << 20)
            assert under_way
            now += chance.random() / 100
            window.arrived(under_way.popleft(), now)
            assert MIN_WINDOW <= window.size() <= max(MAX_WINDOW, 1 << 20)


@given(lengths=lengths, seed=st.integers(0, 1 << 30), record=st.integers(1, 1 << 20))
def test_every_window_ends_every_batch(lengths: list[int], seed: int, record: int) -> None:
    chance = random.Random(seed)
    for window in (FixedWindow(record), MeasuredWindow()):
        run(window, lengths, chance)


def test_a_fixed_window_is_filled_by_stages() -> None:
    window = FixedWindow(1_000)
    assert window.grant([400, 400, 400], 0.0) == 2
    tokens = [window.requested(400, 0.0) for _ in range(2)]
    assert window.grant([200], 0.0) == 0  # less than a stage is free
    window.arrived(tokens.pop(), 0.0)
    assert window.grant([600, 1], 0.0) == 1
    window.cancelled(tokens.pop())
    assert window.grant([2_000, 1], 0.0) == 1  # never less than one record


class Links:
    """A link for each connection, then one line shared by all, bytes a second. Records come in the order of each."""

    def __init__(self, connections: int, link: float, line: float, record: int) -> None:
        self.connections, self.link, self.line, self.record = connections, link, line, record
        self.window, self.now, self.latency = MeasuredWindow(), 0.0, 2e-4
        self._free = [0.0] * connections
        self._line_free = 0.0

    def read(self, records: int) -> float:
        """Read a batch whose records lie evenly; bytes a second."""
        owners = [f"{number % self.connections}" for number in range(records)]
        queues, begun = ConnectionQueues(owners, [self.record] * records), self.now
        under_way = list[tuple[float, int, object]]()
        while True:
            sizes = queues.sizes(64)
            if granted := self.window.grant(sizes, self.now):
                for place in queues.take(sum(sizes[:granted])):
                    token = self.window.requested(self.record, self.now)
                    heapq.heappush(under_way, (self._answered(place % self.connections), place, token))
                continue
            if not under_way:
                return records * self.record / (self.now - begun)
            self.now, place, token = heapq.heappop(under_way)
            queues.received(place)
            self.window.arrived(token, self.now)

    def _answered(self, connection: int) -> float:
        self._free[connection] = max(self._free[connection], self.now + self.latency) + self.record / self.link
        self._line_free = max(self._line_free, self._free[connection]) + self.record / self.line
        return self._line_free


@pytest.mark.parametrize(
    ("connections", "record"), [(1, 110_000), (2, 16_000), (4, 110_000), (8, 16_000), (8, 110_000)]
)
def test_ours_fills_a_link_for_each_data_connection(connections: int, record: int) -> None:
    links = Links(connections, 12.5e6, 1.25e9, record)
    for _ in range(8):
        links.read(256)
    assert links.read(1024) >= 0.85 * connections * 12.5e6


def test_ours_fills_links_whose_latency_changes() -> None:
    links = Links(8, 12.5e6, 1.25e9, 16_000)
    for latency in (2e-4, 2e-2, 2e-4):
        links.latency, links.now = latency, links.now + 20
        for _ in range(8):
            links.read(1024)
        assert links.read(4096) >= 0.85 * 8 * 12.5e6
        assert links.window.size() <= 3 * 8 * 12.5e6 * (latency + 16_000 / 12.5e6)


class SuspendedReader(Links):
    """After one in 500 records everything stands still for a while, of 0.3 s in the mean."""

    def __init__(self, seed: int) -> None:
        super().__init__(4, 12.5e6, 1.25e9, 110_000)
        self._random = random.Random(seed)

    def _answered(self, connection: int) -> float:
        if self._random.random() < 0.002:
            still = self._random.expovariate(1 / 0.3)
            self._free = [max(free, self.now) + still for free in self._free]
        return super()._answered(connection)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_reader_that_is_suspended_now_and_then_fills_its_links_again(seed: int) -> None:
    reader, sizes = SuspendedReader(seed), []
    for _ in range(60):
        reader.read(256)
        sizes.append(reader.window.size())
    assert sum(sizes) / len(sizes) > 3.5 * reader.record


@pytest.mark.parametrize("connections", [4, 32])
def test_ours_fills_a_line_that_connections_share_with_no_more_than_it_takes(connections: int) -> None:
    links = Links(connections, 1.25e9, 12.5e6, 16_000)
    for _ in range(8):
        assert links.read(256) >= 0.9 * 12.5e6
        assert links.window.size() <= 1.5 * 1.5 * MIN_WINDOW


@given(
    owners=st.lists(st.sampled_from("abc"), max_size=40),
    rooms=st.lists(st.integers(0, 300)),
    sizes=st.randoms(),
    lost=st.sampled_from(["a", "b", ""]),
)
def test_queues_give_each_place_once_and_none_of_a_data_connection_that_is_lost(
    owners: list[str], rooms: list[int], sizes: random.Random, lost: str
) -> None:
    lengths = [sizes.randrange(1, 100) for _ in owners]
    queues, taken = ConnectionQueues(owners, lengths), list[int]()
    for number, room in enumerate([*rooms, 1 << 20]):
        if number == 2:
            queues.drop(lost)
        now = queues.take(room)
        assert sum(lengths[place] for place in now) <= room or len(now) == 1
        assert lost not in {owners[place] for place in now} or number < 2
        taken += now
        assert len(queues.sizes(100)) == len(owners) - len(taken) - sum(
            owner == lost and place not in taken and number >= 2 for place, owner in enumerate(owners)
        )
    assert len(taken) == len({*taken})
    assert {owners[place] for place in {*range(len(owners))} - {*taken}} <= {lost}
    assert not queues.connections


def test_the_data_connection_with_the_least_under_way_is_asked_and_all_end_together() -> None:
    queues = ConnectionQueues("aaaabb", [10] * 6)
    assert queues.take(20) == [0, 4]  # one of each
    queues.received(0)
    assert queues.take(10) == [1]
    assert queues.take(20) == [2, 5]  # the one with more left first
    queues.received(4)
    queues.requeue(4)
    assert queues.connections == ["a", "b"]
    assert sorted(queues.take(100)) == [3, 4]


def test_what_does_not_come_says_nothing_of_the_line() -> None:
    window = MeasuredWindow()
    for _ in range(200):
        granted = window.grant([1000] * 64, 0.0)
        assert granted
        for token in [window.requested(1000, 0.0) for _ in range(granted)]:
            window.cancelled(token)
    assert (window.bytes_out, window.size()) == (0, MIN_WINDOW)
