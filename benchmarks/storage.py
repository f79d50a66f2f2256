"""Reading samples from a disk, from S3 and from OSS: ours against torch's loader with the vendor's client.

    python -m benchmarks.storage [--json] [--workload disk,oss,s3] [--latency-ms 0,10,30] [--rounds 5]

What the workloads are, and what the figures mean, is told in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.report import Comparison, Metric, add_arguments, alternate, publish
from benchmarks.storage_corpus import SAMPLES, prepare
from benchmarks.storage_sides import BATCH, SIDES, WORKERS, Place

WORKLOADS = ("disk", "oss", "s3")
LATENCIES_MS = (0.0, 10.0, 30.0)
#: Epochs from the disk, where one is over within a fraction of a second.
DISK_EPOCHS = 8
#: What the sides and the servers are made of.
PACKAGES = ("oss2", "boto3", "moto", "webdataset", "litdata")

EPOCH_METRICS = (
    Metric(name="samples_per_s", label="samples/s"),
    Metric(name="cpu_ms_per_sample", label="CPU ms/sample", higher_is_better=False),
    Metric(name="first_batch_ms", label="first batch, ms", higher_is_better=False),
    Metric(name="worker_mib", label="peak MiB, worker", higher_is_better=False, spec=",.0f"),
)


class StorageRunError(RuntimeError):
    """One side failed, or the sides did not read the same."""


@contextmanager
def served(kind: str, folder: Path, latency_ms: float) -> Iterator[str]:
    """The endpoint of a server of `folder` in a process of its own; empty for the disk."""
    if kind == "disk":
        yield ""
        return
    command = {
        "oss": ["tests.support.oss_server", "--folder", str(folder)],
        "s3": ["benchmarks.s3_server", str(folder)],
    }[kind]
    latency = ["--latency-ms", str(latency_ms)]
    with subprocess.Popen([sys.executable, "-m", *command, *latency], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        endpoint = server.stdout.readline().strip()
        if not endpoint:
            raise StorageRunError(f"the {kind} server did not start: see above")
        try:
            yield endpoint
        finally:
            server.terminate()


def run_side(place: Place, side: str, *options: str) -> Any:
    """Run one side in a process of its own and return what it printed."""
    command = [sys.executable, "-m", "benchmarks.storage_run", place.kind, side, *options]
    command += [f"--endpoint={place.endpoint}", f"--samples={place.samples}", f"--epochs={place.epochs}"]
    with tempfile.TemporaryDirectory(prefix="dpflow-bench-") as folder:
        environment = {**os.environ, "TMPDIR": folder}  # what a side leaves there goes with it
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise StorageRunError(f"{' '.join(command)} ended with {done.returncode}: see above")
    return json.loads(done.stdout.splitlines()[-1])


def sides_of(kind: str) -> list[str]:
    """The sides whose packages are installed."""
    return [side for side in SIDES[kind] if side not in ("webdataset", "litdata") or find_spec(side) is not None]


def compare(kind: str, latency_ms: float, rounds: int, *, quick: bool) -> Comparison:
    """Read epochs of one storage with every side in turn."""
    with served(kind, prepare(), latency_ms) as endpoint:
        place = Place(
            kind=kind,
            endpoint=endpoint,
            samples=64 if quick else SAMPLES,
            epochs=DISK_EPOCHS if kind == "disk" else 1,
        )
        sides = sides_of(kind)
        _check_same(place, sides)
        return alternate(
            "storage",
            kind if kind == "disk" else f"{kind}, {latency_ms:g} ms",
            {side: partial(run_side, place, side) for side in sides},
            rounds=rounds,
            parameters={
                "workers": WORKERS,
                "batch_size": BATCH,
                "latency_ms": latency_ms,
                "samples": place.samples,
                "epochs": place.epochs,
                "packages": {name: version(name) for name in PACKAGES if find_spec(name) is not None},
            },
        )


def _check_same(place: Place, sides: list[str]) -> None:
    """Raise StorageRunError unless every side that reads by number reads the same, and the others everything."""
    whole = Place(kind=place.kind, endpoint=place.endpoint)
    by_number = [side for side in sides if side not in ("webdataset", "litdata")]
    digests = {side: run_side(place, side, "--digest") for side in by_number}
    if len({json.dumps(found) for found in digests.values()}) != 1:
        raise StorageRunError(f"{place.kind}: the sides read different samples: {digests}")
    expected = run_side(Place(kind="disk"), "torch + open()", "--digest")
    for side in set(sides) - set(by_number):
        found = run_side(whole, side, "--digest")
        if found != expected:
            raise StorageRunError(f"{place.kind}: {side} reads {found} instead of {expected}")


def _chosen(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(WORKLOADS):
        raise argparse.ArgumentTypeError(f"{sorted(unknown)} are none of {', '.join(WORKLOADS)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.storage", description="ours against the vendors' clients"
    )
    parser.add_argument("--workload", type=_chosen, default=list(WORKLOADS), help="of disk, oss, s3")
    parser.add_argument(
        "--latency-ms", type=lambda text: [float(part) for part in text.split(",")], default=LATENCIES_MS
    )
    add_arguments(parser)
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    for kind in arguments.workload:
        latencies = [0.0] if kind == "disk" else arguments.latency_ms
        epochs = [compare(kind, latency, rounds, quick=arguments.quick) for latency in latencies]
        publish(epochs, EPOCH_METRICS, arguments)


if __name__ == "__main__":
    main()
