"""What a cache says to its owner, call by call."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from tests.invariants import validate
from torch_dpflow.caches import make_policy
from torch_dpflow.cluster.cache.objects import Arrival, CacheEntry, Cancel, Load, Serve
from torch_dpflow.cluster.cache.sample_cache import SampleCache
from torch_dpflow.errors import OptionError, UsageError


def make_cache(*, policy: str | None = None, capacity: int = 1 << 20, **options: Any) -> SampleCache:
    make = None if policy is None else lambda budget: make_policy(policy, max_bytes=budget)
    defaults: dict[str, Any] = {"concurrency": 8, "repeatable": False}
    cache = SampleCache(capacity_bytes=capacity, policy=make, **{**defaults, **options})
    for job in ("a", "b"):
        cache.join(job)
    return cache


def test_a_sample_is_loaded_when_it_is_wanted_and_served_when_all_of_a_fetch_are_there() -> None:
    cache = make_cache()
    assert cache.want("a", [(0, 7), (1, 9)], draw=3) == [Load(1, 7, 3), Load(2, 9, 3)]
    assert cache.fetch("a", 50, [0, 1]) == []
    assert cache.loaded([Arrival(2, "nine", 10)]) == []
    assert cache.loaded([Arrival(1, "seven", 10)]) == [Serve(50, [(0, "seven"), (1, "nine")])]


def test_a_fetch_of_what_is_there_is_answered_at_once_and_again_if_it_is_repeated() -> None:
    cache = make_cache()
    cache.want("a", [(0, 7)], draw=3)
    cache.loaded([Arrival(1, "seven", 10)])
    assert cache.fetch("a", 50, [0]) == [Serve(50, [(0, "seven")])]
    assert cache.fetch("a", 51, [0]) == [Serve(51, [(0, "seven")])]


def test_a_want_that_comes_twice_counts_once() -> None:
    cache = make_cache()
    cache.want("a", [(0, 7)], draw=3)
    assert cache.want("a", [(0, 7)], draw=3) == []
    assert cache.release("a", [0]) == [Cancel([1])]


def test_two_jobs_share_one_load_and_it_goes_when_both_have_it() -> None:
    cache = make_cache()
    cache.want("a", [(0, 7)], draw=3)
    assert cache.want("b", [(0, 7)], draw=4) == []
    cache.loaded([Arrival(1, "seven", 10)])
    assert cache.fetch("a", 50, [0]) == [Serve(50, [(0, "seven")])]
    cache.release("a", [0])
    assert cache.statistics().held_bytes == 10
    assert cache.fetch("b", 51, [0]) == [Serve(51, [(0, "seven")])]
    cache.release("b", [0])
    assert cache.statistics().held_bytes == 0


def test_a_job_is_never_given_one_draw_twice() -> None:
    cache = make_cache()
    cache.want("a", [(0, 7)], draw=3)
    cache.want("b", [(0, 7)], draw=4)
    cache.loaded([Arrival(1, "seven", 10)])
    cache.fetch("a", 50, [0])
    cache.release("a", [0])
    assert cache.want("a", [(1, 7)], draw=5) == [Load(2, 7, 5)]


def test_a_draw_is_kept_for_a_job_that_has_not_had_it_and_goes_with_the_last() -> None:
    cache = make_cache(policy="lru")
    cache.want("a", [(0, 7)], draw=3)
    cache.loaded([Arrival(1, "seven", 10)])
    cache.release("a", [0])
    assert cache.statistics().cached == 1
    assert cache.want("b", [(0, 7)], draw=4) == []
    assert cache.statistics().cached == 0
    cache.release("b", [0])
    assert cache.statistics().held_bytes == 0


def test_a_draw_kept_for_a_job_goes_when_that_job_leaves() -> None:
    cache = make_cache(policy="lru")
    cache.want("a", [(0, 7)], draw=3)
    cache.loaded([Arrival(1, "seven", 10)])
    cache.release("a", [0])
    cache.leave("b")
    assert cache.statistics().held_bytes == 0


def test_what_can_be_repeated_is_kept_for_everybody() -> None:
    cache = make_cache(policy="lru", repeatable=True)
    cache.want("a", [(0, 7)], draw=3)
    cache.loaded([Arrival(1, "seven", 10)])
    cache.release("a", [0])
    assert cache.want("a", [(1, 7)], draw=5) == []
    assert cache.fetch("a", 50, [1]) == [Serve(50, [(1, "seven")])]


def test_a_failed_load_is_served_and_not_kept() -> None:
    cache = make_cache(policy="lru", repeatable=True)
    cache.want("a", [(0, 7)], draw=3)
    cache.fetch("a", 50, [0])
    assert cache.loaded([Arrival(1, "no such file", 10, keep=False)]) == [Serve(50, [(0, "no such file")])]
    cache.release("a", [0])
    assert cache.want("a", [(1, 7)], draw=3) == [Load(2, 7, 3)]


def test_what_a_job_waits_for_is_loaded_before_what_others_want_later() -> None:
    cache = make_cache(concurrency=1)
    assert cache.want("a", [(ticket, ticket) for ticket in range(5)], draw=3) == [Load(1, 0, 3)]
    cache.want("b", [(ticket, 10 + ticket) for ticket in range(5)], draw=4)
    cache.fetch("b", 50, [4])
    assert cache.loaded([Arrival(1, "zero", 10)]) == [Load(2, 14, 4)]


def test_what_is_far_ahead_makes_room_for_what_a_job_waits_for_and_is_loaded_again() -> None:
    cache = make_cache(capacity=20)
    cache.want("a", [(0, 0), (1, 1)], draw=3)
    assert cache.loaded([Arrival(1, "zero", 10)]) == [Load(2, 1, 3)]
    assert cache.loaded([Arrival(2, "one", 10)]) == []
    assert cache.want("b", [(0, 5)], draw=4) == []
    assert cache.fetch("b", 50, [0]) == [Load(3, 5, 4)]
    assert cache.loaded([Arrival(3, "five", 10)]) == [Serve(50, [(0, "five")])]
    assert cache.statistics().held_bytes == 20
    assert cache.fetch("a", 51, [0]) == [Serve(51, [(0, "zero")])]
    assert cache.release("b", [0]) == [Load(4, 1, 3)]


def test_without_room_a_fetch_is_answered_with_what_is_there() -> None:
    cache = make_cache(capacity=20)
    cache.want("a", [(ticket, ticket) for ticket in range(3)], draw=3)
    cache.fetch("a", 50, [0, 1, 2])
    assert cache.loaded([Arrival(1, "zero", 15)]) == [Serve(50, [(0, "zero")])]
    assert cache.fetch("a", 51, [1, 2]) == []
    assert cache.release("a", [0]) == [Load(2, 1, 3)]


def test_a_sample_larger_than_all_room_is_loaded_alone() -> None:
    cache = make_cache(capacity=20)
    cache.want("a", [(0, 0), (1, 1)], draw=3)
    cache.fetch("a", 50, [0, 1])
    assert cache.loaded([Arrival(1, "zero", 500)]) == [Serve(50, [(0, "zero")])]
    assert cache.fetch("a", 51, [1]) == []
    assert cache.release("a", [0]) == [Load(2, 1, 3)]


def test_a_job_that_leaves_cancels_what_only_it_wanted() -> None:
    cache = make_cache()
    cache.want("a", [(0, 0), (1, 1)], draw=3)
    cache.want("b", [(0, 1)], draw=4)
    cache.fetch("a", 50, [0, 1])
    assert cache.leave("a") == [Serve(50, []), Cancel([1])]
    assert cache.loaded([Arrival(1, "zero", 10)]) == []
    assert cache.leave("a") == []


def test_a_ticket_that_is_given_up_does_not_hold_up_its_fetch() -> None:
    cache = make_cache()
    cache.want("a", [(0, 0), (1, 1)], draw=3)
    cache.fetch("a", 50, [0, 1])
    cache.loaded([Arrival(1, "zero", 10)])
    assert cache.release("a", [1]) == [Serve(50, [(0, "zero")]), Cancel([2])]


def test_what_others_own_is_known_by_its_keys_and_given_up_at_once() -> None:
    cache = make_cache()
    cache.want("a", [(0, 3), (1, 7), (2, 9)], draw=3)
    cache.fetch("a", 50, [0, 1])
    cache.loaded([Arrival(1, "three", 10)])
    assert cache.tickets_outside("a", 0, 7) == [1, 2]
    assert cache.release("a", [1, 2]) == [Serve(50, [(0, "three")]), Cancel([2, 3])]
    assert cache.tickets_outside("a", 0, 0) == [0]


def test_less_room_takes_from_the_cache_and_from_what_nobody_waits_for() -> None:
    cache = make_cache(policy="lru", capacity=100, repeatable=True)
    cache.want("a", [(ticket, ticket) for ticket in range(4)], draw=3)
    for load in range(1, 5):
        cache.loaded([Arrival(load, "sample", 20)])
    cache.fetch("a", 50, [0])
    cache.release("a", [0])
    assert cache.resize(50) == []
    assert (cache.statistics().held_bytes, cache.statistics().capacity_bytes) == (40, 50)
    assert cache.resize(200) == [Load(5, 3, 3)]
    with pytest.raises(OptionError, match="capacity_bytes=0 is out of range; give an int >= 1"):
        cache.resize(0)


def test_what_a_job_has_ceased_to_wait_for_does_not_stand_before_what_another_waits_for() -> None:
    cache = make_cache(concurrency=1)
    cache.want("a", [(0, 0), (1, 1)], draw=3)
    cache.want("b", [(0, 1), (1, 2)], draw=4)
    cache.fetch("a", 50, [1])
    assert cache.release("a", [1]) == [Serve(50, [])]
    cache.fetch("b", 51, [1])
    assert cache.loaded([Arrival(1, "zero", 10)]) == [Load(2, 2, 4)]


@pytest.mark.parametrize("wrong", [{"capacity": 0}, {"concurrency": 0}])
def test_limits_below_one_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(OptionError, match="=0 is out of range; give an int >= 1"):
        make_cache(**wrong)


def test_wrong_calls_say_what_to_do() -> None:
    cache = make_cache()
    with pytest.raises(UsageError, match="'c' has not joined"):
        cache.want("c", [(0, 0)], draw=3)
    with pytest.raises(UsageError, match="ticket 5, which it does not want"):
        cache.fetch("a", 50, [5])
    cache.want("a", [(0, 0)], draw=3)
    cache.fetch("a", 50, [0])
    with pytest.raises(UsageError, match="request 50 is open"):
        cache.fetch("a", 50, [0])


def test_nothing_of_the_samples_that_two_jobs_have_read_is_left() -> None:
    cache = make_cache(policy="lru", capacity=10_000)
    for ticket in range(0, 2000, 2):
        cache.want("a", [(ticket, ticket)], draw=3)
        cache.want("b", [(ticket + 1, ticket)], draw=4)
        cache.loaded([Arrival(ticket // 2 + 1, "value", 10)])
        for request, job in enumerate("ab"):
            assert cache.fetch(job, ticket + request, [ticket + request])
            cache.release(job, [ticket + request])
    assert cache.statistics().loads == 1000
    assert cache.statistics().held_bytes == 0
    objects = sum(type(one) is CacheEntry for one in gc.get_objects())
    assert objects < 100, f"{objects} of 1000 samples are still in memory"


def test_nothing_is_left_of_what_was_wanted_ahead_where_jobs_always_wait() -> None:
    cache = make_cache(concurrency=1)
    cache.want("a", [(ticket, ticket) for ticket in range(10)], draw=3)
    cache.fetch("a", 0, [0])
    for ticket in range(1000):
        cache.want("a", [(ticket + 10, ticket + 10)], draw=3)
        cache.fetch("a", ticket + 1, [ticket + 1])  # before the one before has come
        assert cache.loaded([Arrival(ticket + 1, "value", 10)])
        cache.release("a", [ticket])
    objects = sum(type(one) is CacheEntry for one in gc.get_objects())
    assert objects < 200, f"{objects} of 1000 samples are still in memory"


def test_what_comes_together_serves_who_waits_and_makes_way_for_as_many_loads() -> None:
    cache = make_cache(concurrency=2)
    cache.want("a", [(ticket, ticket) for ticket in range(4)], draw=3)
    cache.fetch("a", 50, [0, 1])
    assert cache.loaded([Arrival(1, "zero", 10), Arrival(7, "unknown", 10), Arrival(2, "one", 10)]) == [
        Serve(50, [(0, "zero"), (1, "one")]),
        Load(3, 2, 3),
        Load(4, 3, 3),
    ]


def test_what_was_read_from_the_cache_and_is_wanted_ahead_again_makes_room_for_what_a_job_waits_for() -> None:
    cache = make_cache(policy="lru", capacity=10, repeatable=True)
    (first,) = cache.want("a", [(0, 7)], draw=3)
    cache.fetch("a", 50, [0])
    cache.loaded([Arrival(first.load, "seven", 10)])
    cache.release("a", [0])
    cache.want("a", [(1, 7)], draw=3)
    validate(cache)
    cache.want("b", [(0, 9)], draw=3)
    (second,) = cache.fetch("b", 51, [0])
    assert second.key == 9
