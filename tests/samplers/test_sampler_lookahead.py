"""What DynaGCSSampler tells a cache, and that it is what it then draws."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from torch_dpflow.lookahead import Lookahead
from torch_dpflow.samplers import STRATEGIES, DynaGCSSampler, sampling_group


def told(sampler: DynaGCSSampler) -> Lookahead:
    lookahead = sampler.lookahead()
    assert lookahead is not None
    return lookahead


def test_alone_it_tells_the_rest_of_the_epoch_and_all_of_the_next() -> None:
    sampler = DynaGCSSampler(range(30), seed=4)
    before = told(sampler)
    running = iter(sampler)
    read = list(islice(running, 10))
    midway = told(sampler)
    assert (before.epoch, before.position, midway.epoch, midway.position) == (0, 0, 0, 10)
    rest = list(running)
    assert before.certain.tolist() == read + rest
    assert midway.certain.tolist() == rest
    assert told(sampler).certain.tolist() == []
    assert midway.following is not None
    assert midway.following.tolist() == list(sampler)


def test_it_tells_of_the_place_at_which_it_resumes() -> None:
    first = DynaGCSSampler([7, 3, 5, 1, 9], seed=4)
    consumed = list(islice(iter(first), 2))
    second = DynaGCSSampler([7, 3, 5, 1, 9], seed=4)
    second.load_state_dict(first.state_dict())
    lookahead = told(second)
    assert (lookahead.position, len(consumed)) == (2, 2)
    assert lookahead.certain.tolist() == list(second)


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_tells_its_own_part_and_leaves_the_next_epoch_to_set_epoch(rank: int) -> None:
    sampler = DynaGCSSampler(range(30), num_replicas=4, rank=rank, seed=4)
    sampler.set_epoch(6)
    lookahead = told(sampler)
    assert (lookahead.epoch, lookahead.length, lookahead.following) == (6, 8, None)
    assert lookahead.certain.tolist() == list(sampler)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_in_a_group_what_is_certain_is_what_it_draws_next(strategy: str) -> None:
    group = sampling_group(strategy, 60, capacity=20)
    one, other = (
        DynaGCSSampler(range(60), group=group, strategy=strategy, batch_size=4, seed=seed) for seed in (5, 99)
    )
    order, announced = [], [told(one)]
    for mine, _ in zip(one, other, strict=True):
        order.append(mine)
        announced.append(told(one))
    for position, lookahead in enumerate(announced):
        assert (lookahead.epoch, lookahead.position, lookahead.length) == (0, position, 60)
        certain = lookahead.certain.tolist()
        assert certain == order[position : position + len(certain)]
    assert sum(len(lookahead.certain) for lookahead in announced) >= 15 * (3 + 2 + 1)


def test_one_rank_of_several_in_a_group_tells_where_it_is() -> None:
    group = sampling_group("shared-log", 61)
    sampler = DynaGCSSampler(range(61), group=group, batch_size=4, num_replicas=2, rank=1)
    list(islice(iter(sampler), 5))
    lookahead = told(sampler)
    assert (lookahead.position, lookahead.length, len(lookahead.certain)) == (5, 31, 0)


def test_who_left_tells_nothing() -> None:
    group = sampling_group("shared-log", 60)
    sampler = DynaGCSSampler(range(60), group=group)
    sampler.leave()
    assert sampler.lookahead() is None


class Asking(Dataset[bool]):
    def __init__(self, sampler: DynaGCSSampler) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __getitem__(self, index: int) -> bool:
        return self.sampler.lookahead() is None


def test_the_copy_in_a_worker_tells_nothing() -> None:
    sampler = DynaGCSSampler(range(4))
    in_worker = DataLoader(Asking(sampler), sampler=sampler, num_workers=1, multiprocessing_context="fork")
    assert all(torch.cat(list(in_worker)))
    assert not any(torch.cat(list(DataLoader(Asking(sampler), sampler=sampler))))
