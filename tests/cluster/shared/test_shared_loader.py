"""DPFlowDataLoader over a shared flow: one changed argument, the loader's promises kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.loader_cases import Failing, Messaged, Stream
from tests.new_process import held_by_child
from tests.shared_cluster import TestCluster
from tests.shared_datasets import Numbers
from torch_dpflow import DPFlowDataLoader, JobOptions
from torch_dpflow.errors import NotPicklableError, OptionError, OptionTypeError, StateError

Make = Callable[..., DPFlowDataLoader[Any]]
QUICK = JobOptions(idle_s=3.0, patience_s=60.0)


@pytest.fixture
def make(cluster: TestCluster, flow: str) -> Any:
    """A loader over this test's flow."""

    def make(dataset: Any, **arguments: Any) -> DPFlowDataLoader[Any]:
        return DPFlowDataLoader(
            dataset, flow=flow, address=cluster.address, job=QUICK, num_workers=2, **arguments
        )

    return make


def keys(batches: Any) -> list[int]:
    return [int(key) for _, labels in batches for key in labels]


def test_a_shuffled_epoch_is_every_sample_once(make: Make) -> None:
    loader = make(Numbers(101), batch_size=8, shuffle=True)
    orders = [keys(loader) for _ in range(3)]
    assert all(sorted(order) == list(range(101)) for order in orders)
    assert len(set(map(tuple, orders))) == 3
    stats = loader.stats()
    assert (stats.epochs, stats.batches, stats.samples) == (3, 39, 303)
    assert len(loader) == 13


@pytest.mark.parametrize(
    "given", [{"shuffle": False}, {"batch_sampler": [[3, 1], [2]]}, {"drop_last": True}], ids=str
)
def test_any_other_order_is_torchs(make: Make, given: dict[str, Any]) -> None:
    sizes = {} if "batch_sampler" in given else {"batch_size": 4}
    theirs = DataLoader(Numbers(30), **sizes, **given)
    ours = make(Numbers(30), **sizes, **given)
    for _ in range(2):
        for mine, expected in zip(ours, theirs, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(mine, expected, strict=True))


def test_a_rank_reads_its_part(make: Make) -> None:
    sampler: Any = DistributedSampler(range(30), num_replicas=2, rank=1, seed=3)
    loader = make(Numbers(30), batch_size=4, sampler=sampler)
    assert keys(loader) == list(sampler)


def test_samples_without_batches(make: Make) -> None:
    loader = make(Numbers(5), batch_size=None)
    assert [int(label) for _, label in loader] == [0, 1, 2, 3, 4]


def test_two_jobs_load_each_sample_about_once(make: Make, tmp_path: Path) -> None:
    log = tmp_path / "log"
    one, other = (make(Numbers(120, log=log), batch_size=8, shuffle=True) for _ in range(2))
    seen: tuple[list[int], list[int]] = ([], [])
    for first, second in zip(one, other, strict=True):
        seen[0].extend(first[1].tolist())
        seen[1].extend(second[1].tolist())
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(120))
    assert len(log.read_text().split()) < 240


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_is_resumed_by_another_loader(make: Make, shuffle: bool) -> None:
    begun = make(Numbers(60), batch_size=4, shuffle=shuffle)
    seen = keys(islice(begun, 6))
    state = begun.state_dict()
    again = make(Numbers(60), batch_size=4, shuffle=shuffle)
    again.load_state_dict(state)
    assert sorted(seen + keys(again)) == list(range(60))
    assert sorted(keys(again)) == list(range(60))


def test_a_state_of_another_kind_is_refused(make: Make) -> None:
    plain = DPFlowDataLoader(Numbers(20), batch_size=4, shuffle=True)
    next(iter(plain))
    loader = make(Numbers(20), batch_size=4, shuffle=True)
    loader.load_state_dict(plain.state_dict())
    with pytest.raises(StateError, match="without a flow"):
        iter(loader)
    assert sorted(keys(loader)) == list(range(20))
    state = loader.state_dict()
    assert state["fresh"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_of_a_flow_is_refused_without_one(make: Make, workers: int) -> None:
    shared = make(Numbers(20), batch_size=4, shuffle=True)
    next(iter(shared))
    plain = DPFlowDataLoader(Numbers(20), batch_size=4, shuffle=True, num_workers=workers)
    with pytest.raises(StateError, match=r"an epoch of a shared flow, .* give it the flow="):
        plain.load_state_dict(shared.state_dict())
    assert sorted(keys(plain)) == list(range(20))


def test_a_state_of_the_routers_order_is_refused_where_the_sampler_decides(make: Make) -> None:
    sampler: Any = DistributedSampler(range(20), num_replicas=1, rank=0)
    routed = make(Numbers(20), batch_size=4, sampler=sampler)
    next(iter(routed))
    sampler.shuffle = False
    kept = make(Numbers(20), batch_size=4, sampler=sampler)
    kept.load_state_dict(routed.state_dict())
    with pytest.raises(StateError, match="order is that of its DistributedSampler; resume with"):
        iter(kept)
    assert keys(kept) == list(range(20))


def test_a_dataset_that_cannot_travel_is_told(make: Make) -> None:
    dataset = Numbers(4)
    dataset.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(NotPicklableError, match=r"dataset\.lock of type _thread.lock"):
        iter(make(dataset))


@pytest.mark.parametrize(
    ("error", "arrives"), [(LookupError("no image"), LookupError), (Messaged("no image"), RuntimeError)]
)
def test_an_error_names_its_type_and_the_loader_goes_on(
    make: Make, error: Exception, arrives: type[Exception]
) -> None:
    loader = make(Failing(12, {5: error}), batch_size=4)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(arrives, match=rf"{type(error).__name__}: no image"):
        next(iterator)
    next(iterator)


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        ({"flow": "no spaces"}, OptionError, "no spaces"),
        ({"flow": "a:v"}, OptionError, "a:v"),
        ({"flow": f"a:v{10**9}"}, OptionError, "version has 10 digits, at most 9 are allowed"),
        ({"address": "auto"}, OptionError, "without a flow"),
        ({"flow": "a", "job": {"ready": 1}}, OptionTypeError, "JobOptions"),
    ],
    ids=str,
)
def test_what_is_not_allowed_is_refused_at_once(arguments: dict[str, Any], error: Any, hint: str) -> None:
    with pytest.raises(error, match=hint):
        DPFlowDataLoader(Numbers(4), **arguments)


def test_iterable_datasets_are_not_shared() -> None:
    with pytest.raises(OptionError, match="map-style"):
        DPFlowDataLoader(Stream(4), flow="a")


def values(batch: list[torch.Tensor]) -> list[int]:
    return [*{int(one) for part in batch for one in part.flatten().tolist()}]


def test_a_forked_child_keeps_the_batch_that_it_holds(make: Make) -> None:
    batches = iter(make(Numbers(100, width=50_000), batch_size=1))
    held = [next(batches) for _ in range(2)]
    with held_by_child("os.fork", lambda: [values(one) for one in held]) as looked:
        held.clear()
        assert [values(batch) for batch in batches] == [[number] for number in range(2, 100)]
        assert looked() == [[0], [1]]


def test_an_array_of_a_batch_can_be_read_after_the_batch_was_shared(make: Make) -> None:
    kept: list[tuple[Any, int]] = []
    for number, batch in enumerate(make(Numbers(30, width=50_000), batch_size=1)):
        for part in batch:
            kept.append((part.numpy(), number))
            part.share_memory_()
    assert len(kept) == 60
    assert all({*array.flatten().tolist()} == {number} for array, number in kept)
