"""One job of `benchmarks.scale`: reads as many samples as it is told to, and says what that took.

Each line of its input is a number of samples; each line of its output is a JSON object.
"""

import argparse
import itertools
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from torch.utils.data import Dataset

from torch_dpflow import DPFlowDataLoader, JobOptions

BATCH = 32


class SleepingRows(Dataset[torch.Tensor]):
    """Rows of 1 kB, each of which takes a sleep, as storage does, and next to no processor time."""

    def __init__(self, length: int, sleep_s: float) -> None:
        self._length = length
        self._sleep_s = sleep_s

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._sleep_s:
            time.sleep(self._sleep_s)
        return torch.full((256,), index, dtype=torch.float32)


class ReadyRows(Dataset[torch.Tensor]):
    """The same row for every number: samples that cost nothing to load."""

    def __init__(self, length: int, nbytes: int) -> None:
        self._length = length
        self._row = torch.arange(nbytes, dtype=torch.uint8)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._row


def endless(loader: "DPFlowDataLoader[torch.Tensor]") -> Iterator[torch.Tensor]:
    """Epoch after epoch."""
    while True:
        yield from loader


def read(batches: Iterator[torch.Tensor], count: int) -> tuple[torch.Tensor, int]:
    """Read `count` samples or more, in whole batches; return the last batch and the number of samples."""
    samples = 0
    while samples < count:
        batch = next(batches)
        samples += len(batch)
    return batch, samples


def own_bytes() -> int:
    """Memory of this process alone."""
    return int(psutil.Process().memory_full_info().uss)


def say(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--length", type=int, default=1_000_000)
    parser.add_argument("--sleep-ms", type=float, default=0.0)
    parser.add_argument("--nbytes", type=int, default=0, help="of a sample that is ready; 0: samples sleep")
    parser.add_argument("--batch-size", type=int, default=BATCH)
    parser.add_argument("--shards", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores: they sleep
    bare = own_bytes()
    dataset: Dataset[torch.Tensor] = SleepingRows(arguments.length, arguments.sleep_ms / 1e3)
    if arguments.nbytes:
        dataset = ReadyRows(arguments.length, arguments.nbytes)
    loader = DPFlowDataLoader(
        dataset,
        batch_size=arguments.batch_size,
        shuffle=True,
        num_workers=arguments.workers,
        flow="benchmark/scale",
        address=arguments.address,
        job=JobOptions(idle_s=30.0, shards=arguments.shards),
    )
    batches = endless(loader)
    for line in sys.stdin:
        begun, used = time.perf_counter(), time.process_time()
        batch, samples = read(batches, int(line))
        seconds, used = time.perf_counter() - begun, time.process_time() - used
        empty = time.process_time()
        read(itertools.repeat(batch), int(line))
        cpu_s = used - (time.process_time() - empty)
        say(samples=samples, seconds=seconds, cpu_s=cpu_s, bytes=own_bytes() - bare)
    os._exit(0)


if __name__ == "__main__":
    main()
