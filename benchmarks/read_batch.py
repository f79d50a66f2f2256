"""Random batches of a stored dataset: from the pool, from the page cache, from an object store; and bare copies.

    python -m benchmarks.read_batch [--json | --markdown] [--rounds N] [--samples 512] [--quick]

256 records of 110 kB a batch, drawn anew in each round; the sides take turns in one process, the pool's server
(`dpflow pool serve`) is another. Each gives `(bytes, annotations)`, but the bare copies: a slice of a mapping for each
record, which is the least that anybody can do. The object store is `benchmarks.oss_server`, in a thread of this
process, with 10 ms to each answer.
"""

from __future__ import annotations

import argparse
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.oss_server import OSSServer
from benchmarks.report import Comparison, Figures, Metric, add_arguments, alternate, publish
from torch_dpflow import PooledDataset
from torch_dpflow.dataservice import DataClient
from torch_dpflow.datasets import DatasetStore, Draft, StoredDataset
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.datasets.reader import DatasetReader

RECORD_BYTES, BATCH = 110_000, 256
LATENCY_S = 0.010
METRICS = [
    Metric(name="records_per_s", label="records/s", spec=",.0f"),
    Metric(name="cpu_us", label="processor time a record, µs", higher_is_better=False, spec=",.1f"),
]
Read = Callable[[Sequence[int]], object]


class Records:
    """What is imported: bytes that differ from record to record."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[bytes, dict[str, int]]:
        return np.random.default_rng(index).bytes(RECORD_BYTES), {"number": index}


def publish_records(store: DatasetStore, count: int) -> StoredDataset:
    draft = Draft(store, "core/records", "v1")
    draft.add("train", IterableImporter(Records(count), name="records"))
    draft.publish()
    return store.open("core/records:v1:train")


@contextmanager
def pool_server(folder: Path, memory_bytes: int) -> Iterator[None]:
    command = [sys.executable, "-m", "torch_dpflow.cli", "pool", "serve"]
    arguments = ["--memory", f"{memory_bytes}B", "--address", str(folder)]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.terminate()


def bare_copies(count: int) -> Read:
    memory = mmap.mmap(-1, count * RECORD_BYTES)
    memory[:] = os.urandom(1 << 20) * (len(memory) >> 20) + bytes(len(memory) % (1 << 20))
    return lambda indices: [memory[one * RECORD_BYTES : (one + 1) * RECORD_BYTES] for one in indices]


def measure(read: Read, count: int, batches: int, numbers: Iterator[int]) -> Figures:
    """Read some random batches, a first one before the clock."""
    chance = np.random.default_rng(next(numbers))
    drawn = [chance.permutation(count)[:BATCH].tolist() for _ in range(batches + 1)]
    read(drawn[0])
    begun, cpu = time.perf_counter(), time.process_time()
    for indices in drawn[1:]:
        read(indices)
    seconds, used = time.perf_counter() - begun, time.process_time() - cpu
    records = batches * len(drawn[0])
    return {"records_per_s": records / seconds, "cpu_us": used / records * 1e6}


def compare(workload: str, sides: dict[str, Read], count: int, batches: int, rounds: int) -> Comparison:
    """The sides, in turns, each with batches of its own."""
    numbers = iter(range(1 << 30))
    return alternate(
        "read_batch",
        workload,
        {name: partial(measure, read, count, batches, numbers) for name, read in sides.items()},
        rounds=rounds,
    )


def run(part: str, count: int, batches: int, rounds: int) -> Comparison:
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
        indices = [*range(0, count, max(1, count // 16))]
        assert plain.read_each(indices) == pooled.read_each(indices)
        sides = {name: plain.read_each, "pool": pooled.read_each, "bare copies": bare_copies(count)}
        return compare(name, sides, count, batches, rounds)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.read_batch", description=__doc__)
    add_arguments(parser)
    parser.add_argument(
        "--part", choices=["files", "objects"], action="append", help="one of the workloads (default: both)"
    )
    parser.add_argument("--samples", type=int, default=512, help="of the dataset (default: %(default)s)")
    arguments = parser.parse_args(argv)
    count = BATCH if arguments.quick else arguments.samples
    if count < BATCH:
        parser.error(f"--samples {count}: at least {BATCH} are needed")
    batches, rounds = (1, 1) if arguments.quick else (4, arguments.rounds)
    publish(
        [run(part, count, batches, rounds) for part in arguments.part or ["files", "objects"]],
        METRICS,
        arguments,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
