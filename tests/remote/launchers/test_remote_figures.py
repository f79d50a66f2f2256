"""How many tasks a worker holds, and how many batches are under way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.errors import MessageError
from torch_dpflow.ipc.messages.remote_worker import WorkerHeartbeat
from torch_dpflow.loader.batch_planner import InFlightLimit
from torch_dpflow.remote.fleet.content import BATCH_WORKERS
from torch_dpflow.remote.fleet.worker_states import LOST_S, FleetWorker, split_identity

LEAST, MOST = BATCH_WORKERS.min_window, BATCH_WORKERS.max_window


def worker(task_s: float, tasks: int = 5) -> FleetWorker:
    found = FleetWorker("dpf", 1, 2, 0.0, 0.0, window=LEAST)
    for count in range(tasks + 1):
        found.note_work(1.0 + count * task_s)
    return found


@pytest.mark.parametrize(
    ("task_s", "round_trip_s", "window"),
    [(0.05, 0.001, 2), (0.05, 0.02, 3), (0.05, 0.06, 4), (0.001, 0.05, 8), (0.02, 0.05, 5)],
)
def test_a_worker_holds_what_it_loads_during_a_round_trip(task_s: float, round_trip_s: float, window: int) -> None:
    assert worker(task_s).fitting_window(round_trip_s, LEAST, MOST) == window


def test_a_window_does_not_change_back_and_forth() -> None:
    one = worker(0.05)
    one.window = one.fitting_window(0.06, LEAST, MOST)
    assert one.fitting_window(0.04, LEAST, MOST) == one.window == 4
    assert one.fitting_window(0.001, LEAST, MOST) == 2
    assert worker(0.05, tasks=0).fitting_window(9.0, LEAST, MOST) == LEAST  # nobody knows how long its tasks take


def missing(one: FleetWorker, count: int = 1) -> WorkerHeartbeat:
    """Return the heartbeat of an idle worker that has sent `count` more messages than have arrived."""
    return WorkerHeartbeat(one.received + count, one.sent)


def test_a_message_is_late_as_long_as_no_connection_has_ended() -> None:
    """A link may take a minute for a batch, and have the next one to carry by then."""
    one = worker(0.05)
    now = one.worked
    assert not one.has_lost_message(missing(one, 0), 7, now)
    assert not any(one.has_lost_message(missing(one), 7, now + late) for late in range(60))
    assert one.has_lost_message(missing(one), 8, now + 60)


def test_a_message_is_lost_where_a_connection_has_ended_and_nothing_comes() -> None:
    one = worker(0.05)
    now = one.worked
    assert not one.has_lost_message(missing(one, 0), 0, now + 100)  # all is here
    assert not one.has_lost_message(missing(one), 1, now + 101)
    one.note_work(now + 105)  # and goes on
    assert not one.has_lost_message(missing(one), 1, now + 112)
    assert one.has_lost_message(missing(one), 1, now + 105 + LOST_S)
    assert not one.has_lost_message(missing(one, 0), 1, now + 116)
    assert not one.has_lost_message(missing(one), 1, now + 200)


def test_a_message_to_a_worker_is_lost_where_it_waits_and_has_received_fewer() -> None:
    """A busy worker may have messages that it has not read, and reports no number."""
    one = worker(0.05)
    one.sent, now = 5, one.worked
    assert not one.has_lost_message(WorkerHeartbeat(one.received, 5), 0, now)
    one.sent = 6
    for late in range(60):
        assert not one.has_lost_message(WorkerHeartbeat(one.received, None), 1, now + late)
    assert not one.has_lost_message(WorkerHeartbeat(one.received, 5), 1, now + 60)
    assert one.has_lost_message(WorkerHeartbeat(one.received, 5), 1, now + 60 + LOST_S)
    assert not one.has_lost_message(WorkerHeartbeat(one.received, 6), 1, now + 61 + LOST_S)


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_windows_have_limits(task_s: float, round_trip_s: float) -> None:
    assert LEAST <= worker(task_s).fitting_window(round_trip_s, LEAST, MOST) <= MOST


@given(
    most=st.integers(1, 64),
    workers=st.integers(1, 16),
    budget=st.integers(1, 10**6),
    sizes=st.lists(st.integers(1, 10**6), min_size=1, max_size=30),
)
def test_batches_in_flight_keep_within_their_bytes_and_never_run_out(
    most: int, workers: int, budget: int, sizes: list[int]
) -> None:
    most = max(most, workers)
    limit = InFlightLimit(most, workers, budget)
    largest, in_flight = 0, limit.at_start(0)
    assert in_flight == workers
    for size in sizes:
        largest = max(largest, size)
        before = in_flight
        in_flight += limit.next(largest, in_flight) - 1
        allowed = max(workers, min(most, budget // largest))
        assert in_flight <= max(allowed, before - 1)
        assert in_flight >= 1
        assert not limit.may_grow(allowed + 1, largest) or allowed == most
    assert InFlightLimit(most, workers, None).at_start(largest) == most
    assert InFlightLimit(most, workers, None).next(largest, most) == 1


@pytest.mark.parametrize("identity", [b"", b"1/2/3", b"1/2//line", b"1/2/3/other", b"1/2/3/4/line"])
def test_connections_that_are_none_of_a_worker(identity: bytes) -> None:
    with pytest.raises(MessageError):
        split_identity(identity)
