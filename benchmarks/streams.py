"""A stream that is mapped by two processes: our `Mapper`, and torchdata's `ParallelMapper` with processes.

    python -m benchmarks.streams [--json] [--rounds 5] [--quick]

Both nodes read the same numbers, keep their order, hold twice as many items in flight as there are workers, and take a
state of the source for each item. Workers are forked. The clock starts with the first result; processor time is that of
this process and its workers, from their start to their end.
"""

import argparse
import gc
import hashlib
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from torchdata.nodes import IterableWrapper, ParallelMapper

from benchmarks.report import Comparison, Metric, add_arguments, alternate, publish
from torch_dpflow.nodes import Mapper

WORKERS, ITEMS = 2, 2_000
#: Bytes that are hashed for an item, which takes about a millisecond; numbers of four bytes in an array.
HASHED, NUMBERS = 1 << 20, 25_000

METRICS = (
    Metric(name="items_per_s", label="items/s", spec=",.0f"),
    Metric(name="cpu_us_per_item", label="CPU µs/item", higher_is_better=False, spec=",.0f"),
)

_CONTENT = bytes(HASHED)


def hashed(number: int) -> str:
    """A function that computes for about a millisecond."""
    return hashlib.sha1(_CONTENT + bytes([number % 256])).hexdigest()


def array(number: int) -> npt.NDArray[np.float32]:
    """A function whose result has 100 kB."""
    return np.full(NUMBERS, number, np.float32)


@contextmanager
def ours(items: int, fn: Callable[[int], Any]) -> Iterator[Any]:
    node = Mapper(IterableWrapper(range(items)), fn, WORKERS)
    yield node
    node.shutdown()


@contextmanager
def theirs(items: int, fn: Callable[[int], Any]) -> Iterator[Any]:
    node = ParallelMapper(IterableWrapper(range(items)), fn, WORKERS, method="process", multiprocessing_context="fork")
    yield node


SIDES = {"ParallelMapper": theirs, "Mapper": ours}
WORKLOADS = {"1 ms an item": hashed, "arrays of 100 kB": array}


def measure(side: str, items: int, fn: Callable[[int], Any]) -> dict[str, float]:
    """Map all items once, after the first result, which waits for the workers' start."""
    before_s = processor_time_s()
    with SIDES[side](items, fn) as node:
        next(node)
        began = time.perf_counter()
        count = sum(1 for _ in node)
        took_s = time.perf_counter() - began
    if count != items - 1:
        raise RuntimeError(f"{side} returned {count + 1} results of {items} items")
    del node
    gc.collect()
    while multiprocessing.active_children():  # reaps ended workers
        time.sleep(0.01)
    return {"items_per_s": count / took_s, "cpu_us_per_item": 1e6 * (processor_time_s() - before_s) / items}


def processor_time_s() -> float:
    """Seconds that this process and its ended children have run."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def compare(workload: str, items: int, rounds: int) -> Comparison:
    """Both sides in turns."""
    sides = {side: lambda side=side: measure(side, items, WORKLOADS[workload]) for side in SIDES}
    return alternate("streams", workload, sides, rounds=rounds, parameters={"items": items, "workers": WORKERS})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    given = parser.parse_args(arguments)
    items = ITEMS // 40 if given.quick else ITEMS
    publish([compare(workload, items, 1 if given.quick else given.rounds) for workload in WORKLOADS], METRICS, given)


if __name__ == "__main__":
    main()
