"""Iterating in other ways than once through."""

from __future__ import annotations

import faulthandler
import gc
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.loader_cases import WORKERS, Counted, Indices, Stream
from torch_dpflow.errors import WorkerError


def numbers(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_two_iterators_of_one_loader_are_independent(Loader: Any, num_workers: int) -> None:
    loader = Loader(Indices(20), batch_size=2, num_workers=num_workers)
    assert [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)] == [
        ([i, i + 1], [i, i + 1]) for i in range(0, 20, 2)
    ]


@pytest.mark.parametrize("dataset", [Indices(40), Stream(40)], ids=["map", "iterable"])
@pytest.mark.parametrize(("num_workers", "persistent_workers"), WORKERS)
def test_leaving_an_epoch_and_beginning_again(
    Loader: Any, dataset: Any, num_workers: int, persistent_workers: bool
) -> None:
    loader = Loader(dataset, batch_size=2, num_workers=num_workers, persistent_workers=persistent_workers)
    for taken in (1, 0, 7, 20):
        assert len(list(itertools.islice(loader, taken))) == taken
        assert sorted(numbers(loader)) == list(range(40))


def test_leaving_an_epoch_leaves_the_next_ones_order_as_in_torch(Loader: Any) -> None:
    def run(loader_class: Any) -> list[list[int]]:
        torch.manual_seed(1)
        loader = loader_class(Indices(30), batch_size=3, shuffle=True, num_workers=2)
        return [numbers(itertools.islice(loader, taken)) for taken in (2, 10, 0, 5)]

    assert run(Loader) == run(DataLoader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exhausted_iterator_stays_exhausted(Loader: Any, num_workers: int) -> None:
    iterator = iter(Loader(Indices(4), num_workers=num_workers))
    assert len(list(iterator)) == 4
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_len_of_an_iterator(Loader: Any, num_workers: int) -> None:
    assert len(iter(Loader(Indices(5), batch_size=2, num_workers=num_workers))) == 3


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [Indices(8), Stream(8)])
def test_a_profiler_has_an_annotation_for_each_batch_and_for_the_end(
    Loader: Any, num_workers: int, dataset: Any
) -> None:
    def annotations() -> list[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            next(batches)
            next(batches)
            list(batches)
        return [event.name for event in profile.events() if event.is_user_annotation]

    loader = Loader(dataset, batch_size=2, num_workers=num_workers)
    batches = iter(loader)
    expected = len(list(iter(loader))) + 1  # an epoch that no profiler sees
    found = annotations()
    assert len(found) == expected
    assert all(name.startswith("enumerate(DataLoader)#") for name in found)
    assert batches._num_yielded == expected - 1


def test_an_iterator_outlives_its_loader(Loader: Any) -> None:
    iterator = iter(Loader(Indices(10), batch_size=5, num_workers=2))
    gc.collect()
    assert numbers(iterator) == list(range(10))


def test_a_dropped_iterator_is_collected_at_once(Loader: Any) -> None:
    """Reference counting alone frees it: nobody waits for the cycle collector while workers hold memory."""
    gc.disable()
    try:
        iterator = iter(Loader(Indices(100), num_workers=2))
        next(iterator)
        gone = weakref.ref(iterator)
        del iterator
        assert gone() is None
    finally:
        gc.enable()


def test_iterating_in_another_thread(Loader: Any) -> None:
    loader = Loader(Indices(50), batch_size=5, shuffle=False, num_workers=2)
    results: list[list[int]] = []
    threads = [threading.Thread(target=lambda: results.append(numbers(loader))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [list(range(50))] * 2


def test_an_iterator_made_here_and_consumed_in_a_thread(Loader: Any) -> None:
    iterator = iter(Loader(Indices(30), batch_size=3, num_workers=2))
    first = next(iterator).tolist()
    rest: list[int] = []
    thread = threading.Thread(target=lambda: rest.extend(numbers(iterator)))
    thread.start()
    thread.join()
    assert first + rest == list(range(30))


def test_many_loaders_at_once(Loader: Any) -> None:
    loaders = [Loader(Indices(10 + n), batch_size=4, num_workers=1) for n in range(6)]
    streams = [iter(loader) for loader in loaders]
    seen: list[list[int]] = [[] for _ in loaders]
    for _ in range(4):
        for stream, numbers_seen in zip(streams, seen, strict=True):
            numbers_seen.extend(int(i) for i in next(stream, []))
    assert seen == [list(range(10 + n)) for n in range(6)]


def test_prefetching_is_bounded(OurLoader: Any, tmp_path: Any) -> None:
    """Never more than eight times torch's batches are in flight, however fast the workers are."""
    log = tmp_path / "log"
    log.touch()
    dataset = Counted(500, str(log))
    iterator = iter(OurLoader(dataset, batch_size=1, num_workers=2, prefetch_factor=3))
    for taken in range(1, 60):
        next(iterator)
        assert len(dataset.loaded()) <= taken + 8 * 2 * 3 + 2


class Endless:
    """Gives what a sampler gives, over and over."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        while True:
            yield from self.sampler


@pytest.mark.parametrize("factor", [10**9, 2**70])
def test_prefetching_without_bound_reads_the_epoch(OurLoader: Any, factor: int) -> None:
    """Torch asks its sampler so often, even if nothing is left."""
    loader = OurLoader(Indices(20), batch_size=2, num_workers=1, prefetch_factor=factor)
    assert numbers(loader) == list(range(20))


def test_workers_start_while_the_script_waits_to_write_its_stacks(Loader: Any) -> None:
    """As with pytest's `faulthandler_timeout`. Its thread is not forked: what waits for that thread waits for ever."""
    faulthandler.dump_traceback_later(3600)
    try:
        assert numbers(Loader(Indices(20), batch_size=2, num_workers=2)) == list(range(20))
    finally:
        faulthandler.cancel_dump_traceback_later()


def test_a_loader_made_endless_and_driven_by_its_parts(Loader: Any) -> None:
    """As training frameworks keep workers over epochs, and end them by themselves."""

    class Kept(Loader):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            object.__setattr__(self, "batch_sampler", Endless(self.batch_sampler))
            self.iterator = self._get_iterator()

        def __len__(self) -> int:
            return len(self.batch_sampler.sampler)

        def __iter__(self) -> Any:
            for _ in range(len(self)):
                yield next(self.iterator)

    loader = Kept(Indices(10), batch_size=3, num_workers=2)
    assert [numbers(loader) for _ in range(3)] == [list(range(10))] * 3
    workers = loader.iterator._workers
    assert len(workers) == 2
    for worker in workers:
        worker.terminate()
    loader.iterator._shutdown_workers()
    assert not any(worker.is_alive() for worker in workers)


class Interrupted(Dataset[int]):
    """Control-C comes while the fourth sample is loaded for the first time."""

    def __init__(self) -> None:
        self.interrupted = False

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 3 and not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        return index


def test_an_interrupted_batch_is_the_next_one_without_workers(OurLoader: Any) -> None:
    iterator = iter(OurLoader(Interrupted(), batch_size=2))
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert [batch.tolist() for batch in iterator] == [[2, 3], [4, 5], [6, 7]]


def test_an_interrupted_sampler_does_not_end_the_epoch_in_silence(OurLoader: Any) -> None:
    def indices() -> Iterator[int]:
        yield from range(3)
        raise KeyboardInterrupt

    iterator = iter(OurLoader(Indices(8), sampler=indices(), batch_size=1))
    for _ in range(3):
        next(iterator)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    with pytest.raises(WorkerError, match="interrupted while the sampler drew"):
        next(iterator)
