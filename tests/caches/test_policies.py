"""Every policy keeps the contract, and does what is peculiar to it."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation.opt import OPT
from tests.caches.exact_policies import DefinedPolicyContract, ExactALSD, ExactPolicy, ExactRefCnt
from tests.contracts.policies import PolicyContract
from torch_dpflow.caches.alsd import ALSD
from torch_dpflow.caches.past_reads import LFU, LRU, MinIO
from torch_dpflow.caches.policy import Policy
from torch_dpflow.caches.policy_registry import POLICIES, make_policy
from torch_dpflow.caches.ranked import RankedPolicy
from torch_dpflow.caches.refcnt import RefCnt
from torch_dpflow.errors import OptionError, UsageError
from torch_dpflow.lookahead import Lookahead


class ByName(PolicyContract):
    examples = 10
    policy: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}

    def make_policy(self, *, stream: Any, keys: int, **budgets: Any) -> Policy:
        return make_policy(self.policy, keys=keys, **budgets, **self.options)


class TestLRUContract(ByName):
    policy = "lru"


class TestLFUContract(ByName):
    policy = "lfu"


class TestMinIOContract(ByName):
    policy = "minio"


class TestRefCntContract(ByName, DefinedPolicyContract):
    policy = "refcnt"

    def make_definition(self, **options: Any) -> ExactPolicy:
        return ExactRefCnt(**options)


class TestUseDistanceContract(ByName, DefinedPolicyContract):
    policy = "use-distance"

    def make_definition(self, **options: Any) -> ExactPolicy:
        return ExactALSD(aggregate="certain", **options)


class TestOPTContract(PolicyContract):
    def make_policy(self, *, stream: Any, keys: int, **budgets: Any) -> Policy:
        return OPT(stream=stream, keys=keys, **budgets)


class TestALSDMinContract(ByName, DefinedPolicyContract):
    policy = "alsd"

    def make_definition(self, **options: Any) -> ExactPolicy:
        return ExactALSD(aggregate="min", **options)


class TestALSDMeanContract(ByName, DefinedPolicyContract):
    policy = "alsd"
    options: ClassVar[dict[str, Any]] = {"aggregate": "mean"}

    def make_definition(self, **options: Any) -> ExactPolicy:
        return ExactALSD(aggregate="mean", **options)


@pytest.mark.parametrize(
    "contract", [TestRefCntContract, TestUseDistanceContract, TestALSDMinContract, TestALSDMeanContract]
)
def test_a_queue_in_slabs_gives_up_what_the_definition_says(
    contract: type[DefinedPolicyContract], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RankedPolicy, "front", 2)  # else a handful of keys fills no bucket
    contract().test_evicts_what_its_definition_says()


class TestALSDWithoutKnowingTheKeysContract(PolicyContract):
    def make_policy(self, *, stream: Any, keys: int, **budgets: Any) -> Policy:
        return ALSD(**budgets)


def read(policy: Policy, keys: list[int], job: str = "a") -> list[int]:
    """`job` reads `keys`, and what is missing is offered; returns what went, in order."""
    gone: list[int] = []
    for key in keys:
        if not policy.access(key, job):
            gone += policy.admit(key)
    return gone


def test_every_policy_is_known_by_its_name() -> None:
    assert sorted(POLICIES) == ["alsd", "alsd-mean", "lfu", "lru", "minio", "refcnt", "use-distance"]
    for name in POLICIES:
        policy = make_policy(name, max_items=1, keys=3)
        assert name.removesuffix("-mean") == policy.name


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"policy='arc'.*" + re.escape(str(sorted(POLICIES)))):
        make_policy("arc", max_items=1)


def test_lru_gives_up_what_was_not_read_for_the_longest_time() -> None:
    assert read(LRU(max_items=3), [1, 2, 3, 1, 4, 5]) == [2, 3]


def test_lfu_gives_up_what_was_read_least_and_of_that_the_eldest() -> None:
    assert read(LFU(max_items=3), [1, 2, 3, 1, 3, 4, 5, 1, 3, 5, 6]) == [2, 4, 5]


def test_lfu_finds_the_least_read_after_counts_have_grown_apart() -> None:
    policy = LFU(max_items=3)
    read(policy, [1] * 9 + [2] * 5 + [3])
    assert [policy.evict() for _ in range(3)] == [3, 2, 1]


def test_minio_keeps_what_came_first() -> None:
    policy = MinIO(max_bytes=10)
    assert list(policy.admit(1, 4)) == []
    assert list(policy.admit(2, 7)) == [2]
    assert list(policy.admit(3, 6)) == []
    assert sorted(policy) == [1, 3]
    assert policy.statistics().bypassed == 1
    assert policy.evict() == 3


def test_refcnt_gives_up_what_the_fewest_jobs_need() -> None:
    policy = RefCnt(max_items=3, keys=6)
    for job, members in (("a", [0, 1, 2, 3]), ("b", [1, 2, 3, 4]), ("c", [2, 3, 4, 5])):
        policy.hint(job, Lookahead.of_order(np.array(members), epoch=0))
    for key in (0, 1, 2):
        policy.admit(key)
    # Jobs that need them: 0: a; 1: a, b; 2: a, b, c; 3: a, b, c.
    assert list(policy.admit(3)) == [0]
    assert policy.access(1, "a")
    assert policy.access(1, "b")
    assert list(policy.admit(4)) == [1]
    policy.forget("c")
    assert policy.evict() == 4


def test_refcnt_begins_a_job_anew_when_it_has_read_everything() -> None:
    policy = RefCnt(max_items=2, keys=3)
    read(policy, [0, 1, 2], "a")
    assert sorted(policy) == [1, 2]
    # All three were read; in the next epoch 1 is read again, so 2 is the one that is needed.
    assert policy.access(1, "a")
    assert policy.evict() == 1


def test_opt_gives_up_what_is_read_last() -> None:
    stream = np.array([1, 2, 3, 1, 2, 3, 3])
    assert read(OPT(stream=stream, max_items=2), stream.tolist()) == [3, 1]


def test_opt_turns_down_another_stream_than_its_own() -> None:
    policy = OPT(stream=np.array([1, 2]), max_items=1)
    policy.access(1, "a")
    with pytest.raises(UsageError, match=r"'b' reads \[7\].*has \[2\]"):
        policy.access(7, "b")
    assert not policy.access(2, "b")


@pytest.mark.parametrize("stream", [np.zeros((2, 2), dtype=np.int64), np.array([0.5]), np.array([-1])])
def test_opt_turns_down_a_stream_that_is_none(stream: Any) -> None:
    with pytest.raises(OptionError):
        OPT(stream=stream, max_items=1)


def test_alsd_turns_down_what_is_no_option() -> None:
    with pytest.raises(OptionError, match=r"aggregate='max' is not one of \('min', 'mean'\)"):
        ALSD(max_items=1, aggregate="max")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="keys=-1"):
        ALSD(max_items=1, keys=-1)


def test_alsd_without_lookahead_gives_up_what_was_read_first() -> None:
    policy = ALSD(max_items=2, keys=6)
    assert read(policy, [0, 1, 2, 3]) == [0, 1]


def test_alsd_without_lookahead_spares_what_is_unread_in_the_next_epoch() -> None:
    policy = ALSD(max_items=2, keys=4)
    read(policy, [0, 1, 2, 3])
    assert sorted(policy) == [2, 3]
    # The second epoch: 2 and 3 are due, so 0 and 1 do not push them out.
    assert read(policy, [0, 1]) == [0, 1]
    assert policy.access(3, "a")
    assert policy.access(2, "a")


def test_alsd_weighs_jobs_in_the_mean() -> None:
    for weight, victim in ((10.0, 2), (0.1, 0)):
        policy = ALSD(max_items=2, keys=3, aggregate="mean")
        policy.join("light")
        policy.join("heavy", weight=weight)
        policy.hint("light", Lookahead.of_order(np.array([2, 1, 0]), epoch=0))
        policy.hint("heavy", Lookahead.of_order(np.array([0, 1, 2]), epoch=0))
        assert policy.admit_many(np.array([0, 1, 2])).tolist() == [victim]


def test_alsd_takes_the_job_that_is_sooner_by_its_pace() -> None:
    policy = ALSD(max_items=1, keys=1000)
    policy.hint("slow", Lookahead.of_order(np.arange(1000), epoch=0))
    policy.hint("fast", Lookahead.of_order(np.arange(1000)[::-1].copy(), epoch=0))
    for turn in range(50):  # ten reads of the fast job for each of the slow one
        policy.access(turn, "slow")
        for key in range(999 - 10 * turn, 989 - 10 * turn, -1):
            policy.access(key, "fast")
    # The slow job reads 60 after 10 reads of its own, which are 110 of both; the fast job 450 after 50, which are 55.
    policy.admit(450)
    assert list(policy.admit(60)) == [60]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_refcnt_counts_as_one_does_by_hand(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sets = {job: rng.permutation(16)[: rng.integers(4, 17)] for job in "abc"}
    policy = RefCnt(max_items=int(rng.integers(1, 10)), keys=16)
    needed: dict[str, set[int]] = {}
    resident: dict[int, None] = {}
    orders: dict[str, list[int]] = {job: [] for job in sets}
    for epoch in range(60):
        job = str(rng.choice(list(sets)))
        if not orders[job]:
            orders[job] = rng.permutation(sets[job]).tolist()
            needed[job] = set(orders[job])
            policy.hint(job, Lookahead.of_order(np.array(orders[job]), epoch=epoch))
        keys = [orders[job].pop(0) for _ in range(min(3, len(orders[job])))]
        needed[job] -= set(keys)
        hits = policy.access_many(np.array(keys), job).tolist()
        assert hits == [key in resident for key in keys]
        missed = [key for key, hit in zip(keys, hits) if not hit]
        gone = policy.admit_many(np.array(missed, dtype=np.int64)).tolist()
        resident.update(dict.fromkeys(missed))
        for victim in gone:
            counts = {key: sum(key in wanted for wanted in needed.values()) for key in resident}
            assert victim == min(resident, key=counts.__getitem__)
            del resident[victim]
