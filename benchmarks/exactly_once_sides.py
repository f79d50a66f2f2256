"""The sides of `benchmarks.exactly_once`: two workers each, one of which can be killed in the middle of an epoch.

python -m benchmarks.exactly_once_sides DISPATCHER PORT      # a worker of tf.data service
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol

import psutil
from torch.utils.data import Dataset

from examples.cluster import processes, started
from torch_dpflow import DPFlowDataLoader

BATCH, WORKERS = 8, 2
#: By when another worker works in place of one that was killed, seconds.
PATIENCE_S = 120.0


class Numbers(Dataset[int]):
    """Samples that tell which they are."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        time.sleep(0.002)  # so that workers are loading when one is killed
        return index


class Side(Protocol):
    """A loader with two workers."""

    def read(self) -> Iterable[Sequence[int]]:
        """The samples of an epoch, batch after batch."""

    def kill(self) -> None:
        """Kill one of the workers by SIGKILL."""

    def settle(self) -> None:
        """Wait until there are two again."""


Open = Callable[[int], AbstractContextManager[Side]]


class DPFlow:
    """Ours. workers: the processes that load, those that were killed perhaps among them."""

    def __init__(self, loader: DPFlowDataLoader[int], workers: Callable[[], list[int]]) -> None:
        self._loader, self._workers = loader, workers
        self._killed: set[int] = set()

    def read(self) -> Iterator[list[int]]:
        for batch in self._loader:
            yield batch.tolist()  # type: ignore[attr-defined]

    def kill(self) -> None:
        self.settle()  # which are told of may be fewer than work
        victim = self._alive()[0]
        self._killed.add(victim)
        os.kill(victim, signal.SIGKILL)

    def settle(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while len(self._alive()) < WORKERS:
            if time.monotonic() > deadline:
                raise TimeoutError(f"there were not {WORKERS} workers again within {PATIENCE_S:g} s")
            time.sleep(0.02)

    def _alive(self) -> list[int]:
        return [pid for pid in self._workers() if pid not in self._killed]


@contextmanager
def shared_flow(samples: int) -> Iterator[DPFlow]:
    """A flow of a cluster, which this process is the only job of."""
    with started() as address:

        def workers() -> list[int]:
            return [view.pid for view in processes(address) if view.role == "worker" and view.pid]

        yield DPFlow(loader_of(samples, flow="exactly-once", address=address), workers)


@contextmanager
def remote_loader(samples: int) -> Iterator[DPFlow]:
    """A private loader whose workers call over tcp, as those on other hosts do."""
    loader = loader_of(samples, platform="processes", persistent_workers=True)

    def workers() -> list[int]:
        """Those that load: one that has just been started cannot yet."""
        shard = loader._iterator._shard.processes  # type: ignore[union-attr]
        found = [child.pid for child in psutil.Process().children() if "torch_dpflow.remote.worker" in command(child)]
        return found if shard.working == len(found) else []

    try:
        yield DPFlow(loader, workers)
    finally:
        loader._iterator._shutdown_workers()  # type: ignore[union-attr]


def command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:  # it has ended
        return []


def loader_of(samples: int, **how: Any) -> DPFlowDataLoader[int]:
    return DPFlowDataLoader(Numbers(samples), batch_size=BATCH, shuffle=True, num_workers=WORKERS, **how)


class TFService:
    """tf.data service. A worker that was killed is started again at its address, as Kubernetes does."""

    def __init__(self, samples: int, policy: str) -> None:
        import tensorflow as tf

        service: Any = tf.data.experimental.service
        self._dispatcher = service.DispatchServer(service.DispatcherConfig(port=0))
        self._address = self._dispatcher.target.partition("://")[2]
        dataset: Any = tf.data.Dataset.range(samples).shuffle(samples).batch(BATCH)
        mode = getattr(service.ShardingPolicy, policy)
        self._dataset = dataset.apply(
            service.distribute(processing_mode=mode, service=self._dispatcher.target)
        ).prefetch(tf.data.AUTOTUNE)
        # What a worker imports takes seconds, so workers are forked off a process that has it.
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload([__name__, "tensorflow"])
        self._ports = [free_port() for _ in range(WORKERS)]
        self._workers = [self._start(port) for port in self._ports]

    def read(self) -> Iterator[list[int]]:
        for batch in self._dataset.as_numpy_iterator():
            yield batch.tolist()

    def kill(self) -> None:
        self._end(self._workers[0])
        self._workers[0] = self._start(self._ports[0])

    def settle(self) -> None:
        """Nothing: a worker tells when it is there."""

    def close(self) -> None:
        for worker in self._workers:
            self._end(worker)
        self._dispatcher._stop()

    def _start(self, port: int) -> multiprocessing.process.BaseProcess:
        ready, tell = self._processes.Pipe(duplex=False)
        worker = self._processes.Process(target=serve, args=(self._address, port, tell), daemon=True)
        worker.start()
        tell.close()
        with ready:
            ready.recv()  # EOFError: it has ended
        return worker

    def _end(self, worker: multiprocessing.process.BaseProcess) -> None:
        worker.kill()
        worker.join()


def serve(dispatcher: str, port: int, ready: Connection) -> None:
    """Be a worker of tf.data service."""
    import tensorflow as tf

    service: Any = tf.data.experimental.service
    # Heartbeats that are more frequent than the default (30 s): only what is waited for becomes shorter.
    config = service.WorkerConfig(
        dispatcher_address=dispatcher,
        worker_address=f"localhost:{port}",
        port=port,
        heartbeat_interval_ms=200,
    )
    worker = service.WorkerServer(config)
    ready.send(None)
    worker.join()


@contextmanager
def tf_service(samples: int, *, policy: str) -> Iterator[TFService]:
    side = TFService(samples, policy)
    try:
        yield side
    finally:
        side.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


#: Side -> what opens it, and the package that it needs.
SIDES: Mapping[str, tuple[Open, str]] = {
    "dpflow, shared flow": (shared_flow, "torch"),
    "dpflow, private, remote workers": (remote_loader, "torch"),
    "tf.data service, sharding off": (partial(tf_service, policy="OFF"), "tensorflow"),
    "tf.data service, DYNAMIC": (partial(tf_service, policy="DYNAMIC"), "tensorflow"),
}
