"""How a flow's services scale: throughput against linear, and what workers and jobs take of memory.

    python -m benchmarks.scale [--json] [--part throughput,memory] [--rounds 3] [--quick]
    python -m benchmarks.scale --samples 1e6,1e7,1e8     # numbers of samples instead: `benchmarks.scale_samples`

The samples of `throughput` sleep 50 ms and take next to no processor time, so that two cores can run 64 workers. What
the parts measure, and how, is described in benchmarks/README.md; what a sample costs is `benchmarks.flow_cost`.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

from benchmarks import scale_samples
from benchmarks.cluster import RoleUse, use_by_role, wait_for_workers
from benchmarks.report import Comparison, Figures, Metric, add_arguments, alternate, publish
from benchmarks.scale_job import BATCH
from benchmarks.scale_samples import BATCHES
from examples.cluster import started

SLEEP_MS = 50.0
WORKERS = (1, 2, 4, 8, 16, 32, 64)
#: Rounds of a part, and of `--samples`.
ROUNDS, SAMPLE_ROUNDS = 3, 1
#: How long a throughput is measured, seconds; until it is, jobs read as long.
MEASURED_S = 5.0
#: Lengths of data sets between which nobody's memory is to grow.
LENGTHS = (10_000, 1_000_000)
#: Fewest and most workers, and most jobs, between which memory is compared; rows that each job reads.
FEW, MANY, JOBS, READ = 2, 18, 5, 12_000

_LOWER = partial(Metric, higher_is_better=False)
COSTS = (
    _LOWER(name="shard_us", label="shard, µs", spec=".0f"),
    _LOWER(name="router_us", label="router, µs", spec=".1f"),
    _LOWER(name="node_us", label="node, coordinator, µs", spec=".1f"),
    _LOWER(name="client_us", label="client, µs", spec=".0f"),
    _LOWER(name="service_and_client_us", label="shard + router + client, µs", spec=".0f"),
    _LOWER(name="worker_us", label="worker, µs", spec=".0f"),
)
THROUGHPUT = (
    Metric(name="samples_per_s", label="samples/s", spec=",.0f"),
    Metric(name="of_linear", label="of linear", spec=".1%"),
    *COSTS,
)
MEMORY = (
    _LOWER(name="job_mib", label="a job's process, MiB", spec=".1f"),
    _LOWER(name="served_job_mib", label="services, for a job, MiB", spec=".1f"),
    _LOWER(name="worker_mib", label="a worker more, MiB", spec=".1f"),
    _LOWER(name="worker_own_mib", label="a worker's own, MiB", spec=".1f"),
    _LOWER(name="worker_start_ms", label="CPU to start it, ms", spec=".0f"),
    _LOWER(name="shard_mib", label="shard's own, MiB", spec=".1f"),
    _LOWER(name="router_mib", label="router's own, MiB", spec=".1f"),
)


class Job:
    """A job in a process of its own, which reads what it is told to."""

    def __init__(
        self,
        address: str,
        *,
        workers: int,
        length: int,
        sleep_ms: float = 0.0,
        nbytes: int = 0,
        batch_size: int = BATCH,
        shards: int = 1,
    ) -> None:
        command = [sys.executable, "-m", "benchmarks.scale_job", f"--address={address}"]
        command += [f"--workers={workers}", f"--length={length}", f"--sleep-ms={sleep_ms}"]
        command += [f"--nbytes={nbytes}", f"--batch-size={batch_size}", f"--shards={shards}"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def begin(self, samples: int) -> None:
        """Tell it to read so many samples, in whole batches."""
        assert self._process.stdin is not None
        print(samples, file=self._process.stdin, flush=True)

    def told(self) -> dict[str, Any]:
        """Wait until it has, and hear what that took."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a job of the benchmark has ended: see above")
        figures: dict[str, Any] = json.loads(line)
        return figures

    def read(self, samples: int) -> dict[str, Any]:
        """Both."""
        self.begin(samples)
        return self.told()

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def running(workers: int, length: int, sleep_ms: float = 0.0) -> Iterator[tuple[str, Job]]:
    """A cluster and its first job, when all workers are there."""
    with started() as address, Job(address, workers=workers, length=length, sleep_ms=sleep_ms) as job:
        job.read(BATCH)
        wait_for_workers(address, workers)
        yield address, job


def throughput(workers: int, seconds: float) -> Figures:
    """Samples that sleep, read by one job in the midst of a long epoch."""
    linear = workers / (SLEEP_MS / 1e3)
    with running(workers, LENGTHS[-1], SLEEP_MS) as (address, job):
        samples = int(linear * seconds)
        job.read(samples)
        figures = costs_of(address, lambda: [job.read(samples)])
    return {**figures, "of_linear": figures["samples_per_s"] / linear}


def all_read(jobs: list[Job], samples: int) -> list[dict[str, Any]]:
    """Have all of them read at once."""
    for job in jobs:
        job.begin(samples)
    return [job.told() for job in jobs]


def costs_of(address: str, read: Callable[[], list[dict[str, Any]]]) -> Figures:
    """What every role spends, processor time in µs a sample, while jobs read."""
    before = use_by_role(address)
    told = read()
    after = use_by_role(address)
    samples = sum(one["samples"] for one in told)

    def spent(*roles: str) -> float:
        return sum(after[role].cpu_s - before[role].cpu_s for role in roles) / samples * 1e6

    client = sum(one["cpu_s"] for one in told) / samples * 1e6
    return {
        "samples_per_s": sum(one["samples"] / one["seconds"] for one in told),
        "shard_us": spent("shard"),
        "router_us": spent("router"),
        "node_us": spent("node", "coordinator"),
        "client_us": client,
        "service_and_client_us": spent("shard", "router") + client,
        "worker_us": spent("worker"),
    }


def memory(length: int, rows: int) -> Figures:
    """What workers and jobs take of memory, over a data set of `length` samples that itself takes none."""
    with running(FEW, length) as (address, first):
        few = use_by_role(address, memory=True)
        first.read(rows)
        one = use_by_role(address, memory=True)
        own = [first.read(BATCH)["bytes"]]
        others = [Job(address, workers=FEW, length=length) for _ in range(JOBS - 1)]
        try:
            own += [told["bytes"] for told in all_read(others, rows)]
            several = use_by_role(address, memory=True)
        finally:
            for job in others:
                job.__exit__(None, None, None)
    with running(MANY, length) as (address, _):
        many = use_by_role(address, memory=True)
    return {
        "job_mib": sum(own) / len(own) / 2**20,
        "served_job_mib": (own_of_services(several) - own_of_services(one)) / (JOBS - 1) / 2**20,
        "worker_mib": (held_by_all(many) - held_by_all(few)) / (MANY - FEW) / 2**20,
        "worker_own_mib": many["worker"].uss / MANY / 2**20,
        "worker_start_ms": many["worker"].cpu_s / MANY * 1e3,
        "shard_mib": one["shard"].uss / 2**20,
        "router_mib": one["router"].uss / 2**20,
    }


def own_of_services(use: dict[str, RoleUse]) -> int:
    """Memory that the shard and the router do not share with anybody."""
    return use["shard"].uss + use["router"].uss


def held_by_all(use: dict[str, RoleUse]) -> int:
    """Memory of the whole cluster. What a worker shares makes the shares of the others smaller."""
    return sum(one.pss for one in use.values())


def measure(part: str, arguments: argparse.Namespace) -> Comparison:
    """One part, its sides in turn."""
    quick, rounds = arguments.quick, 1 if arguments.quick else arguments.rounds
    if part == "throughput":
        sides = {
            f"{count} workers": partial(throughput, count, 1.0 if quick else MEASURED_S) for count in arguments.workers
        }
        return alternate("scale", f"samples of {SLEEP_MS:g} ms", sides, rounds=rounds)
    rows = READ // 20 if quick else READ
    sides = {f"{length:,} samples": partial(memory, length, rows) for length in LENGTHS}
    parameters = {"rows": rows, "jobs": JOBS, "workers": [FEW, MANY]}
    return alternate("scale", "memory", sides, rounds=rounds, parameters=parameters)


PARTS = {"throughput": THROUGHPUT, "memory": MEMORY}


def numbers(text: str) -> list[int]:
    return [int(float(part)) for part in text.split(",")]


def parts(text: str) -> list[str]:
    for part in text.split(","):
        if part not in PARTS:
            raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(PARTS)}")
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--part", type=parts, default=list(PARTS), help="default: all")
    parser.add_argument("--workers", type=numbers, default=list(WORKERS), help="of throughput (default: 1 to 64)")
    parser.add_argument("--samples", type=numbers, help="measure loaders with so many samples, and no part")
    add_arguments(parser, rounds=ROUNDS)
    if parser.parse_known_args()[0].samples:
        parser.set_defaults(rounds=SAMPLE_ROUNDS)  # a round takes ten minutes
    arguments = parser.parse_args()
    if arguments.samples:
        rounds, batches = (1, 20) if arguments.quick else (arguments.rounds, BATCHES)
        many = (scale_samples.compare(length, rounds=rounds, batches=batches) for length in arguments.samples)
        publish(many, scale_samples.METRICS, arguments)
        return
    for part in arguments.part:
        publish([measure(part, arguments)], PARTS[part], arguments)


if __name__ == "__main__":
    main()
