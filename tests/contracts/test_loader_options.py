"""What `LoaderOptions` changes, and what it refuses."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from tests.loader_cases import Batched, Counted, Indices, Rows, assert_same, epochs, patiently
from torch_dpflow.errors import LoaderTimeoutError, OptionError, OptionTypeError, WorkerError
from torch_dpflow.loader import batch_planner
from torch_dpflow.options import LoaderOptions


@pytest.mark.parametrize(
    "values",
    [
        {"read_threads": 0},
        {"read_threads": -1},
        {"seeding": "row"},
        {"prefetch_growth": 0.5},
        {"prefetch_growth": float("nan")},
        {"prefetch_growth": float("inf")},
        {"restart_limit": -1},
        {"poison_limit": 0},
        {"shared_memory": -1},
    ],
    ids=str,
)
def test_values_out_of_range(values: dict[str, Any]) -> None:
    ((name, value),) = values.items()
    with pytest.raises(OptionError, match=name) as raised:
        LoaderOptions(**values)
    assert repr(value) in str(raised.value)
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize(
    "values",
    [
        {"read_threads": 1.5},
        {"read_threads": True},
        {"prefetch_growth": "2"},
        {"restart_limit": "8"},
        {"poison_limit": "3"},
        {"shared_memory": "1GiB"},
    ],
    ids=str,
)
def test_values_of_the_wrong_type(values: dict[str, Any]) -> None:
    ((name, _value),) = values.items()
    with pytest.raises(OptionTypeError, match=name) as raised:
        LoaderOptions(**values)
    assert isinstance(raised.value, TypeError)


def test_options_are_a_frozen_value() -> None:
    options = LoaderOptions(read_threads=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.read_threads = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        LoaderOptions(2)  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize("options", [3, {"read_threads": 2}, LoaderOptions])
def test_what_is_not_options_is_refused(OurLoader: Any, options: Any) -> None:
    with pytest.raises(OptionTypeError, match="LoaderOptions"):
        OurLoader(Indices(3), options=options)


@pytest.mark.parametrize(
    "values",
    [
        {"num_workers": 1.5},
        {"generator": 3},
        {"collate_fn": 3},
        {"worker_init_fn": "seed"},
        {"flow": "imagenet", "address": 3},
    ],
    ids=str,
)
def test_what_no_epoch_could_use_is_refused_at_once(OurLoader: Any, values: dict[str, Any]) -> None:
    name = list(values)[-1]
    with pytest.raises(OptionTypeError, match=f"{name}=.* give ") as raised:
        OurLoader(Indices(3), **values)
    assert isinstance(raised.value, TypeError)


@pytest.mark.parametrize("flow", ["", "../..", "-x", "a b", "x:v0", 3])
def test_what_is_no_flows_name_is_refused(OurLoader: Any, flow: Any) -> None:
    with pytest.raises(OptionError, match="give a name of 1 to 100"):
        OurLoader(Indices(3), flow=flow)


def test_a_flows_workers_are_not_counted_against_this_machines_processors(OurLoader: Any) -> None:
    many = (os.cpu_count() or 1) + 1
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        OurLoader(Indices(3), num_workers=many, flow="indices")
    assert not told
    with pytest.warns(UserWarning, match="This DataLoader will create"):
        OurLoader(Indices(3), num_workers=many)


class Meeting(Indices):
    """Nobody leaves `__getitem__` before four are in it."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.barrier = threading.Barrier(4)

    def __getitem__(self, index: int) -> int:
        self.barrier.wait(timeout=150)
        return index


def test_read_threads_overlap_the_reads_of_a_batch(OurLoader: Any) -> None:
    options = LoaderOptions(read_threads=4)
    loader = OurLoader(Meeting(16), batch_size=8, num_workers=2, options=options)
    assert [batch.tolist() for batch in loader] == [list(range(8)), list(range(8, 16))]


@pytest.mark.parametrize("batch_size", [None, 1, 5])
def test_read_threads_keep_order_and_errors(OurLoader: Any, batch_size: int | None) -> None:
    options = LoaderOptions(read_threads=3)
    arguments = {"batch_size": batch_size, "num_workers": 2}
    rows = Rows(17)
    assert_same(list(OurLoader(rows, options=options, **arguments)), list(OurLoader(rows, **arguments)))
    with pytest.raises(IndexError, match="row 99 of 17"):
        list(OurLoader(rows, sampler=[1, 2, 99], options=options, **arguments))


def test_read_threads_leave_a_dataset_that_reads_at_once_alone(OurLoader: Any) -> None:
    options = LoaderOptions(read_threads=3)
    loader = OurLoader(Batched(6), batch_size=3, num_workers=1, options=options)
    assert [how for _, how in loader] == [("3 at once",) * 3] * 2


@pytest.mark.parametrize("shared_memory", [0, 4096, 1 << 20, None])
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_any_amount_of_shared_memory_will_do(
    OurLoader: Any, shared_memory: int | None, persistent_workers: bool
) -> None:
    rows = Rows(24, width=50_000)
    loader = OurLoader(
        rows,
        batch_size=3,
        num_workers=2,
        persistent_workers=persistent_workers,
        options=LoaderOptions(shared_memory=shared_memory),
    )
    for epoch in epochs(loader, 2):
        assert [indices.tolist() for indices, _, _ in epoch] == [[i, i + 1, i + 2] for i in range(0, 24, 3)]
        for indices, vectors, _ in epoch:
            assert_same(vectors, torch.stack([rows[int(index)][1] for index in indices]))


@pytest.mark.parametrize("growth", [1.0, 1.5, 4])
def test_what_is_in_flight_grows_no_further_than_allowed(OurLoader: Any, growth: float, tmp_path: Any) -> None:
    log = tmp_path / "log"
    log.touch()
    dataset = Counted(300, str(log))
    options = LoaderOptions(prefetch_growth=growth)
    iterator = iter(OurLoader(dataset, num_workers=2, prefetch_factor=3, options=options))
    for taken in range(1, 50):
        next(iterator)
        # A batch that an idle worker takes over may have been begun: it is loaded twice.
        assert len(dataset.loaded()) <= taken + growth * 6 + iterator._shard.totals().steals


class Late(Counted):
    """One sample comes when it is let through; all from `large` on are of two MiB."""

    def __init__(self, size: int, log: str, late: int = 0, large: int = 0) -> None:
        super().__init__(size, log)
        self.late, self.large = late, large
        self.gate = multiprocessing.get_context("fork").Event()

    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        if index == self.late:
            self.gate.wait()
        return self.sample(index)

    def sample(self, index: int) -> Any:
        return torch.full((1 << 18 if index >= self.large else 1,), index)


class LateObjects(Late):
    """As `Late`; a sample is a list, which counts as 256 KiB, and is 32 KiB as a pickle."""

    def sample(self, index: int) -> Any:
        return [index] * (1 << 14)


@pytest.mark.parametrize(
    ("growth", "extra_mib", "fraction", "most"),
    [
        pytest.param(3, 1, 4, 12, id="given"),
        pytest.param(3, 1, 1 << 60, 4, id="given, memory is short"),
        pytest.param(None, 1, 4, 8, id="default, large batches"),
        pytest.param(None, 1, 1 << 60, 4, id="default, memory is short"),
        pytest.param(None, 17, 4, 12, id="default, small batches at first"),
        pytest.param(None, 99, 1 << 60, 32, id="default, small batches"),
    ],
)
def test_what_is_in_flight_grows_as_memory_allows(
    OurLoader: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    growth: float | None,
    extra_mib: int,
    fraction: int,
    most: int,
) -> None:
    monkeypatch.setattr(batch_planner, "GROWTH_BYTES", extra_mib << 20)
    monkeypatch.setattr(batch_planner, "GROWTH_FRACTION", fraction)
    log = tmp_path / "log"
    log.touch()
    dataset = Late(40, str(log))
    options = LoaderOptions(prefetch_growth=growth)
    loader = OurLoader(dataset, batch_size=None, num_workers=2, prefetch_factor=2, timeout=1, options=options)
    iterator = iter(loader)
    begun = 0
    while begun < most or len(set(dataset.loaded())) > begun:  # until nothing more comes within the timeout
        begun = len(set(dataset.loaded()))
        with pytest.raises(LoaderTimeoutError):
            next(iterator)
    assert begun == most
    dataset.gate.set()
    assert [int(sample[0]) for sample in patiently(iterator)] == list(range(40))


@pytest.mark.parametrize(("batch_size", "most"), [(None, 30), (4, 25), (5, 26)])
def test_growth_does_not_change_when_a_generator_of_the_training_loop_is_drawn_from(
    OurLoader: Any, tmp_path: Any, batch_size: int | None, most: int
) -> None:
    def drawn(loader: type, **options: Any) -> list[float]:
        log = tmp_path / loader.__name__
        log.touch()
        first = int(torch.randperm(30, generator=torch.Generator().manual_seed(1))[0])
        dataset, generator = Late(30, str(log), late=first), torch.Generator().manual_seed(1)
        sampler = RandomSampler(dataset, generator=generator)
        options = {"batch_size": batch_size, "sampler": sampler, "num_workers": 2, "prefetch_factor": 1, **options}
        iterator = iter(loader(dataset, **options))
        begun = 0
        while loader is not DataLoader and (begun < most or len(set(dataset.loaded())) > begun):
            begun = len(set(dataset.loaded()))
            with pytest.raises(LoaderTimeoutError):
                next(iterator)
        dataset.gate.set()
        return [float(torch.rand((), generator=generator)) for _ in patiently(iterator)]

    assert drawn(OurLoader, timeout=1, options=LoaderOptions(prefetch_growth=30)) == drawn(DataLoader)


def test_what_is_in_flight_shrinks_when_batches_become_larger(
    OurLoader: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(batch_planner, "GROWTH_BYTES", 1 << 20)
    log = tmp_path / "log"
    log.touch()
    dataset = Late(100, str(log), large=32)
    iterator = iter(OurLoader(dataset, batch_size=None, num_workers=2, prefetch_factor=2, timeout=1))
    while len(set(dataset.loaded())) < 32:
        with pytest.raises(LoaderTimeoutError):
            next(iterator)
    dataset.gate.set()
    rest = patiently(iterator)
    seen = [int(next(rest)[0]) for _ in range(60)]
    assert len(iterator._in_flight) <= 8
    assert seen + [int(sample[0]) for sample in rest] == list(range(100))


def test_the_size_of_python_objects_is_not_that_of_their_pickle(
    OurLoader: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(batch_planner, "GROWTH_BYTES", 17 << 18)
    log = tmp_path / "log"
    log.touch()
    dataset = LateObjects(40, str(log))
    loader = OurLoader(dataset, batch_size=None, num_workers=2, prefetch_factor=2, timeout=1)
    iterator = iter(loader)
    begun = 0
    while begun < 20 or len(set(dataset.loaded())) > begun:  # until nothing more comes within the timeout
        begun = len(set(dataset.loaded()))
        with pytest.raises(LoaderTimeoutError):
            next(iterator)
    assert begun == 20
    dataset.gate.set()
    assert [sample[0] for sample in patiently(iterator)] == list(range(40))
    assert loader.stats().bytes < 40 << 16, "bytes are counted as they were sent"


def test_what_is_in_flight_does_not_grow_before_a_batch_tells_its_size(OurLoader: Any, tmp_path: Any) -> None:
    log = tmp_path / "log"
    log.touch()
    dataset = Late(8, str(log))
    options = LoaderOptions(prefetch_growth=2)
    iterator = iter(OurLoader(dataset, batch_size=8, num_workers=2, prefetch_factor=1, timeout=1, options=options))
    while not iterator._has_idle_worker:  # the second one: there is one batch
        with pytest.raises(LoaderTimeoutError):
            next(iterator)
    assert not iterator._limit.may_grow(len(iterator._in_flight) + 1, iterator._largest)
    dataset.gate.set()
    assert len(list(patiently(iterator))) == 1


def test_a_batch_that_came_before_the_workers_were_shut_down_is_refused(OurLoader: Any, tmp_path: Any) -> None:
    log = tmp_path / "log"
    log.touch()
    dataset = Late(8, str(log))
    iterator = iter(OurLoader(dataset, batch_size=None, num_workers=2, timeout=1))
    while len(set(dataset.loaded())) < 4:
        with pytest.raises(LoaderTimeoutError):
            next(iterator)
    with pytest.raises(LoaderTimeoutError):  # meanwhile the second sample comes
        next(iterator)
    dataset.gate.set()
    assert int(next(patiently(iterator))[0]) == 0
    iterator._shutdown_workers()
    with pytest.raises(WorkerError, match="shut down"):
        next(iterator)


@pytest.mark.parametrize("seeding", ["batch", "worker", "auto"])
def test_every_kind_of_seeding_loads_everything_once(OurLoader: Any, seeding: Any) -> None:
    loader = OurLoader(Indices(50), batch_size=3, shuffle=True, num_workers=3, options=LoaderOptions(seeding=seeding))
    for epoch in epochs(loader, 2):
        assert sorted(int(index) for batch in epoch for index in batch) == list(range(50))
