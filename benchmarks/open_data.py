"""Data that is opened in place: each library on files of its own format, and `open_dataset` on the same files.

    python -m benchmarks.open_data [--json] [--rounds 5] [--formats tar,mds,litdata,arrow,parquet] [--quick]

Formats: tar (webdataset), MDS (Mosaic Streaming), chunks of LitData, Arrow files and Parquet (HuggingFace's datasets);
from the disk, and from an S3 server with 10 ms to every answer. A library that is not installed is left out, and named.
Each round is a process of its own: two epochs of raw samples without a loader, as one worker reads them, in batches of
64, then samples by number, one at a time. Ours and HuggingFace read a random order; the others shuffle in their own
way. On S3 all keep what they read in a cache directory, and the second epoch comes from it. Opening, which is where
ours builds its index, is a column of its own. Processor time is that of the process and of its children.

Then ours builds indexes of 100,000 small samples. The other libraries have none, or build it as they write.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.open_data_sides import LEFT_OUT, PEERS, WRITERS, Data, open_ours
from benchmarks.report import Comparison, Figures, Metric, add_arguments, alternate, publish
from benchmarks.storage import served

LATENCY_MS = 10
#: Samples that are read by number.
READS = 2_000

METRICS = (
    Metric(name="second_us", label="2nd epoch, processor µs a sample", higher_is_better=False, spec=",.0f"),
    Metric(name="second_rate", label="samples/s", spec=",.0f"),
    Metric(name="random_us", label="by number, processor µs", higher_is_better=False, spec=",.0f"),
    Metric(name="first_us", label="1st epoch, processor µs a sample", higher_is_better=False, spec=",.0f"),
    Metric(name="first_rate", label="samples/s", spec=",.0f"),
    Metric(name="first_batch_ms", label="first batch, ms", higher_is_better=False, spec=",.0f"),
    Metric(name="open_s", label="open, s", higher_is_better=False, spec=",.2f"),
)
INDEX_METRICS = (
    Metric(name="index_cpu_s", label="index, processor s", higher_is_better=False, spec=",.2f"),
    Metric(name="index_s", label="s", higher_is_better=False, spec=",.2f"),
    Metric(name="again_ms", label="opened again, ms", higher_is_better=False, spec=",.0f"),
)


def processor_s() -> float:
    """Return the processor time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(side: str, data: Data, samples: int) -> dict[str, float]:
    """Return the figures of one side, in this process."""
    with tempfile.TemporaryDirectory(prefix="dpflow-bench-") as cache:
        package, opener = ("torch_dpflow.datasets.opening", open_ours) if side == "open_dataset" else PEERS[data.kind]
        import_module(package)
        begun = time.perf_counter()
        opened = opener(data, cache)
        figures = {"open_s": time.perf_counter() - begun}
        for number, title in enumerate(("first", "second")):
            begun, used, count = time.perf_counter(), processor_s(), 0
            for batch in opened.epoch(number):
                if not count and not number:
                    figures["first_batch_ms"] = (time.perf_counter() - begun) * 1e3
                count += len(batch)
            assert count == samples, (side, count)
            figures[f"{title}_rate"] = count / (time.perf_counter() - begun)
            figures[f"{title}_us"] = (processor_s() - used) * 1e6 / count
        figures["random_us"] = math.nan
        if opened.read is not None:
            numbers = [random.Random(2).randrange(samples) for _ in range(READS)]
            used = processor_s()
            for number in numbers:
                opened.read(number)
            figures["random_us"] = (processor_s() - used) * 1e6 / READS
    return figures


def measure_index(side: str, data: Data, samples: int) -> dict[str, float]:
    """Return the figures of opening data for the first and for the second time."""
    with tempfile.TemporaryDirectory(prefix="dpflow-bench-") as cache:
        import_module("torch_dpflow.datasets.opening")
        begun, used = time.perf_counter(), processor_s()
        open_ours(data, cache)
        figures = {"index_s": time.perf_counter() - begun, "index_cpu_s": processor_s() - used}
        begun = time.perf_counter()
        open_ours(data, cache)
        return {**figures, "again_ms": (time.perf_counter() - begun) * 1e3}


MEASURES = {"epochs": measure, "index": measure_index}


def in_own_process(what: str, side: str, data: Data, samples: int) -> Figures:
    """Run one measurement in a new program, as libraries leave threads and shared memory behind."""
    arguments = [what, side, data.kind, str(data.folder), data.endpoint, str(samples)]
    command = [sys.executable, "-m", "benchmarks.open_data", "--measure", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    pairs = [pair.split("=") for pair in done.stdout.splitlines()[-1].split()]
    return {name: float(value) for name, value in pairs}


def run_measurement(arguments: list[str]) -> None:
    what, side, kind, folder, endpoint, samples = arguments
    figures = MEASURES[what](side, Data(kind, Path(folder), endpoint), int(samples))
    print("\n" + " ".join(f"{name}={value}" for name, value in figures.items()), flush=True)
    os._exit(0)  # threads of libraries would keep the process


def installed(formats: list[str]) -> list[str]:
    """Return the formats whose library is installed, and name the others."""
    found = []
    for kind in formats:
        if find_spec(PEERS[kind][0]) is None:
            print(f"{kind} is left out: {PEERS[kind][0]} is not installed", file=sys.stderr)
        else:
            found.append(kind)
    return found


@contextmanager
def written(kinds: list[str], samples: int, size: int) -> Iterator[tuple[Path, str]]:
    """Write the formats, and serve them. Yields their folder and the server's endpoint."""
    with tempfile.TemporaryDirectory(prefix="dpflow-bench-") as name:
        folder = Path(name) / "data"
        folder.mkdir()
        for kind in kinds:
            WRITERS[kind](folder / kind, samples, size)
        with served("s3", folder, LATENCY_MS) as endpoint:
            yield folder, endpoint


def compare(kinds: list[str], samples: int, size: int, rounds: int) -> Iterator[Comparison]:
    parameters = {"samples": samples, "bytes": size, "latency_ms": LATENCY_MS}
    with written(kinds, samples, size) as (folder, endpoint):
        for kind in kinds:
            for title, place in (("disk", ""), ("S3", endpoint)):
                if (kind, title) in LEFT_OUT:
                    continue
                data = Data(kind, folder, place)
                sides = {
                    side: partial(in_own_process, "epochs", side, data, samples)
                    for side in (PEERS[kind][0], "open_dataset")
                }
                yield alternate("open_data", f"{kind}, {title}", sides, rounds=rounds, parameters=parameters)


def compare_indexes(kinds: list[str], samples: int, rounds: int) -> Iterator[Comparison]:
    """Build indexes of many small samples."""
    size = 100
    with written(kinds, samples, size) as (folder, endpoint):
        for title, place in (("disk", ""), ("S3", endpoint)):
            sides = {
                kind: partial(in_own_process, "index", "open_dataset", Data(kind, folder, place), samples)
                for kind in kinds
                if (kind, title) not in LEFT_OUT
            }
            if sides:
                parameters = {"samples": samples, "bytes": size, "latency_ms": LATENCY_MS}
                yield alternate("open_data", f"index, {title}", sides, rounds=rounds, parameters=parameters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_arguments(parser, rounds=5)
    parser.add_argument(
        "--formats", type=lambda text: text.split(","), default=list(PEERS), help="of " + ", ".join(PEERS)
    )
    parser.add_argument("--indexes-only", action="store_true", help="no epochs")
    parser.add_argument("--measure", nargs=6, help=argparse.SUPPRESS)
    arguments: Any = parser.parse_args()
    if arguments.measure:
        run_measurement(arguments.measure)
    kinds = installed(arguments.formats)
    samples, size, indexed = (800, 4_000, 2_000) if arguments.quick else (4_000, 20_000, 100_000)
    if not arguments.indexes_only:
        publish(compare(kinds, samples, size, arguments.rounds), METRICS, arguments)
    publish(compare_indexes(kinds, indexed, arguments.rounds), INDEX_METRICS, arguments)


if __name__ == "__main__":
    main()
