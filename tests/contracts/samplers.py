"""The contract suite of sampling strategies: subclass `SamplingContract`, make a group, and let pytest collect it.

::

    class TestMyStrategy(SamplingContract):
        def make_group(self, size, capacity, seed):
            return MyGroup(size, capacity=capacity, seed=seed)
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.invariants import validate
from torch_dpflow.errors import OptionError, OptionTypeError, UsageError
from torch_dpflow.samplers.group import Draw, SamplingGroup
from torch_dpflow.samplers.indices import IndexArray

#: From size, capacity and seed to a new group.
MakeGroup = Callable[[int, int, int], SamplingGroup]

_JOBS = st.sampled_from(["a", "b", "c", "d", "e"])
_SIZE = 40


class SamplingContract:
    """The contract of `torch_dpflow.samplers.group`, as tests."""

    #: How many random sequences of calls are tried, and their length.
    examples = 30
    calls = 60

    def make_group(self, size: int, capacity: int, seed: int) -> SamplingGroup:
        """A new group over `size` samples."""
        raise NotImplementedError(f"{type(self).__name__} must say how a group is made")

    def test_epochs_are_permutations_under_any_history(self) -> None:
        """Draws repeat nothing and omit nothing; a pickled group continues like its original."""
        machine = type("History", (GroupHistory,), {"make_group": staticmethod(self.make_group)})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=self.calls,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )

    def test_speed_is_measured_from_the_times_of_draws(self) -> None:
        group = self.make_group(6000, 60, 0)
        group.join("a", speed=1.0)
        group.start_epoch("a", 0)
        for k in range(50):
            group.draw("a", 100, now=3.0 + k / 4)
            group.draw("a", 20, now=3.0 + k / 4)
        assert group._member("a").speed == pytest.approx(4 * 120, rel=0.01)

    def test_equal_calls_give_equal_draws(self) -> None:
        drawn = [_interleaved(self.make_group(200, 20, 7)) for _ in range(2)]
        assert drawn[0] == drawn[1]

    def test_successive_epochs_differ(self) -> None:
        group = self.make_group(200, 20, 0)
        group.join("a", seed=3)
        orders = []
        for epoch in range(2):
            group.start_epoch("a", epoch)
            orders.append(group.next("a", 200).tolist())
        assert sorted(orders[0]) == sorted(orders[1]) == list(range(200))
        assert orders[0] != orders[1]

    def test_a_draw_may_exceed_the_capacity_and_the_epoch(self) -> None:
        group = self.make_group(50, 3, 0)
        for job in ("a", "b"):
            group.join(job, batch_size=4)
            group.start_epoch(job, 0)
        for job in ("a", "b"):
            assert sorted(group.next(job, 1000).tolist()) == list(range(50))
            assert len(group.next(job, 1)) == 0

    @pytest.mark.parametrize("indices", [[3, -1], [0, 60], [1, 2, 1], []])
    def test_a_set_of_wrong_indices_is_refused(self, indices: list[int]) -> None:
        group = self.make_group(60, 10, 0)
        with pytest.raises(OptionError):
            group.join("a", indices)
        assert group.jobs == ()

    @pytest.mark.parametrize("indices", [[0.5], [[1, 2]], "abc", 7])
    def test_an_invalid_set_of_indices_is_refused(self, indices: Any) -> None:
        with pytest.raises(OptionTypeError):
            self.make_group(60, 10, 0).join("a", indices)

    @pytest.mark.parametrize(
        "option",
        [{"batch_size": 0}, {"seed": -1}, {"independence": 1.5}, {"independence": -0.1}, {"speed": 0.0}],
    )
    def test_numbers_out_of_range_are_refused(self, option: dict[str, Any]) -> None:
        with pytest.raises(OptionError, match=next(iter(option))):
            self.make_group(60, 10, 0).join("a", **option)

    @pytest.mark.parametrize("bad", [{"size": 0}, {"capacity": 0}, {"seed": -1}])
    def test_a_group_needs_sensible_numbers(self, bad: dict[str, int]) -> None:
        with pytest.raises(OptionError, match=next(iter(bad))):
            self.make_group(**{"size": 60, "capacity": 10, "seed": 0, **bad})

    def test_joining_twice_is_refused(self) -> None:
        group = self.make_group(60, 10, 0)
        group.join("a")
        with pytest.raises(UsageError, match="member already"):
            group.join("a")
        assert group.jobs == ("a",)

    def test_unknown_jobs_and_those_that_left_are_refused(self) -> None:
        group = self.make_group(60, 10, 0)
        _start(group, "a")
        group.leave("a")
        for call in (group.leave, group.remaining, group.lookahead):
            for job in ("a", "unknown"):
                with pytest.raises(UsageError, match=f"'{job}' is no member"):
                    call(job)
        with pytest.raises(UsageError, match="no member"):
            group.draw("a", 1)
        with pytest.raises(UsageError, match="no member"):
            group.start_epoch("a", 0)

    def test_drawing_needs_an_epoch_and_a_number(self) -> None:
        group = self.make_group(60, 10, 0)
        group.join("a")
        assert group.remaining("a") == 0
        with pytest.raises(UsageError, match="start_epoch"):
            group.draw("a", 1)
        with pytest.raises(UsageError, match="start_epoch"):
            group.lookahead("a")
        group.start_epoch("a", 0)
        with pytest.raises(OptionError, match="n="):
            group.draw("a", 0)
        assert group.remaining("a") == 60

    def test_done_must_be_of_the_job(self) -> None:
        group = self.make_group(60, 10, 0)
        group.join("a", range(10))
        for wrong in ([10], [1, 1], [-1]):
            with pytest.raises(OptionError, match="done has"):
                group.start_epoch("a", 0, done=wrong)
        with pytest.raises(OptionError, match="epoch"):
            group.start_epoch("a", -1)
        assert group.remaining("a") == 0


class GroupHistory(RuleBasedStateMachine):
    """A group beside a simple model of its jobs, and sometimes a twin from its pickle."""

    make_group: MakeGroup

    @initialize(capacity=st.integers(1, _SIZE), seed=st.integers(0, 1000))
    def start(self, capacity: int, seed: int) -> None:
        self.capacity, self.seed = capacity, seed
        self.group = self.make_group(_SIZE, capacity, seed)
        self.twin: SamplingGroup | None = None
        #: The jobs' sets, and what is left of the epochs that were started.
        self.sets: dict[str, frozenset[int]] = {}
        self.left: dict[str, set[int]] = {}
        self.residents: set[int] = set()

    @rule(
        job=_JOBS,
        members=st.none() | st.frozensets(st.integers(0, _SIZE - 1), min_size=1),
        seed=st.integers(0, 3),
        batch_size=st.integers(1, 9),
        independence=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
    )
    def join(self, job: str, members: frozenset[int] | None, seed: int, batch_size: int, independence: float) -> None:
        if job in self.sets:
            with pytest.raises(UsageError):
                self.group.join(job)
            return
        indices = None if members is None else sorted(members, reverse=True)
        for group in self._groups():
            group.join(job, indices, seed=seed, batch_size=batch_size, independence=independence)
        self.sets[job] = frozenset(range(_SIZE)) if members is None else members

    @rule(job=_JOBS)
    def leave(self, job: str) -> None:
        if job not in self.sets:
            with pytest.raises(UsageError):
                self.group.leave(job)
            return
        for group in self._groups():
            group.leave(job)
        del self.sets[job]
        self.left.pop(job, None)

    @rule(job=_JOBS, epoch=st.integers(0, 3), read=st.integers(0, 5))
    def start_epoch(self, job: str, epoch: int, read: int) -> None:
        if job not in self.sets:
            return
        done = sorted(self.sets[job])[:read]
        for group in self._groups():
            group.start_epoch(job, epoch, done=done or None)
        self.left[job] = set(self.sets[job]) - set(done)

    @rule(job=_JOBS, n=st.integers(1, 25), now=st.none() | st.floats(0, 100))
    def draw(self, job: str, n: int, now: float | None) -> None:
        if job not in self.left:
            with pytest.raises(UsageError):
                self.group.draw(job, n)
            return
        draws = [group.draw(job, n, now) for group in self._groups()]
        for other in draws[1:]:
            _same_draws(draws[0], other)
        self._take(job, n, draws[0])

    @rule(job=_JOBS)
    def look_ahead(self, job: str) -> None:
        """A lookahead has no more than is left, draws nothing, and what it calls certain comes next."""
        if job not in self.left:
            return
        # On the group alone: if it changed anything, the twin would differ.
        seen = self.group.lookahead(job)
        left = self.left[job]
        assert seen.length - seen.position == len(left) == self.group.remaining(job)
        seen_keys = seen.certain.tolist() + seen.likely.tolist()
        assert len(set(seen_keys)) == len(seen_keys)
        assert set(seen_keys) <= left
        if seen.complete and left:
            n = (len(left) + 1) // 2
            certain = seen.certain[:n].tolist()
            drawn = [group.draw(job, n) for group in self._groups()]
            assert drawn[0].indices.tolist() == certain
            self._take(job, n, drawn[0])

    @rule()
    @precondition(lambda self: self.sets)
    def make_a_twin(self) -> None:
        self.twin = pickle.loads(pickle.dumps(self.group))
        assert self.twin.jobs == self.group.jobs == tuple(self.sets)

    @rule(job=_JOBS)
    def refuse_wrong_calls(self, job: str) -> None:
        """Make wrong calls, which must change nothing; otherwise the twin would differ."""
        if job in self.sets:
            with pytest.raises(OptionError):
                self.group.draw(job, 0) if job in self.left else self.group.start_epoch(job, -1)
            with pytest.raises(OptionError):
                self.group.start_epoch(job, 0, done=[_SIZE])
        else:
            with pytest.raises(OptionError):
                self.group.join(job, [0, 0])

    @invariant()
    def holds_what_must_always_hold(self) -> None:
        if hasattr(self, "group"):
            for group in self._groups():
                validate(group)

    def teardown(self) -> None:
        for job in list(getattr(self, "left", ())):
            self.draw(job, _SIZE, None)
            assert not self.left[job]
            assert self.group.remaining(job) == 0

    def _groups(self) -> list[SamplingGroup]:
        return [self.group] if self.twin is None else [self.group, self.twin]

    def _take(self, job: str, n: int, drawn: Draw) -> None:
        """Compare a draw with the model, and record it in the model."""
        indices, left = drawn.indices, self.left[job]
        assert indices.dtype == np.int64
        assert len(indices) == min(n, len(left)), "as many as requested, or all that are left"
        picked = set(indices.tolist())
        assert len(picked) == len(indices), "no sample twice in one draw"
        assert picked <= left, "nothing but what the job still has to read in this epoch"
        self.left[job] = left - picked
        self._check_directory(drawn)

    def _check_directory(self, drawn: Draw) -> None:
        assert (drawn.led is not None) == self.group.keeps_directory
        if drawn.led is None:
            assert not len(drawn.evicted)
            return
        loaded, evicted = set(drawn.indices[drawn.led].tolist()), set(drawn.evicted.tolist())
        assert set(drawn.indices.tolist()) & self.residents == set(drawn.indices[~drawn.led].tolist())
        assert len(evicted) == len(drawn.evicted)
        assert evicted <= self.residents | loaded
        self.residents = (self.residents | loaded) - evicted
        assert len(self.residents) <= self.capacity


def _same_draws(one: Draw, other: Draw) -> None:
    np.testing.assert_array_equal(one.indices, other.indices)
    np.testing.assert_array_equal(one.evicted, other.evicted)
    assert (one.led is None) == (other.led is None)
    if one.led is not None and other.led is not None:
        np.testing.assert_array_equal(one.led, other.led)


def _start(group: SamplingGroup, *jobs: str) -> None:
    for job in jobs:
        group.join(job, batch_size=4)
        group.start_epoch(job, 0)


def _interleaved(group: SamplingGroup) -> list[list[int]]:
    """Two jobs with sets that overlap in part, of unequal speed."""
    group.join("slow", range(150), seed=1, batch_size=4)
    group.join("fast", range(50, 200), seed=2, batch_size=8)
    drawn: list[IndexArray] = []
    for epoch in range(2):
        for job in ("slow", "fast"):
            group.start_epoch(job, epoch)
        while group.remaining("slow") or group.remaining("fast"):
            drawn += [group.next("slow", 4), group.next("fast", 8)]
    return [indices.tolist() for indices in drawn]
