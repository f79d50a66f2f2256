"""A real cluster held against the simulator: the same jobs, orders, policies and capacities, and both hit rates.

    python -m benchmarks.sharing --against-simulator [--quick] [--json]

One process reads all jobs, batch by batch, in the order of the simulator's events, so that nothing depends on the
machine's speed. Everything else is the real thing: a cluster of its own, loaders, router, shard and workers. A hit is
a read that loaded nothing; loads are counted where samples are loaded.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import Dataset

from benchmarks.simulation.contestants import make_group, make_policy
from benchmarks.simulation.engine import Simulation
from benchmarks.simulation.scenarios import SCENARIOS, equal_sets
from benchmarks.simulation.schedule import Kind, job_seed, schedule
from benchmarks.simulation.workload import Workload
from examples.cluster import started
from torch_dpflow import ALSDCache, DPFlowDataLoader, DynaGCSSampler, JobOptions

#: Samples of the dataset, and bytes of one: enough that a sample's headers do not count.
SAMPLES, SAMPLE_BYTES = 600, 1 << 16
#: Bytes of a sample in a shard.
HELD_BYTES = SAMPLE_BYTES + 600
#: Samples of a batch: few, as those in flight take memory that the simulator does not count.
BATCH = 2
#: Batches that a job requests ahead, and samples that it has in flight by that, on average.
ASKED, IN_FLIGHT = 2, 3


def six(samples: int, seed: int = 0) -> Workload:
    """Six jobs, a fifth of an epoch apart, same speed."""
    return equal_sets("six", samples, starts=[k / 5 for k in range(6)], speeds=[1.0] * 6)


def unequal(samples: int, seed: int = 0) -> Workload:
    """Five jobs of one start whose models train at five speeds: JOADER's figure 6."""
    return equal_sets("unequal", samples, starts=[0.0] * 5, speeds=[1.0, 0.8, 0.6, 0.45, 0.3])


WORKLOADS: dict[str, Callable[[int, int], Workload]] = {
    **{name: SCENARIOS[name] for name in ("same2", "speed2", "core", "windows")},
    "six": six,
    "unequal": unequal,
}
TITLES = {
    "same2": "4 jobs, a third of an epoch apart",
    "speed2": "4 jobs, a third of an epoch apart, speeds 1, 0.8, 0.6, 0.4",
    "core": "4 jobs, half of the samples common to all",
    "windows": "4 jobs, intervals that overlap by half",
    "six": "6 jobs, a fifth of an epoch apart",
    "unequal": "5 jobs of one start, speeds 1, 0.8, 0.6, 0.45, 0.3",
}


class CountedBlocks(Dataset[torch.Tensor]):
    """Samples of one size; each load appends a byte to a file."""

    def __init__(self, samples: int, counter: str) -> None:
        self.samples, self.counter = samples, counter

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        file = os.open(self.counter, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, b".")
        os.close(file)
        return torch.full((SAMPLE_BYTES,), index % 251, dtype=torch.uint8)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: who reads, in which orders, and what is kept."""

    workload: str
    strategy: str
    policy: str
    #: Share of the samples that the cache may hold.
    capacity: float

    def jobs(self) -> Workload:
        return WORKLOADS[self.workload](SAMPLES, 0).with_jobs(batch_size=BATCH)

    def simulated(self, seed: int) -> float:
        """The simulator's hit rate."""
        jobs, slots = self.jobs(), int(SAMPLES * self.capacity)
        group = make_group(self.strategy, SAMPLES, capacity=slots, seed=seed)
        policy = make_policy(self.policy, slots, SAMPLES)
        return Simulation(schedule(jobs, seed=seed), group, policy, seed=seed).run().hit_rate

    def measured(self, address: str, seed: int, **options: Any) -> float:
        """The hit rate of a real flow. Raises AssertionError if a job misses a sample or reads one twice."""
        jobs, slots = self.jobs(), int(SAMPLES * self.capacity)
        memory = (slots + IN_FLIGHT * len(jobs.jobs)) * HELD_BYTES
        given: dict[str, Any] = {
            "policy": self.policy,
            "strategy": self.strategy,
            "memory_bytes": memory,
            "cache_samples": slots,
            "ready": 1,
            "requested": ASKED,
            "idle_s": 3.0,
        }
        with tempfile.TemporaryDirectory(prefix="torch_dpflow-") as folder:
            counter = Path(folder, "loads")
            dataset = CountedBlocks(SAMPLES, str(counter))

            def loader(number: int) -> DPFlowDataLoader[Any]:
                indices = jobs.jobs[number].indices
                return DPFlowDataLoader(
                    ALSDCache(dataset, memory),
                    batch_size=BATCH,
                    sampler=DynaGCSSampler(indices.tolist(), seed=job_seed(seed, number), num_replicas=1, rank=0),
                    num_workers=2,
                    flow=f"against-simulator/{Path(folder).name}",
                    address=address,
                    job=JobOptions(**given | options),
                )

            reads = sum(1 for _ in replay(jobs, seed, loader))
            return 1 - counter.stat().st_size / reads


def replay(jobs: Workload, seed: int, loader: Callable[[int], Any]) -> Iterator[int]:
    """Read all jobs in the order of the simulator's events; yields each sample's job."""
    loaders: dict[int, Any] = {}
    epochs: dict[int, Any] = {}
    left: dict[int, int] = {}
    for event in schedule(jobs, seed=seed).events:
        job = event.job
        if event.kind is Kind.JOIN:
            loaders[job] = loader(job)
        elif event.kind is Kind.EPOCH:
            if event.epoch:  # a sampler of torch's may have no epochs
                loaders[job].sampler.set_epoch(event.epoch)
            epochs[job], left[job] = iter(loaders[job]), len(jobs.jobs[job].indices)
        elif event.kind is Kind.REQUEST:
            batch = next(epochs[job])
            assert len(batch) == event.size, (len(batch), event)
            left[job] -= len(batch)
            yield from [job] * len(batch)
        else:
            assert not left[job], f"job {job} has {left[job]} samples of its epoch left"
            del epochs[job], loaders[job]  # a loader that is collected leaves its flow


def cases(quick: bool) -> list[Case]:
    """All rows; the quick ones alone."""
    if quick:
        return [Case(workload="same2", strategy="independent", policy="alsd", capacity=0.2)]
    policies = ("alsd", "use-distance", "refcnt", "minio", "lru")
    rows = [
        Case(workload="same2", strategy="independent", policy=policy, capacity=capacity)
        for capacity in (0.1, 0.2, 0.5)
        for policy in policies
    ]
    sharing = [("dynagcs", "alsd"), ("joader", "alsd"), ("shared-log", "alsd"), ("shared-log", "refcnt")]
    rows += [
        Case(workload=workload, strategy=strategy, policy=policy, capacity=0.2)
        for workload in WORKLOADS
        for strategy, policy in sharing
    ]
    return rows


def run(rows: Sequence[Case], *, seeds: int, as_json: bool) -> None:
    """Measure all rows on a cluster of their own, and print each as it comes, or one table at the end."""
    table = Table("jobs", "strategy", "policy", "cache", "cluster", "simulator", "difference")
    progress = Console(stderr=True)
    with started() as address:
        for case in rows:
            real = [100 * case.measured(address, seed) for seed in range(seeds)]
            model = [100 * case.simulated(seed) for seed in range(seeds)]
            figures = {
                "measured": mean(real),
                "simulated": mean(model),
                "difference": mean(real) - mean(model),
            }
            if as_json:
                print(json.dumps({**asdict(case), **figures, "seeds": seeds, "runs": real}), flush=True)
                continue
            progress.print(f"{case}: {figures}")
            table.add_row(
                TITLES[case.workload],
                case.strategy,
                case.policy,
                f"{case.capacity:.0%}",
                *(f"{figures[name]:.1f}" for name in ("measured", "simulated")),
                f"{figures['difference']:+.1f}",
            )
    if not as_json:
        Console().print(table)
