"""Runs samplers for thousands of epochs and judges every job's orders.

Each run starts a fresh group under a fresh seed and every job reads two epochs, of which the second is
counted: by then all jobs are under way. Epochs of one run resemble each other (`dependence`), so counting
several of one run would test that, not uniformity.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulation.contestants import make_group
from benchmarks.simulation.scenarios import SCENARIOS
from benchmarks.simulation.schedule import Kind, Schedule, job_seed, schedule
from benchmarks.simulation.uniformity import Counts, Verdict
from benchmarks.simulation.workload import Workload
from torch_dpflow.samplers.group import SamplingGroup

#: what follows a scenario's name where all of its jobs have one seed
ONE_SEED = "/one-seed"
#: the scenarios that the samplers must pass
SCENARIO_NAMES = (
    "same1",
    "same2",
    "speed2",
    "core",
    "windows",
    "core" + ONE_SEED,
    "windows" + ONE_SEED,
)
#: share of the data set that a directory holds: large enough to follow often, small enough to evict
CAPACITY = 0.25
COUNTED_EPOCH = 1
#: in the whole data set, so that jobs take turns within their epochs
BATCHES = 10

Progress = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What the tests say about every job of one scenario under one sampler."""

    scenario: str
    sampler: str
    #: one for each job
    verdicts: list[Verdict]

    @property
    def failing_positions(self) -> float:
        """The worst job's share of positions that fail."""
        return max(verdict.failing_positions for verdict in self.verdicts)

    @property
    def failing_items(self) -> float:
        return max(verdict.failing_items for verdict in self.verdicts)

    @property
    def ratio_range(self) -> tuple[float, float]:
        """Chi-square over its degrees of freedom, least and most over jobs, positions and items."""
        ratios = [r for v in self.verdicts for r in (v.position_ratio, v.item_ratio)]
        return min(ratios), max(ratios)

    @property
    def pair_z(self) -> float:
        """The worst job's."""
        return max((verdict.pair_z for verdict in self.verdicts), key=abs)

    @property
    def share_range(self) -> tuple[float, float]:
        lows, highs = zip(*(verdict.share_range for verdict in self.verdicts))
        return min(lows), max(highs)

    def record(self) -> dict[str, object]:
        """Plain data for one line of JSON."""
        return {
            "scenario": self.scenario,
            "sampler": self.sampler,
            "epochs": self.verdicts[0].epochs,
            "failing_positions": self.failing_positions,
            "failing_items": self.failing_items,
            "chi_square_ratio": self.ratio_range,
            "class_share": self.share_range,
            "pair_z": self.pair_z,
        }


def judge(
    sampler: str, scenario: str, *, epochs: int, samples: int = 1000, progress: Progress | None = None
) -> Judgement:
    """Count `epochs` epochs of every job that is not killed, each of another run, and test them.

    Raises ValueError if an epoch is no permutation. `progress` hears of every run.
    """
    jobs = scenario.removesuffix(ONE_SEED)
    workload = SCENARIOS[jobs](samples, 0).with_jobs(epochs=COUNTED_EPOCH + 1, batch_size=samples // BATCHES)
    plan = schedule(workload)
    classes = _classes(workload)
    counts = {
        k: Counts(job.indices, classes[job.indices]) for k, job in enumerate(workload.jobs) if job.killed_at is None
    }
    for seed in range(epochs):
        group = make_group(sampler, samples, capacity=round(CAPACITY * samples), seed=seed)
        orders = _second_epochs(plan, group, seed, one_seed=jobs != scenario)
        for job, count in counts.items():
            count.add(orders[job])
        if progress is not None:
            progress(1)
    return Judgement(scenario=scenario, sampler=sampler, verdicts=[each.verdict() for each in counts.values()])


def judge_all(
    samplers: list[str], scenarios: list[str], *, epochs: int, workers: int = 1, progress: Progress
) -> Iterator[Judgement]:
    """Judge every sampler in every scenario; with several workers each takes a pair at a time."""
    cells = [(sampler, scenario) for scenario in scenarios for sampler in samplers]
    if workers == 1:
        for sampler, scenario in cells:
            yield judge(sampler, scenario, epochs=epochs, progress=progress)
        return
    with ProcessPoolExecutor(workers) as pool:
        running = [pool.submit(judge, sampler, scenario, epochs=epochs) for sampler, scenario in cells]
        for future in running:
            yield future.result()
            progress(epochs)


def _second_epochs(plan: Schedule, group: SamplingGroup, seed: int, *, one_seed: bool) -> list[NDArray[np.int64]]:
    """Run the schedule without any cache; every job's counted epoch."""
    parts: list[list[NDArray[np.int64]]] = [[] for _ in plan.workload.jobs]
    for _, time, kind, job, epoch, size in plan.events:
        name = str(job)
        if kind is Kind.REQUEST:
            drawn = group.next(name, size, time)
            if epoch == COUNTED_EPOCH:
                parts[job].append(drawn)
        elif kind is Kind.EPOCH:
            group.start_epoch(name, epoch)
        elif kind is Kind.JOIN:
            spec = plan.workload.jobs[job]
            mine = job_seed(seed, 0 if one_seed else job)
            group.join(name, spec.indices, seed=mine, batch_size=spec.batch_size)
        else:
            group.leave(name)
    return [np.concatenate([np.empty(0, dtype=np.int64), *part]) for part in parts]


def _classes(workload: Workload) -> NDArray[np.int64]:
    """A class number for every sample: the set of jobs that read it, as bits."""
    masks = np.zeros(workload.samples, dtype=np.int64)
    for k, job in enumerate(workload.jobs):
        masks[job.indices] |= 1 << k
    return masks
