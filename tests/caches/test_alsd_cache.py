"""ALSDCache as a dataset: what it keeps, what it hands out, under torch's loader and across processes."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from torch_dpflow.caches import POLICIES, ALSDCache
from torch_dpflow.errors import OptionError, OptionTypeError, UsageError
from torch_dpflow.lookahead import Lookahead
from torch_dpflow.samplers import DynaGCSSampler


class Counting(Dataset[Any]):
    """Row `i` is a tensor of `i`s; counts how often each is loaded."""

    def __init__(self, size: int, width: int = 4) -> None:
        self.size, self.width = size, width
        self.loads: list[Any] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.loads.append(index)
        if not -self.size <= index < self.size:
            raise IndexError(f"row {index} of {self.size}")
        return torch.full((self.width,), float(index))


class Together(Counting):
    """Loads several rows at once."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.batches: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        self.batches.append(indices)
        return [self[index] for index in indices]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Words(Dataset[str]):
    """Has keys instead of positions, and no length."""

    def __init__(self) -> None:
        self.loads: list[Any] = []

    def __getitem__(self, index: Any) -> str:
        self.loads.append(index)
        return f"<{index}>"


def negate(sample: torch.Tensor) -> torch.Tensor:
    return sample.neg_()


# -- keeping ---------------------------------------------------------------------------------------------


def test_loads_each_sample_once_while_all_fit() -> None:
    dataset = Counting(10)
    cache = ALSDCache(dataset, 10)
    for _ in range(3):
        assert [int(cache[k][0]) for k in range(10)] == list(range(10))
    assert dataset.loads == list(range(10))
    statistics = cache.statistics()
    assert (statistics.hits, statistics.misses, statistics.loads) == (20, 10, 10)
    assert (statistics.items, statistics.max_items, statistics.max_bytes) == (10, 10, None)
    assert statistics.hit_rate == pytest.approx(2 / 3)


def test_keeps_within_measured_bytes() -> None:
    cache = ALSDCache(Counting(10, width=25_000), "310kB")
    for k in range(10):
        cache[k]
    statistics = cache.statistics()
    assert statistics.items == 3
    assert 300_000 <= statistics.bytes <= 310_000 == statistics.max_bytes


def test_refuses_what_is_larger_than_all_of_it() -> None:
    cache = ALSDCache(Counting(2, width=25_000), "50kB")
    assert int(cache[1][0]) == 1
    assert (cache.statistics().refused, cache.statistics().items) == (1, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves(policy: str) -> None:
    dataset = Counting(20)
    cache = ALSDCache(dataset, 5, policy=policy)
    for _ in range(3):
        assert [int(cache[k][0]) for k in range(20)] == list(range(20))
    assert cache.statistics().items == 5


def test_without_a_sampler_an_epoch_hits_as_many_samples_as_fit() -> None:
    cache = ALSDCache(Counting(20), 5)
    rng = np.random.default_rng(0)
    for _ in range(4):
        for k in rng.permutation(20).tolist():
            cache[k]
    assert cache.statistics().hits == 3 * 5


def test_a_cleared_cache_begins_anew() -> None:
    cache = ALSDCache(Counting(3), 3)
    cache[0]
    cache.clear()
    assert (cache.statistics().items, cache.statistics().misses) == (0, 0)
    assert int(cache[0][0]) == 0


# -- what is handed out ----------------------------------------------------------------------------------


def test_writing_to_a_sample_does_not_reach_the_cache() -> None:
    dataset = TensorDataset(torch.ones(3, 2))
    cache = ALSDCache(dataset, 3)
    for _ in range(3):
        (sample,) = cache[1]
        assert sample.tolist() == [1, 1]
        sample += 5


def test_what_is_kept_does_not_follow_the_dataset() -> None:
    rows = torch.ones(3, 2)
    cache = ALSDCache(TensorDataset(rows), 3)
    cache[0]
    rows.zero_()
    assert cache[0][0].tolist() == [1, 1]


def test_the_transform_is_applied_afresh_and_its_result_not_kept() -> None:
    cache = ALSDCache(Counting(3), 3, transform=negate)
    assert [int(cache[2][0]) for _ in range(3)] == [-2, -2, -2]


def test_without_copies_the_same_object_is_handed_out() -> None:
    cache = ALSDCache(Counting(3), 3, copy=False)
    assert cache[1] is cache[1]
    assert cache.__getitems__([1])[0] is cache[1]


# -- indices ---------------------------------------------------------------------------------------------


def test_an_index_from_the_end_is_the_same_sample() -> None:
    dataset = Counting(10)
    cache = ALSDCache(dataset, 10)
    assert [int(cache[k][0]) for k in (-1, 9, np.int64(9), torch.tensor(-1))] == [9, 9, 9, 9]
    assert dataset.loads == [9]


@pytest.mark.parametrize("index", [10, -11])
def test_an_index_outside_is_the_datasets_to_turn_down(index: int) -> None:
    cache = ALSDCache(Counting(10), 10)
    for _ in range(2):
        with pytest.raises(IndexError, match=f"row {index} of 10"):
            cache[index]
        with pytest.raises(IndexError, match=f"row {index} of 10"):
            cache.__getitems__([1, index])
    assert cache.statistics().errors == 0


class Endless(Counting):
    """Has rows beyond its length."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.full((self.width,), float(index))


def test_an_index_outside_is_an_error_also_where_the_dataset_has_none() -> None:
    cache = ALSDCache(Endless(10), 10)
    for index in (10, -11):
        with pytest.raises(IndexError, match=f"index {index} is outside the dataset, which has 10 samples"):
            cache[index]
        with pytest.raises(IndexError, match=f"index {index} is outside"):
            cache.__getitems__([1, index])


@pytest.mark.parametrize("change", [-4, 3])
@pytest.mark.parametrize("together", [False, True])
def test_nothing_is_kept_of_a_dataset_of_another_length(change: int, together: bool) -> None:
    rows = [torch.tensor([float(number)]) for number in range(10)]
    cache = ALSDCache(rows, 100)  # type: ignore[arg-type]

    def read(*indices: int) -> list[float]:
        found = cache.__getitems__([*indices]) if together else [cache[index] for index in indices]
        return [float(one) for one in found]

    assert read(*range(10)) == [*range(10)]
    rows[:] = [torch.tensor([100.0 + number]) for number in range(10 + change)]
    size = len(rows)
    assert len(cache) == size
    assert read(-1, *range(size)) == [100.0 + size - 1, *(100.0 + number for number in range(size))]
    for index in (size, -size - 1):
        with pytest.raises(IndexError):
            read(index)
    assert cache.statistics().misses == size


def test_another_dataset_is_read_anew_and_the_same_is_not() -> None:
    rows = [0, 1, 2]
    cache = ALSDCache(rows, 3)  # type: ignore[arg-type]
    assert [cache[n] for n in range(3)] == [0, 1, 2]
    cache.dataset = rows  # type: ignore[assignment]
    assert cache.statistics().misses == 3
    cache.dataset = [10, 11, 12]  # type: ignore[assignment]
    assert cache.statistics().misses == 0
    assert [cache[n] for n in range(3)] == [10, 11, 12]
    with pytest.raises(OptionTypeError, match="cannot be indexed"):
        cache.dataset = iter(rows)  # type: ignore[assignment]
    assert cache[0] == 10


def test_a_changed_dataset_is_read_anew_after_clear() -> None:
    dataset = Counting(3)
    cache = ALSDCache(dataset, 3)
    assert [int(cache[1][0]), len(cache[1])] == [1, 4]
    dataset.width = 7
    assert len(cache[1]) == 4
    cache.clear()
    assert len(cache[1]) == 7


def test_keys_of_any_kind_are_kept_where_the_dataset_takes_them() -> None:
    dataset = Words()
    cache = ALSDCache(dataset, 10)
    for _ in range(2):
        assert [cache[key] for key in ("a", -1, 7, ("b", 2))] == ["<a>", "<-1>", "<7>", "<('b', 2)>"]
    assert dataset.loads == ["a", -1, 7, ("b", 2)]


def test_a_list_of_indices_goes_to_the_dataset() -> None:
    dataset = Words()
    cache = ALSDCache(dataset, 10)
    assert [cache[[1, 2]] for _ in range(2)] == ["<[1, 2]>"] * 2
    assert dataset.loads == [[1, 2]] * 2


def test_several_indices_are_loaded_together_and_each_once() -> None:
    dataset = Together(10)
    cache = ALSDCache(dataset, 10)
    cache[3]
    samples = cache.__getitems__([3, 4, -5, 4, 3, 5])
    assert [int(sample[0]) for sample in samples] == [3, 4, 5, 4, 3, 5]
    assert dataset.batches == [[4, 5]]
    samples[1].zero_()
    assert [int(sample[0]) for sample in cache.__getitems__([4])] == [4]
    assert (cache.statistics().hits, cache.statistics().loads) == (5, 3)


def test_several_indices_are_loaded_one_by_one_where_the_dataset_cannot_otherwise() -> None:
    dataset = Counting(10)
    cache = ALSDCache(dataset, 3, transform=negate)
    assert [int(sample[0]) for sample in cache.__getitems__([1, 2, 1])] == [-1, -2, -1]
    assert dataset.loads == [1, 2]


def test_a_batch_of_another_length_is_an_error() -> None:
    class Forgetful(Together):
        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            return super().__getitems__(indices)[1:]

    with pytest.raises(UsageError, match="1 samples for 2 indices"):
        ALSDCache(Forgetful(4), 4).__getitems__([0, 1])


def test_it_nests_in_other_datasets() -> None:
    dataset = Counting(10)
    cache = ALSDCache(Subset(dataset, [5, 6, 7]), 3)
    both = ConcatDataset([cache, cache])
    assert [int(both[k][0]) for k in range(6)] == [5, 6, 7, 5, 6, 7]
    assert dataset.loads == [5, 6, 7]
    assert len(cache) == 3


# -- samplers --------------------------------------------------------------------------------------------


class Told:
    """Draws the orders given, and tells of each and of the next."""

    def __init__(self, orders: list[list[int]]) -> None:
        self.orders, self.epoch, self.asked = orders, -1, 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(self.orders[self.epoch])

    def __len__(self) -> int:
        return len(self.orders[0])

    def lookahead(self) -> Lookahead | None:
        self.asked += 1
        if self.epoch < 0:
            return None
        rest = self.orders[self.epoch + 1 :]
        order = np.array(self.orders[self.epoch])
        return Lookahead.of_order(order, epoch=self.epoch, following=np.array(rest[0]) if rest else None)


def hits_with(sampler: Told | None, orders: list[list[int]]) -> int:
    cache = ALSDCache(Counting(400), 100, sampler=sampler)
    loader = DataLoader(cache, batch_size=5, sampler=sampler or Told(orders))
    for order in orders:
        assert torch.cat(list(loader))[:, 0].tolist() == order
    return cache.statistics().hits


def test_a_sampler_that_tells_its_order_makes_for_more_hits() -> None:
    """Each epoch reads another half of the samples; of a whole one, no policy could keep more than fit."""
    rng = np.random.default_rng(1)
    orders = [rng.permutation(400)[:200].tolist() for _ in range(5)]
    sampler = Told(orders)
    assert hits_with(sampler, orders) > 1.5 * hits_with(None, orders)
    assert sampler.asked == 5


def test_a_sampler_that_knows_nothing_yet_is_asked_again() -> None:
    sampler = Told([[0, 1, 2], [2, 1, 0]])
    cache = ALSDCache(Counting(3), 1, sampler=sampler)
    cache[0]
    iter(sampler)
    cache[0]
    assert sampler.asked == 2


def test_the_librarys_own_sampler_tells_its_order() -> None:
    """With the next epoch's order, which its seed decides, more can be kept than fits of what is read."""
    orders = [list(DynaGCSSampler(range(0, 400, 2), seed=seed)) for seed in range(5)]
    caches = [ALSDCache(Counting(400), 100, sampler=s) for s in (DynaGCSSampler(range(0, 400, 2)), None)]
    for order in orders:
        loader = DataLoader(caches[0], batch_size=5, sampler=caches[0].sampler)  # type: ignore[arg-type]
        assert torch.cat(list(loader))[:, 0].tolist() == order
        assert len(list(DataLoader(caches[1], batch_size=5, sampler=order))) == 40
    assert caches[0].statistics().hits > 1.1 * caches[1].statistics().hits


# -- processes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("context", "num_workers"), [("fork", 2), pytest.param("spawn", 1, marks=pytest.mark.slow)])
def test_serves_torchs_workers(context: str, num_workers: int) -> None:
    sampler = DynaGCSSampler(range(12), shuffle=False)
    cache = ALSDCache(Counting(12), 12, transform=negate, sampler=sampler)
    workers: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": context}
    loader = DataLoader(cache, batch_size=4, num_workers=num_workers, sampler=sampler, **workers)
    for _ in range(2):
        assert torch.cat(list(loader))[:, 0].tolist() == [-k for k in range(12)]
    assert cache.statistics().misses == 0
    del loader


def test_a_forked_worker_starts_with_what_its_parent_had() -> None:
    class Once(Counting):
        def __getitem__(self, index: Any) -> torch.Tensor:
            assert index not in self.loads, "loaded again"
            return super().__getitem__(index)

    cache = ALSDCache(Once(6), 6)
    for k in range(6):
        cache[k]
    loader = DataLoader(cache, batch_size=3, num_workers=1, multiprocessing_context="fork")
    assert torch.cat(list(loader))[:, 0].tolist() == list(range(6))


def test_a_pickle_takes_the_options_along_and_leaves_the_content() -> None:
    cache = ALSDCache(Counting(6, width=100), "1MiB", policy="lru", transform=negate, copy=False)
    cache[1]
    twin = pickle.loads(pickle.dumps(cache))
    assert (twin.capacity, twin.policy, twin.transform, twin.copy) == ("1MiB", "lru", negate, False)
    assert (twin.statistics().items, twin.statistics().misses) == (0, 0)
    assert twin.statistics().max_bytes == 2**20
    assert int(twin[1][0]) == -1
    assert len(pickle.dumps(cache)) < 2000


def test_a_copy_goes_on_with_a_sampler_and_a_content_of_its_own() -> None:
    sampler = DynaGCSSampler(range(6), seed=1)
    cache = ALSDCache(Counting(6), 6, sampler=sampler)
    running = iter(sampler)
    cache[next(running)]
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert twin.sampler is not sampler
        assert twin.sampler.lookahead().position == 1
        assert twin.statistics().items == 0
        assert int(twin[3][0]) == 3
    assert cache.statistics().items == 1


# -- what is turned down ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", [Stream(), 7, object()])
def test_what_cannot_be_indexed_is_turned_down(dataset: Any) -> None:
    with pytest.raises(OptionTypeError, match=f"{type(dataset).__name__}, which cannot be indexed"):
        ALSDCache(dataset, 3)


@pytest.mark.parametrize("policy", ["arc", "opt", None])
def test_an_unknown_policy_is_answered_with_the_known_ones(policy: Any) -> None:
    with pytest.raises(OptionError, match=re.escape(str(sorted(POLICIES)))):
        ALSDCache(Counting(3), 3, policy=policy)


def test_a_capacity_that_is_none_is_turned_down() -> None:
    with pytest.raises(OptionError, match="12XB"):
        ALSDCache(Counting(3), "12XB")


def test_a_transform_or_sampler_that_is_none_is_turned_down() -> None:
    with pytest.raises(OptionTypeError, match="transform=3 is not callable"):
        ALSDCache(Counting(3), 3, transform=3)  # type: ignore[arg-type]
    with pytest.raises(OptionTypeError, match="no method lookahead"):
        ALSDCache(Counting(3), 3, sampler=range(3))  # type: ignore[arg-type]
    with pytest.raises(OptionTypeError, match="copy='no'"):
        ALSDCache(Counting(3), 3, copy="no")  # type: ignore[arg-type]


def test_a_sample_that_cannot_be_copied_is_named() -> None:
    cache = ALSDCache([{"open": (k for k in range(3))}], 3)  # type: ignore[arg-type]
    with pytest.raises(OptionTypeError, match=r"dict cannot be copied.*copy=False"):
        cache[0]
