"""One side of `benchmarks.storage`, once, in this process, which does nothing else."""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import time

from benchmarks.loader_run import processor_s, reap_workers
from benchmarks.report import Figures
from benchmarks.storage_corpus import SAMPLES
from benchmarks.storage_sides import SIDES, Place


def time_epochs(place: Place, side: str) -> Figures:
    """Read all epochs; the clock runs from the first `iter()` to the last batch."""
    batches = SIDES[place.kind][side](place)
    processor_before = processor_s()
    begun = time.perf_counter()
    first_s, samples = 0.0, 0
    for _ in range(place.epochs):
        for batch in batches:
            first_s = first_s or time.perf_counter() - begun
            samples += len(batch)
    taken_s = time.perf_counter() - begun
    del batches
    reap_workers()
    return {
        "samples_per_s": samples / taken_s,
        "cpu_ms_per_sample": (processor_s() - processor_before) / samples * 1e3,
        "first_batch_ms": first_s * 1e3,
        "worker_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
        "samples": samples,
    }


def digest(place: Place, side: str) -> list[object]:
    """How many samples an epoch has, and a sum of their hashes, which their order does not change."""
    samples, total = 0, 0
    for batch in SIDES[place.kind][side](place):
        for data in batch:
            samples += 1
            total += int.from_bytes(hashlib.sha256(data).digest()[:8], "little")
    return [samples, f"{total % (1 << 64):016x}"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storage_run", description=__doc__)
    parser.add_argument("kind", choices=SIDES)
    parser.add_argument("side")
    parser.add_argument("--endpoint", default="")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--digest", action="store_true", help="print what an epoch has, time nothing")
    arguments = parser.parse_args()
    place = Place(
        kind=arguments.kind,
        endpoint=arguments.endpoint,
        samples=arguments.samples,
        epochs=arguments.epochs,
    )
    if arguments.digest:
        print(json.dumps(digest(place, arguments.side)))
    else:
        print(json.dumps(time_epochs(place, arguments.side)))


if __name__ == "__main__":
    main()
