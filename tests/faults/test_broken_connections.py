"""Real connections of live remote workers that are reset, at moments when messages are lost with them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from tests.shared_cluster import wait
from tests.support.tcp_proxy import ProxiedConnection, TcpProxy
from torch_dpflow import DPFlowDataLoader, LoaderOptions
from torch_dpflow.epoch.rng import seed_batch
from torch_dpflow.remote.fleet import worker_listener, worker_states

BATCHES = 40
pytestmark = pytest.mark.usefixtures("preloaded_workers")


class Rows(Dataset):
    """Index and random number; row 6 takes as long as a file exists."""

    def __init__(self, held: Path) -> None:
        self.held = str(held)

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 6 and Path(self.held).exists():
            Path(f"{self.held}-begun").touch()
            wait(lambda: not Path(self.held).exists())
        return torch.tensor([index, int(torch.randint(1 << 30, ()))])


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[TcpProxy]:
    opened = TcpProxy()
    monkeypatch.setattr(worker_listener, "to_tell", opened.tell)
    monkeypatch.setattr(worker_states, "LOST_S", 1.0)
    yield opened
    opened.close()


def loader_of(held: Path, **given: Any) -> DPFlowDataLoader:
    return DPFlowDataLoader(
        Rows(held),
        batch_size=1,
        platform="processes",
        timeout=60,
        options=LoaderOptions(listen="tcp://127.0.0.1:0"),
        **{"num_workers": 1, **given},
    )


def break_all(proxy: TcpProxy) -> None:
    for connection in [*proxy.connections]:
        if not connection.is_over:
            connection.reset()


def check(loader: DPFlowDataLoader, got: list[torch.Tensor], epoch: int) -> None:
    """Check that the batches of one epoch are in order, each with the random numbers of its position."""
    assert [int(batch[0, 0]) for batch in got] == [*range(BATCHES)]
    base_seed = int(loader._iterator._base_seed)
    for position, batch in enumerate(got):
        seed_batch(base_seed, epoch, position)
        assert int(batch[0, 1]) == int(torch.randint(1 << 30, ())), f"batch {position}"


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_connections_reset_while_a_worker_loads(tmp_path: Path, proxy: TcpProxy, workers: int) -> None:
    """Its next tasks are sent while no connection is there, and its result is on its way."""
    held = tmp_path / "held"
    held.touch()
    loader = loader_of(held, num_workers=workers, persistent_workers=True)
    reading = iter(loader)
    got = [next(reading) for _ in range(5)]
    wait(Path(f"{held}-begun").exists)
    proxy.accepts.clear()
    break_all(proxy)
    got += [next(reading)]
    held.unlink()
    proxy.accepts.set()
    got += reading
    check(loader, got, loader._runtime.epoch - 1)


def is_idle_after(reading: Any, batches: int) -> bool:
    """Whether the one worker has delivered so many batches and has no task."""
    scheduler = reading._shard._scheduler
    return scheduler.counters.delivered >= batches and scheduler.workers == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("away", [False, True])
def test_connections_reset_while_a_worker_is_idle(tmp_path: Path, proxy: TcpProxy, away: bool) -> None:
    """The next tasks are sent into connections that are gone, or that come back at that moment."""
    loader = loader_of(tmp_path / "none", persistent_workers=True)
    reading = iter(loader)
    got = [next(reading) for _ in range(3)]
    for _ in range(3):
        # Both batches ahead are there. An idle worker alone may mean that the last `next` has submitted no task yet.
        wait(partial(is_idle_after, reading, len(got) + 2))
        if away:
            proxy.accepts.clear()
        break_all(proxy)
        got += [next(reading)]  # it is there already, and another one is requested in its place
        proxy.accepts.set()
    got += reading
    check(loader, got, loader._runtime.epoch - 1)


@pytest.mark.slow
def test_connections_reset_between_two_epochs(tmp_path: Path, proxy: TcpProxy) -> None:
    """The beginning of the next epoch is sent into connections that are gone, or that come back at that moment."""
    loader = loader_of(tmp_path / "none", persistent_workers=True)
    check(loader, [*loader], loader._runtime.epoch - 1)
    for _ in range(3):
        break_all(proxy)
        check(loader, [*loader], loader._runtime.epoch - 1)


@pytest.mark.parametrize("number", [1, *(pytest.param(number, marks=pytest.mark.slow) for number in (0, 2, 3))])
def test_a_connection_reset_before_a_worker_is_ready(tmp_path: Path, proxy: TcpProxy, number: int) -> None:
    """The n-th connection is reset as soon as the server has answered there: the handshake may be lost with it."""

    def reset_one(connection: ProxiedConnection) -> None:
        if len(proxy.connections) == number + 1:
            wait(lambda: connection.from_server)
            connection.reset()

    proxy.on_connection = reset_one
    loader = loader_of(tmp_path / "none", persistent_workers=True)
    check(loader, [*loader], loader._runtime.epoch - 1)
