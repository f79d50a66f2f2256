"""What is peculiar to the shared log: following and leading, classes, the overlap that it gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.invariants import validate
from tests.samplers.timed_jobs import TimedJob, hit_rate, run_jobs
from torch_dpflow.samplers import SamplingGroup, sampling_group
from torch_dpflow.samplers.group import Member

STAGGER = (0.0, 1 / 3, 2 / 3, 1.0)
SPEEDS = (1.0, 0.8, 0.6, 0.4)
SAMPLES = 1000


def private_order(n: int, seed: int, epoch: int = 0) -> list[int]:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


def order_among_others(n: int, seed: int, job: str, epoch: int = 0) -> list[int]:
    member = Member(name=job, indices=None, length=n, seed=seed, batch_size=1, independence=0.0)
    return member.own_order(epoch)[:].tolist()


def new_group(size: int = 60, capacity: int = 20, **jobs: dict[str, object]) -> SamplingGroup:
    """A group in which these jobs have begun their first epoch."""
    group = sampling_group("shared-log", size, capacity=capacity)
    for job, options in jobs.items():
        group.join(job, **{"batch_size": 4, **options})  # type: ignore[arg-type]
        group.start_epoch(job, 0)
    return group


# -- room ----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=6), st.integers(1, 9))
def test_whatever_becomes_of_the_caches_room_each_epoch_is_whole(capacities: list[int], count: int) -> None:
    group = new_group(a={"seed": 1}, b={"seed": 2})
    read: dict[str, list[int]] = {"a": [], "b": []}
    step = 0
    while any(group.remaining(job) for job in read):
        if step % 3 == 0:
            gone = group.resize(capacities[step // 3 % len(capacities)])
            assert len(set(gone.tolist())) == len(gone)
        job = "ab"[step % 2]
        read[job] += group.next(job, count).tolist()
        validate(group)
        step += 1
    assert all(sorted(samples) == list(range(60)) for samples in read.values())


# -- follow and lead -----------------------------------------------------------------------------------------


def test_a_job_follows_what_another_has_just_loaded() -> None:
    group = new_group(a={"seed": 1}, b={"seed": 99})
    led, followed = group.draw("a", 8), group.draw("b", 8)
    assert led.indices.tolist() == private_order(60, 1)[:8]
    assert led.led.all()
    assert set(followed.indices.tolist()) == set(led.indices.tolist())
    assert not followed.led.any()


def test_what_it_cannot_follow_it_leads_in_its_own_order() -> None:
    group = new_group(a={"seed": 1}, b={"seed": 99})
    first = set(group.next("a", 4).tolist())
    drawn = group.draw("b", 10)
    own = [x for x in order_among_others(60, 99, "b") if x not in first][:6]
    assert drawn.indices[:4].tolist() != own[:4]
    assert set(drawn.indices[:4].tolist()) == first
    assert drawn.indices[4:].tolist() == own
    assert drawn.led.tolist() == [False] * 4 + [True] * 6


def test_nothing_is_followed_that_was_loaded_before_the_epoch_began() -> None:
    group = new_group(a={"seed": 1}, b={"seed": 99})
    group.draw("a", 20)
    group.start_epoch("b", 1)
    drawn = group.draw("b", 20)
    assert drawn.indices.tolist() == order_among_others(60, 99, "b", 1)[:20]
    assert not drawn.led.all(), "what happens to be resident is not loaded again"


def test_samples_that_few_need_are_followed_first() -> None:
    group = new_group(a={"seed": 1}, b={"seed": 2}, c={"seed": 3})
    old, new = group.next("a", 4), group.next("a", 4)
    assert set(group.next("b", 4).tolist()) == set(new.tolist()), "the latest among equals"
    assert set(group.next("c", 4).tolist()) == set(new.tolist()), "then those that only c needs"
    assert set(group.next("c", 4).tolist()) == set(old.tolist())


def test_the_choice_is_made_within_each_class() -> None:
    low = set(range(30))
    group = new_group(60, 40, a={"seed": 1}, b={"seed": 2}, c={"seed": 3}, d={"indices": low, "seed": 4})
    group.draw("a", 12)
    read_by_b = set(group.next("b", 9).tolist())
    group.draw("a", 12)
    could_follow = set(group.lookahead("c").likely.tolist())
    order = order_among_others(60, 3, "c")
    picks = group.next("c", 8).tolist()
    assert [x in low for x in picks] == [x in low for x in order[:8]]
    for members in (low, set(range(30, 60))):
        picked = members & set(picks)
        assert picked <= could_follow
        assert picked <= read_by_b or (members & read_by_b & could_follow) <= picked, "few need these"


def test_a_job_that_is_alone_reads_its_private_order_and_can_tell_it() -> None:
    group = new_group(a={"seed": 7})
    assert group.next("a", 13).tolist() == private_order(60, 7)[:13]
    assert group.lookahead("a").certain.tolist() == private_order(60, 7)[13:]
    group.join("b")
    seen = group.lookahead("a")
    assert not seen.complete
    assert (seen.length, seen.position) == (60, 13)


def test_followable_residents_are_announced_as_likely() -> None:
    group = new_group(a={"seed": 1}, b={"seed": 99})
    loaded = group.next("a", 6).tolist()
    assert group.lookahead("b").likely.tolist() == loaded[::-1]
    assert not len(group.lookahead("a").likely)


@pytest.mark.parametrize("independence", [0.0, 0.25, 1.0])
def test_independence_is_the_share_of_picks_that_ignore_the_directory(independence: float) -> None:
    group = new_group(100_000, 1000, a={"seed": 1}, b={"seed": 99, "independence": independence})
    group.draw("a", 1000)
    drawn = group.draw("b", 1000)
    ignoring = np.isin(drawn.indices, order_among_others(100_000, 99, "b")[:1000])
    assert abs(ignoring.mean() - independence) < 0.05
    assert (independence < 1) or (drawn.indices.tolist() == order_among_others(100_000, 99, "b")[:1000])


def test_jobs_of_one_seed_draw_each_their_own_and_the_same_again() -> None:
    def orders() -> list[list[int]]:
        jobs = {job: {"seed": 5, "independence": 1.0} for job in "abc"}
        group = sampling_group("shared-log", 60)
        for job, options in jobs.items():
            group.join(job, batch_size=4, **options)  # type: ignore[arg-type]
        for job in jobs:
            group.start_epoch(job, 0)
        return [group.next(job, 60).tolist() for job in jobs]

    assert orders() == orders()
    assert len({tuple(order) for order in orders()}) == 3


def test_a_job_whose_name_was_drawn_reads_as_if_alone_beside_others_with_its_set() -> None:
    group = sampling_group("shared-log", 60)
    for job in ("drawn-1", "drawn-2"):
        group.join(job, seed=5, named=False)
        group.start_epoch(job, 0)
        assert group.next(job, 60).tolist() == private_order(60, 5)


def test_of_jobs_whose_names_were_drawn_the_sets_decide_and_the_same_again() -> None:
    def orders(names: str) -> list[list[int]]:
        group = sampling_group("shared-log", 60)
        for place, job in enumerate(names):
            group.join(job, range(10 * place, 10 * place + 40), seed=5, independence=1.0, named=False)
        for job in names:
            group.start_epoch(job, 0)
        return [[index - 10 * place for index in group.next(job, 40)] for place, job in enumerate(names)]

    assert orders("abc") == orders("xyz")
    assert len({tuple(order) for order in orders("abc")}) == 3


# -- classes -------------------------------------------------------------------------------------------------


def test_each_position_reads_the_class_that_the_private_order_has_there() -> None:
    rng = np.random.default_rng(0)
    sets = [np.sort(rng.choice(300, 150, replace=False)) for _ in range(3)]
    classes = sum(np.isin(np.arange(300), s).astype(int) << k for k, s in enumerate(sets))
    group = sampling_group("shared-log", 300, capacity=60)
    group.join("beside")  # so that nobody begins alone
    readings = run_jobs(group, [TimedJob(members=s, speed=1 + k) for k, s in enumerate(sets)])
    for k, (members, reading) in enumerate(zip(sets, readings)):
        private = members[order_among_others(150, 10_007 * k, str(k))]
        assert (classes[reading.orders[0]] == classes[private]).all()
    assert hit_rate(readings) > 20


@settings(deadline=None, max_examples=50)
@given(
    drawn=st.integers(1, 39),
    beside=st.integers(0, 39),
    members=st.frozensets(st.integers(0, 39), min_size=1, max_size=39),
)
def test_a_set_that_comes_later_changes_no_class_of_what_is_left(
    drawn: int, beside: int, members: frozenset[int]
) -> None:
    group = sampling_group("shared-log", 40, capacity=15)
    low = range(25)
    for job, indices in (("a", None), ("low", low), ("b", None)):
        group.join(job, indices, seed=len(job), batch_size=4)
        group.start_epoch(job, 0)
    if beside:
        group.draw("b", beside)
    order = group.next("a", drawn).tolist()
    group.join("late", sorted(members))
    group.start_epoch("late", 0)
    group.next("late", 5)
    order += group.next("a", 40).tolist()
    assert sorted(order) == list(range(40))
    assert [x in low for x in order] == [x in low for x in private_order(40, 1)]


# -- directory -----------------------------------------------------------------------------------------------


def test_a_resumed_job_goes_on_in_its_order_or_in_a_new_one() -> None:
    group = new_group(a={"seed": 7})
    order = private_order(60, 7)
    group.start_epoch("a", 0, done=order[:20])
    assert group.next("a", 60).tolist() == order[20:]
    group.start_epoch("a", 0, done=order[1:21])
    rest = group.next("a", 60).tolist()
    assert sorted(rest) == sorted(order[:1] + order[21:])
    assert rest != order[:1] + order[21:]
    group.start_epoch("a", 0, done=order[1:21])
    assert group.next("a", 60).tolist() == rest


def test_leaving_frees_what_only_the_leaver_needed() -> None:
    group = new_group(capacity=8, a={"seed": 1}, b={"seed": 2}, c={"seed": 3})
    group.draw("a", 8)
    group.draw("b", 8)
    group.leave("c")
    evicted = group.draw("a", 8).evicted
    assert len(evicted) == 8


# -- overlap: deterministic, no clock ------------------------------------------------------------------------


def overlap(
    starts: tuple[float, ...], speeds: tuple[float, ...], *, share: float, epochs: int = 1, seeds: int = 2
) -> float:
    """Mean hit rate in percent of four jobs with a directory for `share` of the samples."""
    rates = []
    for seed in range(seeds):
        group = sampling_group("shared-log", SAMPLES, capacity=round(share * SAMPLES), seed=seed)
        jobs = [TimedJob(start * SAMPLES, speed, epochs=epochs) for start, speed in zip(starts, speeds)]
        rates.append(hit_rate(run_jobs(group, jobs, seed)))
    return float(np.mean(rates))


SAME_START, SAME_SPEED = (0.0,) * 4, (1.0,) * 4


@pytest.mark.parametrize(
    ("starts", "speeds", "at_least"),
    [
        (SAME_START, SAME_SPEED, 75.0),
        (STAGGER, SAME_SPEED, 50.5),
        (SAME_START, SPEEDS, 55.5),
        (STAGGER, SPEEDS, 42.5),
    ],
    ids=["same1", "same2", "speed1", "speed2"],
)
def test_orders_overlap_nearly_as_much_as_can_be(
    starts: tuple[float, ...], speeds: tuple[float, ...], at_least: float
) -> None:
    assert overlap(starts, speeds, share=0.05) >= at_least


@pytest.mark.parametrize(
    ("starts", "speeds", "at_least"),
    [(STAGGER, SAME_SPEED, 72.0), (SAME_START, SPEEDS, 62.0)],
    ids=["same2", "speed1"],
)
def test_a_larger_cache_carries_over_to_the_next_epochs(
    starts: tuple[float, ...], speeds: tuple[float, ...], at_least: float
) -> None:
    assert overlap(starts, speeds, share=0.25, epochs=4, seeds=1) >= at_least
