"""TensorSocket as a side of `benchmarks.sharing`: one process loads and sends every batch to all jobs.

Run as a program it is that process: `python -m benchmarks.sharing_tensorsocket --ports A,B,C,D --images DIR ...`.
Each line of its input is answered with how many samples it has loaded.
"""

import argparse
import importlib.util
import logging
import os
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.sharing_job import BATCH, dataset_of

#: Batches that are collated and sent at a time: the fewest with which it works. What is left over at the end of an
#: epoch is not sent.
BATCHES_AT_A_TIME = 2
#: How far jobs may lag behind each other, as a share of an epoch; and at least, in batches.
LAG, FEWEST = 0.2, 6


def is_installed() -> bool:
    """Whether this side can run."""
    return importlib.util.find_spec("tensorsocket") is not None


class Producer:
    """The process that loads, as the benchmark sees it."""

    def __init__(self, process: "subprocess.Popen[str]", address: str) -> None:
        self._process = process
        #: Its ports.
        self.address = address

    def elsewhere_s(self) -> float:
        """None of its processes stands for another host's."""
        return 0.0

    def loads(self) -> int:
        """Samples that it has loaded."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print("loads", file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())


@contextmanager
def producing(images: str, samples: int, workers: int, *, kept: bool) -> Iterator[Producer]:
    """Have a process load for jobs that are about to start."""
    ports = ",".join(map(str, _free_ports(4)))
    command = [sys.executable, "-m", "benchmarks.sharing_tensorsocket", f"--ports={ports}"]
    command += [f"--images={images}", f"--samples={samples}", f"--workers={workers}"] + ["--kept"] * kept
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Producer(process, ports)
    finally:
        process.terminate()
        process.communicate()


class Consumed:
    """The epochs that one job gets."""

    def __init__(self, address: str) -> None:
        from tensorsocket import TensorConsumer

        _quieten()
        self._consumer = TensorConsumer(**_ports_of(address), batch_size=BATCH)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for (batch,) in self._consumer:
            yield batch


class _Counted:
    """A loader whose batches are counted, and have the form that TensorSocket wants."""

    def __init__(self, loader: "DataLoader[torch.Tensor]") -> None:
        self._loader = loader
        self.samples = 0

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        # At once: the loader forks its workers here, before TensorSocket starts its threads.
        return self._counted(iter(self._loader))

    def _counted(self, batches: Iterator[torch.Tensor]) -> Iterator[tuple[torch.Tensor]]:
        for batch in batches:
            self.samples += len(batch)
            yield (batch,)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _ports_of(address: str) -> dict[str, Any]:
    data, acknowledged, *hearts = map(int, address.split(","))
    return {"port": data, "ack_port": acknowledged, "heart_ports": tuple(hearts)}


def _quieten() -> None:
    """Its import sends the log of every library to standard output."""
    logging.getLogger().handlers.clear()


def _answer(loader: _Counted) -> None:
    # Not by `sys.stdin`, whose lock this thread would hold for good: a worker that is forked meanwhile closes it.
    while os.read(0, 1024):
        print(loader.samples, flush=True)


def main() -> None:
    from tensorsocket import TensorProducer

    _quieten()
    parser = argparse.ArgumentParser()
    parser.add_argument("--ports", required=True)
    parser.add_argument("--images", required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--kept", action="store_true")
    parser.set_defaults(fast=False)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create|TypedStorage is deprecated")
    given: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "num_workers": arguments.workers}
    loader = _Counted(DataLoader(dataset_of(arguments), persistent_workers=True, **given))
    producer = TensorProducer(
        loader,
        **_ports_of(arguments.ports),
        producer_batch_size=BATCHES_AT_A_TIME,
        rubber_band_pct=max(LAG, FEWEST / len(loader)),
        consumer_max_buffer_size=2 * BATCHES_AT_A_TIME,
    )
    threading.Thread(target=_answer, args=(loader,), daemon=True).start()
    while True:
        for _ in producer:
            pass


if __name__ == "__main__":
    main()
