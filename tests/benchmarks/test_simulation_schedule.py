"""The simulator's events: who asks for how much, when, and in which order."""

from collections import Counter

import numpy as np
import pytest

from benchmarks.simulation.scenarios import SCENARIOS, equal_sets
from benchmarks.simulation.schedule import Kind, schedule
from benchmarks.simulation.workload import Job, Workload


def workload(**changes: object) -> Workload:
    job = Job(indices=np.arange(20), **{"batch_size": 8} | changes)  # type: ignore[arg-type]
    return Workload(name="one", samples=20, jobs=(job,))


def test_a_job_joins_reads_whole_epochs_and_leaves() -> None:
    events = schedule(workload(epochs=2)).events
    assert [event.kind for event in events] == [
        Kind.JOIN,
        *([Kind.EPOCH] + [Kind.REQUEST] * 3) * 2,
        Kind.LEAVE,
    ]
    assert [event.size for event in events if event.kind is Kind.REQUEST] == [8, 8, 4] * 2
    assert [event.epoch for event in events if event.kind is Kind.EPOCH] == [0, 1]
    assert events[-1].time == pytest.approx(2.0)


def test_speed_stretches_time() -> None:
    assert schedule(workload(speed=0.4, start=0.5)).events[-1].time == pytest.approx(3.0)


def test_a_killed_job_reads_nothing_from_then_on() -> None:
    events = schedule(workload(epochs=3, killed_at=0.9)).events
    assert events[-1].kind is Kind.LEAVE
    assert events[-1].time == pytest.approx(0.9)
    assert sum(event.size for event in events) == 20


def test_a_job_killed_before_it_starts_never_appears() -> None:
    assert schedule(workload(start=1.0, killed_at=0.2)).events == []


def test_jobs_in_step_share_instants_and_join_before_anyone_reads() -> None:
    four = (0.0,) * 4
    events = schedule(equal_sets("x", 100, starts=four, speeds=(1.0,) * 4)).events
    requests = Counter(event.instant for event in events if event.kind is Kind.REQUEST)
    assert set(requests.values()) == {4}
    assert [event.kind for event in events[:4]] == [Kind.JOIN] * 4


def test_times_never_run_backwards_and_every_job_leaves_once() -> None:
    for name, factory in SCENARIOS.items():
        plan = schedule(factory(200, 3), seed=3)
        times = [event.time for event in plan.events]
        assert times == sorted(times), name
        left = Counter(event.job for event in plan.events if event.kind is Kind.LEAVE)
        assert left == dict.fromkeys(range(len(plan.workload.jobs)), 1), name


def test_irregular_times_follow_the_seed() -> None:
    jobs = SCENARIOS["irregular"](200, 0)
    assert schedule(jobs, seed=1).events == schedule(jobs, seed=1).events
    assert schedule(jobs, seed=1).events != schedule(jobs, seed=2).events


@pytest.mark.parametrize("change", [{"speed": 0}, {"epochs": 0}, {"batch_size": 0}, {"start": -1.0}])
def test_a_job_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        workload(**change)


def test_sets_outside_the_data_set_are_refused() -> None:
    with pytest.raises(ValueError, match=r"outside 0\.\.9"):
        Workload(name="x", samples=10, jobs=(Job(indices=np.arange(11)),))
