"""A worker that sits in one sample reads no message: the messages to it are bounded, and none is lost."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from tests.shared_cluster import wait
from torch_dpflow import DPFlowDataLoader
from torch_dpflow.epoch.rng import seed_batch
from torch_dpflow.ipc import transport
from torch_dpflow.ipc.transport import TransportOptions
from torch_dpflow.ipc.transport.zeromq import sockets

BATCHES = 40


@pytest.fixture(autouse=True)
def short_queues(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Let queues be full after some hundred messages, so that it takes no minute to fill one; no worker is replaced."""
    for socket in (transport.listen, transport.connect):
        monkeypatch.setitem(socket.__kwdefaults__, "options", TransportOptions(queue_messages=160))
    monkeypatch.setattr(sockets, "LOCAL_KERNEL_BYTES", 4096)
    with caplog.at_level(logging.WARNING, logger="torch_dpflow"):
        yield
    assert not caplog.records


def hold(path: str) -> None:
    """Wait until the file is gone; make a file before that and one after it.

    In the first process alone: another one may steal the sample before it is known that its load has begun.
    """
    if Path(path).exists():
        try:
            Path(f"{path}-begun").touch(exist_ok=False)
        except FileExistsError:
            return
        wait(lambda: not Path(path).exists())
        Path(f"{path}-passed").touch()


class Rows(Dataset):
    """Index and random number; row 1 takes as long as a file exists."""

    def __init__(self, held: str) -> None:
        self.held = held

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 1:
            hold(self.held)
        return torch.tensor([index, int(torch.randint(1 << 30, ()))])


class Items(IterableDataset):
    """Items of two workers; the second item of the second worker takes as long as a file exists."""

    def __init__(self, held: str) -> None:
        self.held = held

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        assert info is not None
        for item in range(info.id, BATCHES, 2):
            if item == 3:
                hold(self.held)
            yield torch.tensor([item, 0])


class FirstOnce(list):
    """An order that has row 1 in its first epoch only."""

    is_first = True

    def __iter__(self) -> Iterator[int]:
        head, self.is_first = ([0, 1] if self.is_first else [0, 2]), False
        return iter([*head, *range(2, BATCHES)])

    def __len__(self) -> int:
        return BATCHES


@pytest.mark.parametrize("streams", [False, True])
def test_the_last_of_many_epochs_has_its_own_numbers(tmp_path: Path, streams: bool) -> None:
    """A step-based script takes one batch of each of many epochs while a worker sits in a sample of the first."""
    held = tmp_path / "held"
    held.touch()
    data: Any = Items(str(held)) if streams else Rows(str(held))
    order = {} if streams else {"sampler": FirstOnce()}
    loader = DPFlowDataLoader(data, batch_size=1, **order, num_workers=2, persistent_workers=True, timeout=60)
    for _ in range(400):
        last = iter(loader)
        first = next(last)
        wait(Path(f"{held}-begun").exists)
    held.unlink()
    wait(Path(f"{held}-passed").exists)
    got = [first, *last]
    if streams:
        assert [int(batch[0, 0]) for batch in got] == [*range(BATCHES)]
        return
    base_seed, epoch = int(loader._iterator._base_seed), loader._runtime.epoch - 1
    for position, batch in enumerate(got):
        seed_batch(base_seed, epoch, position)
        assert int(batch[0, 1]) == int(torch.randint(1 << 30, ())), position
    assert len(got) == BATCHES


def test_all_batches_come_without_an_order(tmp_path: Path) -> None:
    """One worker loads thousands of batches, and steals what the other gets, which sits in one sample."""
    held, samples = tmp_path / "held", 2000
    held.touch()
    loader = DPFlowDataLoader(
        Rows(str(held)), batch_size=1, sampler=range(samples), num_workers=2, in_order=False, timeout=60
    )
    got: list[int] = []
    for batch in loader:
        got.append(int(batch[0, 0]))
        if len(got) == samples - 100:
            held.unlink()
    assert sorted(got) == [*range(samples)]
