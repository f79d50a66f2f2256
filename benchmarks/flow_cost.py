"""What a flow costs: processor time a sample, by process, of samples that cost nothing to load.

    python -m benchmarks.flow_cost [--jobs 1,2,4,8] [--bytes 1024] [--batch-size 32] [--shards 1] [--workers 2]
                                   [--samples 40000] [--rounds 5] [--json] [--quick]

All jobs read one flow together, as fast as they can, in the midst of a long epoch. Every sample is the same tensor, so
all that is left is the way of a sample: shards, workers, router, node, and the jobs. Times are for each sample that a
job has received. A worker's is also given for each sample that it has loaded, as several jobs share one loading.
"""

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from benchmarks.cluster import RoleUse, use_by_role, wait_for_workers
from benchmarks.report import Comparison, Figures, Metric, add_arguments, alternate, publish
from benchmarks.scale import Job, all_read, numbers
from examples.cluster import loads, started

#: Numbers of jobs that read at once.
JOBS = (1, 2, 4, 8)
#: Samples of the dataset: an epoch that ends in no round.
LENGTH = 4_000_000
#: How old a cluster's figures may be, seconds.
STATUS_AGE_S = 2.5

_LOWER = partial(Metric, higher_is_better=False)
METRICS = (
    _LOWER(name="shard_us", label="shards, µs", spec=".1f"),
    _LOWER(name="job_us", label="jobs, µs", spec=".1f"),
    _LOWER(name="worker_us", label="workers, µs", spec=".1f"),
    _LOWER(name="worker_loaded_us", label="workers, µs a load", spec=".1f"),
    _LOWER(name="router_us", label="router, µs", spec=".1f"),
    _LOWER(name="node_us", label="node, coordinator, µs", spec=".1f"),
    _LOWER(name="total_us", label="all, µs", spec=".1f"),
    _LOWER(name="loads_per_sample", label="loads a sample", spec=".2f"),
    Metric(name="samples_per_s", label="samples/s, all jobs", spec=",.0f"),
)


def measure(jobs: int, *, samples: int, nbytes: int, batch_size: int, shards: int, workers: int) -> Figures:
    """Return what a sample costs each role while `jobs` jobs read `samples` samples each, processor time in µs."""
    with ExitStack() as stack:
        address = stack.enter_context(started())
        given = {"workers": workers, "length": LENGTH, "nbytes": nbytes, "batch_size": batch_size, "shards": shards}
        readers = [stack.enter_context(Job(address, **given))]
        readers[0].read(batch_size)
        wait_for_workers(address, workers)
        readers += [stack.enter_context(Job(address, **given)) for _ in range(jobs - 1)]
        all_read(readers, samples // 4)
        time.sleep(STATUS_AGE_S)
        loads_before, before = loads(address), use_by_role(address)
        read = all_read(readers, samples)
        after = use_by_role(address)
        time.sleep(STATUS_AGE_S)
        loaded = loads(address) - loads_before
    received = sum(one["samples"] for one in read)
    return {
        **costs(before, after, job_s=sum(one["cpu_s"] for one in read), received=received, loaded=loaded),
        "loads_per_sample": loaded / received,
        "samples_per_s": sum(one["samples"] / one["seconds"] for one in read),
    }


def costs(
    before: dict[str, RoleUse], after: dict[str, RoleUse], *, job_s: float, received: int, loaded: int
) -> Figures:
    """Return the processor time of each role for a sample, µs.

    before, after: what the roles of the cluster had used. job_s: processor time of all jobs, seconds. received: samples
    that jobs have received. loaded: samples that workers have loaded.
    """
    used = {role: (use.cpu_s - before[role].cpu_s if role in before else use.cpu_s) for role, use in after.items()}
    per_sample = {role: used_s / received * 1e6 for role, used_s in used.items()}
    job_us = job_s / received * 1e6
    return {
        "shard_us": per_sample["shard"],
        "job_us": job_us,
        "worker_us": per_sample["worker"],
        "worker_loaded_us": used["worker"] / max(1, loaded) * 1e6,
        "router_us": per_sample["router"],
        "node_us": per_sample["node"] + per_sample["coordinator"],
        "total_us": sum(per_sample.values()) + job_us,
    }


def compare(jobs: Sequence[int], nbytes: int, arguments: argparse.Namespace) -> Comparison:
    """Return the figures of every number of jobs, round by round, for samples of one size."""
    given = {
        "samples": arguments.samples // 20 if arguments.quick else arguments.samples,
        "nbytes": nbytes,
        "batch_size": arguments.batch_size,
        "shards": arguments.shards,
        "workers": max(arguments.workers, arguments.shards),
    }
    title = (
        f"{nbytes:,} bytes, batches of {given['batch_size']}, shards: {given['shards']}, workers: {given['workers']}"
    )
    sides = {f"{count} jobs" if count > 1 else "1 job": partial(measure, count, **given) for count in jobs}
    rounds = 1 if arguments.quick else arguments.rounds
    return alternate("flow_cost", title, sides, rounds=rounds, parameters=given)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flow_cost", description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("--jobs", type=numbers, default=list(JOBS), help="how many at once (default: 1,2,4,8)")
    add("--bytes", type=numbers, default=[1024], help="of a sample, several in turn (default: 1024)")
    add("--batch-size", type=int, default=32, help="(default: %(default)s)")
    add("--shards", type=int, default=1, help="of the flow (default: %(default)s)")
    add("--workers", type=int, default=2, help="of all shards together (default: %(default)s)")
    add("--samples", type=int, default=40_000, help="that each job reads in a round (default: %(default)s)")
    add_arguments(parser)
    arguments = parser.parse_args()
    publish((compare(arguments.jobs, nbytes, arguments) for nbytes in arguments.bytes), METRICS, arguments)


if __name__ == "__main__":
    main()
