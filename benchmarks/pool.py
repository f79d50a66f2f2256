"""Several servers in one pool: how fast they load a dataset, what they read and take for it, and what a death costs.

    python -m benchmarks.pool [--json | --markdown] [--rounds N] [--part preload|loss] [--megabytes 1024]
        [--latency-ms 10] [--connection-mb-s RATE] [--quick]

preload: one server and four, each a process of its own on this host (`dpflow pool serve`, `--join`), load a dataset of
records of 110 kB in packs from a double of OSS, which holds each answer back and is a process too. "storage" is
what they read of the data, "memory" what their processes take (proportional set size), both by the dataset's bytes;
"idle" is what each took before, and "beside" what each takes in the end that is no record, MB. Servers and store share
the processors here; with --connection-mb-s, which bounds what one connection to the store carries, as clouds do, the
servers' own requests are what takes time. loss: a process reads an epoch in batches of 64, from storage without a pool,
and from four servers of which one is killed in the midst, the one that the process was given; "stall" is the longest
batch, "storage" the samples that it has read from there, by the dataset's samples. Over data connections it reads as on
another host, over TCP, so it has nothing of the server that is killed. Otherwise it has mapped the memory of all.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.read_batch import RECORD_BYTES, Records
from benchmarks.report import Comparison, Figures, Metric, add_arguments, alternate, publish
from tests.support.oss_server import OSSServer
from torch_dpflow import PooledDataset
from torch_dpflow.cluster.security.connection_file import generate_keys, write_connection_file
from torch_dpflow.datasets import DatasetStore, Draft, StoredDataset
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.pool import DataClient
from torch_dpflow.pool.messages import ServerInfo
from torch_dpflow.pool.transport.address import find_address
from torch_dpflow.pool.transport.control_connection import PoolConnection

BATCH, PER_STRIPE = 64, 20
METRICS = [
    Metric(name="seconds", label="preload, s", higher_is_better=False, spec=".2f"),
    Metric(name="storage", label="storage", higher_is_better=False, spec=".3f"),
    Metric(name="memory", label="memory", higher_is_better=False, spec=".3f"),
    Metric(name="idle_mb", label="idle, MB a server", higher_is_better=False, spec=".1f"),
    Metric(name="beside_mb", label="beside, MB a server", higher_is_better=False, spec=".1f"),
    Metric(name="epoch_s", label="epoch, s", higher_is_better=False, spec=".2f"),
    Metric(name="stall_s", label="stall, s", higher_is_better=False, spec=".3f"),
    Metric(name="wrong", label="wrong or missing", higher_is_better=False, spec=".0f"),
]


def serve_objects(latency_s: float, bytes_per_s: float | None, count: int, pipe: Connection) -> None:
    """The object store: publishes the dataset, says where, then how many bytes of data it was asked for since."""
    with OSSServer() as oss:
        oss.buckets.create("bucket")
        publish_records("oss://bucket/datasets", count, **oss.storage_options())
        oss.latency_s, oss.connection_bytes_per_s = latency_s, bytes_per_s
        pipe.send(oss.storage_options())
        while pipe.recv():
            pipe.send(sum(map(bytes_asked_for, oss.requests)))
            oss.requests.clear()


def bytes_asked_for(request: object) -> int:
    """Of data, by ranges."""
    method, key, span = (getattr(request, name) for name in ("method", "key", "headers"))
    if method != "GET" or "/data/" not in key or "range" not in span:
        return 0
    first, last = span["range"].removeprefix("bytes=").split("-")
    return int(last) - int(first) + 1


def publish_records(url: str, count: int, **options: object) -> None:
    draft = Draft(DatasetStore.create(url, **options), "core/records", "v1")
    draft.add("train", IterableImporter(Records(count), name="records"), shard_size=PER_STRIPE)
    draft.publish()


@contextmanager
def servers(folder: Path, count: int, memory_bytes: int, *more: str) -> Iterator[list[subprocess.Popen[str]]]:
    """So many, once all have joined. more: further options of each."""
    processes = list[subprocess.Popen[str]]()
    command = [
        sys.executable,
        "-m",
        "torch_dpflow.cli",
        "pool",
        "serve",
        "--memory",
        f"{memory_bytes // count}B",
        *more,
    ]
    try:
        for number in range(count):
            join = ("--join", str(folder / "0")) if number else ()
            line = [*command, "--address", str(folder / str(number)), *join]
            processes.append(subprocess.Popen(line, stdout=subprocess.PIPE, text=True))
            out = processes[-1].stdout
            assert out is not None
            out.readline()
        with PoolConnection(folder / "0") as connection:
            while len(connection.servers()) < count:
                time.sleep(0.01)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def memory_of(processes: Sequence[subprocess.Popen[str]]) -> int:
    """The proportional set size of all, bytes."""
    total = 0
    for process in processes:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        total += 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def preload(count: int, servers_count: int, options: dict[str, object], pipe: Connection) -> Figures:
    size = count * RECORD_BYTES
    stored = DatasetStore("oss://bucket/datasets", **options).open("core/records:v1:train")
    with tempfile.TemporaryDirectory() as folder, servers(Path(folder), servers_count, 3 * size) as processes:
        before = memory_of(processes)
        asked(pipe)
        begun = time.perf_counter()
        DataClient(Path(folder, "0")).preload(stored)
        seconds = time.perf_counter() - begun
        after = memory_of(processes)
        return {
            "seconds": seconds,
            "storage": asked(pipe) / size,
            "memory": after / size,
            "idle_mb": before / servers_count / 1e6,
            "beside_mb": (after - size) / servers_count / 1e6,
        }


def asked(pipe: Connection) -> int:
    pipe.send(True)
    return int(pipe.recv())


def epoch(dataset: DatasetReader, victim: subprocess.Popen[str] | None, chance: np.random.Generator) -> Figures:
    """Read in random order; kill a server in the midst."""
    order, longest, wrong = chance.permutation(len(dataset)).tolist(), 0.0, 0
    begun = time.perf_counter()
    for first in range(0, len(order), BATCH):
        if victim is not None and first <= len(order) // 2 < first + BATCH:
            os.kill(victim.pid, signal.SIGKILL)
        indices, since = order[first : first + BATCH], time.perf_counter()
        samples = dataset.read_each(indices)
        longest = max(longest, time.perf_counter() - since)
        wrong += sum(not isinstance(one, tuple) for one in samples)
        wrong += sum(
            isinstance(one, tuple) and (len(one[0]) != RECORD_BYTES or one[1] != {"number": index})
            for one, index in zip(samples, indices)
        )
    figures = {"epoch_s": time.perf_counter() - begun, "stall_s": longest, "wrong": float(wrong)}
    if isinstance(dataset, PooledDataset):
        figures["storage"] = dataset.misses / len(dataset)
    else:
        figures["storage"] = 1.0
    return figures


def read_plainly(stored: StoredDataset, numbers: Iterator[int]) -> Figures:
    with closing(DatasetReader(stored, check=True)) as dataset:
        return epoch(dataset, None, np.random.default_rng(next(numbers)))


def read_with_loss(stored: StoredDataset, is_killed: bool, is_far: bool, numbers: Iterator[int]) -> Figures:
    size = len(stored) * RECORD_BYTES
    with tempfile.TemporaryDirectory() as name:
        folder, keys = Path(name), Path(name, "keys")
        write_connection_file(keys, generate_keys("", certificates=True))
        remote = ("--listen", "tcp://127.0.0.1:0", "--connection", str(keys), "--trust-network")
        with servers(folder, 4, 2 * size, *remote) as processes, far(is_far):
            DataClient(folder / "1").preload(stored)
            address = find_address(address_of(folder / "1") if is_far else folder / "1", keys, trust_network=True)
            with closing(PooledDataset(stored, address, check=True)) as dataset:
                victim = processes[1] if is_killed else None
                return epoch(dataset, victim, np.random.default_rng(next(numbers)))


def address_of(directory: Path) -> str:
    """Where other hosts reach a server."""
    with PoolConnection(directory) as connection:
        return next(one.listen for one in connection.servers() if one.directory == str(directory))


@contextmanager
def far(is_far: bool) -> Iterator[None]:
    """Have readers of this process take servers for those of other hosts."""
    before = ServerInfo.is_near
    try:
        if is_far:
            ServerInfo.is_near = property(lambda self: False)  # type: ignore[method-assign,assignment]
        yield
    finally:
        ServerInfo.is_near = before  # type: ignore[method-assign]


def run(part: str, count: int, latency_s: float, bytes_per_s: float | None, rounds: int) -> Comparison:
    """One workload."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    store = context.Process(target=serve_objects, args=(latency_s, bytes_per_s, count, other), daemon=True)
    store.start()
    with ExitStack() as stack:
        stack.callback(store.join)
        stack.callback(pipe.send, False)
        options = pipe.recv()
        if part == "preload":
            sides = {
                "1 server": partial(preload, count, 1, options, pipe),
                "4 servers": partial(preload, count, 4, options, pipe),
            }
        else:
            numbers = iter(range(1 << 30))
            stored = DatasetStore("oss://bucket/datasets", **options).open("core/records:v1:train")
            sides = {
                "storage": partial(read_plainly, stored, numbers),
                "mapped": partial(read_with_loss, stored, False, False, numbers),
                "mapped, 1 killed": partial(read_with_loss, stored, True, False, numbers),
                "data connections": partial(read_with_loss, stored, False, True, numbers),
                "data connections, 1 killed": partial(read_with_loss, stored, True, True, numbers),
            }
        size = f"{count * RECORD_BYTES / 1e6:,.0f} MB, {1e3 * latency_s:g} ms"
        size += "" if bytes_per_s is None else f", {bytes_per_s / 1e6:g} MB/s a connection"
        return alternate("pool", f"{part} of {size}", sides, rounds=rounds)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pool", description=__doc__)
    add_arguments(parser)
    parser.add_argument(
        "--part", choices=["preload", "loss"], action="append", help="one of the workloads (default: both)"
    )
    parser.add_argument("--megabytes", type=int, default=1024, help="of the dataset (default: %(default)s)")
    parser.add_argument("--latency-ms", type=float, default=10.0, help="of the store (default: %(default)s)")
    parser.add_argument("--connection-mb-s", type=float, help="what one connection to the store carries (default: any)")
    arguments = parser.parse_args(argv)
    rate = arguments.connection_mb_s and arguments.connection_mb_s * 1e6
    count = 200 if arguments.quick else max(BATCH, arguments.megabytes * 10**6 // RECORD_BYTES)
    rounds = 1 if arguments.quick else arguments.rounds
    parts = arguments.part or ["preload", "loss"]
    publish([run(one, count, arguments.latency_ms / 1e3, rate, rounds) for one in parts], METRICS, arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
