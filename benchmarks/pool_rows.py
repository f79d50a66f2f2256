"""Rows of arrays for training: from this process, from the pool of this host, and from a server of another.

    python -m benchmarks.pool_rows [--json | --markdown] [--rounds N] [--quick]

Rows of 3 kB in batches of 256 and of 150 kB in batches of 64, shuffled; a `DPFlowDataLoader` with two workers, which
live through all rounds; each round is an epoch, and the training loop does nothing. "mapped" is a server of this host,
the others are servers whose memory cannot be mapped, as on another host, over TCP at 127.0.0.1; all run on the same
processors. "stacked" has a `collate_fn` of its own, so that rows are copied into the batch once more. "in memory" is
torch's `TensorDataset` of the same rows, which every worker has. Processor time is that of all processes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from benchmarks.pool_sides import process
from benchmarks.read_batch import pool_server
from benchmarks.report import Comparison, Figures, Metric, add_arguments, alternate, publish
from torch_dpflow import DPFlowDataLoader
from torch_dpflow.cluster.security.connection_file import generate_keys, write_connection_file
from torch_dpflow.pool import DataClient, PooledArray
from torch_dpflow.pool.transport.address import find_address

#: Shape of a row, rows, and rows of a batch.
WORKLOADS = {"rows of 3 kB": ((3, 32, 32), 65_536, 256), "rows of 150 kB": ((3, 224, 224), 4096, 64)}
METRICS = [
    Metric(name="rows_per_s", label="rows/s", spec=",.0f"),
    Metric(name="cpu_us", label="processor time a row, µs", higher_is_better=False, spec=",.1f"),
]


def collate(rows: Sequence[Any]) -> Any:
    return default_collate(rows)


def epoch(loader: DPFlowDataLoader[Any]) -> Figures:
    begun, cpu, rows = time.perf_counter(), cpu_s(), 0
    for batch in loader:
        rows += len(batch[0]) if isinstance(batch, list) else len(batch)
    return {"rows_per_s": rows / (time.perf_counter() - begun), "cpu_us": (cpu_s() - cpu) / rows * 1e6}


def cpu_s() -> float:
    """Seconds of this process, its workers and servers."""
    own = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in [own, *own.children(recursive=True)])


def serve(stack: ExitStack, folder: Path, rows: np.ndarray, *, trust_network: bool) -> PooledArray:
    """A server of these rows whose memory nobody can map, and a reader of it."""
    keys, held = folder / "keys", folder / f"held {trust_network}"
    memory = ["--memory", f"{2 * rows.nbytes}B", "--listen", "tcp://127.0.0.1:0", "--connection", str(keys)]
    command = [sys.executable, "-m", "torch_dpflow.cli", "pool", "serve", "--address", str(held), *memory]
    said, _ = stack.enter_context(process([*command] + ["--trust-network"] * trust_network))
    source = DataClient(held).push("benchmarks/rows:1", rows)
    held.rename(folder / f"other host {trust_network}")
    address = said.rpartition(" and at ")[2].partition(",")[0]
    return PooledArray(source, find_address(address, keys, trust_network=trust_network))


def run(workload: str, rounds: int, *, quick: bool) -> Comparison:
    shape, count, batch = WORKLOADS[workload]
    count = count // 16 if quick else count
    rows = np.random.default_rng(0).integers(0, 256, (count, *shape), np.uint8)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_connection_file(folder / "keys", generate_keys("", certificates=True))
        stack.enter_context(pool_server(folder / "near", 2 * rows.nbytes))
        mapped = PooledArray(DataClient(folder / "near").push("benchmarks/rows:1", rows), folder / "near")
        plain = serve(stack, folder, rows, trust_network=True)
        sealed = serve(stack, folder, rows, trust_network=False)
        datasets: dict[str, tuple[Dataset[Any], Any]] = {
            "in memory": (TensorDataset(torch.from_numpy(rows)), None),
            "mapped": (mapped, None),
            "mapped, stacked": (mapped, collate),
            "tcp in plain": (plain, None),
            "tcp in plain, stacked": (plain, collate),
            "tcp with TLS": (sealed, None),
        }
        for array in (mapped, plain, sealed):
            stack.enter_context(closing(array))
        sides = {}
        for name, (dataset, function) in datasets.items():
            loader = DPFlowDataLoader(
                dataset, batch, shuffle=True, num_workers=2, persistent_workers=True, collate_fn=function
            )
            epoch(loader)
            sides[name] = partial(epoch, loader)
        return alternate("pool_rows", workload, sides, rounds=rounds)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pool_rows", description=__doc__)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    rounds = 1 if arguments.quick else arguments.rounds
    publish([run(one, rounds, quick=arguments.quick) for one in WORKLOADS], METRICS, arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
