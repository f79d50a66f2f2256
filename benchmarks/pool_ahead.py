"""Epochs of a dataset twice as large as the pool, on a storage of 30 ms: read ahead, not ahead, and without the pool.

    python -m benchmarks.pool_ahead [--json | --markdown] [--rounds N] [--samples 2048] [--step-ms 25] [--quick]

Each sample is an object of its own, of 20 kB. A training loop reads shuffled epochs by a `DPFlowDataLoader` with two
workers, 32 samples a step, which takes as long as is said. The storage is `benchmarks.oss_server`, in a thread of this
process, with 30 ms to each answer. "reads" are its requests for samples, for each sample of the dataset; the memory is
loaded before the first round. Each epoch starts workers, which the first batch waits for. A cache of that size that
replaces what was least recently used would have 1 - c - (1 - c) ln(1 - c) = 0.85 reads a sample.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler

from benchmarks.oss_server import OSSServer, StoredObject
from benchmarks.report import Comparison, Figures, Metric, add_arguments, alternate, publish
from torch_dpflow import DPFlowDataLoader, PooledDataset
from torch_dpflow.dataservice import DataClient
from torch_dpflow.datasets import DatasetStore, Draft, StoredDataset
from torch_dpflow.datasets.importers import Item
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.datasets.reader import DatasetReader

RECORD_BYTES, BATCH, WORKERS = 20_000, 32, 2
METRICS = [
    Metric(name="reads", label="reads a sample", higher_is_better=False, spec=".3f"),
    Metric(name="stall_s", label="stall, s", higher_is_better=False, spec=".2f"),
    Metric(name="later_stall_s", label="after the first batch, s", higher_is_better=False, spec=".2f"),
    Metric(name="epoch_s", label="epoch, s", higher_is_better=False, spec=".2f"),
]


class Unsettled(RandomSampler):
    """The same order, of a class that is not known to fix it when the epoch begins."""


def publish_objects(oss: OSSServer, count: int) -> StoredDataset:
    for number in range(count):
        content = np.random.default_rng(number).bytes(RECORD_BYTES)
        stored = StoredObject(data=content, content_type="application/octet-stream")
        oss.buckets.put("bucket", f"datasets/core/objects/data/{number}", stored)
    store = DatasetStore.create("oss://bucket/datasets", **oss.storage_options())
    draft = Draft(store, "core/objects", "v1")
    items = [Item(path=f"{number}", length=RECORD_BYTES, meta={}) for number in range(count)]
    draft.add("train", IterableImporter(items, root="data"))
    draft.publish()
    return store.open("core/objects:v1:train")


@contextmanager
def pool_server(folder: Path, memory_bytes: int, ahead_bytes: int) -> Iterator[None]:
    command = [sys.executable, "-m", "torch_dpflow.cli", "pool", "serve", "--address", str(folder)]
    arguments = ["--memory", f"{memory_bytes}B", "--ahead-memory", f"{ahead_bytes}B"]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.terminate()


def epoch(
    oss: OSSServer, dataset: Any, sampler: type[RandomSampler], step_s: float, numbers: Iterator[int]
) -> Figures:
    generator = torch.Generator().manual_seed(next(numbers))
    before = len(oss.requests)
    loader = DPFlowDataLoader(
        dataset, BATCH, sampler=sampler(dataset, generator=generator), num_workers=WORKERS, collate_fn=len
    )
    begun = time.perf_counter()
    for _ in loader:
        time.sleep(step_s)
    seconds = time.perf_counter() - begun
    reads = sum(one.method == "GET" and "/data/" in one.key for one in oss.requests[before:])
    stats = loader.stats()
    return {
        "reads": reads / len(dataset),
        "stall_s": stats.stall_s,
        "later_stall_s": stats.stall_s - (stats.time_to_first_batch_s or 0.0),
        "epoch_s": seconds,
    }


def run(count: int, step_s: float, latency_s: float, rounds: int) -> Comparison:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        oss = stack.enter_context(OSSServer())
        oss.buckets.create("bucket")
        stored = publish_objects(oss, count)
        oss.latency_s = latency_s
        # Half of the samples, each at a multiple of 64 bytes, and the index.
        memory = count // 2 * (RECORD_BYTES + 64 - RECORD_BYTES % 64) + 16 * (count + count // 1000 + 1)
        stack.enter_context(pool_server(folder / "pool", memory, count * RECORD_BYTES // 4))
        info = DataClient(folder / "pool").preload(stored, fit="part")
        plain = stack.enter_context(closing(DatasetReader(stored)))
        pooled = stack.enter_context(closing(PooledDataset(stored, folder / "pool")))
        numbers = iter(range(1 << 30))
        sides = {
            "storage": partial(epoch, oss, plain, RandomSampler, step_s, numbers),
            "pool": partial(epoch, oss, pooled, Unsettled, step_s, numbers),
            "pool, read ahead": partial(epoch, oss, pooled, RandomSampler, step_s, numbers),
        }
        parameters = {"samples": count, "in_memory": info.loaded, "step_s": step_s, "latency_s": latency_s}
        workload = f"{info.loaded} of {count} samples in memory"
        return alternate("pool_ahead", workload, sides, rounds=rounds, parameters=parameters)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pool_ahead", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--samples", type=int, default=2048, help="of the dataset (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=25.0, help="of training (default: %(default)s)")
    parser.add_argument(
        "--storage-ms", type=float, default=30.0, help="to each answer (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    count, rounds = (256, 1) if arguments.quick else (arguments.samples, arguments.rounds)
    publish([run(count, arguments.step_ms / 1e3, arguments.storage_ms / 1e3, rounds)], METRICS, arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
