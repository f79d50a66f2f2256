"""How much longer the first batch takes after resuming at 90% of a long epoch than at its beginning.

    python -m benchmarks.resume [--json] [--rounds 5] [--quick]

The first epoch is shuffled; the loader must find its place in the order without loading what was delivered.
torchdata's StatefulDataLoader, which fast-forwards its sampler, stands beside ours.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.report import Comparison, Metric, add_arguments, alternate, publish
from torch_dpflow import DPFlowDataLoader

SAMPLES = 1_000_000
BATCH_SIZE = 10
SHARE_DONE = 0.9
WORKERS = 2

METRICS = (Metric(name="first_batch_s", label="first batch, s", higher_is_better=False),)


class Numbers(Dataset[int]):
    """Item `i` is `i`: what takes time here is the loader."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def make(loader_class: Callable[..., Any], samples: int) -> Any:
    """A shuffling loader with a generator that begins alike each time."""
    own = torch.Generator().manual_seed(1)
    return loader_class(Numbers(samples), batch_size=BATCH_SIZE, shuffle=True, num_workers=WORKERS, generator=own)


def state_at(loader_class: Callable[..., Any], samples: int) -> Any:
    """The loader's state at 90% of its epoch. It does not depend on how one got there."""
    loader = make(loader_class, samples)
    iterator = iter(loader)
    for _ in range(int(samples * SHARE_DONE) // BATCH_SIZE):
        next(iterator)
    return loader.state_dict()


def first_batch(loader_class: Callable[..., Any], samples: int, state: Any) -> dict[str, float]:
    """Seconds from making a loader (and loading its state) to its first batch."""
    began = time.perf_counter()
    loader = make(loader_class, samples)
    if state is not None:
        loader.load_state_dict(state)
    next(iter(loader))
    return {"first_batch_s": time.perf_counter() - began}


def compare(samples: int, rounds: int) -> Comparison:
    """Fresh against resumed; and torchdata's loader, where it is installed."""
    ours = state_at(DPFlowDataLoader, samples)
    sides = {
        "fresh": lambda: first_batch(DPFlowDataLoader, samples, None),
        "resumed": lambda: first_batch(DPFlowDataLoader, samples, ours),
    }
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        pass
    else:
        theirs = state_at(StatefulDataLoader, samples)
        sides["torchdata resumed"] = lambda: first_batch(StatefulDataLoader, samples, theirs)
    parameters = {"samples": samples, "batch_size": BATCH_SIZE, "done": SHARE_DONE, "workers": WORKERS}
    return alternate("resume", f"{samples:,} samples", sides, rounds=rounds, parameters=parameters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    arguments = parser.parse_args()
    samples = SAMPLES // 100 if arguments.quick else SAMPLES
    publish([compare(samples, arguments.rounds)], METRICS, arguments)


if __name__ == "__main__":
    main()
