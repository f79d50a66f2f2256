"""How an epoch is divided among ranks."""

from __future__ import annotations

import numpy as np
import pytest

from torch_dpflow.samplers import RankShares, sampling_group
from torch_dpflow.samplers.passes import SharedPass


def passes_of(shares: RankShares, batch_size: int) -> list[SharedPass]:
    """One pass of each rank, each with its own copy of the group."""
    found = []
    for rank in range(shares.replicas):
        group = sampling_group("independent", shares.length)
        group.join("a", seed=1)
        found.append(SharedPass(0, group=group, job="a", shares=shares, rank=rank, batch_size=batch_size))
    return found


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("size", "replicas", "batch_size"), [(10, 3, 2), (1, 4, 2), (12, 4, 1), (7, 7, 3)])
def test_slices_are_consecutive_and_all_ranks_see_one_epoch(
    size: int, replicas: int, batch_size: int, drop_last: bool
) -> None:
    shares = RankShares(size, replicas, drop_last)
    ranks = [[*one] for one in passes_of(shares, batch_size)]
    assert [len(one) for one in ranks] == [shares.per_rank] * replicas
    batches = [one[at : at + batch_size] for at in range(0, shares.per_rank, batch_size) for one in ranks]
    order = np.concatenate([np.empty(0, np.int64), *batches])
    group = sampling_group("independent", size)
    group.join("a", seed=1)
    group.start_epoch("a", 0)
    expected = group.next("a", size)[: shares.total]
    assert np.array_equal(order[:size], expected)
    assert np.array_equal(order[size:], np.resize(order[: min(size, replicas)], max(0, shares.total - size)))


def test_a_resumed_epoch_is_filled_up_with_its_own_head() -> None:
    shares, firsts, lasts = RankShares(10, 4, False), [], []
    for rank, begun in enumerate(passes_of(shares, 1)):
        samples = iter(begun)
        firsts.append(next(samples))
        next(samples)
        group = sampling_group("independent", 10)
        group.join("a", seed=1)
        state = begun.shared_state(2)
        resumed = SharedPass(0, group=group, job="a", shares=shares, rank=rank, batch_size=1, state=state, position=2)
        lasts.append([*resumed])
    assert lasts[2:] == [firsts[:1], firsts[1:2]]
    assert [len(one) for one in lasts] == [1] * 4
