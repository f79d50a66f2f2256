"""Tar shards read by webdataset and by `open_dataset`: the same files, local and on S3.

    python -m benchmarks.open_data [--json] [--rounds 3] [--quick]

webdataset streams the shards and shuffles within a buffer of 1,000 samples. Ours reads random samples in batches of 64;
its index is built before, and its time is a column of its own. Each round is a process of its own: two epochs of raw
samples without a loader, as one worker reads them. On S3 both keep what they read in a cache directory, and the second
epoch comes from it. Processor time is that of the process and of its children.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import random
import resource
import tarfile
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import Figures, Metric, add_arguments, alternate, publish
from benchmarks.storage import served

BATCH = 64
SHARDS = 8
LATENCY_MS = 10

METRICS = (
    Metric(name="second_rate", label="2nd epoch, samples/s", spec=",.0f"),
    Metric(name="second_us", label="processor, µs a sample", higher_is_better=False, spec=",.0f"),
    Metric(name="first_rate", label="1st epoch, samples/s", spec=",.0f"),
    Metric(name="first_us", label="processor, µs a sample", higher_is_better=False, spec=",.0f"),
    Metric(name="first_batch_ms", label="first batch, ms", higher_is_better=False, spec=",.0f"),
    Metric(name="index_s", label="index, s", higher_is_better=False, spec=",.2f"),
)


def write_shards(folder: Path, samples: int, size: int) -> None:
    """Write shards with an image and a label a sample."""
    folder.mkdir()
    content = random.Random(0).randbytes(size)
    each = samples // SHARDS
    for shard in range(SHARDS):
        with tarfile.open(folder / f"train-{shard:03d}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for number in range(shard * each, (shard + 1) * each):
                for ending, data in (("jpg", content), ("cls", b"%d" % (number % 1000))):
                    entry = tarfile.TarInfo(f"{number:08d}.{ending}")
                    entry.size = len(data)
                    archive.addfile(entry, io.BytesIO(data))


def processor_s() -> float:
    """Return the processor time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def theirs(pattern: str, cache: str | None, folder: Path) -> Any:
    """Return a function that yields an epoch's batches by webdataset, and the seconds of building an index: none."""
    import webdataset

    if cache is not None:
        pattern = f"pipe:curl -sf {pattern}"
    dataset = webdataset.WebDataset(pattern, shardshuffle=SHARDS, cache_dir=cache, seed=0).shuffle(1000)

    def epoch(number: int) -> Iterator[list[Any]]:
        batch = []
        for sample in dataset:
            batch.append(sample)
            if len(batch) == BATCH:
                yield batch
                batch = []
        yield batch

    return epoch, 0.0


def ours(pattern: str, cache: str | None, folder: Path) -> Any:
    """Return a function that yields an epoch's batches by `open_dataset`, and the seconds of building its index."""
    from torch_dpflow.datasets import open_dataset
    from torch_dpflow.datasets.storage import ReadOptions

    how: dict[str, Any] = {"index_dir": folder / "index"}
    if cache is not None:
        endpoint, _, path = pattern.removeprefix("http://").partition("/")
        pattern = f"s3://{path}"
        how["storage_options"] = {"key": "test-key-id", "secret": "test-secret", "endpoint_url": f"http://{endpoint}"}
        how["read_options"] = ReadOptions(cache_dir=cache)
    begun = time.perf_counter()
    open_dataset(pattern, **how)
    index_s = time.perf_counter() - begun

    def epoch(number: int) -> Iterator[list[Any]]:
        dataset = open_dataset(pattern, **how)
        order = random.Random(number).sample(range(len(dataset)), len(dataset))
        for first in range(0, len(order), BATCH):
            yield dataset.__getitems__(order[first : first + BATCH])
        dataset.close()

    return epoch, index_s


SIDES = {"webdataset": theirs, "open_dataset": ours}


def measure(side: str, pattern: str, is_remote: bool, samples: int) -> dict[str, float]:
    """Return the figures of one side, in this process."""
    with tempfile.TemporaryDirectory(prefix="dpflow-bench-") as name:
        folder = Path(name)
        cache = str(folder / "cache") if is_remote else None
        if cache is not None:
            os.mkdir(cache)
        epoch, index_s = SIDES[side](pattern, cache, folder)
        figures = {"index_s": index_s}
        for number, title in enumerate(("first", "second")):
            begun, used, count = time.perf_counter(), processor_s(), 0
            for batch in epoch(number):
                if not count and not number:
                    figures["first_batch_ms"] = (time.perf_counter() - begun) * 1e3
                count += len(batch)
            assert count == samples, (side, count)
            figures[f"{title}_rate"] = count / (time.perf_counter() - begun)
            figures[f"{title}_us"] = (processor_s() - used) * 1e6 / count
    return figures


def in_own_process(side: str, pattern: str, is_remote: bool, samples: int) -> Figures:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (side, pattern, is_remote, samples))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_arguments(parser, rounds=3)
    arguments = parser.parse_args()
    samples, size = (800, 4_000) if arguments.quick else (4_000, 20_000)
    names = f"train-{{000..{SHARDS - 1:03d}}}.tar"
    comparisons = []
    with tempfile.TemporaryDirectory(prefix="dpflow-bench-") as name:
        folder = Path(name) / "data"
        write_shards(folder, samples, size)
        with served("s3", folder, LATENCY_MS) as endpoint:
            for title, pattern in (("local", f"{folder}/{names}"), ("S3", f"{endpoint}/data/{names}")):
                sides = {side: partial(in_own_process, side, pattern, title == "S3", samples) for side in SIDES}
                parameters = {"samples": samples, "bytes": size, "latency_ms": LATENCY_MS}
                comparisons.append(alternate("open_data", title, sides, rounds=arguments.rounds, parameters=parameters))
    publish(comparisons, METRICS, arguments)


if __name__ == "__main__":
    main()
