"""Several threads at one cache: one load for all, errors for all, nothing lost, nothing stuck."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from torch_dpflow.caches import ALSDCache
from torch_dpflow.caches.past_reads import LRU
from torch_dpflow.caches.store import SampleStore


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


class Gated:
    """Loads wait at a gate."""

    def __init__(self, outcome: Callable[[int], Any], size: int = 10) -> None:
        self.outcome, self.size = outcome, size
        self.loads: Counter[int] = Counter()
        self.entered = threading.Event()
        self.gate = threading.Event()

    def __getitem__(self, index: int) -> Any:
        self.loads[index] += 1
        self.entered.set()
        assert self.gate.wait(150)
        return self.outcome(index)

    def __len__(self) -> int:
        return self.size


def broken(index: int) -> Any:
    raise OSError(f"sample {index} is damaged")


def test_simultaneous_misses_load_once(pool: ThreadPoolExecutor, eventually: Callable[..., None]) -> None:
    dataset = Gated(lambda index: np.full(3, index))
    cache = ALSDCache(dataset, 10)  # type: ignore[arg-type]
    readers = [pool.submit(cache.__getitem__, 4) for _ in range(7)]
    eventually(lambda: cache.statistics().hits == 6, what="six readers waiting")
    dataset.gate.set()
    samples = [reader.result(150) for reader in readers]
    assert dataset.loads == {4: 1}
    assert len({id(sample) for sample in samples}) == 7
    samples[0][:] = 99
    assert cache[4].tolist() == [4, 4, 4]
    assert (cache.statistics().hits, cache.statistics().misses, cache.statistics().loads) == (7, 1, 1)


def test_an_error_reaches_everybody_and_is_not_kept(pool: ThreadPoolExecutor, eventually: Callable[..., None]) -> None:
    dataset = Gated(broken)
    cache = ALSDCache(dataset, 10)  # type: ignore[arg-type]
    readers = [pool.submit(cache.__getitem__, 4) for _ in range(4)]
    readers += [pool.submit(cache.__getitems__, [4]) for _ in range(3)]
    eventually(lambda: cache.statistics().hits == 6, what="six readers waiting")
    dataset.gate.set()
    for reader in readers:
        with pytest.raises(OSError, match="sample 4 is damaged"):
            reader.result(150)
    assert (cache.statistics().errors, cache.statistics().loads, cache.statistics().items) == (1, 0, 0)
    dataset.outcome = lambda index: np.full(3, index)
    assert cache[4].tolist() == [4, 4, 4]
    assert dataset.loads == {4: 2}


def test_an_error_in_a_batch_leaves_no_sample_of_it_under_way(pool: ThreadPoolExecutor) -> None:
    dataset = Gated(lambda index: broken(index) if index == 2 else index)
    dataset.gate.set()
    cache = ALSDCache(dataset, 10)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="sample 2"):
        cache.__getitems__([1, 2, 3])
    assert [pool.submit(cache.__getitem__, k).result(150) for k in (1, 3)] == [1, 3]


def test_an_interrupt_of_the_loader_lets_another_try(pool: ThreadPoolExecutor, eventually: Callable[..., None]) -> None:
    interrupts = iter([KeyboardInterrupt()])

    def load(index: int) -> int:
        for interrupt in interrupts:
            raise interrupt
        return index

    dataset = Gated(load)
    cache = ALSDCache(dataset, 10)  # type: ignore[arg-type]
    first = pool.submit(cache.__getitem__, 4)
    assert dataset.entered.wait(150)
    others = [pool.submit(cache.__getitem__, 4) for _ in range(3)]
    eventually(lambda: cache.statistics().hits == 3, what="three readers waiting")
    dataset.gate.set()
    with pytest.raises(KeyboardInterrupt):
        first.result(150)
    assert [other.result(150) for other in others] == [4, 4, 4]
    statistics = cache.statistics()
    assert statistics.hits + statistics.misses == 4
    assert statistics.misses == statistics.loads + statistics.errors == 2


def test_batches_that_wait_for_each_other_end(pool: ThreadPoolExecutor, eventually: Callable[..., None]) -> None:
    dataset = Gated(lambda index: index)
    cache = ALSDCache(dataset, 10)  # type: ignore[arg-type]
    left = pool.submit(cache.__getitems__, [1, 2])
    eventually(lambda: cache.statistics().misses == 2)
    right = pool.submit(cache.__getitems__, [3, 2, 1])
    eventually(lambda: cache.statistics().hits == 2)
    third = pool.submit(cache.__getitems__, [3, 1])
    eventually(lambda: cache.statistics().hits == 4)
    dataset.gate.set()
    assert (left.result(150), right.result(150), third.result(150)) == ([1, 2], [3, 2, 1], [3, 1])
    assert dataset.loads == {1: 1, 2: 1, 3: 1}


def test_a_load_that_outlives_a_clearing_is_handed_out_and_not_kept(pool: ThreadPoolExecutor) -> None:
    dataset = Gated(lambda index: index)
    cache = ALSDCache(dataset, 10)  # type: ignore[arg-type]
    reader = pool.submit(cache.__getitem__, 4)
    assert dataset.entered.wait(150)
    cache.clear()
    dataset.gate.set()
    assert reader.result(150) == 4
    assert cache.statistics().items == 0


@pytest.mark.parametrize("policy", ["alsd", "lru"])
def test_many_threads_get_what_they_ask_for_and_the_books_balance(policy: str, pool: ThreadPoolExecutor) -> None:
    dataset = Gated(lambda index: np.full(100, index), size=200)
    dataset.gate.set()
    cache = ALSDCache(dataset, "40kB", policy=policy)  # type: ignore[arg-type]

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(60):
            keys = rng.integers(0, 200, size=6).tolist()
            for key, sample in zip(keys, cache.__getitems__(keys)):
                assert (sample == key).all()
                sample[:] = -1
            assert (cache[keys[0]] == keys[0]).all()

    for reader in [pool.submit(read, seed) for seed in range(8)]:
        reader.result(150)
    statistics = cache.statistics()
    assert statistics.hits + statistics.misses == 8 * 60 * 7
    assert statistics.misses == statistics.loads
    assert 0 < statistics.bytes <= 40_000
    assert statistics.hits > 0


def test_a_fork_while_another_thread_changes_the_store_leaves_the_child_an_empty_one() -> None:
    store = SampleStore(lambda: LRU(max_items=4), copies=False)
    store.get(1, lambda: "one")
    assert _in_child(lambda: store.get(1, lambda: "again") == "one")
    with store._lock:
        assert _in_child(lambda: store.get(1, lambda: "again") == "again")
    assert store.get(1, lambda: "again") == "one"


@pytest.mark.parametrize("forget", [SampleStore.clear, SampleStore._after_fork])
@pytest.mark.parametrize("outcome", ["loads", "errors"])
def test_a_load_that_was_forgotten_is_in_no_book(forget: Callable[[SampleStore], None], outcome: str) -> None:
    store = SampleStore(lambda: LRU(max_items=4), copies=False)

    def load() -> str:
        forget(store)
        if outcome == "errors":
            raise ValueError
        return "one"

    with contextlib.suppress(ValueError):
        store.get(1, load)
    assert store.get(2, lambda: "two") == "two"
    counted = store.statistics()
    assert (counted.misses, counted.loads, counted.errors) == (1, 1, 0)


def _in_child(check: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        os._exit(0 if check() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
