"""A cache of two parts: the first kept once for all, the rest drawn for each job and epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.invariants import validate
from torch_dpflow.caches import make_policy
from torch_dpflow.cluster.cache.objects import Arrival, CacheInstruction, Cancel, Load, Serve
from torch_dpflow.cluster.cache.sample_cache import SampleCache
from torch_dpflow.errors import UsageError


@dataclass(frozen=True)
class Value:
    """An output of the cacheable stage, or a sample that a draw made of one."""

    key: int
    draw: int | None = None
    nbytes: int = 10
    is_sample: bool = True


def make_cache(*, capacity: int = 1 << 20, concurrency: int = 8, policy: str | None = "lru") -> SampleCache:
    make = None if policy is None else lambda budget: make_policy(policy, max_bytes=budget)
    cache = SampleCache(capacity_bytes=capacity, concurrency=concurrency, repeatable=False, staged=True, policy=make)
    for job in ("a", "b"):
        cache.join(job)
    return cache


def do(cache: SampleCache, load: Load, **fields: Any) -> list[CacheInstruction]:
    """A worker does what it is told."""
    draw = None if load.input is None else load.draw
    value = Value(load.key, draw, **fields)
    return cache.loaded([Arrival(load.load, value, value.nbytes, keep=value.is_sample)])


def test_the_first_part_is_loaded_once_and_the_rest_drawn_for_each_draw() -> None:
    cache = make_cache()
    (first,) = cache.want("a", [(0, 7)], draw=3)
    assert (first.key, first.input) == (7, None)
    assert cache.want("b", [(0, 7)], draw=4) == []
    rests = do(cache, first)
    assert [(one.key, one.draw, one.input) for one in rests] == [(7, 3, Value(7)), (7, 4, Value(7))]
    assert cache.fetch("a", 1, [0]) == []
    assert do(cache, rests[0]) == [Serve(1, [(0, Value(7, 3))])]
    assert do(cache, rests[1]) == []
    assert cache.fetch("b", 2, [0]) == [Serve(2, [(0, Value(7, 4))])]
    cache.release("a", [0])
    (again,) = cache.want("a", [(1, 7)], draw=5)
    assert (again.draw, again.input) == (5, Value(7))
    figures = cache.statistics()
    assert (figures.loads, figures.drawn, figures.jobs) == (1, 3, 2)


def test_one_draw_serves_all_who_ask_for_it_and_goes_with_the_last() -> None:
    cache = make_cache(policy=None)
    (first,) = cache.want("a", [(0, 7), (1, 7)], draw=3)
    assert cache.want("b", [(0, 7)], draw=3) == []
    (rest,) = do(cache, first)
    assert do(cache, rest) == []
    served = Value(7, 3)
    assert cache.fetch("a", 1, [0, 1]) == [Serve(1, [(0, served), (1, served)])]
    cache.release("a", [0, 1])
    assert cache.fetch("b", 2, [0]) == [Serve(2, [(0, served)])]
    cache.release("b", [0])
    assert cache.statistics().held_bytes == 0


def test_a_first_part_that_fails_is_told_to_all_and_not_kept() -> None:
    cache = make_cache()
    (first,) = cache.want("a", [(0, 7)], draw=3)
    cache.want("b", [(0, 7)], draw=4)
    cache.fetch("a", 1, [0])
    cache.fetch("b", 2, [0])
    failed = Value(7, None, is_sample=False)
    assert do(cache, first, is_sample=False) == [Serve(1, [(0, failed)]), Serve(2, [(0, failed)])]
    cache.release("a", [0])
    cache.release("b", [0])
    assert cache.statistics().held_bytes == 0
    (again,) = cache.want("a", [(1, 7)], draw=3)
    assert again.input is None


def test_a_rest_that_fails_is_told_and_the_first_part_stays() -> None:
    cache = make_cache()
    (first,) = cache.want("a", [(0, 7)], draw=3)
    (rest,) = do(cache, first)
    cache.fetch("a", 1, [0])
    assert do(cache, rest, is_sample=False) == [Serve(1, [(0, Value(7, 3, is_sample=False))])]
    cache.release("a", [0])
    (again,) = cache.want("a", [(1, 7)], draw=3)
    assert again.input == Value(7)


def test_what_nobody_wants_any_more_is_cancelled_at_either_stage() -> None:
    cache = make_cache()
    (first,) = cache.want("a", [(0, 7)], draw=3)
    assert cache.release("a", [0]) == [Cancel([first.load])]
    assert do(cache, first) == []
    (first,) = cache.want("a", [(1, 7)], draw=3)
    (rest,) = do(cache, first)
    assert cache.leave("a") == [Cancel([rest.load])]
    assert do(cache, rest) == []
    assert cache.statistics().cached == 1


def test_a_job_may_read_the_first_part_alone() -> None:
    cache = make_cache()
    (first,) = cache.want("a", [(0, 7)], draw=None)
    cache.fetch("a", 1, [0])
    assert do(cache, first) == [Serve(1, [(0, Value(7))])]
    cache.release("a", [0])
    (rest,) = cache.want("b", [(0, 7)], draw=3)
    assert rest.input == Value(7)
    with pytest.raises(UsageError, match="join as two jobs"):
        cache.want("a", [(1, 7)], draw=3)
    with pytest.raises(UsageError, match="join as two jobs"):
        cache.want("b", [(1, 7)], draw=None)


class Readers(RuleBasedStateMachine):
    """Jobs that want, fetch, release, leave; workers that finish in any order. Nobody waits for ever."""

    JOBS = ("a", "b", "c")

    @initialize(capacity=st.integers(5, 200), concurrency=st.integers(1, 6), policy=st.sampled_from([None, "lru"]))
    def begin(self, capacity: int, concurrency: int, policy: str | None) -> None:
        self.cache = make_cache(capacity=capacity, concurrency=concurrency, policy=policy)
        self.cache.join("c")
        self.loads: dict[int, Load] = {}
        #: By job, its tickets with the key and draw of each; "c" reads outputs of the cacheable stage.
        self.wants: dict[str, dict[int, tuple[int, int | None]]] = {job: {} for job in self.JOBS}
        self.requests: dict[int, tuple[str, list[int]]] = {}
        self.tickets = self.numbers = 0
        self.broken = {3}

    def follow(self, instructions: list[CacheInstruction]) -> None:
        for one in instructions:
            match one:
                case Load():
                    assert one.input is None or one.input == Value(one.key, nbytes=self.size(one.key))
                    self.loads[one.load] = one
                case Cancel(loads):
                    for load in loads:
                        self.loads.pop(load, None)
                case Serve(request, samples):
                    job, tickets = self.requests.pop(request)
                    for ticket, value in samples:
                        assert ticket in tickets
                        key, draw = self.wants[job][ticket]
                        assert value.key == key
                        assert (value.draw == draw) == value.is_sample or draw is None
                        self.wants[job].pop(ticket)
                    if samples:
                        self.follow(self.cache.release(job, [ticket for ticket, _ in samples]))

    @staticmethod
    def size(key: int) -> int:
        return 4 + 7 * key

    @rule(
        job=st.sampled_from(JOBS),
        keys=st.lists(st.integers(0, 5), min_size=1, max_size=4),
        draw=st.integers(0, 2),
    )
    def want(self, job: str, keys: list[int], draw: int) -> None:
        chosen = None if job == "c" else draw
        wants = []
        for key in keys:
            self.tickets += 1
            self.wants[job][self.tickets] = (key, chosen)
            wants.append((self.tickets, key))
        self.follow(self.cache.want(job, wants, chosen))

    @rule(job=st.sampled_from(JOBS), count=st.integers(1, 4))
    def fetch(self, job: str, count: int) -> None:
        busy = {ticket for other, tickets in self.requests.values() if other == job for ticket in tickets}
        tickets = [ticket for ticket in self.wants[job] if ticket not in busy][:count]
        if tickets:
            self.numbers += 1
            self.requests[self.numbers] = (job, tickets)
            self.follow(self.cache.fetch(job, self.numbers, tickets))

    @precondition(lambda self: getattr(self, "loads", None))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        load = self.loads.pop(data.draw(st.sampled_from(sorted(self.loads))))
        fine = load.key not in self.broken or load.input is not None
        self.follow(do(self.cache, load, nbytes=self.size(load.key), is_sample=fine))

    @rule(job=st.sampled_from(JOBS), data=st.data())
    def give_up(self, job: str, data: st.DataObject) -> None:
        busy = {ticket for other, tickets in self.requests.values() if other == job for ticket in tickets}
        free = [ticket for ticket in self.wants[job] if ticket not in busy]
        if free:
            ticket = data.draw(st.sampled_from(free))
            del self.wants[job][ticket]
            self.follow(self.cache.release(job, [ticket]))

    @rule(job=st.sampled_from(JOBS))
    def come_anew(self, job: str) -> None:
        self.wants[job] = {}
        self.follow(self.cache.leave(job))
        self.cache.join(job)

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "cache"):
            validate(self.cache)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for job in self.JOBS:
            while self.wants[job]:
                before = len(self.wants[job])
                self.fetch(job, 2)
                while self.loads and any(other == job for other, _ in self.requests.values()):
                    load = self.loads.pop(min(self.loads))
                    fine = load.key not in self.broken or load.input is not None
                    self.follow(do(self.cache, load, nbytes=self.size(load.key), is_sample=fine))
                    validate(self.cache)
                assert len(self.wants[job]) < before or self.loads, "a job waits and nothing is under way"


TestReaders = Readers.TestCase
TestReaders.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
