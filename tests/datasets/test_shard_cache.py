"""The cache of metadata shards: what interrupts one thread is no matter of the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from torch_dpflow.datasets.shard_cache import LoadedShard, ShardCache
from torch_dpflow.errors import DamagedStoreError


def test_an_interrupt_ends_the_load_of_one_thread_only() -> None:
    loading, waiting = threading.Event(), threading.Event()
    interrupts = iter([KeyboardInterrupt()])
    shard = DamagedStoreError("stands for a shard")

    def load(numbers: Sequence[int]) -> list[LoadedShard]:
        for interrupt in interrupts:
            loading.set()
            waiting.wait()
            raise interrupt
        return [shard for _ in numbers]

    cache = ShardCache(load, lambda _: 1, 10)

    def read() -> list[object]:
        return [dict(portion) for portion in cache.portions([4])]

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(read)
        loading.wait()
        second = pool.submit(read)
        while not cache._loading[4]._condition._waiters:  # type: ignore[attr-defined]
            time.sleep(0)
        waiting.set()
        with pytest.raises(KeyboardInterrupt):
            first.result()
        assert second.result() == [{4: shard}]
