"""Orders of torch's samplers that a loader draws in pieces: torch's numbers, at torch's times, in bounded work."""

import json
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, RandomSampler

from torch_dpflow import DPFlowDataLoader
from torch_dpflow._core import permutation
from torch_dpflow.epoch.index_order import batches_of, indices_of, is_drawn_here
from torch_dpflow.epoch.rank_order import RankOrder, regrouped
from torch_dpflow.samplers import DynaGCSSampler

MANY = 20_000_000


class Numbers(Dataset[int]):
    """Samples that cost nothing."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short orders are drawn in pieces too."""
    monkeypatch.setattr(permutation, "MIN_LENGTH", 50)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of places that any permutation draws, by call."""
    counts: list[int] = []
    original = permutation.Permutation._targets

    def counted(self: Any, left: Any) -> Any:
        counts.append(len(left))
        return original(self, left)

    monkeypatch.setattr(permutation.Permutation, "_targets", counted)
    return counts


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("has_generator", [True, False])
@pytest.mark.parametrize("num_samples", [None, 60, 3000, 7000])
@pytest.mark.parametrize("skip", [0, 100, 5999])
def test_indices_and_generators_are_those_of_torch(has_generator: bool, num_samples: int | None, skip: int) -> None:
    found = []
    for ours in (True, False):
        torch.manual_seed(7)
        generator = torch.Generator().manual_seed(8) if has_generator else None
        sampler = RandomSampler(range(3000), num_samples=num_samples, generator=generator)
        indices = indices_of(sampler, skip) if ours else islice(iter(sampler), skip, None)
        head = list(islice(indices, 5))
        states = [torch.get_rng_state(), *([] if generator is None else [generator.get_state()])]
        rest = list(indices)
        states += [torch.get_rng_state(), *([] if generator is None else [generator.get_state()])]
        found.append((head, rest, [state.tolist() for state in states]))
    assert found[0] == found[1]


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize(("batch_size", "drop_last"), [(64, False), (64, True)])
def test_batches_are_those_of_torch(batch_size: int, drop_last: bool) -> None:
    torch.manual_seed(3)
    expected = list(BatchSampler(RandomSampler(range(1000)), batch_size, drop_last))
    torch.manual_seed(3)
    assert list(batches_of(BatchSampler(RandomSampler(range(1000)), batch_size, drop_last))) == expected


class Reversed(RandomSampler):
    def __iter__(self) -> Any:
        return iter(range(len(self.data_source))[::-1])


def test_other_samplers_are_iterated_as_they_are() -> None:
    for sampler in (Reversed(range(5)), RandomSampler(range(5), replacement=True, num_samples=3)):
        assert not is_drawn_here(sampler)
    assert list(batches_of(BatchSampler(Reversed(range(5)), 2, False))) == [[4, 3], [2, 1], [0]]


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("length", "replicas"), [(1000, 3), (2, 5), (1001, 7)])
def test_ranks_have_the_parts_of_torch(shuffle: bool, drop_last: bool, length: int, replicas: int) -> None:
    for rank in range(replicas):
        sampler: Any = DistributedSampler(
            range(length), replicas, rank, shuffle=shuffle, drop_last=drop_last and length >= replicas
        )
        sampler.set_epoch(4)
        order = RankOrder.of(BatchSampler(sampler, 8, False), sampler)
        assert order is not None
        index_sampler = BatchSampler(sampler, 8, False)
        assert list(order.begun(index_sampler)) == list(regrouped(index_sampler, iter(sampler)))


@pytest.mark.parametrize("kind", ["random", "generator", "ranks", "dynagcs", "dynagcs ranks"])
def test_a_first_batch_of_many_samples_draws_what_it_reads(kind: str, drawn: list[int]) -> None:
    data = Numbers(MANY)
    sampler: Any = {
        "random": lambda: RandomSampler(data),
        "generator": lambda: RandomSampler(data, generator=torch.Generator().manual_seed(1)),
        "ranks": lambda: DistributedSampler(data, 4, 1),
        "dynagcs": lambda: DynaGCSSampler(data),
        "dynagcs ranks": lambda: DynaGCSSampler(data, num_replicas=4, rank=1),
    }[kind]()
    loader = DPFlowDataLoader(data, batch_size=256, sampler=sampler)
    batches = iter(loader)
    first = next(batches)
    assert len(first) == 256
    state = loader.state_dict()
    assert 0 < sum(drawn) <= 4 * permutation._PIECE
    assert len(json.dumps(state)) <= 64 << 10
    second = next(batches)
    resumed = DPFlowDataLoader(data, batch_size=256, sampler=sampler)
    resumed.load_state_dict(state)
    assert torch.equal(next(iter(resumed)), second)


def test_the_end_of_an_epoch_draws_no_order(drawn: list[int]) -> None:
    loader = DPFlowDataLoader(Numbers(permutation.MIN_LENGTH), batch_size=permutation.MIN_LENGTH // 4, shuffle=True)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    before = sum(drawn)
    assert next(batches, None) is None
    assert sum(drawn) == before >= permutation.MIN_LENGTH - 1
