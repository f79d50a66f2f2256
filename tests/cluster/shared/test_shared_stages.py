"""Flows in two parts: what is below the cut is loaded once for all jobs, what is above it drawn for each."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shared_cluster import TestCluster, wait
from tests.shared_datasets import Failing, Numbers
from torch_dpflow import ALSDCache, DPFlowDataLoader, JobOptions
from torch_dpflow.cluster.client.open_job import SharedJob
from torch_dpflow.cluster.messages.router import JobId
from torch_dpflow.cluster.messages.shard import Ask
from torch_dpflow.cluster.security.connection_file import find_cluster
from torch_dpflow.errors import RemoteCallError

Join = Callable[..., SharedJob]
SIZE = 60


def jittered(sample: Any) -> Any:
    """Adds noise in place: nobody else may see it."""
    values, key = sample
    values += torch.rand(4)
    return values, key


def draws(batches: Any) -> dict[int, tuple[float, ...]]:
    return {int(key): tuple(row.tolist()) for values, keys in batches for row, key in zip(values, keys)}


def test_what_is_refused_does_not_count_as_asked_for(cluster: TestCluster, join: Join, flow: str) -> None:
    next(join(flow, ALSDCache(Numbers(SIZE), "64MiB", transform=jittered)).traverse(0))
    address = cluster.process(f"{flow}:v1/shard-000", role="shard").address
    tickets = itertools.count(1)

    def want(count: int, draw: int | None) -> None:
        asked = list(itertools.islice(tickets, count))
        shard.call("want", Ask(JobId("other", 1, f"{flow}:v1"), 2**62, 0, draw, asked, [0] * count, []))

    with find_cluster(cluster.address).connect(address) as shard:
        want(1, 0)
        for _ in range(5):  # more in all than a job may ask for
            with pytest.raises(RemoteCallError, match="join as two jobs"):
                want(1 << 14, None)
        want(1, 0)
        shard.call("leave", JobId("other", 1, f"{flow}:v1"))


def read_together(jobs: list[SharedJob], epoch: int) -> list[dict[int, tuple[float, ...]]]:
    read: list[dict[int, tuple[float, ...]]] = [{} for _ in jobs]

    def run(number: int) -> None:
        read[number] = draws(jobs[number].traverse(epoch))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return read


def test_each_sample_is_decoded_once_and_augmented_for_each_job_and_epoch(
    join: Join, flow: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    dataset = ALSDCache(Numbers(SIZE, log=log), "64MiB", transform=jittered)
    # With one worker nothing is stolen, so nothing is loaded twice by two at once.
    jobs = [join(flow, dataset, batch_size=8, seed=seed, workers=1) for seed in (1, 2)]
    epochs = [read_together(jobs, epoch) for epoch in range(2)]
    decoded = Counter(map(int, log.read_text().split()))
    assert decoded == Counter(range(SIZE))
    seen = [read for epoch in epochs for read in epoch]
    assert all(read.keys() == set(range(SIZE)) for read in seen)
    for key in range(SIZE):
        of_key = [read[key] for read in seen]
        assert len(set(of_key)) == 4, "two jobs or epochs have the same augmentation"
        assert all(key <= value < key + 1 for values in of_key for value in values)
    again = join(f"{flow}/again", dataset, batch_size=4, seed=2, workers=2)
    assert [draws(again.traverse(epoch)) for epoch in range(2)] == [epoch[1] for epoch in epochs]


def test_jobs_with_one_seed_draw_alike(join: Join, flow: str) -> None:
    dataset = ALSDCache(Numbers(SIZE), "64MiB", transform=jittered)
    first, second = read_together([join(flow, dataset, batch_size=8, seed=5) for _ in range(2)], 0)
    assert first == second


def test_a_loader_that_goes_on_from_its_state_draws_what_it_would_have(
    cluster: TestCluster, flow: str, tmp_path: Path
) -> None:
    def make() -> DPFlowDataLoader[Any]:
        return DPFlowDataLoader(
            ALSDCache(Numbers(SIZE), "64MiB", transform=jittered),
            batch_size=4,
            shuffle=True,
            num_workers=2,
            generator=torch.Generator().manual_seed(3),
            flow=flow,
            address=cluster.address,
            job=JobOptions(idle_s=3.0),
        )

    whole = make()
    expected = [draws(whole) for _ in range(3)]
    begun = make()
    first = draws(itertools.islice(begun, 5))
    again = make()
    again.load_state_dict(begun.state_dict())
    rest = draws(again)
    assert not first.keys() & rest.keys()
    resumed = [first | rest]
    at_the_end = make()
    at_the_end.load_state_dict(again.state_dict())
    resumed += [draws(loader) for loader in (at_the_end, at_the_end)]
    # Not their order: the job that was left in mid-epoch still counts as a reader, with whom the flow may share.
    assert resumed == expected


def test_a_pool_too_small_for_the_first_parts_still_gives_each_sample(join: Join, flow: str) -> None:
    dataset = ALSDCache(Numbers(40, width=50_000), "1MiB", transform=last_two)
    jobs = [join(flow, dataset, batch_size=4, seed=seed, memory_bytes=2 << 20) for seed in (1, 2)]
    for epoch in range(2):
        assert [sorted(read) for read in read_together(jobs, epoch)] == [list(range(40))] * 2


def test_the_router_reckons_with_the_samples_that_fit_into_the_caches(
    join: Join, cluster: TestCluster, flow: str
) -> None:
    dataset = ALSDCache(Numbers(100, width=25_000), "64MiB")
    job = join(flow, dataset, batch_size=4, memory_bytes=4 << 20)

    def reckoned() -> int:
        return int(cluster.process(f"{flow}:v1/router").status.get("cache_samples", 10))

    assert reckoned() == 10
    assert len(draws(job.traverse(0))) == 100
    wait(lambda: reckoned() == int(0.9 * (4 << 20)) // 100_000, what="the caches' room")


def last_two(sample: Any) -> Any:
    values, key = sample
    return values[-2:] * 1.0, key


def test_errors_of_either_part_are_raised_in_their_place(join: Join, flow: str) -> None:
    def halve(sample: Any) -> Any:
        if sample[1] == 4:
            raise ArithmeticError("cannot be halved")
        return sample

    job = join(flow, ALSDCache(Failing(12, raises=7), "64MiB", transform=halve), batch_size=3)
    reading = job.read([[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]], 0)
    assert len(next(reading)[1]) == 3
    with pytest.raises(ArithmeticError, match="cannot be halved"):
        next(reading)
    with pytest.raises(LookupError, match="no such image: 7"):
        next(reading)
    assert len(next(reading)[1]) == 3


@pytest.mark.parametrize(("repeatable", "loads", "kinds"), [(True, 1, 1), (False, 2, 2)])
def test_a_cache_can_be_told_that_all_or_nothing_may_be_kept(
    join: Join, flow: str, tmp_path: Path, repeatable: bool, loads: int, kinds: int
) -> None:
    log = tmp_path / "log"
    dataset = ALSDCache(Numbers(12, log=log), "64MiB", transform=jittered)
    job = join(flow, dataset, batch_size=4, workers=1, repeatable=repeatable)
    epochs = [draws(job.traverse(epoch)) for epoch in range(2)]
    assert Counter(map(int, log.read_text().split())) == Counter(dict.fromkeys(range(12), loads))
    assert len({epoch[5] for epoch in epochs}) == kinds
