"""One side of `benchmarks.loader`, once, in this process, which does nothing else.

A fresh process for every run makes its processor time and its peak memory the run's own: children count when
they have been reaped, and the high-water mark of memory never falls.
"""

import argparse
import gc
import hashlib
import itertools
import json
import multiprocessing
import resource
import statistics
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.loader_workloads import WORKLOADS, Setting, Side, Workload
from benchmarks.report import Figures

#: Batches that `digest` looks at.
DIGEST_BATCHES = 40
#: Starts after the first that `time_starts` takes the median of.
LATER_STARTS = 4
#: Seconds within which every worker must be gone once its iterator is.
CLOSE_S = 30.0


def time_epoch(workload: Workload, side: Side, setting: Setting, step_s: float) -> Figures:
    """Read one epoch, sleeping `step_s` after every batch; the clock runs from `iter()` to the last batch."""
    dataset = workload.dataset(setting)
    loader = side.build(workload, dataset)
    samples, stall_s, first_s = 0, 0.0, None
    processor_before = processor_s()
    begun = time.perf_counter()
    batches = iter(loader)
    for batch, waited_s in timed(batches):
        stall_s += waited_s
        first_s = time.perf_counter() - begun if first_s is None else first_s
        samples += len(batch if isinstance(batch, torch.Tensor) else batch[0])
        if step_s:
            time.sleep(step_s)
    read = time.perf_counter()
    del batches
    reap_workers()
    closed = time.perf_counter()
    assert first_s is not None
    return {
        "samples_per_s": samples / (read - begun),
        "cpu_ms_per_sample": (processor_s() - processor_before) / samples * 1e3,
        "stall_share": stall_s / (read - begun),
        "first_batch_ms": first_s * 1e3,
        "close_ms": (closed - read) * 1e3,
        "main_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "worker_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
        "samples": samples,
    }


def time_starts(workload: Workload, side: Side, setting: Setting) -> Figures:
    """Time the first batch of several epochs: from the constructor at first, from `iter()` later.

    What a script's first lines import is timed by itself. Persistent workers read each epoch to its end.
    """
    dataset = workload.dataset(setting)
    begun = time.perf_counter()
    side.loader_class()
    import_s = time.perf_counter() - begun
    begun = time.perf_counter()
    loader = side.build(workload, dataset)
    later_s = []
    batches = iter(loader)
    next(batches)
    first_s = time.perf_counter() - begun
    for _ in range(LATER_STARTS):
        if loader.persistent_workers:
            deque(batches, maxlen=0)
        else:
            del batches
            reap_workers()
        begun = time.perf_counter()
        batches = iter(loader)
        next(batches)
        later_s.append(time.perf_counter() - begun)
    return {
        "import_ms": import_s * 1e3,
        "first_batch_ms": first_s * 1e3,
        "later_first_batch_ms": statistics.median(later_s) * 1e3,
    }


def digest(workload: Workload, side: Side, setting: Setting) -> str:
    """A hash of the first batches: their order, types, shapes and bits."""
    state = hashlib.sha256()
    batches = itertools.islice(side.build(workload, workload.dataset(setting)), DIGEST_BATCHES)
    for number, batch in enumerate(batches):
        for tensor in [batch] if isinstance(batch, torch.Tensor) else batch:
            state.update(f"{number} {tensor.dtype} {tuple(tensor.shape)}".encode())
            state.update(tensor.contiguous().numpy().tobytes())
    return state.hexdigest()


def timed(batches: Iterator[Any]) -> Iterator[tuple[Any, float]]:
    """Yield each batch and the seconds that it was waited for."""
    while True:
        asked = time.perf_counter()
        try:
            batch = next(batches)
        except StopIteration:
            return
        yield batch, time.perf_counter() - asked


def processor_s() -> float:
    """Processor seconds, user and system, of this process and of its reaped children."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def reap_workers() -> None:
    """Wait until every worker has ended, so that its processor time is counted and its cores are free."""
    gc.collect()
    for worker in multiprocessing.active_children():
        worker.join(CLOSE_S)
        if worker.is_alive():
            raise TimeoutError(f"worker {worker.pid} still runs {CLOSE_S} s after its iterator was let go")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loader_run", description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("side")
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--spin", type=int, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--digest", action="store_true", help="print a hash of the first batches, time nothing")
    arguments = parser.parse_args()
    workload = WORKLOADS[arguments.workload]
    side = workload.sides[arguments.side]
    setting = Setting(images=arguments.images, spin=arguments.spin, quick=arguments.quick)
    if arguments.digest:
        print(json.dumps(digest(workload, side, setting)))
    elif workload.whole_epoch:
        print(json.dumps(time_epoch(workload, side, setting, arguments.step_ms / 1e3)))
    else:
        print(json.dumps(time_starts(workload, side, setting)))


if __name__ == "__main__":
    main()
