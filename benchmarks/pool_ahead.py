"""Epochs of a dataset twice as large as the pool, on a storage of 30 ms: read ahead, not ahead, and without the pool.

    python -m benchmarks.pool_ahead [--json | --markdown] [--part all|job|flow] [--rounds N] [--samples 2048]
        [--step-ms 25] [--quick]

Each sample is an object of its own, of 20 kB. A training loop reads shuffled epochs by a `DPFlowDataLoader` with two
workers, 32 samples a step, which takes as long as is said; "flow" has two such loops, in threads, that share a flow of
two workers. The storage is a double of OSS, in a thread of this process, with 30 ms to each answer. "reads" are
its requests for samples, for each sample of the dataset; the memory is loaded before the first round. "another host" is
a server that is reached over TCP with TLS, at 127.0.0.1, whose memory nobody can map. Each epoch of "job" starts
workers, which the first batch waits for. A cache of that size that replaces what was least recently used would have
1 - c - (1 - c) ln(1 - c) = 0.85 reads a sample.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler

from benchmarks.report import Comparison, Figures, Metric, add_arguments, alternate, publish
from examples.cluster import started
from tests.support.oss_server import OSSServer, StoredObject
from torch_dpflow import DPFlowDataLoader, JobOptions, PooledDataset
from torch_dpflow.cluster.security.connection_file import generate_keys, write_connection_file
from torch_dpflow.datasets import DatasetStore, Draft, StoredDataset
from torch_dpflow.datasets.importers import Item
from torch_dpflow.datasets.importers.iterable import IterableImporter
from torch_dpflow.datasets.reader import DatasetReader
from torch_dpflow.lookahead import Order
from torch_dpflow.pool import DataClient

RECORD_BYTES, BATCH, WORKERS, JOBS = 20_000, 32, 2, 2
PARTS = ("job", "flow")
METRICS = [
    Metric(name="reads", label="reads a sample", higher_is_better=False, spec=".3f"),
    Metric(name="stall_s", label="stall, s", higher_is_better=False, spec=".2f"),
    Metric(name="later_stall_s", label="after the first batch, s", higher_is_better=False, spec=".2f"),
    Metric(name="epoch_s", label="epoch, s", higher_is_better=False, spec=".2f"),
]


class Unsettled(RandomSampler):
    """The same order, of a class that is not known to fix it when the epoch begins."""


class Unannounced(PooledDataset):
    """Dataset that announces no order to the pool."""

    def announce_order(self, order: Order, spread: int, extends: bool = False) -> None:
        """Drop the order."""


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
def pool_server(folder: Path, memory_bytes: int, ahead_bytes: int, *more: str) -> Iterator[str]:
    """Where other hosts reach it, if they do."""
    command = [sys.executable, "-m", "torch_dpflow.cli", "pool", "serve", "--address", str(folder)]
    arguments = ["--memory", f"{memory_bytes}B", "--ahead-memory", f"{ahead_bytes}B"]
    with subprocess.Popen([*command, *arguments, *more], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        try:
            yield said.rpartition(" and at ")[2].partition(",")[0]
        finally:
            process.terminate()


def read(loader: Any, step_s: float) -> tuple[float, float]:
    """One epoch; how long its first batch was waited for, and the others, seconds."""
    waits = list[float]()
    batches = iter(loader)
    while True:
        begun = time.perf_counter()
        if next(batches, None) is None:
            return waits[0], sum(waits[1:])
        waits.append(time.perf_counter() - begun)
        time.sleep(step_s)


def measured(oss: OSSServer, samples: int, loaders: Sequence[Any], step_s: float) -> Figures:
    """An epoch of each at the same time; the mean of their stalls."""
    before, begun = len(oss.requests), time.perf_counter()
    with ThreadPoolExecutor(len(loaders)) as threads:
        waits = [*threads.map(partial(read, step_s=step_s), loaders)]
    seconds = time.perf_counter() - begun
    reads = sum(one.method == "GET" and "/data/" in one.key for one in oss.requests[before:])
    later = sum(rest for _, rest in waits) / len(waits)
    return {
        "reads": reads / samples,
        "stall_s": later + sum(first for first, _ in waits) / len(waits),
        "later_stall_s": later,
        "epoch_s": seconds,
    }


def epoch(oss: OSSServer, dataset: Any, sampler: type[RandomSampler], step_s: float, numbers: Iterator[int]) -> Figures:
    generator = torch.Generator().manual_seed(next(numbers))
    loader = DPFlowDataLoader(
        dataset, BATCH, sampler=sampler(dataset, generator=generator), num_workers=WORKERS, collate_fn=len
    )
    return measured(oss, len(dataset), [loader], step_s)


def flow_epoch(oss: OSSServer, dataset: Any, address: str, name: str, loaders: list[Any], step_s: float) -> Figures:
    """loaders: none before the first epoch."""
    for _ in range(JOBS - len(loaders)):
        job = JobOptions(idle_s=600.0)
        loader = DPFlowDataLoader(
            dataset,
            BATCH,
            shuffle=True,
            num_workers=WORKERS,
            collate_fn=len,
            flow=f"ahead/{name}",
            address=address,
            job=job,
        )
        loaders.append(loader)
        for _ in loader:  # has workers started
            pass
    return measured(oss, len(dataset), loaders, step_s)


def run(count: int, step_s: float, latency_s: float, rounds: int, parts: Sequence[str]) -> Iterator[Comparison]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        oss = stack.enter_context(OSSServer())
        oss.buckets.create("bucket")
        stored = publish_objects(oss, count)
        oss.latency_s = latency_s
        # Half of the samples, each at a multiple of 64 bytes, and the index.
        memory = count // 2 * (RECORD_BYTES + 64 - RECORD_BYTES % 64) + 16 * (count + count // 1000 + 1)
        ahead, keys = count * RECORD_BYTES // 4, str(folder / "keys")
        stack.enter_context(pool_server(folder / "pool", memory, ahead))
        write_connection_file(keys, generate_keys("", certificates=True))
        listener = ("--listen", "tcp://127.0.0.1:0", "--connection", keys)
        far = stack.enter_context(pool_server(folder / "far", memory, ahead, *listener))
        (folder / "far").rename(folder / "elsewhere")
        info = DataClient(folder / "pool").preload(stored, fit="part")
        DataClient(far, connection=keys).preload(stored, fit="part")
        datasets = {
            "storage": DatasetReader(stored),
            "pool, order not announced": Unannounced(stored, folder / "pool"),
            "pool, read ahead": PooledDataset(stored, folder / "pool"),
            "pool of another host, read ahead": PooledDataset(stored, far, connection=keys),
        }
        for one in datasets.values():
            stack.enter_context(closing(one))
        parameters = {"samples": count, "in_memory": info.loaded, "step_s": step_s, "latency_s": latency_s}
        workload = f"{info.loaded} of {count} samples in memory"
        if "job" in parts:
            numbers = iter(range(1 << 30))
            sides = {name: partial(epoch, oss, one, RandomSampler, step_s, numbers) for name, one in datasets.items()}
            drawn = partial(epoch, oss, datasets["pool, read ahead"], Unsettled, step_s, numbers)
            sides["pool, announced as it is drawn"] = drawn
            yield alternate("pool_ahead", workload, sides, rounds=rounds, parameters=parameters)
        if "flow" in parts:
            address = stack.enter_context(started())
            sides = {
                name: partial(flow_epoch, oss, one, address, str(number), [], step_s)
                for number, (name, one) in enumerate(datasets.items())
            }
            workload += ", two jobs of a shared flow"
            yield alternate("pool_ahead_flow", workload, sides, rounds=rounds, parameters=parameters)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pool_ahead", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--samples", type=int, default=2048, help="of the dataset (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=25.0, help="of training (default: %(default)s)")
    parser.add_argument("--storage-ms", type=float, default=30.0, help="to each answer (default: %(default)s)")
    parser.add_argument("--part", choices=("all", *PARTS), default="all")
    arguments = parser.parse_args(argv)
    count, rounds = (256, 1) if arguments.quick else (arguments.samples, arguments.rounds)
    parts = PARTS if arguments.part == "all" else [arguments.part]
    times = arguments.step_ms / 1e3, arguments.storage_ms / 1e3
    publish([*run(count, *times, rounds, parts)], METRICS, arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
