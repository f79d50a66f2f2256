"""What a loader's options do where its workers are remote workers: as with workers of this host."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.loader_cases import Indices, assert_same, patiently
from tests.remote_cases import PacedStream, Troubled, Watched, label, names_of
from torch_dpflow import DPFlowDataLoader, LoaderOptions
from torch_dpflow.errors import LoaderTimeoutError, PoisonTaskError, QuotaError, WorkerStartError
from torch_dpflow.remote.fleet.content import RemoteContent

SIZE = 24
pytestmark = [
    # Without an accelerator there is nothing to pin for.
    pytest.mark.filterwarnings("ignore:.*no accelerator"),
    pytest.mark.usefixtures("preloaded_workers"),
]


def loader_of(dataset: Watched, **arguments: Any) -> DPFlowDataLoader[Any]:
    return DPFlowDataLoader(
        dataset,
        num_workers=2,
        persistent_workers=True,
        prefetch_factor=2,
        worker_init_fn=label,
        generator=torch.Generator().manual_seed(7),
        **{"batch_size": None, "in_order": False, **arguments},
    )


@pytest.fixture(autouse=True, scope="module")
def no_leaks(no_leaks_of_module: None) -> None:
    """Workers live through the tests of this module."""


@pytest.fixture(scope="module")
def platform() -> Iterator[Troubled]:
    platform = Troubled()
    yield platform
    platform.opened.set()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return Watched(SIZE, tmp_path_factory.mktemp("watched"))


def remote_loader(dataset: Watched, platform: Troubled) -> DPFlowDataLoader[Any]:
    """A loader with all that can be set at once."""
    options = LoaderOptions(min_workers=2, task_timeout_s=60.0, seeding="batch", prefetch_growth=1)
    return loader_of(dataset, platform=platform, timeout=1, pin_memory=True, options=options)


@pytest.fixture(scope="module")
def remote(no_leaks: None, platform: Troubled, dataset: Watched) -> Iterator[DPFlowDataLoader[Any]]:
    """One loader for the tests of this module that need no new one."""
    loader = remote_loader(dataset, platform)
    yield loader
    platform.opened.set()
    loader._iterator._shutdown_workers()


@pytest.fixture
def ready(remote: DPFlowDataLoader[Any], platform: Troubled) -> DPFlowDataLoader[Any]:
    """The loader, with an epoch behind it."""
    platform.opened.set()
    if remote._iterator is None:
        by_index(iter(remote))
    return remote


@pytest.fixture
def impatient(ready: DPFlowDataLoader[Any], monkeypatch: pytest.MonkeyPatch) -> DPFlowDataLoader[Any]:
    """The loader, with a shorter time for a sample, which other tests might exceed on a busy machine."""
    shard = ready._iterator._shard
    for part in (shard, shard._scheduler):
        monkeypatch.setattr(part, "_task_timeout_s", 1.0)
    return ready


def by_index(batches: Iterator[Any]) -> list[Any]:
    return sorted(patiently(batches), key=lambda sample: sample["index"])


def test_nothing_is_loaded_before_so_many_workers_are_there(tmp_path: Path, eventually: Callable[..., None]) -> None:
    platform, dataset = Troubled(), Watched(SIZE, tmp_path)
    remote = remote_loader(dataset, platform)
    iterator = iter(remote)
    processes = remote._iterator._shard.processes
    eventually(lambda: any(one.state == "working" for one in processes.views()), what="the first worker")
    with pytest.raises(LoaderTimeoutError, match="timed out after 1 seconds"):
        next(iterator)
    assert not dataset.noted("loads")
    platform.opened.set()
    assert [sample["index"] for sample in by_index(iterator)] == [*range(SIZE)]
    assert sorted(worker for worker, _ in dataset.noted("inits")) == [0, 1]
    remote._iterator._shutdown_workers()


def test_a_slow_sample_holds_up_no_other_and_no_more_are_loaded_than_the_prefetch_factor_says(
    ready: DPFlowDataLoader[Any], dataset: Watched
) -> None:
    before = len(dataset.noted("loads"))
    slow = dataset.folder / "hang-0"
    slow.touch()
    batches = patiently(iter(ready))
    early = [next(batches)["index"] for _ in range(3)]
    slow.unlink()
    assert 0 not in early
    assert len(dataset.noted("loads")) - before <= 3 + 2 * 2 + ready.stats().steals
    assert sorted([*early, *(one["index"] for one in batches)]) == [*range(SIZE)]


def test_a_worker_that_is_to_end_hands_over_to_its_successor(
    ready: DPFlowDataLoader[Any], platform: Troubled, dataset: Watched, eventually: Callable[..., None]
) -> None:
    eventually(lambda: len(names_of(ready)) == 2)
    loads, restarts = len(dataset.noted("loads")), ready.stats().restarts
    duplicates = ready._iterator._shard.totals().duplicates
    old = names_of(ready)[0]
    epochs = 0
    platform.warned[old] = 60.0
    ready._iterator._shard.processes._platform.suspect(old)
    while names_of(ready).get(0, old) == old:
        assert [one["index"] for one in by_index(iter(ready))] == [*range(SIZE)]
        epochs += 1
    # Only what was taken over from a busy worker that had begun it, and is counted when that comes too.
    totals = ready._iterator._shard.totals
    eventually(lambda: len(dataset.noted("loads")) - loads - epochs * SIZE <= totals().duplicates - duplicates)
    assert ready.stats().restarts == restarts


def test_a_sample_that_hangs_costs_its_worker_and_is_loaded_again(
    impatient: DPFlowDataLoader[Any], dataset: Watched
) -> None:
    restarts = impatient.stats().restarts
    (dataset.folder / "once-5").touch()
    assert [one["index"] for one in by_index(iter(impatient))] == [*range(SIZE)]
    assert impatient.stats().restarts > restarts


@pytest.mark.slow
def test_a_sample_that_always_hangs_is_given_up_after_three_workers(
    impatient: DPFlowDataLoader[Any], dataset: Watched
) -> None:
    hanging = dataset.folder / "hang-5"
    hanging.touch()
    batches, seen = iter(impatient), []
    with pytest.raises(PoisonTaskError, match=r"index 5 took down 3 workers.*task_timeout_s=1 s"):
        seen.extend(one["index"] for one in patiently(batches))
    hanging.unlink()
    assert sorted([*seen, *(one["index"] for one in patiently(batches))]) == [*range(5), *range(6, SIZE)]
    assert len(by_index(iter(impatient))) == SIZE


def test_too_few_workers_in_the_time_of_a_start_are_an_error_with_what_the_platform_says() -> None:
    refusing = Troubled(limits={"start_timeout_s": (0.1, 0.5)}, refusal=[QuotaError("the account may have none")])
    loader = DPFlowDataLoader(Indices(4), num_workers=3, platform=refusing, options=LoaderOptions(min_workers=2))
    with pytest.raises(
        WorkerStartError, match=r"0 of min_workers=2 workers.*limited by quota: the account may have none"
    ):
        next(iter(loader))


@pytest.mark.parametrize("kind", ["content", pytest.param("code", marks=pytest.mark.slow)])
def test_what_was_changed_on_its_way_is_not_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    """Each worker says so and leaves; after three the loader does."""
    changed, piece = [], RemoteContent.piece

    def changed_piece(content: RemoteContent, digest: str, offset: int) -> memoryview:
        data = piece(content, digest, offset)
        if not content.code_digest or (digest == content.digest) != (kind == "content"):
            return data
        changed.append(digest)
        return memoryview(bytes(data[:-1]) + bytes([data[-1] ^ 1]))

    monkeypatch.setattr(RemoteContent, "piece", changed_piece)
    (tmp_path / "anything.txt").write_text("of the user's")
    platform = Troubled(python=sys.executable, env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    options = LoaderOptions(code=[str(tmp_path)])
    loader = DPFlowDataLoader(Indices(4), num_workers=1, platform=platform, options=options)
    with pytest.raises(WorkerStartError, match=r"(?s)no worker can be had.*does not have the digest"):
        next(iter(loader))
    assert len(changed) == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["items", "stream"])
def test_workers_of_a_limited_life_follow_one_another_and_nothing_is_lost_or_loaded_twice(
    tmp_path: Path, kind: str, eventually: Callable[..., None]
) -> None:
    platform = Troubled(limits={"max_lifetime_s": 40.0}, held_from=2)
    # Large ones, which come after the words of a worker that leaves.
    items: Any = (
        Watched(SIZE, tmp_path, pace_s=0.2, payload=4 << 20) if kind == "items" else PacedStream(SIZE, augment=True)
    )
    loader = DPFlowDataLoader(
        items,
        batch_size=None,
        num_workers=2,
        persistent_workers=True,
        platform=platform,
        generator=torch.Generator().manual_seed(7),
        options=LoaderOptions(shared_memory=0),
    )
    torchs = DataLoader(
        PacedStream(SIZE, augment=True),
        batch_size=None,
        num_workers=2,
        persistent_workers=True,
        generator=torch.Generator().manual_seed(7),
    )
    names: set[str] = set()
    epochs = 0
    while len(names) < 6:
        batches = list(loader)
        epochs += 1
        names.update(names_of(loader).values())
        if kind == "stream":
            assert_same(batches, list(torchs))
        else:
            assert [one["index"] for one in batches] == [*range(SIZE)]
    if kind == "items":
        # Only what was taken over from a busy worker that had begun it, and is counted when that comes too.
        totals = loader._iterator._shard.totals
        eventually(lambda: len(items.noted("loads")) - epochs * SIZE <= totals().duplicates)
    assert loader.stats().restarts == 0
    loader._iterator._shutdown_workers()


@pytest.mark.slow
def test_a_batch_is_not_blamed_for_the_end_of_its_workers_host(tmp_path: Path, eventually: Callable[..., None]) -> None:
    """It takes longer than the host has left."""
    dataset, platform = Watched(2, tmp_path), Troubled()
    (tmp_path / "hang-0").touch()
    options = LoaderOptions(poison_limit=1)
    loader = DPFlowDataLoader(dataset, batch_size=None, num_workers=1, platform=platform, options=options)
    iterator = iter(loader)
    eventually(lambda: dataset.noted("loads"))
    processes = iterator._shard.processes
    (worker,) = processes._fleet.workers
    platform.warned[worker.name] = 2.0
    processes._platform.suspect(worker.name)
    eventually(lambda: len(dataset.noted("loads")) == 2)
    (tmp_path / "hang-0").unlink()
    assert [one["index"] for one in iterator] == [0, 1]
