"""How an epoch is divided among ranks."""

from __future__ import annotations

import numpy as np
import pytest

from torch_dpflow.samplers import GlobalBatches, RankShares, sampling_group
from torch_dpflow.samplers.passes import rank_slice


def batches_of(size: int, replicas: int, batch_size: int, drop_last: bool) -> GlobalBatches:
    group = sampling_group("independent", size)
    group.join("a", seed=1)
    group.start_epoch("a", 0)
    return GlobalBatches(group, "a", RankShares(size, replicas, drop_last), batch_size)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("size", "replicas", "batch_size"), [(10, 3, 2), (1, 4, 2), (12, 4, 1), (7, 7, 3)])
def test_slices_are_consecutive_and_all_ranks_see_one_epoch(
    size: int, replicas: int, batch_size: int, drop_last: bool
) -> None:
    whole, batches = [], batches_of(size, replicas, batch_size, drop_last)
    while len(batch := batches.draw()):
        whole.append(batch)
    shares = RankShares(size, replicas, drop_last)
    for rank in range(replicas):
        assert sum(len(rank_slice(batch, rank, replicas)) for batch in whole) == shares.per_rank
    for batch in whole:
        parts = [rank_slice(batch, rank, replicas) for rank in range(replicas)]
        assert np.array_equal(np.concatenate(parts), batch)
    order = np.concatenate([np.empty(0, np.int64), *whole])
    assert len(order) == shares.total
    assert len(set(order.tolist())) == min(size, shares.total)
    assert np.array_equal(order[size:], np.resize(order[: min(size, replicas)], max(0, shares.total - size)))


def test_a_resumed_epoch_is_filled_up_with_its_own_head() -> None:
    group = sampling_group("independent", 10)
    group.join("a", seed=1)
    group.start_epoch("a", 0)
    shares = RankShares(10, 4, False)
    first = GlobalBatches(group, "a", shares, 1)
    drawn = [first.draw(), first.draw()]
    group.start_epoch("a", 0, done=np.concatenate(drawn))
    second = GlobalBatches(group, "a", shares, 1, position=first.position, first=first.first)
    last = second.draw()
    assert last[2:].tolist() == drawn[0][:2].tolist()
    assert not len(second.draw())
