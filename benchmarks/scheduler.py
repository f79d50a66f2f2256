"""What the scheduler costs, and what its rules gain: `python -m benchmarks.scheduler [--json] [--quick]`.

First, processor time per task: submitted one at a time, assigned, exchanged and delivered. Then simulated
time of in-order consumers with a bounded lookahead on skewed costs, relative to the least that any schedule
needs: the scheduler against torch's round-robin, no stealing, and another choice of what to steal.
"""

import argparse
import random
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

from benchmarks import report
from benchmarks.simulated_fleet import OrderedConsumer, SimulatedFleet
from torch_dpflow.workers.scheduler.machine import (
    AddWorker,
    Assign,
    Exchanged,
    Scheduler,
    SchedulerInstruction,
    Submit,
)
from torch_dpflow.workers.scheduler.views import Task, WorkerViews

METRICS = (
    report.Metric(name="us_per_task", label="processor time [µs/task]", higher_is_better=False, spec=".2f"),
    report.Metric(name="time", label="simulated time / least", higher_is_better=False, spec=".3f"),
    report.Metric(name="twice", label="loaded twice [%]", higher_is_better=False, spec=".2f"),
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One simulated fleet and its consumer. Times are in mean costs of a cheap task."""

    workers: int
    window: int
    lookahead: int
    latency: float
    results_per_exchange: int = 1

    def text(self) -> str:
        return (
            f"{self.workers} workers, K={self.window}, N={self.results_per_exchange}, "
            f"{self.lookahead} ahead, latency {self.latency:g}"
        )


SETTINGS = (
    Setting(workers=2, window=2, lookahead=8, latency=0.01),
    Setting(workers=8, window=2, lookahead=32, latency=0.01),
    Setting(workers=8, window=8, lookahead=128, latency=0.1),
    Setting(workers=8, window=8, lookahead=128, latency=0.5),
    Setting(workers=8, window=8, lookahead=128, latency=0.5, results_per_exchange=4),
    Setting(workers=32, window=8, lookahead=512, latency=0.5),
)


class _NoStealing(WorkerViews):
    def steal_candidate(self) -> Task | None:
        return None


class _OldestFirst(WorkerViews):
    """Steals the oldest task that waits anywhere: the one an in-order consumer needs first."""

    def steal_candidate(self) -> Task | None:
        waiting = [task for view in self.views.values() for task in list(view.held.values())[1:]]
        return min(filter(Task.is_movable, waiting), key=lambda task: task.order, default=None)


def skewed_costs(tasks: int, *, seed: int) -> list[float]:
    """Batches of 8 samples, one in a hundred of which costs a hundred times the rest."""
    draw = random.Random(seed).random
    return [sum(100.0 if draw() < 0.01 else 1.0 for _ in range(8)) / 8 for _ in range(tasks)]


def simulate(
    setting: Setting,
    tasks: int,
    seeds: Iterator[int],
    *,
    rule: type[WorkerViews] = WorkerViews,
    deal: bool = False,
) -> report.Figures:
    """One run on the next seed."""
    costs = skewed_costs(tasks, seed=next(seeds))
    scheduler = Scheduler(window=setting.window)
    scheduler._views = rule(setting.window)
    fleet = SimulatedFleet(
        scheduler,
        workers=setting.workers,
        cost_s=costs.__getitem__,
        latency_s=setting.latency,
        results_per_exchange=setting.results_per_exchange,
    )
    consumer = OrderedConsumer(
        fleet,
        tasks=tasks,
        lookahead=setting.lookahead,
        round_robin_over=setting.workers if deal else None,
    )
    least = sum(costs) / setting.workers
    return {"time": consumer.run() / least, "twice": 100 * len(fleet.discarded) / tasks}


def live(workers: int, tasks: int, window: int = 2) -> report.Figures:
    """The life of `tasks` tasks with two in flight for each worker."""
    scheduler = Scheduler(window=window)
    queues = [deque[int]() for _ in range(workers)]
    unsubmitted = iter(range(tasks))

    def follow(instructions: list[SchedulerInstruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Assign):
                queues[instruction.worker].extend(instruction.tasks)

    begin = time.process_time()
    for worker in range(workers):
        scheduler.handle(AddWorker(worker, 0.0))
    follow(scheduler.handle(Submit([next(unsubmitted) for _ in range(2 * workers)], None, 0.0)))
    while scheduler.counters.delivered < tasks:
        for worker, queue in enumerate(queues):
            if queue:
                done = queue.popleft()
                follow(scheduler.handle(Exchanged(worker, [done], queue[0] if queue else None, 0.0)))
                follow(scheduler.handle(Submit(list(islice(unsubmitted, 1)), None, 0.0)))
    return {"us_per_task": 1e6 * (time.process_time() - begin) / tasks}


def measure(arguments: argparse.Namespace) -> list[report.Comparison]:
    """Run everything; the sides of one comparison see the same seeds in the same order."""
    rounds, tasks = arguments.rounds, 2_000 if arguments.quick else 50_000
    lives: dict[str, report.Side] = {f"{workers} workers": partial(live, workers, tasks) for workers in (1, 8, 64)}
    comparisons = [report.alternate("scheduler", "life of a task", lives, rounds=rounds)]
    for setting in SETTINGS:
        run = partial(simulate, setting, 200 if arguments.quick else 2_000)
        sides: dict[str, report.Side] = {
            "round-robin": partial(run, iter(range(rounds)), rule=_NoStealing, deal=True),
            "no stealing": partial(run, iter(range(rounds)), rule=_NoStealing),
            "oldest waiting": partial(run, iter(range(rounds)), rule=_OldestFirst),
            "scheduler": partial(run, iter(range(rounds))),
        }
        comparisons.append(report.alternate("scheduler", setting.text(), sides, rounds=rounds))
    return comparisons


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    arguments = parser.parse_args()
    report.publish(measure(arguments), METRICS, arguments)


if __name__ == "__main__":
    main()
