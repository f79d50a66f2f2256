"""Batches of the pool on a GPU, by way of pinned memory: `make test-gpu`, on a machine that has one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.pool.pool_servers import inner_server
from torch_dpflow import DPFlowDataLoader
from torch_dpflow.pool import DataClient, PooledArray

ROWS = np.random.default_rng(0).random((512, 1000), dtype=np.float32)


@pytest.fixture
def pooled(tmp_path: Path) -> Iterator[PooledArray]:
    """An array that is in the memory of a server."""
    with inner_server(tmp_path / "p", 64 << 20):
        with closing(DataClient(tmp_path / "p")) as client:
            source = client.push("tests/rows:v1", ROWS)
        with closing(PooledArray(source, tmp_path / "p")) as dataset:
            yield dataset


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_the_pool_are_pinned_and_reach_the_gpu_whole(pooled: PooledArray, workers: int) -> None:
    loader = DPFlowDataLoader(pooled, batch_size=64, num_workers=workers, pin_memory=True)
    first = 0
    for batch in loader:
        assert batch.is_pinned()
        there = batch.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        np.testing.assert_array_equal(there.cpu().numpy(), ROWS[first : first + len(batch)])
        first += len(batch)
    assert first == len(ROWS)


def test_a_batch_that_is_kept_does_not_change_while_others_are_copied(pooled: PooledArray) -> None:
    loader = DPFlowDataLoader(pooled, batch_size=64, num_workers=2, pin_memory=True, prefetch_factor=4)
    kept = [(batch, batch.to("cuda", non_blocking=True)) for batch in loader]
    torch.cuda.synchronize()
    for number, (here, there) in enumerate(kept):
        rows = ROWS[64 * number : 64 * (number + 1)]
        np.testing.assert_array_equal(here.numpy(), rows)
        np.testing.assert_array_equal(there.cpu().numpy(), rows)
