"""What a job reads through a whole cluster: its plan, each sample once, alone and with others."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shared_datasets import Draws, Failing, Numbers, Pictures
from torch_dpflow import ALSDCache
from torch_dpflow._core.channels_last import collate_channels_last
from torch_dpflow.cluster.client.open_job import SharedJob
from torch_dpflow.cluster.messages.shard import MAX_WANTS
from torch_dpflow.errors import OptionError, PoisonTaskError, StateError, UsageError

Join = Callable[..., SharedJob]


def keys(batches: Any) -> list[int]:
    return [int(key) for values, labels in batches for key in labels]


def test_an_epoch_is_every_sample_once_and_another_order_each_time(join: Join, flow: str) -> None:
    job = join(flow, Numbers(203), batch_size=16)
    orders = [keys(job.traverse(epoch)) for epoch in range(3)]
    assert all(sorted(order) == list(range(203)) for order in orders)
    assert len(set(map(tuple, orders))) == 3


def test_batches_have_the_size_asked_for_and_the_values_of_their_samples(join: Join, flow: str) -> None:
    job = join(flow, Numbers(50), batch_size=16)
    batches = list(job.traverse(0))
    assert [len(labels) for _, labels in batches] == [16, 16, 16, 2]
    assert all(torch.equal(values[:, 0], labels.float()) for values, labels in batches)


@pytest.mark.slow
def test_batches_may_be_so_large_that_not_all_can_be_requested_ahead_of_need(join: Join, flow: str) -> None:
    size, batches = 18_000, 4
    assert batches * size > MAX_WANTS
    job = join(flow, Numbers(batches * size, width=1), batch_size=size, collate_fn=numbers_of)
    read = list(job.traverse(0))
    assert [len(batch) for batch in read] == [size] * batches
    assert sorted(itertools.chain(*read)) == list(range(batches * size))


def numbers_of(samples: list[Any]) -> list[int]:
    return [number for _, number in samples]


def test_an_uneven_end_can_be_dropped(join: Join, flow: str) -> None:
    job = join(flow, Numbers(50), batch_size=16, drop_last=True)
    assert [len(labels) for _, labels in job.traverse(0)] == [16, 16, 16]


def test_a_job_alone_reads_the_order_of_torchs_sampler_for_its_seed(join: Join, flow: str) -> None:
    job = join(flow, Numbers(100), batch_size=10, seed=7)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(7 + 3)).tolist()
    assert keys(job.traverse(3)) == order


def test_a_plan_of_the_callers_is_read_in_its_order(join: Join, flow: str) -> None:
    job = join(flow, Numbers(60), shards=3, workers=3)
    plan = [[5, 59, 5], [0], list(range(30, 0, -3)), [20, 40]]
    assert keys(job.read(plan, 0)) == [key for batch in plan for key in batch]


def test_a_job_reads_a_part_of_the_samples(join: Join, flow: str) -> None:
    job = join(flow, Numbers(100), batch_size=8, indices=range(10, 31))
    assert job.length == 21
    assert sorted(keys(job.traverse(0))) == list(range(10, 31))


def test_large_samples_cross_whole(join: Join, flow: str) -> None:
    job = join(flow, Numbers(24, width=200_000), batch_size=8, memory_bytes=8 << 20, budget_bytes=1 << 20)
    for values, labels in job.traverse(0):
        assert torch.equal(values, labels.float()[:, None].expand(-1, 200_000))


def test_what_is_drawn_by_chance_differs_between_epochs_and_is_the_same_in_another_run(join: Join, flow: str) -> None:
    def draws(job: SharedJob, epoch: int) -> dict[int, tuple[float, ...]]:
        batches = job.traverse(epoch)
        return {int(k): tuple(v.tolist()) for ks, vs in batches for k, v in zip(ks, vs)}

    first = join(f"{flow}/a", Draws(40), batch_size=8, seed=5, workers=1)
    epochs = [draws(first, epoch) for epoch in range(2)]
    assert all(epochs[0][key] != epochs[1][key] for key in range(40))
    again = join(f"{flow}/b", Draws(40), batch_size=8, seed=5, workers=3)
    assert draws(again, 0) == epochs[0]


def test_jobs_that_read_together_load_each_sample_about_once_and_get_it_once_each(
    join: Join, flow: str, tmp_path: Path
) -> None:
    log = tmp_path / "loads"
    jobs = [join(flow, Numbers(240, log=log), batch_size=8, seed=seed) for seed in range(4)]
    orders: list[list[int]] = [[] for _ in jobs]
    together = threading.Barrier(len(jobs))

    def read(number: int) -> None:
        for _, labels in jobs[number].traverse(0):
            orders[number] += labels.tolist()
            if len(orders[number]) < 240:
                together.wait(150)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(sorted(order) == list(range(240)) for order in orders)
    assert len(log.read_text().splitlines()) <= 1.5 * 240


def test_a_cache_around_the_dataset_is_the_flows(join: Join, flow: str, tmp_path: Path) -> None:
    log = tmp_path / "loads"
    cached = ALSDCache(Numbers(60, log=log), "1GiB")
    job = join(flow, cached, batch_size=10)
    for epoch in range(3):
        assert sorted(keys(job.traverse(epoch))) == list(range(60))
    # A sample may be loaded by two workers at once; never again in a later epoch.
    assert len(log.read_text().split()) <= 1.5 * 60


def test_an_epoch_goes_on_where_its_state_says(join: Join, flow: str) -> None:
    job = join(flow, Numbers(100), batch_size=8)
    reading = job.traverse(2)
    first = keys(next(reading) for _ in range(5))
    state = job.state()
    job.close()
    again = join(flow, Numbers(100), batch_size=8)
    assert sorted(first + keys(again.traverse(2, done=state))) == list(range(100))
    with pytest.raises(StateError, match="of epoch 2 of 100 samples, to be begun is epoch 3"):
        again.traverse(3, done=state)
    with pytest.raises(StateError, match="damaged"):
        again.traverse(2, done={**state, "done": "%%%"})


def test_an_epoch_that_is_given_up_leaves_the_next_one_whole(join: Join, flow: str) -> None:
    job = join(flow, Numbers(400), batch_size=8)
    next(job.traverse(0))
    assert sorted(keys(job.traverse(0))) == list(range(400))


def test_an_error_of_a_sample_is_raised_in_its_place_with_the_workers_traceback(join: Join, flow: str) -> None:
    job = join(flow, Failing(30, raises=13), batch_size=10)
    reading = job.read([list(range(10)), list(range(10, 20)), list(range(20, 30))], 0)
    assert keys([next(reading)]) == list(range(10))
    with pytest.raises(LookupError, match="no such image: 13") as caught:
        next(reading)
    assert "in DataLoader worker process" in str(caught.value)
    assert keys(reading) == list(range(20, 30))


def test_a_sample_that_takes_down_its_workers_fails_alone(join: Join, flow: str) -> None:
    job = join(flow, Failing(30, kills=13), batch_size=10)
    reading = job.read([[11, 12, 13], [14, 15]], 0)
    how = r"sample 13: loading it took down 3 workers .* The workers that ended last: pid \d+ (was|has) ended"
    with pytest.raises(PoisonTaskError, match=how):
        next(reading)
    assert keys(reading) == [14, 15]


def test_pixels_stay_as_they_lie_for_a_job_that_wants_them_so_and_others_get_planes(join: Join, flow: str) -> None:
    pictures = Pictures(8)
    expected = torch.stack([pictures[key] for key in range(8)])
    wants_pixels = join(flow, pictures, batch_size=8, collate_fn=collate_channels_last)
    wants_planes = join(flow, pictures, batch_size=8)
    [pixels], [planes] = (list(job.read([list(range(8))], 0)) for job in (wants_pixels, wants_planes))
    assert torch.equal(pixels, expected)
    assert torch.equal(planes, expected)
    assert pixels.is_contiguous(memory_format=torch.channels_last)
    assert planes.is_contiguous()


def test_what_cannot_be_put_together_says_so(join: Join, flow: str) -> None:
    def collate(samples: list[Any]) -> Any:
        raise ArithmeticError("shapes differ")

    job = join(flow, Numbers(10), batch_size=5, collate_fn=collate)
    with pytest.raises(ArithmeticError, match="shapes differ"):
        next(job.traverse(0))


def test_the_same_version_of_something_else_is_refused(join: Join, flow: str) -> None:
    join(flow, Numbers(10))
    with pytest.raises(UsageError, match=r"of 11 samples, registered is .*of 10 samples"):
        join(flow, Numbers(11))
    assert sorted(keys(join(flow, Numbers(11), version=2).traverse(0))) == list(range(11))
    assert sorted(keys(join(flow, Numbers(10)).traverse(0))) == list(range(10))


def test_more_memory_than_the_host_has_is_refused(join: Join, flow: str) -> None:
    with pytest.raises(UsageError, match=r"memory_bytes=1,125,899,906,842,624: the cluster's host has .* bytes in all"):
        join(flow, Numbers(10), memory_bytes=1 << 50)
    assert sorted(keys(join(flow, Numbers(10), memory_bytes=1 << 21).traverse(0))) == list(range(10))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"flow": "no good name!"}, "a letter or digit first"),
        ({"shards": 0}, "shards=0 is out of range; give an int from 1 to 256"),
        ({"memory_bytes": 0}, "memory_bytes=0"),
        ({"ready": 8, "requested": 8}, "ready=8, requested=8: .*give requested=9 or more"),
        ({"indices": [3, 3]}, "more than once"),
        ({"indices": [10]}, "0 to 9 are allowed"),
    ],
)
def test_what_is_not_possible_is_refused_before_anything_starts(
    join: Join, flow: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        join(**{"flow": flow, "dataset": Numbers(10), **given})
