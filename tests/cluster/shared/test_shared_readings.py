"""Several readings of one loader at once, as torch's loader allows them: each is whole, none ends another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from tests.shared_cluster import TestCluster, open_job, wait
from tests.shared_datasets import Numbers
from torch_dpflow import ALSDCache, DPFlowDataLoader, JobOptions
from torch_dpflow.errors import UsageError

ALL = list(range(40))


@pytest.fixture
def make(cluster: TestCluster, flow: str) -> Any:
    """A loader over this test's flow."""

    def make(name: str | None = None, **arguments: Any) -> DPFlowDataLoader[Any]:
        job = JobOptions(idle_s=3.0, name=name)
        given = {"dataset": Numbers(40), "batch_size": 4, "num_workers": 2, **arguments}
        return DPFlowDataLoader(flow=flow, address=cluster.address, job=job, **given)

    return make


def keys(batches: Any) -> list[int]:
    return [int(key) for _, labels in batches for key in labels]


def read_in_pairs(loader: Any) -> tuple[list[int], list[int]]:
    first, second = zip(*zip(loader, loader, strict=True), strict=True)
    return keys(first), keys(second)


@pytest.mark.parametrize("name", [None, "trial"])
def test_two_readings_side_by_side_are_both_whole(make: Any, name: str | None) -> None:
    loader = make(name, shuffle=True)
    for _ in range(2):
        first, second = read_in_pairs(loader)
        assert sorted(first) == sorted(second) == ALL
        assert first != second


def test_two_readings_of_a_samplers_order_have_that(make: Any) -> None:
    assert read_in_pairs(make()) == (ALL, ALL)


def test_an_inner_loop_over_the_same_loader(make: Any) -> None:
    loader, outer = make(shuffle=True), []
    for batch in loader:
        outer += keys([batch])
        assert sorted(keys(loader)) == ALL
    assert sorted(outer) == ALL


def test_ranks_read_twice_side_by_side(make: Any) -> None:
    read: dict[int, tuple[list[int], list[int]]] = {}

    def run(rank: int) -> None:
        sampler: Any = DistributedSampler(range(40), num_replicas=2, rank=rank)
        read[rank] = read_in_pairs(make("ranks", sampler=sampler))

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    for reading in range(2):
        assert sorted(read[0][reading] + read[1][reading]) == ALL


def test_a_state_is_that_of_the_reading_that_began_last(make: Any) -> None:
    loader = make(shuffle=True)
    before = iter(loader)
    next(before)
    latest = iter(loader)
    seen = keys([next(latest), next(latest)])
    next(before)
    again = make(shuffle=True)
    again.load_state_dict(loader.state_dict())
    assert sorted(seen + keys(again)) == ALL


def test_a_reading_that_is_over_makes_room_for_the_next_one(make: Any) -> None:
    """Its iterator may still be held, and it may not have been asked for more than there was."""
    loader = make(shuffle=True)
    for _ in range(3):
        iterator = iter(loader)
        for _ in range(10):
            next(iterator)
    wait(
        lambda: [thread.name for thread in threading.enumerate()].count("dpflow-heartbeat") == 1,
        what="the end of the readings before",
    )
    assert next(iterator, None) is None


def test_a_jobs_reading_that_another_one_ended_says_so(cluster: TestCluster, flow: str) -> None:
    with open_job(flow, Numbers(40), address=cluster.address, batch_size=4) as job:
        first = job.traverse(0)
        next(first)
        assert sorted(keys(job.traverse(1))) == ALL
        with pytest.raises(UsageError, match="epoch 0 was abandoned"):
            next(first)


class Scaled(Numbers):
    """Sample `i` is a multiple of `i`."""

    factor = 1

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0], self.factor * index


def test_a_dataset_that_changes_between_epochs_is_refused_or_read_as_another_version(make: Any, flow: str) -> None:
    dataset = Scaled(40)
    loader = make(dataset=dataset)
    assert keys(loader) == ALL
    dataset.factor = 2
    with pytest.raises(UsageError, match=r"changed since the loader was iterated .* read it as flow=\"test/\d+:v2\""):
        iter(loader)
    loader.flow = f"{flow}:v2"
    assert keys(loader) == [2 * key for key in ALL]
    dataset.factor = 1
    loader.flow = f"{flow}:v3"
    assert keys(loader) == ALL


@pytest.mark.parametrize("what", ["transform", "worker_init_fn", "setting"])
def test_other_content_that_changes_between_epochs_is_refused(make: Any, what: str) -> None:
    dataset = ALSDCache(Numbers(40), "1MiB", transform=lambda sample: sample)
    loader = make(dataset=dataset)
    jobs = loader._runtime.jobs
    assert keys(loader) == ALL
    first = dict(jobs)
    assert keys(loader) == ALL
    assert jobs == first
    if what == "transform":
        dataset.transform = lambda sample: (sample[0], -sample[1])
    elif what == "worker_init_fn":
        loader.worker_init_fn = print
    dtype = torch.float64 if what == "setting" else torch.float32
    with default_dtype(dtype), pytest.raises(UsageError, match="changed since the loader was iterated last"):
        iter(loader)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(torch.float32)


def test_a_collate_fn_that_changes_between_epochs_is_used(make: Any) -> None:
    loader = make()
    assert keys(loader) == ALL
    loader.collate_fn = lambda samples: [label for _, label in samples]
    assert list(loader) == [ALL[start : start + 4] for start in range(0, 40, 4)]


def test_a_samplers_seed_that_changes_between_epochs_is_used(make: Any) -> None:
    sampler: Any = DistributedSampler(range(40), num_replicas=1, rank=0, seed=1)
    loader = make(sampler=sampler)
    assert keys(loader) == list(sampler)
    sampler.seed = 2
    assert keys(loader) == list(sampler)
