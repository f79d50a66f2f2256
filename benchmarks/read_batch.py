"""Random batches of a stored dataset: from the pool, from the page cache, from an object store; and bare copies.

    python -m benchmarks.read_batch [--json | --markdown] [--rounds N] [--samples 512] [--quick] [--part PART]...

256 records of 110 kB a batch, drawn anew in each round; the sides take turns in one process, the pool's server
(`dpflow pool serve`) is another. Each returns `(bytes, annotations)`, except the bare copies: a slice of a mapping for
each record, which is the least possible work. The object store is a double of OSS, in a thread of this
process, with 10 ms to each answer.

The part `connections` reads the same records from four servers of this host over tcp: by our data connections, in
plain and with TLS, by bare sockets, by our own calls (`ipc.rpc`) with payloads, by ZeroMQ with CURVE, from Redis and
memcached, by Mooncake's transfer engine, and from Ray's object store. It also reads from one server whose memory is
mapped. Each side returns `bytes`, or, "not copied", views: of mapped memory, of Ray's store, or of memory that is used
again once the views are dropped (`copy=False`). Processor time there is that of reader and servers together. Sides that
are not installed are left out.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from benchmarks.pool_sides import (
    RECORD_BYTES,
    SERVERS,
    PoolSide,
    Read,
    content_of,
    curve,
    data_connections,
    memcached_servers,
    missing,
    mooncake,
    process,
    raw_sockets,
    ray_objects,
    redis_servers,
    rpc,
)
from benchmarks.report import Comparison, Figures, Metric, add_arguments, alternate, publish
from tests.support.oss_server import OSSServer
from torch_dpflow import PooledDataset
from torch_dpflow.datasets import DatasetStore, Draft, StoredDataset
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.pool import DataClient
from torch_dpflow.pool.reader.pool_reader import PoolReader
from torch_dpflow.pool.sources import identity_of, source_of
from torch_dpflow.pool.transport.address import PoolAddress

BATCH = 256
LATENCY_S = 0.010
#: For how long a side reads in each round, seconds: a server's processor time is counted in 10 ms.
MIN_HANDSHAKE_S = 0.5
METRICS = [
    Metric(name="records_per_s", label="records/s", spec=",.0f"),
    Metric(name="cpu_us", label="processor time a record, µs", higher_is_better=False, spec=",.1f"),
]
#: What each way of ours is compared with, in figures of the same rounds.
AGAINST = {
    "bare sockets": ("tcp in plain", "tcp with TLS", "mapped"),
    "bare sockets, memory kept": ("tcp in plain, not copied",),
    "calls with payloads": ("tcp in plain", "tcp in plain, not copied"),
    "ZeroMQ with CURVE": ("tcp with TLS", "tcp with TLS, not copied"),
    "Redis": ("tcp in plain", "tcp in plain, not copied", "mapped"),
    "memcached": ("tcp in plain", "tcp in plain, not copied", "mapped"),
    "Mooncake": ("tcp in plain",),
    "Ray": ("mapped",),
    "Ray, not copied": ("mapped, not copied",),
    "bare copies": ("mapped",),
}


class Records:
    """What is imported: bytes that differ from record to record."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[bytes, dict[str, int]]:
        return content_of(index), {"number": index}


def publish_records(store: DatasetStore, count: int) -> StoredDataset:
    draft = Draft(store, "core/records", "v1")
    draft.add("train", IterableImporter(Records(count), name="records"))
    draft.publish()
    return store.open("core/records:v1:train")


@contextmanager
def pool_server(folder: Path, memory_bytes: int) -> Iterator[psutil.Process]:
    command = [sys.executable, "-m", "torch_dpflow.cli", "pool", "serve"]
    arguments = ["--memory", f"{memory_bytes}B", "--address", str(folder)]
    with process([*command, *arguments]) as (_, server):
        yield server


def bare_copies(count: int) -> Read:
    memory = mmap.mmap(-1, count * RECORD_BYTES)
    memory[:] = os.urandom(1 << 20) * (len(memory) >> 20) + bytes(len(memory) % (1 << 20))
    return lambda indices: [memory[one * RECORD_BYTES : (one + 1) * RECORD_BYTES] for one in indices]


def measure(side: PoolSide, count: int, least_s: float, numbers: Iterator[int]) -> Figures:
    """Read random batches for so long, a first one before the clock."""
    chance = np.random.default_rng(next(numbers))
    drawn = itertools.cycle([chance.permutation(count)[:BATCH].tolist() for _ in range(16)])
    side.read(next(drawn))
    begun, cpu, records, seconds = time.perf_counter(), _cpu_s(side), 0, 0.0
    while not records or seconds < least_s:
        side.read(next(drawn))
        records += BATCH
        seconds = time.perf_counter() - begun
    used = _cpu_s(side) - cpu
    return {"records_per_s": records / seconds, "cpu_us": used / records * 1e6}


def _cpu_s(side: PoolSide) -> float:
    """Seconds of this process and the servers."""
    return time.process_time() + sum(sum(server.cpu_times()[:2]) for server in side.servers)


def compare(workload: str, sides: dict[str, PoolSide], count: int, least_s: float, rounds: int) -> Comparison:
    """The sides, in turns, each with batches of its own."""
    numbers = iter(range(1 << 30))
    return alternate(
        "read_batch",
        workload,
        {name: partial(measure, side, count, least_s, numbers) for name, side in sides.items()},
        rounds=rounds,
    )


def run(part: str, count: int, least_s: float, rounds: int) -> Comparison:
    """One workload: the dataset's own way first."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(pool_server(folder / "pool", 2 * count * RECORD_BYTES))
        if part == "files":
            name, store = "files in the page cache", DatasetStore.create(str(folder / "datasets"))
        else:
            oss = stack.enter_context(OSSServer())
            oss.buckets.create("bucket")
            name = "object store, 10 ms"
            store = DatasetStore.create("oss://bucket/datasets", **oss.storage_options())
        stored = publish_records(store, count)
        if part == "objects":
            oss.latency_s = LATENCY_S
        DataClient(folder / "pool").preload(stored)
        plain = stack.enter_context(closing(DatasetReader(stored)))
        pooled = stack.enter_context(closing(PooledDataset(stored, folder / "pool")))
        in_place = stack.enter_context(closing(PooledDataset(stored, folder / "pool", copy=False)))
        indices = [*range(0, count, max(1, count // 16))]
        assert plain.read_each(indices) == pooled.read_each(indices) == in_place.read_each(indices)
        reads = {
            name: plain.read_each,
            "pool": pooled.read_each,
            "pool, not copied": in_place.read_each,
            "bare copies": bare_copies(count),
        }
        sides = {name: PoolSide(read, []) for name, read in reads.items()}
        return compare(name, sides, count, least_s, rounds)


def run_connections(count: int, least_s: float, rounds: int) -> list[Comparison]:
    """Every way to the memory of other processes, in turns, and each of ours beside what it is compared with."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stored = publish_records(DatasetStore.create(str(folder / "datasets")), count)
        plain, plain_kept = data_connections(stack, stored, folder / "plain", trust_network=True)
        tls, tls_kept = data_connections(stack, stored, folder / "tls", trust_network=False)
        mapped, mapped_kept = _mapped(stack, stored, folder / "pool")
        raw, raw_kept = raw_sockets(stack, count)
        sides = {
            "tcp in plain": plain,
            "tcp in plain, not copied": plain_kept,
            "tcp with TLS": tls,
            "tcp with TLS, not copied": tls_kept,
            "mapped": mapped,
            "mapped, not copied": mapped_kept,
            "bare copies": PoolSide(bare_copies(count), []),
            "bare sockets": raw,
            "bare sockets, memory kept": raw_kept,
            "calls with payloads": rpc(stack, count),
            "ZeroMQ with CURVE": curve(stack, count),
        }
        peers = {"Redis": redis_servers, "memcached": memcached_servers, "Mooncake": mooncake}
        sides |= {name: make(stack, count) for name, make in peers.items() if _takes_part(name)}
        if _takes_part("Ray"):
            sides["Ray"], sides["Ray, not copied"] = ray_objects(stack, count)
        indices = [*range(0, count, max(1, count // 16))]
        for name, side in sides.items():
            if name != "bare copies":
                assert side.read(indices) == [content_of(index) for index in indices], name
        rounds_of = compare(f"{SERVERS} servers", sides, count, least_s, rounds).rounds
    return [
        Comparison(
            benchmark="read_batch",
            workload=f"against {baseline}",
            rounds={name: rounds_of[name] for name in (baseline, *ours)},
            parameters={"servers": SERVERS, "record_bytes": RECORD_BYTES, "batch": BATCH},
        )
        for baseline, ours in AGAINST.items()
        if baseline in rounds_of
    ]


def _takes_part(name: str) -> bool:
    if what := missing(name):
        print(f"{name} takes no part: {what} is missing", file=sys.stderr)
    return not what


def _mapped(stack: ExitStack, stored: StoredDataset, folder: Path) -> tuple[PoolSide, PoolSide]:
    server = stack.enter_context(pool_server(folder, 2 * len(stored) * RECORD_BYTES))
    DataClient(folder).preload(stored)
    address = PoolAddress(directory=folder)
    reading = PoolReader(address, source_of(stored, None), identity_of(stored), silence_s=60.0)
    stack.enter_context(closing(reading))
    return PoolSide(reading.read, [server]), PoolSide(partial(reading.read, copy=False), [server])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.read_batch", description=__doc__)
    add_arguments(parser)
    parser.add_argument(
        "--part",
        choices=["files", "objects", "connections"],
        action="append",
        help="of the workloads (default: all)",
    )
    parser.add_argument("--samples", type=int, default=512, help="of the dataset (default: %(default)s)")
    arguments = parser.parse_args(argv)
    count = BATCH if arguments.quick else arguments.samples
    if count < BATCH:
        parser.error(f"--samples {count}: at least {BATCH} are needed")
    least_s, rounds = (0.0, 1) if arguments.quick else (MIN_HANDSHAKE_S, arguments.rounds)
    comparisons = list[Comparison]()
    for part in arguments.part or ["files", "objects", "connections"]:
        if part == "connections":
            comparisons += run_connections(count, least_s, rounds)
        else:
            comparisons.append(run(part, count, least_s, rounds))
    publish(comparisons, METRICS, arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
