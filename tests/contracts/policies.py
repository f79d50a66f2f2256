"""The contract suite of cache policies: subclass `PolicyContract`, make a policy, and let pytest collect it.

::

    class TestMyPolicy(PolicyContract):
        def make_policy(self, *, stream, keys, max_items, max_bytes):
            return MyPolicy(max_items=max_items, max_bytes=max_bytes)
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from torch_dpflow.caches.policy import Policy
from torch_dpflow.errors import OptionError
from torch_dpflow.lookahead import Lookahead

_KEYS = 20
_JOBS = st.sampled_from(["a", "b", "c"])
_SEEDS = st.integers(0, 2**32 - 1)


class PolicyContract:
    """The contract of `torch_dpflow.caches.policy`, as tests."""

    #: How many random sequences of calls are tried, and their length.
    examples = 15
    calls = 50

    def make_policy(
        self,
        *,
        stream: npt.NDArray[np.int64],
        keys: int,
        max_items: int | None = None,
        max_bytes: int | None = None,
    ) -> Policy:
        """A new policy for keys below `keys`, which are read in the order of `stream`."""
        raise NotImplementedError(f"{type(self).__name__} must say how a policy is made")

    def test_keeps_its_budget_and_its_counts_under_any_history(self) -> None:
        """Evicted keys were resident, the rest fits the budget, statistics add up, forgotten jobs are unknown."""
        machine = type("History", (PolicyHistory,), {"make_policy": staticmethod(self.make_policy)})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=self.calls,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )

    def test_fills_up_before_anything_goes(self) -> None:
        policy = self._reading(range(8), max_items=8)
        for key in range(8):
            assert not policy.access(key, "a")
            assert list(policy.admit(key)) == []
        assert sorted(policy) == list(range(8))

    def test_refuses_what_is_larger_than_the_budget(self) -> None:
        policy = self._reading([0, 1], max_bytes=100)
        policy.access(0, "a")
        assert list(policy.admit(0, 60)) == []
        policy.access(1, "a")
        assert list(policy.admit(1, 101)) == [1]
        statistics = policy.statistics()
        assert (statistics.refused, statistics.items, statistics.bytes) == (1, 1, 60)
        assert list(policy) == [0]

    def test_takes_the_new_size_of_a_resident_key(self) -> None:
        policy = self._reading([0], max_bytes=100)
        policy.access(0, "a")
        policy.admit(0, 10)
        assert list(policy.admit(0, 90)) == []
        assert (policy.statistics().bytes, policy.statistics().offered) == (90, 1)
        assert list(policy.admit(0, 101)) == [0]
        assert (policy.statistics().bytes, len(policy)) == (0, 0)

    def test_evicts_every_key_on_request(self) -> None:
        policy = self._reading(range(6), max_items=6)
        for key in range(6):
            policy.access(key, "a")
            policy.admit(key)
        assert sorted(policy.evict() for _ in range(6)) == list(range(6))  # type: ignore[type-var]
        assert policy.evict() is None
        assert policy.statistics().evicted == 6

    def test_keeps_nothing_of_a_forgotten_job(self) -> None:
        policy = self._reading([3, 4], max_items=4)
        job = _HistoryJob()
        gone = weakref.ref(job)
        policy.join(job, weight=2.0)
        policy.hint(job, Lookahead.of_order(np.arange(_KEYS), epoch=0))
        policy.access(3, job)
        policy.admit(3)
        policy.forget(job)
        del job
        gc.collect()
        assert gone() is None
        assert not policy.jobs
        policy.forget("never seen")
        policy.access(4, "b")
        assert policy.jobs == ("b",)

    def test_no_keys_at_all(self) -> None:
        policy = self._reading([], max_items=4)
        nothing = np.empty(0, dtype=np.int64)
        assert policy.access_many(nothing, "a").tolist() == []
        assert policy.admit_many(nothing).tolist() == []
        assert policy.statistics().hit_rate == 0.0

    @pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
    def test_turns_down_a_weight_that_is_none(self, weight: float) -> None:
        policy = self._reading([0], max_items=1)
        with pytest.raises(OptionError, match="weight"):
            policy.join("a", weight=weight)
        assert policy.jobs == ()

    @pytest.mark.parametrize(
        "budgets", [{}, {"max_items": 0}, {"max_bytes": -1}, {"max_items": True}, {"max_bytes": 1.5}]
    )
    def test_turns_down_a_budget_that_is_none(self, budgets: dict[str, Any]) -> None:
        with pytest.raises((OptionError, TypeError), match=r"budget|max_"):
            self._reading([0], **budgets)

    def test_turns_down_negative_keys_and_stays_as_it_was(self) -> None:
        policy = self._reading([0], max_items=2)
        before = policy.statistics()
        for call in (lambda: policy.access(-1, "a"), lambda: policy.admit(-1)):
            with pytest.raises(OptionError, match="-1"):
                call()
        for many in (
            lambda: policy.access_many(np.array([0, -1]), "a"),
            lambda: policy.admit_many(np.array([-1])),
        ):
            with pytest.raises(OptionError, match="-1"):
                many()
        assert policy.statistics() == before

    def test_turns_down_sizes_that_are_none(self) -> None:
        policy = self._reading([0, 1], max_bytes=10)
        with pytest.raises(OptionError, match="size=-1"):
            policy.admit(0, -1)
        for sizes in ([3], [3, -1]):
            with pytest.raises(OptionError, match="size"):
                policy.admit_many(np.array([0, 1]), np.array(sizes))
        assert (len(policy), policy.statistics().offered) == (0, 0)

    def _reading(self, stream: Sequence[int], **budgets: Any) -> Policy:
        return self.make_policy(stream=np.array(stream, dtype=np.int64), keys=_KEYS, **budgets)


class _HistoryJob:
    """A job's name that can be weakly referenced."""


class PolicyHistory(RuleBasedStateMachine):
    """Any sequence of calls, against a dict of the keys that must be resident."""

    make_policy: ClassVar[Any]

    @initialize(
        seed=_SEEDS,
        items=st.none() | st.integers(1, _KEYS),
        size=st.none() | st.integers(1, 60),
    )
    def start(self, seed: int, items: int | None, size: int | None) -> None:
        if items is None and size is None:
            items = 5
        self.max_items, self.max_bytes = items, size
        self.script = np.random.default_rng(seed).integers(0, _KEYS, size=600)
        self.place = 0
        self.policy: Policy = self.make_policy(stream=self.script, keys=_KEYS, max_items=items, max_bytes=size)
        self.resident: dict[int, int] = {}
        self.jobs: dict[str, None] = {}
        self.hits = self.misses = 0

    @rule(job=_JOBS, size=st.integers(1, 15), keep=st.booleans())
    def read(self, job: str, size: int, keep: bool) -> None:
        key = int(self.script[self.place])
        self.place += 1
        hit = self.policy.access(key, job)
        self._note([key], [hit], job)
        if keep and not hit:
            self._offer([key], [size], self.policy.admit(key, size))

    @rule(job=_JOBS, count=st.integers(0, 8), sizes=st.none() | _SEEDS)
    def read_many(self, job: str, count: int, sizes: int | None) -> None:
        keys = self.script[self.place : self.place + count]
        self.place += count
        hits = self.policy.access_many(keys, job)
        assert hits.shape == keys.shape
        if count:
            self._note(keys.tolist(), hits.tolist(), job)
        missed = np.array(list(dict.fromkeys(keys[~hits].tolist())), dtype=np.int64)
        given = None if sizes is None else np.random.default_rng(sizes).integers(1, 15, size=len(missed))
        gone = self.policy.admit_many(missed, given).tolist()
        self._offer(missed.tolist(), [1] * len(missed) if given is None else given.tolist(), gone)

    @rule(key=st.integers(0, _KEYS - 1), size=st.integers(1, 15))
    def load_ahead(self, key: int, size: int) -> None:
        self._offer([key], [size], self.policy.admit(key, size))

    @rule(seed=_SEEDS)
    def offer_with_repeats(self, seed: int) -> None:
        keys = np.random.default_rng(seed).integers(0, _KEYS, size=6)
        gone = self.policy.admit_many(keys).tolist()
        self._offer(keys.tolist(), [1] * 6, gone)

    @rule()
    def evict(self) -> None:
        key = self.policy.evict()
        assert (key is None) == (not self.resident)
        if key is not None:
            del self.resident[key]

    @rule(key=st.integers(0, _KEYS - 1))
    def discard(self, key: int) -> None:
        assert self.policy.discard(key) == (self.resident.pop(key, None) is not None)

    @rule(job=_JOBS, weight=st.sampled_from([0.5, 1.0, 3.0]))
    def join(self, job: str, weight: float) -> None:
        self.policy.join(job, weight=weight)
        self.jobs.setdefault(job)

    @rule(job=_JOBS)
    def forget(self, job: str) -> None:
        self.policy.forget(job)
        self.jobs.pop(job, None)

    @rule(job=_JOBS, seed=_SEEDS)
    def hint(self, job: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        order = rng.permutation(_KEYS)[: rng.integers(1, _KEYS + 1)]
        certain = int(rng.integers(len(order) + 1))
        lookahead = Lookahead(
            epoch=int(rng.integers(3)),
            length=len(order),
            certain=order[:certain],
            likely=order[certain : certain + int(rng.integers(4))],
            members=order if rng.random() < 0.5 else None,
            following=rng.permutation(order) if rng.random() < 0.3 else None,
        )
        self.policy.hint(job, lookahead)
        self.jobs.setdefault(job)

    @invariant()
    def residents_agree(self) -> None:
        assert sorted(self.policy) == sorted(self.resident)
        assert len(self.policy) == len(self.resident)
        assert all((key in self.policy) == (key in self.resident) for key in range(-1, _KEYS + 1))

    @invariant()
    def budget_holds(self) -> None:
        assert self.max_items is None or len(self.resident) <= self.max_items
        assert self.max_bytes is None or sum(self.resident.values()) <= self.max_bytes

    @invariant()
    def books_balance(self) -> None:
        statistics = self.policy.statistics()
        assert (statistics.hits, statistics.misses) == (self.hits, self.misses)
        assert statistics.offered == statistics.admitted + statistics.bypassed + statistics.refused
        assert statistics.items == statistics.admitted - statistics.evicted - statistics.discarded
        assert statistics.items == len(self.resident)
        assert statistics.bytes == sum(self.resident.values())
        assert statistics.jobs == len(self.jobs)

    @invariant()
    def jobs_agree(self) -> None:
        assert self.policy.jobs == tuple(self.jobs)

    def _note(self, keys: list[int], hits: list[bool], job: str) -> None:
        assert hits == [key in self.resident for key in keys]
        self.hits += sum(hits)
        self.misses += len(hits) - sum(hits)
        self.jobs.setdefault(job)

    def _offer(self, keys: list[int], sizes: list[int], gone: Sequence[int]) -> None:
        self.resident.update(zip(keys, sizes))
        assert len(set(gone)) == len(gone), f"{gone} names a key twice"
        assert set(gone) <= set(self.resident), f"{gone} names keys that were neither resident nor offered"
        for key in gone:
            del self.resident[key]
