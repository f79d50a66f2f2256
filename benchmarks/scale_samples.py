"""How loaders behave with many samples: `python -m benchmarks.scale --samples 1e6,1e7,1e8`.

Run as a module, this file is one job, which reads the beginning of two epochs and prints time and memory. Jobs of one
flow begin together, once all have imported what they need; the first batch includes the start of the flow's services
and workers.
"""

import argparse
import json
import os
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from threading import Timer
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader

from benchmarks.cluster import use_by_role
from benchmarks.report import Comparison, Figures, Metric, alternate
from benchmarks.scale_job import ReadyRows
from examples.cluster import processes, started
from torch_dpflow import DPFlowDataLoader, JobOptions, LoaderOptions
from torch_dpflow.samplers import DynaGCSSampler

BATCH, BATCHES, JOBS = 256, 300, 4
#: How long the jobs of one row may take, seconds; then they are killed, and the row has no figures.
ROW_S = 240.0
#: numpy draws a permutation, and no loader reads anything: what first batches are compared with.
PRIVATE = ("numpy", "torch", "private", "dynagcs")
FLOWS = tuple((strategy, jobs) for strategy in ("shared-log", "independent") for jobs in (1, JOBS))

_LOWER = partial(Metric, higher_is_better=False)
METRICS = (
    _LOWER(name="first_s", label="first, s", spec=".2f"),
    _LOWER(name="turn_s", label="next epoch, s", spec=".2f"),
    _LOWER(name="pause_s", label="pause, s", spec=".2f"),
    _LOWER(name="job_mib", label="job, MiB", spec=",.0f"),
    _LOWER(name="router_mib", label="router, MiB", spec=",.0f"),
    _LOWER(name="shard_mib", label="shards, MiB", spec=",.0f"),
    _LOWER(name="services_cpu_s", label="CPU, s", spec=".1f"),
    _LOWER(name="state_kib", label="state, KiB", spec=",.1f"),
    _LOWER(name="changes", label="tables", spec=".0f"),
    _LOWER(name="restarts", label="restarts", spec=".0f"),
)
_NO_FIGURES = {metric.name: float("nan") for metric in METRICS}


def loader_of(kind: str, length: int, address: str, strategy: str) -> Any:
    """Return a loader of the samples 0 to `length` - 1, which cost nothing."""
    data = ReadyRows(length, 8)
    common: dict[str, Any] = {"batch_size": BATCH, "num_workers": 1}
    if kind == "torch":
        return DataLoader(data, shuffle=True, **common)
    if kind == "private":
        return DPFlowDataLoader(data, shuffle=True, **common)
    if kind == "dynagcs":
        return DPFlowDataLoader(data, sampler=DynaGCSSampler(data), **common)
    common["job"] = JobOptions(strategy=strategy, policy="alsd", idle_s=30.0)
    common["options"] = LoaderOptions(code=None)  # parsing all modules of the benchmarks takes a second
    return DPFlowDataLoader(data, shuffle=True, flow="benchmark/samples", address=address, **common)


def read(loader: Any, batches: int) -> tuple[float, float, Any]:
    """Begin an epoch and read so many batches; return the time of the first, the longest other one, and the rest."""
    begun = time.perf_counter()
    iterator = iter(loader)
    next(iterator)
    first, pause = time.perf_counter() - begun, 0.0
    for _ in range(batches - 1):
        before = time.perf_counter()
        next(iterator)
        pause = max(pause, time.perf_counter() - before)
    return first, pause, iterator


def drawn(length: int) -> dict[str, float]:
    """Draw a permutation with numpy."""
    begun = time.perf_counter()
    order = np.random.default_rng(0).permutation(length)
    return {**_NO_FIGURES, "first_s": time.perf_counter() - begun, "job_mib": order.nbytes / 2**20}


def run_job(arguments: argparse.Namespace) -> dict[str, float]:
    """Read the beginning of two epochs."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    bare = psutil.Process().memory_info().rss
    loader = loader_of(arguments.kind, arguments.length, arguments.address, arguments.strategy)
    print("", flush=True)
    sys.stdin.readline()  # until all jobs are here
    first, pause, iterator = read(loader, arguments.batches)
    own = psutil.Process().memory_info().rss - bare
    state = loader.state_dict() if hasattr(loader, "state_dict") else None
    print("", flush=True)
    sys.stdin.readline()  # until all jobs have read, so that services are measured with all of them
    del iterator
    turn, later, _ = read(loader, arguments.batches)
    return {
        **_NO_FIGURES,
        "first_s": first,
        "pause_s": max(pause, later),
        "turn_s": turn,
        "job_mib": own / 2**20,
        "state_kib": 0.0 if state is None else len(pickle.dumps(state)) / 1024,
    }


def private(kind: str, length: int, batches: int) -> Figures:
    """One job without services."""
    return _run([_job(kind, length, batches)])


def flow(strategy: str, jobs: int, length: int, batches: int) -> Figures:
    """Jobs of one flow, at once."""
    with started() as address:
        running = [_job("flow", length, batches, address, strategy) for _ in range(jobs)]
        services: dict[str, float] = {}

        def measure() -> None:
            use = use_by_role(address, memory=True)
            services["router_mib"] = use["router"].uss / 2**20
            services["shard_mib"] = use["shard"].uss / 2**20

        figures = dict(_run(running, measure))
        views = processes(address)
        use = use_by_role(address)
        services["services_cpu_s"] = use["router"].cpu_s + use["shard"].cpu_s
        services["restarts"] = float(sum(view.restarts for view in views))
        tables = [int(view.status.get("generation", 0)) for view in views if view.role == "router"]
        services["changes"] = float(max(tables, default=0) % 2**32)  # above that, the router's incarnation
        return {**figures, **services}


def _job(kind: str, length: int, batches: int, address: str = "", strategy: str = "shared-log") -> Any:
    command = [sys.executable, "-m", "benchmarks.scale_samples", kind, str(length), f"--batches={batches}"]
    command += [f"--address={address}", f"--strategy={strategy}"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _run(jobs: list[Any], measure: Callable[[], None] = lambda: None) -> Figures:
    """Lead all jobs through their two steps; return their largest figures."""

    def kill() -> None:
        for job in jobs:
            job.kill()

    def answers() -> list[str]:
        lines = [job.stdout.readline() for job in jobs]
        if not all(lines):
            raise RuntimeError(f"a job of the benchmark has ended, or took longer than {ROW_S:g} s")
        return lines

    timer = Timer(ROW_S, kill)
    timer.start()
    try:
        for step in (lambda: None, measure):
            answers()
            step()
            for job in jobs:
                print(file=job.stdin, flush=True)
        told = [json.loads(line) for line in answers()]
    finally:
        timer.cancel()
        kill()
        for job in jobs:
            job.communicate()
    return {name: max(one[name] for one in told) for name in told[0]}


def _row(side: Callable[[], Figures]) -> Figures:
    """Return the figures of a side; none if it fails, so that the other sides are measured all the same."""
    try:
        return side()
    except Exception as error:
        print(f"no figures: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return _NO_FIGURES


def compare(length: int, *, rounds: int, batches: int = BATCHES) -> Comparison:
    """All loaders with so many samples."""
    sides: dict[str, Callable[[], Figures]] = {kind: partial(private, kind, length, batches) for kind in PRIVATE}
    sides["numpy"] = partial(drawn, length)
    if length * 40 > psutil.virtual_memory().available:
        del sides["torch"]  # its list of Python integers does not fit
    for strategy, jobs in FLOWS:
        sides[f"flow, {strategy}, {jobs} job{'s' * (jobs > 1)}"] = partial(flow, strategy, jobs, length, batches)
    safe = {name: partial(_row, side) for name, side in sides.items()}
    return alternate("scale", f"{length:,}", safe, rounds=rounds, parameters={"batches": batches})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=(*PRIVATE, "flow"))
    parser.add_argument("length", type=int)
    parser.add_argument("--batches", type=int, default=BATCHES)
    parser.add_argument("--address", default="")
    parser.add_argument("--strategy", default="shared-log")
    print(json.dumps(run_job(parser.parse_args())), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
