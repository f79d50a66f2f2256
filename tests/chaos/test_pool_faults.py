"""Servers of a pool are killed, frozen and started again while jobs read: every sample comes, once, and right."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from tests.datasets.samples_source import Numbered, numbers, publish
from tests.shared_cluster import PATIENCE_S, wait
from torch_dpflow import DPFlowDataLoader, PooledDataset
from torch_dpflow.datasets import DatasetStore
from torch_dpflow.errors import DPFlowError
from torch_dpflow.pool import DataServer
from torch_dpflow.pool.sources import identity_of
from torch_dpflow.pool.transport.control_connection import PoolConnection

COUNT, SERVERS, JOBS = 400, 4, 4
REF = "core/numbers:v1:train"
_CONTEXT = multiprocessing.get_context("forkserver")


def serve(folder: str, number: int) -> None:
    """A server with room for a third of the set: with one gone, the others have room for nearly all."""
    address, leader = Path(folder, f"s{number}"), Path(folder, "s0")
    try:
        DataServer(12 << 10, address, join=leader if number else None).serve()
    except BaseException:
        ended(folder, number).write_text(traceback.format_exc())
        raise


def ended(folder: str | Path, number: int) -> Path:
    """The file with the error that ended a server."""
    return Path(folder, f"ended-{number}")


def read_epochs(folder: str, number: int, store: str, epochs: list[int], problems: list[str]) -> None:
    """Read epochs until killed; tell how many, and what was wrong."""
    expected = numbers(COUNT)
    stored = DatasetStore(store).open(REF)
    try:
        while True:
            with closing(PooledDataset(stored, Path(folder, f"s{number}"), silence_s=0.3)) as dataset:
                loader = DPFlowDataLoader(dataset, batch_size=16, shuffle=True, collate_fn=list)
                samples = [sample for batch in loader for sample in batch]
                if sorted(samples, key=lambda sample: sample[1]["number"]) != expected:
                    problems.append(f"job {number}: {len(samples)} samples, {samples!r}")
            epochs[number] += 1
    except (EOFError, OSError, KeyboardInterrupt):  # the test has ended
        raise SystemExit from None
    except Exception as error:
        problems.append(f"job {number}: {error!r}")
        raise


def end(process: ForkServerProcess) -> None:
    process.kill()
    process.join()
    process.close()


class Pool:
    """Servers in processes that are forked from one in which everything is imported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers = [self._start(number) for number in range(SERVERS)]

    def _start(self, number: int) -> ForkServerProcess:
        process = _CONTEXT.Process(target=serve, args=(str(self.folder), number), daemon=True)
        process.start()
        return process

    def signal(self, number: int, what: signal.Signals) -> None:
        """Send a signal to a server. One that has ended without any is the fault that is looked for."""
        server, error = self.servers[number], ended(self.folder, number)
        assert server.is_alive(), (number, server.exitcode, error.read_text() if error.exists() else "no error")
        assert server.pid is not None
        os.kill(server.pid, what)

    def kill(self, number: int) -> None:
        """It is killed, and another begins at its address, with empty memory."""
        self.signal(number, signal.SIGKILL)
        end(self.servers[number])
        self.servers[number] = self._start(number)

    def close(self) -> None:
        for server in self.servers:
            end(server)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    _CONTEXT.set_forkserver_preload(["torch_dpflow.pool.server.data_server", "torch_dpflow.loader", __name__])
    found = Pool(tmp_path)
    yield found
    found.close()


def cause(pool: Pool, chance: random.Random, identity: bytes) -> None:
    """One fault, of a server that chance says."""
    number = chance.randrange(SERVERS)
    match chance.choice(["kill", "kill", "freeze", "freeze", "unload", "wait"]):
        case "kill":
            pool.kill(number)
        case "freeze":
            pool.signal(number, signal.SIGSTOP)
            time.sleep(chance.choice([0.02, 0.1, 0.5]))
            pool.signal(number, signal.SIGCONT)
        case "unload":
            with (
                contextlib.suppress(DPFlowError),
                PoolConnection(pool.folder / f"s{number}", silence_s=0.5) as connection,
            ):
                connection.unload(identity)
        case "wait":
            time.sleep(chance.choice([0.1, 0.3]))


@pytest.mark.parametrize("faults", [12, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_faults_of_servers(tmp_path: Path, pool: Pool, faults: int) -> None:
    chance = random.Random(faults)
    stored = publish(DatasetStore.create(str(tmp_path / "datasets")), Numbered(COUNT), shard_size=10)
    with _CONTEXT.Manager() as manager:
        epochs, problems = manager.list([0] * JOBS), manager.list()
        store = str(tmp_path / "datasets")
        jobs = [
            _CONTEXT.Process(target=read_epochs, args=(str(pool.folder), number, store, epochs, problems), daemon=True)
            for number in range(JOBS)
        ]
        for job in jobs:
            job.start()
        try:
            wait(lambda: min(epochs) > 0, what="the first epochs")
            for _ in range(faults):
                cause(pool, chance, identity_of(stored))
                assert not problems, problems[0]
            before = [*epochs]
            wait(
                lambda: all(now > then + 1 for now, then in zip(epochs, before)),
                what="whole epochs after faults",
            )
            assert [*problems] == []
            assert all(job.is_alive() for job in jobs)
            print(f"{faults} faults, epochs of each job: {[*epochs]}")
        finally:
            for job in jobs:
                end(job)
    with closing(PooledDataset(stored, tmp_path / "s0", silence_s=PATIENCE_S)) as dataset:
        wait(
            lambda: dataset.read_each(range(COUNT)) == numbers(COUNT) and dataset.hits >= COUNT,
            what="memory that is used again",
        )
