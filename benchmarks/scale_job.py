"""One job of `benchmarks.scale`: reads as many samples as it is told to, and says what that took.

Each line of its input is a number of samples; each line of its output is a JSON object.
"""

import argparse
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


def endless(loader: "DPFlowDataLoader[torch.Tensor]") -> Iterator[torch.Tensor]:
    """Epoch after epoch."""
    while True:
        yield from loader


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
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores: they sleep
    bare = own_bytes()
    loader = DPFlowDataLoader(
        SleepingRows(arguments.length, arguments.sleep_ms / 1e3),
        batch_size=BATCH,
        shuffle=True,
        num_workers=arguments.workers,
        flow="benchmark/scale",
        address=arguments.address,
        job=JobOptions(idle_s=30.0),
    )
    batches = endless(loader)
    for line in sys.stdin:
        samples, begun, used = 0, time.perf_counter(), time.process_time()
        while samples < int(line):
            samples += len(next(batches))
        say(
            samples=samples,
            seconds=time.perf_counter() - begun,
            cpu_s=time.process_time() - used,
            bytes=own_bytes() - bare,
        )
    os._exit(0)


if __name__ == "__main__":
    main()
