"""Jobs that read parts of one dataset share its loading, and each reads the samples of its own part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, Subset, SubsetRandomSampler

from tests.shared_cluster import TestCluster
from tests.shared_datasets import Numbers
from torch_dpflow import ALSDCache, DPFlowDataLoader, DynaGCSSampler, JobOptions
from torch_dpflow.errors import StateError, UsageError
from torch_dpflow.flows import DataLoadFlow, RemoteDataLoadFlowReader, random_split
from torch_dpflow.loader.flow_job import routed_order

SIZE = 60
MEMORY = 1 << 26


def keys(batches: Any) -> list[int]:
    return [int(key) for _, labels in batches for key in labels]


@pytest.fixture
def dataset(tmp_path: Path) -> Numbers:
    return Numbers(SIZE, log=tmp_path / "loads")


@pytest.fixture
def loader(cluster: TestCluster, flow: str) -> Callable[..., DPFlowDataLoader[Any]]:
    def loader(part: Any, **given: Any) -> DPFlowDataLoader[Any]:
        options = JobOptions(idle_s=3.0, memory_bytes=MEMORY, **given.pop("options", {}))
        defaults: dict[str, Any] = {
            "batch_size": 4,
            "num_workers": 2,
            "flow": flow,
            "address": cluster.address,
            "job": options,
        }
        return DPFlowDataLoader(part, **defaults | given)

    return loader


def loaded(dataset: Numbers) -> list[int]:
    assert dataset.log is not None
    return [int(line) for line in dataset.log.read_text().split()]


@pytest.mark.parametrize("order", ["routed", "in order", "batches", "ranks"])
def test_two_folds_load_each_sample_of_either_once(
    loader: Callable[..., DPFlowDataLoader[Any]], dataset: Numbers, order: str
) -> None:
    for fold, is_outside in ((list(range(6, SIZE)), False), (list(range(SIZE - 1, -1, -1))[6:], True)):
        cached = ALSDCache(dataset if is_outside else Subset(dataset, fold), MEMORY)
        part = Subset(cached, fold) if is_outside else cached
        orders: dict[str, dict[str, Any]] = {
            "routed": {"shuffle": True},
            "in order": {},
            "batches": {"batch_size": 1, "batch_sampler": [[n] for n in range(len(fold))]},
            "ranks": {"sampler": DistributedSampler(part, num_replicas=1, rank=0, shuffle=False)},
        }
        read = keys(loader(part, **orders[order]))
        assert (sorted(read) if order == "routed" else read) == (sorted(fold) if order == "routed" else fold)
    assert set(loaded(dataset)) == set(range(SIZE))
    assert len(loaded(dataset)) < 1.5 * SIZE, "idle workers may load some again; apart they would load 108"


def test_a_part_of_a_part_is_a_part(loader: Callable[..., DPFlowDataLoader[Any]], dataset: Numbers) -> None:
    part = Subset(Subset(dataset, range(20, 50)), torch.tensor([29, 0, 4]).tolist())
    assert keys(loader(part)) == [49, 20, 24]
    assert sorted(keys(loader(dataset, sampler=SubsetRandomSampler([3, 1])))) == [1, 3]
    assert sorted(keys(loader(dataset, sampler=DynaGCSSampler([7, 5], num_replicas=1, rank=0)))) == [5, 7]


def test_samples_of_a_changed_part_are_those_of_the_new_one(
    loader: Callable[..., DPFlowDataLoader[Any]], dataset: Numbers
) -> None:
    part = Subset(dataset, [1, 2, 3])
    one = loader(part)
    assert keys(one) == [1, 2, 3]
    part.indices = [5, 9]
    assert keys(one) == [5, 9]


@pytest.mark.parametrize(
    ("indices", "read", "named"),
    [
        ([4, 4, 8], [4, 4, 8], "indices has 4 more than once"),
        ([4, -1], [4, -1], "indices has -1; sample numbers start at 0"),
        ([4, True], [4, 1], "indices has a bool"),
        ([4, SIZE], None, f"indices has {SIZE}; with {SIZE} samples"),
        ([4.0], None, "whole numbers is required, got dtype float64"),
    ],
)
def test_a_part_of_unusual_indices_is_a_dataset_of_its_own_and_its_refusal_names_them(
    loader: Callable[..., DPFlowDataLoader[Any]], dataset: Numbers, indices: Any, read: list[int] | None, named: str
) -> None:
    part = loader(Subset(dataset, indices))
    if read is None:
        keys(loader(dataset))
    else:
        assert keys(part) == read
        part = loader(dataset)
    with pytest.raises(UsageError, match=rf"dataset is .*no part of another dataset: .*{named}") as refusal:
        keys(part)
    assert "registered is" in str(refusal.value)


def test_jobs_with_a_cache_and_without_are_refused_by_what_the_flow_caches(
    loader: Callable[..., DPFlowDataLoader[Any]], dataset: Numbers
) -> None:
    keys(loader(dataset))
    cached = Subset(ALSDCache(dataset, MEMORY), range(10))
    with pytest.raises(UsageError, match=r"what it caches is samples, registered is nothing \(no ALSDCache"):
        keys(loader(cached))


def test_an_epoch_of_a_part_is_resumed(loader: Callable[..., DPFlowDataLoader[Any]], dataset: Numbers) -> None:
    fold = list(range(10, 40))
    first = loader(Subset(dataset, fold), shuffle=True)
    batches = iter(first)
    seen = keys([next(batches), next(batches)])
    state = first.state_dict()
    again = loader(Subset(dataset, fold), shuffle=True)
    again.load_state_dict(state)
    assert sorted(seen + keys(again)) == fold


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_state_of_another_part_is_refused(
    loader: Callable[..., DPFlowDataLoader[Any]], dataset: Numbers, shuffle: bool
) -> None:
    first = loader(Subset(dataset, list(range(10, 40))), shuffle=shuffle)
    next(iter(first))
    for other in (ALSDCache(Subset(dataset, list(range(11, 41))), MEMORY), Subset(dataset, range(39, 9, -1))):
        again = loader(other, shuffle=shuffle)
        expected = r"part of the dataset is 30 samples \[10, 11, 12, \.\.\.\] .* this one's is 30 samples \[(11|39), "
        with pytest.raises(StateError, match=expected):
            again.load_state_dict(first.state_dict())
    assert len(keys(again)) == 30


def test_parts_of_a_flow_are_ordered_by_its_router(cluster: TestCluster, flow: str, dataset: Numbers) -> None:
    """Without, they kept orders of their own, and no load was shared that a small cache had not kept."""
    described = DataLoadFlow(flow, 1)
    described.dataset("core/numbers", "v1", "train", samples=dataset)
    described.map_target("label", int, cache="always")
    reader = RemoteDataLoadFlowReader(address=cluster.address, workers=1, job=JobOptions(idle_s=3.0), seed=3)
    read = described.prepare_read(reader)
    training, validation = random_split(read, [50, 10])
    for part in (training, validation):
        expected = sorted(int(index) for index in part.indices())
        batches = part.to_shuffled(4)
        orders = [[int(key) for _, labels in batches for key in labels] for _ in range(2)]
        assert [sorted(order) for order in orders] == [expected, expected]
        assert orders[0] != orders[1]
        assert routed_order(batches) is not None
