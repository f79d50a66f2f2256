"""Users' code may read the cache that runs it: no lock is held, and nobody waits for himself."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from torch_dpflow.caches import ALSDCache
from torch_dpflow.caches.policy_registry import POLICIES
from torch_dpflow.lookahead import Lookahead

pytestmark = pytest.mark.timeout(60)


class _Pairs:
    """Sample k is (k, partner's number), read through the cache."""

    def __init__(self, partner: dict[int, int]) -> None:
        self.cache: Any = None
        self.partner = partner
        #: threads meet here before they read what the other one loads
        self.meet: threading.Barrier | None = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, ...]:
        if index not in self.partner or threading.current_thread() in _inside:
            return (index,)
        _inside.add(threading.current_thread())
        try:
            if self.meet is not None:
                self.meet.wait()
            return (index, self.cache[self.partner[index]][0])
        finally:
            _inside.discard(threading.current_thread())


_inside: set[threading.Thread] = set()


def _cached(partner: dict[int, int], **options: Any) -> Any:
    dataset: Any = _Pairs(partner)
    dataset.cache = ALSDCache(dataset, 8, **options)
    return dataset.cache


def test_a_dataset_reads_in_its_cache_what_it_is_loading() -> None:
    cache = _cached({3: 3})
    assert cache[3] == (3, 3)
    assert cache[3] == (3, 3)
    statistics = cache.statistics()
    assert (statistics.misses, statistics.loads, statistics.hits) == (1, 1, 1)


def test_a_batch_reads_in_its_cache_a_sample_of_its_own() -> None:
    cache = _cached({1: 2, 2: 1})
    assert cache.__getitems__([1, 2]) == [(1, 2), (2, 1)]


def test_threads_that_need_what_the_other_loads_both_go_on() -> None:
    cache = _cached({1: 2, 2: 1})
    cache.dataset.meet = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(cache.__getitem__, [1, 2])) == [(1, 2), (2, 1)]
    assert cache.statistics().loads == cache.statistics().misses == 2


def test_a_sampler_may_read_the_cache_that_asks_it() -> None:
    class Curious:
        cache: Any = None

        def lookahead(self) -> Lookahead:
            assert self.cache[5] == (5,)
            return Lookahead.of_order(np.arange(8), epoch=0)

    sampler = Curious()
    sampler.cache = _cached({}, sampler=sampler)
    assert sampler.cache[0] == (0,)
    assert sampler.cache.__getitems__([1, 2]) == [(1,), (2,)]


def test_indices_that_are_no_numbers_take_one_number_each() -> None:
    class Named:
        def __getitem__(self, name: str) -> str:
            return name

    dataset: Any = Named()
    cache = ALSDCache(dataset, 8)
    assert [cache[name] for name in ["a", "b"] * 50] == ["a", "b"] * 50
    assert max(cache._store._policy) == 1


class _Touchy:
    """Samples with a slot that is not set, of a dataset that finds nothing that it does not have."""

    __slots__ = ("unset", "value")

    def __init__(self, value: int) -> None:
        self.value = value

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class _TouchyDataset:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> _Touchy:
        return _Touchy(index)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_attributes_that_fail_are_as_if_they_were_not_there() -> None:
    cache = ALSDCache(_TouchyDataset(), 1 << 20, copy=False)  # type: ignore[arg-type]
    for _ in range(2):
        assert [sample.value for sample in cache.__getitems__([0, 3, 1])] == [0, 3, 1]
    assert cache.statistics().hits == 3


class Words:
    """Has no length and any key."""

    def __getitem__(self, key: Any) -> str:
        return str(key).upper()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_names_of_samples_that_are_gone_are_forgotten(policy: str) -> None:
    """So memory is that of the samples that are held, however many are read; and each index has its own sample."""
    cache: Any = ALSDCache(Words(), capacity=10, policy=policy)  # type: ignore[arg-type]
    for number in range(4_600):
        assert cache[f"word {number}"] == f"WORD {number}"
        if number % 7 == 0:
            assert cache[f"word {number // 2}"] == f"WORD {number // 2}"
    assert cache.__getitems__(["word 1", "word 2"]) == ["WORD 1", "WORD 2"]
    assert cache.statistics().items <= 10
    assert len(cache._names) <= 4096
    assert next(cache._numbers) <= 4200
    key = object()
    assert [cache[key], cache[key]] == [str(key).upper()] * 2


def test_an_index_whose_number_another_one_has_meanwhile_gets_its_own_sample() -> None:
    cache: Any = ALSDCache(Words(), capacity=10)  # type: ignore[arg-type]
    assert cache["first"] == "FIRST"
    cache._names["second"] = cache._names["first"]
    assert (cache["second"], cache.__getitems__(["first", "second"])) == ("SECOND", ["FIRST", "SECOND"])
