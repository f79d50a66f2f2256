"""Several jobs that read the same images at once: each with separate workers, as torch has them, or with one flow.

    python -m benchmarks.sharing [--json] [--scenario together,staggered,unequal] [--rounds 3] [--quick]
    python -m benchmarks.sharing --against-simulator [--json] [--rounds 3] [--quick]

Every job is a process, and the total of workers is the same on all sides. `together` has 1, 2 and 4 jobs begin at
once, each sample drawn afresh for each of them. In `staggered` each of 4 jobs begins when the one before has read a
tenth, a quarter, half of its first epoch; samples are the same every time, so that a cache may keep a quarter of them.
In `unequal` 4 jobs sleep after every batch, as a training step does, each half as long again as the fastest one more
than the one before.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

from benchmarks import sharing_simulated
from benchmarks import sharing_tensorsocket as tensorsocket
from benchmarks import sharing_tfdata as tfdata
from benchmarks.loader import IMAGES, SPECIFICATION, warm_page_cache
from benchmarks.meter import Meter
from benchmarks.report import Comparison, Figures, Metric, add_arguments, alternate, publish
from benchmarks.sharing_job import LIKE_TORCHVISION
from examples.cluster import loads, started
from examples.natural_images import generate

#: How old a cluster's figures may be, seconds.
STATUS_AGE_S = 2.5
#: Where they are installed, also other libraries.
TENSORSOCKET, TF_SERVICE = "tensorsocket", "tf.data service"
TF_LIKE = f"{TF_SERVICE} like torchvision"
SIDES = (
    "torch",
    "dpflow",
    "dpflow + vision",
    *(TENSORSOCKET,) * tensorsocket.is_installed(),
    *(TF_SERVICE, TF_LIKE) * tfdata.is_installed(),
)
#: The kinds of their jobs, as `benchmarks.sharing_job` has them.
KINDS = {"dpflow + vision": "dpflow", TF_SERVICE: "tfdata", TF_LIKE: LIKE_TORCHVISION}
#: Workers of all jobs together.
WORKERS = 4
#: A sample is 224 x 224 x 3 bytes.
SAMPLE_BYTES = 224 * 224 * 3
#: Room for samples that are drawn afresh and wait for the other jobs: the default.
DRAWN_BYTES = 1 << 30
METRICS = (
    Metric(name="samples_per_s", label="samples/s, all jobs", spec=",.0f"),
    Metric(name="decodes_per_sample", label="decodes/sample", higher_is_better=False, spec=".3f"),
    Metric(name="cpu_ms_per_sample", label="CPU ms/sample", higher_is_better=False, spec=".2f"),
    Metric(name="stall_share", label="stall share, mean", higher_is_better=False, spec=".0%"),
    Metric(name="worst_stall_share", label="of the job with most", higher_is_better=False, spec=".0%"),
    Metric(name="total_mib", label="peak MiB, all processes", higher_is_better=False, spec=",.0f"),
)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Which jobs there are, and when each begins."""

    jobs: int = 4
    #: Share of its first epoch that a job has read when the next one begins; 0: all begin at once.
    stagger: float = 0.0
    #: Sleep of the first job after each batch; and of each next one so many times as much more.
    step_ms: float = 0.0
    spread: float = 0.0
    #: Whether samples are the same every time, so that a cache may keep them, or drawn afresh.
    kept: bool = False

    @property
    def title(self) -> str:
        parts = [f"{self.jobs} jobs" if self.jobs > 1 else "1 job"]
        if self.stagger:
            parts.append(f"{self.stagger:.0%} of an epoch apart")
        if self.step_ms:
            parts.append(", ".join(f"{self.step_of(number):.0f}" for number in range(self.jobs)) + " ms steps")
        return "; ".join([*parts, "kept" if self.kept else "drawn afresh"])

    def allows(self, side: str) -> bool:
        """Whether a side can run it.

        TensorSocket's jobs wait for each other, so none can begin by itself. What is kept is Pillow's.
        """
        if side == TENSORSOCKET:
            return not self.stagger
        return side not in KINDS or not self.kept

    def step_of(self, job: int) -> float:
        """Sleep of a job after each batch, ms."""
        return self.step_ms * (1 + self.spread * job)


SCENARIOS: Mapping[str, Sequence[Scenario]] = {
    "together": [Scenario(jobs=jobs) for jobs in (1, 2, 4)],
    "staggered": [Scenario(stagger=stagger, kept=True) for stagger in (0.1, 0.25, 0.5)],
    "unequal": [Scenario(step_ms=100.0, spread=0.5, kept=kept) for kept in (False, True)],
}


#: What a job says at its end.
Told: TypeAlias = Mapping[str, Any]


class Source(Protocol):
    """Where jobs get what others load for them."""

    address: str

    def elsewhere_s(self) -> float:
        """Processor time of its processes that stand for another host's, seconds."""

    def loads(self) -> float | None:
        """Samples that it has loaded; None where each job loads for itself; not a number where it is not known."""


class NoSource:
    """Every job has workers of its own."""

    address = ""

    def elsewhere_s(self) -> float:
        return 0.0

    def loads(self) -> int | None:
        return None


class ClusterSource:
    """A cluster; it is `STATUS_AGE_S` before all that it has done is known."""

    def __init__(self, address: str) -> None:
        self.address = address

    def elsewhere_s(self) -> float:
        return 0.0

    def loads(self) -> int | None:
        time.sleep(STATUS_AGE_S)
        return loads(self.address)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of one side."""

    side: str
    scenario: Scenario
    samples: int
    epochs: int
    #: Share of the samples that a cache may hold.
    cache: float

    @property
    def kind(self) -> str:
        """The kind of its jobs, as `benchmarks.sharing_job` has them."""
        return KINDS.get(self.side, self.side)

    @property
    def is_fast(self) -> bool:
        """Whether torch_dpflow.vision decodes."""
        return self.side.endswith("+ vision")

    @property
    def workers(self) -> int:
        """Of each job's loader."""
        return WORKERS // self.scenario.jobs if self.side == "torch" else WORKERS

    def measure(self) -> Figures:
        """Run all jobs once."""
        with self._source() as source:
            jobs = [self._start(number, source.address) for number in range(self.scenario.jobs)]
            try:
                return self._follow(jobs, source)
            finally:
                for job in jobs:
                    job.kill()
                    job.communicate()

    @contextmanager
    def _source(self) -> Iterator[Source]:
        if self.kind == "dpflow":
            with started() as address:
                yield ClusterSource(address)
        elif self.side == TENSORSOCKET:
            kept = self.scenario.kept
            with tensorsocket.producing(str(IMAGES), self.samples, WORKERS, kept=kept) as producer:
                yield producer
        elif self.side in {TF_SERVICE, TF_LIKE}:
            with tfdata.serving() as service:
                yield service
        else:
            yield NoSource()

    def _start(self, number: int, address: str) -> "subprocess.Popen[str]":
        scenario = self.scenario
        kept_samples = int(self.cache * self.samples)
        given = {
            "images": IMAGES,
            "number": number,
            "samples": self.samples,
            "epochs": self.epochs,
            "workers": self.workers,
            "step-ms": scenario.step_of(number),
            "stagger": scenario.stagger,
            "address": address,
            "memory": kept_samples * SAMPLE_BYTES if scenario.kept else DRAWN_BYTES,
            "cache-samples": kept_samples,
        }
        command = [sys.executable, "-m", "benchmarks.sharing_job", self.kind]
        command += [f"--{name}={value}" for name, value in given.items()]
        command += ["--kept"] * scenario.kept + ["--fast"] * self.is_fast
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _await_workers(self, source: Source) -> None:
        """Wait until all workers are there, where they come one after the other."""

    def _note(self, told: Sequence[Told]) -> None:
        """What all jobs have said at their ends."""

    def _follow(self, jobs: Sequence["subprocess.Popen[str]"], source: Source) -> Figures:
        """Let the jobs begin, and wait for what they have to tell."""
        for job in jobs:
            hear(job)
        self._await_workers(source)
        before, elsewhere_s = source.loads(), source.elsewhere_s()
        meter = Meter()
        for job in jobs:
            assert job.stdin is not None
            print("go", file=job.stdin, flush=True)
            if self.scenario.stagger:
                hear(job)
        told = [hear(job) for job in jobs]
        elsewhere_s = source.elsewhere_s() - elsewhere_s
        cpu_s, peak_mib = meter.stop()
        self._note(told)
        samples = sum(one["samples"] for one in told)
        after = source.loads()
        elapsed = max(one["ended"] for one in told) - min(one["begun"] for one in told)
        stalls = [one["stall_s"] / (one["ended"] - one["begun"]) for one in told]
        return {
            "samples_per_s": samples / elapsed,
            "decodes_per_sample": 1.0 if before is None or after is None else (after - before) / samples,
            "cpu_ms_per_sample": cpu_s / samples * 1e3,
            "host_cpu_ms_per_sample": (cpu_s - elsewhere_s) / samples * 1e3,
            "stall_share": sum(stalls) / len(stalls),
            "worst_stall_share": max(stalls),
            "total_mib": peak_mib,
            **{f"stall_share_of_job_{number}": stall for number, stall in enumerate(stalls)},
        }


def hear(job: "subprocess.Popen[str]") -> Any:
    """The next thing that a job says."""
    assert job.stdout is not None
    line = job.stdout.readline()
    if not line:
        raise RuntimeError(f"{' '.join(map(str, job.args))} has ended: see above")  # type: ignore[union-attr]
    return json.loads(line)


def compare(scenario: Scenario, arguments: argparse.Namespace) -> Comparison:
    """All sides in turn."""
    quick = arguments.quick
    given = {
        "scenario": scenario,
        "samples": 128 if quick else arguments.samples,
        "epochs": 1 if quick else arguments.epochs,
        "cache": arguments.cache,
    }
    return alternate(
        "sharing",
        scenario.title,
        {side: Run(side=side, **given).measure for side in arguments.side if scenario.allows(side)},
        rounds=1 if quick else arguments.rounds,
        parameters={**given, "scenario": asdict(scenario), "workers": WORKERS},
    )


def choice(known: Sequence[str], text: str) -> list[str]:
    """The names in a list such as `together,unequal`."""
    for name in text.split(","):
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return text.split(",")


def jobs_of(text: str) -> list[int]:
    """The numbers in a list such as `1,4`, each of which has a scenario."""
    known = sorted({scenario.jobs for scenarios in SCENARIOS.values() for scenario in scenarios})
    return [int(name) for name in choice([str(number) for number in known], text)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharing", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--scenario", type=partial(choice, list(SCENARIOS)), default=list(SCENARIOS), help="default: all")
    add("--side", type=partial(choice, SIDES), default=list(SIDES), help="default: all")
    add("--jobs", type=jobs_of, default=[1, 2, 4], help="how many at once (default: 1,2,4)")
    add("--samples", type=int, default=1920, help="of an epoch (default: %(default)s)")
    add("--epochs", type=int, default=2, help="of each job, measured (default: %(default)s)")
    add("--cache", type=float, default=0.25, help="share of the samples that is kept (default: %(default)s)")
    add(
        "--against-simulator",
        action="store_true",
        help="hit rates of a cluster beside the simulator's instead",
    )
    add_arguments(parser, rounds=3)
    arguments = parser.parse_args()
    if arguments.against_simulator:
        rows = sharing_simulated.cases(arguments.quick)
        sharing_simulated.run(rows, seeds=1 if arguments.quick else arguments.rounds, as_json=arguments.json)
        return
    generate(IMAGES, SPECIFICATION)
    warm_page_cache(IMAGES)
    named = [scenario for name in arguments.scenario for scenario in SCENARIOS[name]]
    chosen = [scenario for scenario in named if scenario.jobs in arguments.jobs]
    publish((compare(scenario, arguments) for scenario in chosen), METRICS, arguments)


if __name__ == "__main__":
    main()
