"""What it costs to know where a million samples are: the dataset store against one index file.

    python -m benchmarks.dataset_store [--json] [--rounds 5] [--quick]

Both sides describe the same samples: a path, a size and two annotations each. "one file" is how data sets
are usually published: a JSON array of all samples, parsed when a process starts (here with msgspec, the
fastest parser at hand; `json` takes several times as long). "store" opens a published version and reads
metadata shards as they are needed. Every round is a process of its own, as a data loading worker is; memory
is what the process holds beyond what its imports took. A random read goes to the file each time, uncached.
"""

import argparse
import multiprocessing
import random
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.report import Figures, Metric, add_arguments, alternate, publish
from torch_dpflow.datasets import DatasetStore, Draft
from torch_dpflow.datasets.importers import Item
from torch_dpflow.datasets.importers.iterable import IterableImporter

RANDOM_READS = 200

METRICS = (
    Metric(name="open_ms", label="open, ms", higher_is_better=False, spec=",.1f"),
    Metric(name="open_mb", label="memory when open, MB", higher_is_better=False, spec=",.1f"),
    Metric(name="random_ms", label="a random sample, ms", higher_is_better=False, spec=",.4f"),
    Metric(name="pass_s", label="a pass over all, s", higher_is_better=False, spec=",.2f"),
    Metric(name="peak_mb", label="most memory in the pass, MB", higher_is_better=False, spec=",.1f"),
)


class Record(msgspec.Struct):
    """A line of the one file."""

    path: str
    length: int
    meta: dict[str, Any]


def items(samples: int) -> Iterator[Item]:
    """The samples that both sides describe."""
    for number in range(samples):
        label = number * 1000 // samples
        meta = {"label": label, "class": f"n{label:08d}"}
        yield Item(path=f"n{label:08d}/{number:08d}.JPEG", length=100_000 + number % 1000, meta=meta)


def prepare(folder: Path, samples: int) -> None:
    """Write what both sides read."""
    importer = IterableImporter(items(samples), root="s3://bucket/train")
    draft = Draft(DatasetStore.create(str(folder / "datasets")), "core/imagenet", "v1")
    draft.add("train", importer)
    draft.publish()
    encoder = msgspec.json.Encoder()
    with (folder / "index.json").open("wb") as file:
        separator = b"["
        found = items(samples)
        while chunk := [[i.path, i.length, i.meta] for i in islice(found, 10_000)]:
            records = (Record(path, length, dict(meta)) for path, length, meta in chunk)
            file.write(separator + b",".join(map(encoder.encode, records)))
            separator = b","
        file.write(b"]")


class OneFile:
    """All samples, parsed when it is opened."""

    def __init__(self, folder: Path) -> None:
        self._records = msgspec.json.decode((folder / "index.json").read_bytes(), type=list[Record])

    def __len__(self) -> int:
        return len(self._records)

    def sample(self, index: int) -> Record:
        return self._records[index]

    def samples(self) -> Iterator[Record]:
        return iter(self._records)


def open_store(folder: Path) -> Any:
    return DatasetStore(str(folder / "datasets")).open("core/imagenet:v1:train")


SIDES = {"one file": OneFile, "store": open_store}


def measure(side: str, folder: Path) -> dict[str, float]:
    """The figures of one side, in this process."""
    process = psutil.Process()
    before, begun = process.memory_info().rss, time.perf_counter()
    opened = SIDES[side](folder)
    figures = {
        "open_ms": (time.perf_counter() - begun) * 1e3,
        "open_mb": (process.memory_info().rss - before) / 1e6,
    }
    draw = random.Random(0)
    begun = time.perf_counter()
    for _ in range(RANDOM_READS):
        opened.sample(draw.randrange(len(opened)))
    figures["random_ms"] = (time.perf_counter() - begun) * 1e3 / RANDOM_READS
    peak, begun = 0, time.perf_counter()
    for number, _ in enumerate(opened.samples()):
        if number % 10_000 == 0:
            peak = max(peak, process.memory_info().rss - before)
    return {**figures, "pass_s": time.perf_counter() - begun, "peak_mb": peak / 1e6}


def in_own_process(side: str, folder: Path) -> Figures:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (side, folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_arguments(parser)
    arguments = parser.parse_args()
    samples = 20_000 if arguments.quick else 1_000_000
    with tempfile.TemporaryDirectory(prefix="dpflow-bench-") as name:
        folder = Path(name)
        prepare(folder, samples)
        sides = {side: partial(in_own_process, side, folder) for side in SIDES}
        comparison = alternate(
            "dataset_store",
            f"{samples:,} samples",
            sides,
            rounds=arguments.rounds,
            parameters={"samples": samples, "index_bytes": (folder / "index.json").stat().st_size},
        )
    publish([comparison], METRICS, arguments)


if __name__ == "__main__":
    main()
