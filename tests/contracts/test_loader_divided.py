"""Batches that several workers load: the same bytes, errors and orders as batches that one worker loads."""

from __future__ import annotations

import os
import signal
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, default_collate

from tests.loader_cases import assert_same, patiently, seed_everything
from torch_dpflow import DPFlowDataLoader
from torch_dpflow.errors import LoaderTimeoutError, MessageError
from torch_dpflow.ipc.messages.headers import BATCH, FAILURE, OPENED, BufferSpan, PayloadTable
from torch_dpflow.ipc.serialization.codec import encode
from torch_dpflow.loader import open_batches
from torch_dpflow.options import LoaderOptions
from torch_dpflow.workers import batch_pieces

ROWS = 24
BY_SAMPLE = LoaderOptions(seeding="sample")


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have every batch divided into single rows, and return the tasks of the opened batches."""
    monkeypatch.setattr(batch_pieces, "OPEN_S", 0.0)
    monkeypatch.setattr(batch_pieces, "REST_S", 0.0)
    monkeypatch.setattr(open_batches, "PIECE_S", 1e-9)
    tasks: list[int] = []
    add = open_batches.OpenBatches.add

    def noted(self: Any, task: int, opening: Any) -> None:
        tasks.append(task)
        add(self, task, opening)

    monkeypatch.setattr(open_batches.OpenBatches, "add", noted)
    return tasks


class Samples(Dataset[Any]):
    """Samples with one of everything that is collated in place. `at` is called for each index before it is loaded."""

    def __init__(self, length: int = 6 * ROWS, at: Callable[[int], None] = lambda index: None) -> None:
        self.length, self.at = length, at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.at(index)
        picture = torch.full((3, 40, 50), float(index)).permute(2, 0, 1)
        return {
            "pictures": [picture, picture + 0.5],
            "array": np.arange(7, dtype=np.int16) * index,
            "label": index,
            "weight": (index / 3, bool(index % 2), np.float32(index)),
            "scalar": torch.tensor(index),
        }


class Draws(Samples):
    """Samples some of which draw from all generators."""

    def __init__(self, begin: int = 0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.begin = begin

    def __getitem__(self, index: int) -> Any:
        self.at(index)
        if index < self.begin:
            return torch.zeros(2, dtype=torch.float64), 0
        return torch.rand(2, dtype=torch.float64) + np.random.random(), index


class Once:
    """Does something at these indices, once in all processes, or always."""

    def __init__(self, directory: Path, action: Callable[[int], None], *indices: int) -> None:
        self.directory, self.action, self.indices = directory, action, indices

    def __call__(self, index: int) -> None:
        if index in self.indices:
            try:
                (self.directory / str(index)).touch(exist_ok=False)
            except FileExistsError:
                return
            self.action(index)


def die(index: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail_at(*indices: int) -> Callable[[int], None]:
    def at(index: int) -> None:
        if index in indices:
            raise ValueError(f"sample {index} is damaged")

    return at


def loader(dataset: Any, num_workers: int = 3, **arguments: Any) -> Any:
    seed_everything(5)
    return DPFlowDataLoader(dataset, **{"batch_size": ROWS, "num_workers": num_workers, **arguments})


def read(dataset: Any, num_workers: int = 3, **arguments: Any) -> list[Any]:
    return list(loader(dataset, num_workers, **arguments))


@pytest.mark.parametrize("arguments", [{}, {"shuffle": True, "batch_size": 7}, {"drop_last": True, "batch_size": 50}])
def test_divided_batches_are_those_of_one_worker(opened: list[int], arguments: dict[str, Any]) -> None:
    reference = read(Samples(), 1, **arguments)
    assert not opened, "one worker shares with no other"
    batches = read(Samples(), **arguments)
    positions = sorted(map(batch_pieces.position_of, opened))
    # Two for each worker at the beginning, and one for each at the end.
    assert positions == [at for at in range(len(batches)) if at < 6 or at >= len(batches) - 3]
    assert_same(batches, reference)
    for batch in batches:  # in memory that only its reader writes
        batch["pictures"][0].fill_(-1)
    storages = {leaf.untyped_storage().data_ptr() for batch in batches for leaf in batch["pictures"]}
    assert len(storages) == 2 * len(batches)


def test_all_workers_load_one_batch() -> None:
    class Pids(Samples):
        def __getitem__(self, index: int) -> int:
            return os.getpid()

    pids = torch.cat(read(Pids(length=20 * ROWS)))
    assert max(len(set(part.tolist())) for part in pids.split(ROWS)) > 1


def test_rows_of_a_late_batch_do_not_begin_its_wait_again(opened: list[int]) -> None:
    rows = iter(loader(Samples(ROWS, at=lambda index: time.sleep(0.15)), 2, timeout=1, options=BY_SAMPLE))
    while not opened:  # on a busy machine, a first wait may end before the batch has begun
        with pytest.raises(LoaderTimeoutError, match="it waits for"):
            next(rows)
    (batch,) = patiently(rows)
    assert batch["label"].tolist() == [*range(ROWS)]


def test_subsets_are_divided(opened: list[int]) -> None:
    part = Subset(Subset(Samples(), range(100)), range(0, 100, 2))
    assert_same(read(part), read(part, 1))
    assert opened


def test_an_opened_batch_without_shared_memory_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = batch_pieces.PieceLoader.begin

    def opens_nothing(self: Any, index: Any, has_drawn: Any) -> Any:
        return (OPENED, encode(index)) if 0 in index else begin(self, index, has_drawn)

    monkeypatch.setattr(batch_pieces.PieceLoader, "begin", opens_nothing)
    batches = iter(DPFlowDataLoader(Samples(), batch_size=ROWS, num_workers=2))
    with pytest.raises(MessageError, match="an opened batch in 0 blocks of shared memory"):
        next(batches)
    assert [batch["label"].tolist()[0] for batch in batches] == [*range(ROWS, 6 * ROWS, ROWS)]


def test_workers_that_die_in_a_piece_or_after_they_opened_a_batch(tmp_path: Path, opened: list[int]) -> None:
    reference = read(Samples(), 1)
    # Row 0 is loaded before a batch is opened, and row 1 is that of the first piece.
    deaths = Once(tmp_path, die, 0, ROWS + 1, 2 * ROWS + 20, 3 * ROWS + 23, 4 * ROWS + 2, 4 * ROWS + 3)
    assert_same(read(Samples(at=deaths), options=LoaderOptions(restart_limit=20)), reference)
    assert len(list(tmp_path.iterdir())) == 6
    assert opened


@pytest.mark.parametrize("options", [None, BY_SAMPLE], ids=["default", "by sample"])
def test_random_numbers_depend_on_no_worker(tmp_path: Path, opened: list[int], options: Any) -> None:
    reference = read(Draws(), 1, options=options)
    values = torch.cat([batch[0] for batch in reference])
    assert len(set(values.flatten().tolist())) == values.numel()
    assert_same(read(Draws(), 2, options=options), reference)
    assert bool(opened) == (options is not None), "numbers that are drawn by batch need one worker"
    dying = Draws(at=Once(tmp_path, die, 3, ROWS, 5 * ROWS - 1))
    assert_same(read(dying, 4, options=options), reference)


def test_rows_that_draw_only_late_have_the_numbers_of_their_batch(opened: list[int]) -> None:
    late = Draws(begin=3 * ROWS + 9)
    batches = read(late)
    assert opened
    assert_same(batches, read(late, 1))


def test_one_seed_for_a_sample_also_where_one_worker_loads_the_batch() -> None:
    def collate(samples: list[Any]) -> Any:
        return default_collate(samples), torch.rand(1), len(samples)

    plain = read(Draws(), options=BY_SAMPLE)
    collated = read(Draws(), collate_fn=collate, options=BY_SAMPLE)
    assert_same([batch for batch, _, _ in collated], plain)
    assert [rows for _, _, rows in collated] == [ROWS] * 6, "a user's collate_fn gets whole batches"
    assert_same(collated, read(Draws(), 1, collate_fn=collate, options=BY_SAMPLE))


def test_the_error_is_that_of_the_first_damaged_sample(opened: list[int]) -> None:
    batches = loader(Samples(at=fail_at(2 * ROWS + 17, 2 * ROWS + 5, 2 * ROWS + 22)))
    whole = iter(batches)
    assert_same([next(whole), next(whole)], read(Samples(), 1)[:2])
    with pytest.raises(ValueError, match=f"sample {2 * ROWS + 5} is damaged"):
        next(whole)
    assert_same(list(whole), read(Samples(), 1)[3:])
    assert len(opened) == 6


def test_an_error_waits_for_the_rows_before_it() -> None:
    submitted: list[int] = []
    cancelled: list[int] = []
    delivered: list[Any] = []
    batches = open_batches.OpenBatches(
        2,
        lambda tasks: submitted.extend(task for task, _ in tasks),
        cancelled.extend,
        lambda *arguments: delivered.append(arguments),
    )
    task = batch_pieces.task_of(0, 7)
    lender = batch_pieces.Lender(0, 0, 0)
    opened = batch_pieces.OpenedBatch(None, range(7), 1, [], 1.0, lender)
    table = PayloadTable(1, (), BufferSpan(0, 0, 0), ())
    batches.add(task, open_batches.Opening(opened, table, b"", lambda: True))
    first, second, third, *later = submitted
    assert len(later) == 3
    batches.finish(third, FAILURE, "the third")
    batches.finish(first, BATCH, True)
    assert (sorted(cancelled), delivered) == (later, [])
    batches.finish(second, FAILURE, "the second")
    batches.finish(later[0], BATCH, True)  # late
    assert delivered == [(task, FAILURE, "the second", None)]
    assert not len(batches)


def test_indices_beyond_the_dataset_are_named(opened: list[int]) -> None:
    beyond = [[*range(20)], [*range(10), 900, 800, 5]]

    class Short(Samples):
        def __getitem__(self, index: int) -> Any:
            return torch.arange(144)[index]

    with pytest.raises(IndexError, match=r"The batch needs index 900, but the dataset's length is 144"):
        list(DPFlowDataLoader(Short(), batch_sampler=beyond, num_workers=2))
    assert opened


@pytest.mark.parametrize(
    "sample",
    [
        lambda index: torch.zeros(2 + (index == 30)),
        lambda index: {"a": 1, **({"b": 2} if index != 40 else {"c": 2})},
        lambda index: (1, 2, 3)[: 2 + (index == 47)],
        lambda index: np.ones(2) if index % ROWS == 5 else torch.ones(2, dtype=torch.float64),
        lambda index: {"a": [np.int64(index) if index % ROWS == 7 else torch.tensor(index)]},
    ],
    ids=["shapes", "keys", "lengths", "an array among tensors", "a number among tensors"],
)
def test_samples_that_cannot_be_stacked_fail_as_in_one_worker(sample: Callable[[int], Any]) -> None:
    class Uneven(Samples):
        def __getitem__(self, index: int) -> Any:
            return sample(index)

    def outcome(num_workers: int) -> list[Any]:
        batches, outcomes = iter(loader(Uneven(), num_workers)), []
        for _ in range(6):
            try:
                outcomes.append(str(next(batches)))
            except Exception as error:
                outcomes.append((type(error), str(error).splitlines()[-1]))
        return outcomes

    assert outcome(3) == outcome(1)


def test_what_is_not_stacked_row_by_row(opened: list[int]) -> None:
    """Text stays in lists, batches of several sizes and mixed numbers become what one worker makes of them."""

    class Mixed(Samples):
        def __getitem__(self, index: int) -> Any:
            size = 2 + index // ROWS
            return torch.zeros(size), (1 if index % 7 else 1.5)

    class Named(Samples):
        def __getitem__(self, index: int) -> Any:
            return f"sample {index}", index

    for dataset in (Mixed(), Named()):
        assert_same(read(dataset), read(dataset, 1))


def test_a_dataset_that_gets_whole_batches_is_not_divided(opened: list[int]) -> None:
    class Grouped(Samples):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [len(indices)] * len(indices)

    assert all((batch == ROWS).all() for batch in read(Grouped()))
    assert all((batch == ROWS).all() for batch in read(Subset(Grouped(), range(2 * ROWS))))
    read(Samples(length=5), batch_size=None)
    read(Samples(), options=LoaderOptions(read_threads=2))
    read(Samples(), options=LoaderOptions(shared_memory=0))
    read(Samples(), options=LoaderOptions(seeding="worker"))
    assert not opened


def test_resumed_and_persistent_epochs(opened: list[int]) -> None:
    def two_epochs(num_workers: int, stop: int | None) -> list[Any]:
        arguments = {"shuffle": True, "persistent_workers": True, "options": BY_SAMPLE}
        first, batches = loader(Draws(), num_workers, **arguments), []
        for batch in first:
            batches.append(batch)
            if len(batches) == stop:
                state = first.state_dict()
                first = loader(Draws(), num_workers + 1, **arguments)
                first.load_state_dict(state)
                batches += first
                break
        batches += first
        return batches

    reference = two_epochs(1, None)
    assert len(reference) == 12
    assert_same(two_epochs(3, None), reference)
    assert_same(two_epochs(3, 2), reference)
    persistent = loader(Samples(), persistent_workers=True)
    for stop in (1, 3, 2, 6):  # epochs that are left while pieces are on their way
        for number, batch in enumerate(persistent, 1):
            assert batch["label"].tolist() == [*range((number - 1) * ROWS, number * ROWS)]
            assert (batch["pictures"][1][:, 4, 2, 1] == batch["label"] + 0.5).all()
            if number == stop:
                break
    assert opened


def test_out_of_order_each_sample_comes_once() -> None:
    batches = read(Samples(), in_order=False, shuffle=True)
    assert sorted(torch.cat([batch["label"] for batch in batches]).tolist()) == [*range(6 * ROWS)]
    assert all((batch["array"][:, 1] == batch["label"]).all() for batch in batches)


def test_sample_seeding_needs_one_thread() -> None:
    with pytest.raises(ValueError, match="seeding='sample' with read_threads=2"):
        LoaderOptions(seeding="sample", read_threads=2)


class Noted(Samples):
    """Samples that are containers with an attribute."""

    def __getitem__(self, index: int) -> Any:
        sample = OrderedDict(label=index)
        sample.note = index  # type: ignore[attr-defined]
        return sample


@pytest.mark.parametrize("workers", [1, 2])
def test_attributes_of_containers_are_those_of_the_first_sample(workers: int, opened: list[int]) -> None:
    batches = [*DPFlowDataLoader(Noted(), ROWS, num_workers=workers)]
    assert [batch.note for batch in batches] == [*range(0, 6 * ROWS, ROWS)]
    assert torch.cat([batch["label"] for batch in batches]).tolist() == [*range(6 * ROWS)]
    assert not opened
