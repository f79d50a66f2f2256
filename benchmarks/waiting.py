"""How long a training loop waits on a host with few processors, with workers there and with remote ones.

    python -m benchmarks.waiting [--json] [--rounds 5] [--quick] [--picture docs/waiting.svg]

The counterpart of the thesis's end-to-end figures (5-8, 5-11, 5-12) for a machine of any size, as its times are stated
ones. Loading a sample takes a sleep, for which a worker of the training host holds one of that host's four virtual
processors; a remote worker brings a processor of its own. A training step takes a sleep too, as one on a GPU does.
"""

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.report import Comparison, Figures, Metric, add_arguments, alternate, publish
from examples.bar_picture import PALE, RED, Bar, bar_picture
from examples.cluster import started
from torch_dpflow import DPFlowDataLoader, JobOptions

#: Virtual processors of the training host, and workers of a job there.
PROCESSORS = 4
#: Fewest and most workers of a flow, which are all remote.
FLOW_WORKERS = 1, 8
#: How often a worker looks for a free processor while there is none, seconds.
LOOK_S = 0.002
#: One sample in so many is slow; times of the others and of the slow ones, of the stated mean.
SLOW_EVERY, COMMON, SLOW = 8, 0.7, 3.1
#: Set for workers that have a processor of their own, and the number that such a processor has in records.
OWN_VARIABLE, OWN = "BENCHMARKS_WAITING_OWN_PROCESSOR", -1
#: By when a job ends after its last figure, seconds.
END_S = 60.0
METRICS = (
    Metric(name="waiting_s", label="waiting, s", higher_is_better=False, spec=".2f"),
    Metric(name="epoch_s", label="epoch, s", higher_is_better=False, spec=".2f"),
    Metric(name="step_share", label="the step runs", spec=".1%"),
    Metric(name="worker_s", label="worker-seconds a job", higher_is_better=False, spec=".1f"),
    Metric(name="loads_per_sample", label="loads/sample", higher_is_better=False, spec=".3f"),
    Metric(name="remote_share", label="loaded remotely", spec=".0%"),
)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a job reads in an epoch, and how long it takes; times are means, seconds."""

    samples: int = 2560
    batch_size: int = 16
    sample_s: float = 0.020
    step_s: float = 0.067

    def sample_s_of(self, index: int) -> float:
        """Time that this sample takes, seconds."""
        return self.sample_s * (COMMON if index % SLOW_EVERY else SLOW)


@dataclass(frozen=True, kw_only=True)
class Side:
    """Which jobs there are, and the workers of each."""

    jobs: int = 1
    #: Whether the loader is a DPFlowDataLoader, or torch's.
    is_ours: bool = True
    #: Whether the jobs read one flow, whose workers are all remote, instead of having workers of their own.
    has_flow: bool = False

    @property
    def local(self) -> int:
        """Workers of each job on the training host."""
        return 0 if self.has_flow else PROCESSORS


SIDES = {
    f"one job: torch, {PROCESSORS} workers": Side(is_ours=False),
    f"one job: torch_dpflow, {PROCESSORS} workers": Side(),
    f"two jobs: torch, {PROCESSORS} workers for each job": Side(is_ours=False, jobs=2),
    "two jobs: torch_dpflow, one flow, remote workers": Side(jobs=2, has_flow=True),
}


class Processors:
    """The virtual processors of a host: one file each, locked by the process that holds it.

    The kernel gives a processor back if its holder dies.
    """

    def __init__(self, folder: Path, count: int = PROCESSORS) -> None:
        self._files = [folder / f"processor-{number}" for number in range(count)]

    @contextmanager
    def held(self) -> Iterator[int]:
        """Wait until a processor is free and hold it; its number."""
        while (found := self._free()) is None:
            time.sleep(LOOK_S)
        number, descriptor = found
        try:
            yield number
        finally:
            os.close(descriptor)

    def _free(self) -> tuple[int, int] | None:
        for number, file in enumerate(self._files):
            # Opened each time: forked processes and threads would share the lock of one descriptor.
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
            else:
                return number, descriptor
        return None


class StatedTime:
    """Sleeps that take the stated times together: each is shorter by what earlier ones took too long.

    A loaded machine wakes a process late, which would be counted as slower processors.
    """

    def __init__(self) -> None:
        self._late_s = 0.0

    def sleep(self, seconds: float) -> None:
        begun = time.monotonic()
        time.sleep(max(0.0, seconds - self._late_s))
        self._late_s += time.monotonic() - begun - seconds


class TimedSamples(Dataset[torch.Tensor]):
    """Samples that take a stated time; each is the record of its loading.

    A record has its index, the processor's number or `OWN`, and begin and end (time.monotonic, seconds), float64.
    """

    def __init__(self, load: Load, processors: Processors) -> None:
        self._load, self._processors = load, processors
        self._time = StatedTime()

    def __len__(self) -> int:
        return self._load.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        with nullcontext(OWN) if OWN_VARIABLE in os.environ else self._processors.held() as number:
            begun = time.monotonic()
            self._time.sleep(self._load.sample_s_of(index))
            return torch.tensor([index, number, begun, time.monotonic()], dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training, in a process that does nothing else."""

    number: int
    side: Side
    load: Load
    #: Folder of the processors, and of what the job has read.
    folder: str
    #: Of the flow's cluster.
    address: str = ""

    @classmethod
    def from_text(cls, text: str) -> "Job":
        """The inverse of `text`."""
        given = json.loads(text)
        return cls(**{**given, "side": Side(**given["side"]), "load": Load(**given["load"])})

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))

    @property
    def records(self) -> Path:
        """The file of all records that the job has read, in their order."""
        return Path(self.folder, f"records-{self.number}.npy")

    def open_loader(self) -> "DataLoader[torch.Tensor]":
        side = self.side
        dataset = TimedSamples(self.load, Processors(Path(self.folder)))
        given: dict[str, Any] = {
            "batch_size": self.load.batch_size,
            "shuffle": True,
            "generator": torch.Generator().manual_seed(self.number),
            "num_workers": PROCESSORS,
            "persistent_workers": True,
        }
        if not side.is_ours:
            return DataLoader(dataset, **given)
        if side.has_flow:
            job = JobOptions(idle_s=30.0)
            return DPFlowDataLoader(dataset, flow="benchmark/waiting", address=self.address, job=job, **given)
        return DPFlowDataLoader(dataset, **given)

    def run(self) -> None:
        """Read an epoch, print a line, read one from stdin, read the measured epoch, and print its figures."""
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", "This DataLoader will create")
        loader = self.open_loader()
        # Workers start and their number is found; with the same steps, for it follows what the job needs.
        self._read(loader)
        print(json.dumps("ready"), flush=True)
        sys.stdin.readline()
        before_s = _billed_s(loader)
        figures, records = self._read(loader)
        worker_s = self.side.local * figures["epoch_s"] + _billed_s(loader) - before_s
        np.save(self.records, records)
        print(json.dumps({**figures, "worker_s": worker_s}), flush=True)
        if loader._iterator is not None:
            loader._iterator._shutdown_workers()  # type: ignore[attr-defined]

    def _read(self, loader: Iterable[torch.Tensor]) -> tuple[dict[str, float], "np.ndarray[Any, Any]"]:
        batches, stepping_s, stated = [], 0.0, StatedTime()
        begun = time.monotonic()
        for batch in loader:
            batches.append(batch)
            came = time.monotonic()
            stated.sleep(self.load.step_s)
            stepping_s += time.monotonic() - came
        epoch_s = time.monotonic() - begun
        figures = {"waiting_s": epoch_s - stepping_s, "epoch_s": epoch_s, "step_share": stepping_s / epoch_s}
        return figures, torch.cat(batches).numpy()


def _billed_s(loader: "DataLoader[torch.Tensor]") -> float:
    """Seconds that remote workers have run for this job."""
    return loader.stats().worker_s if isinstance(loader, DPFlowDataLoader) else 0.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of one side."""

    side: Side
    load: Load

    def measure(self) -> Figures:
        """Run all jobs at once. Times are means of the jobs.

        Raises:
            ValueError: a job has not read every sample once, or more workers ran than the host has processors.
        """
        with tempfile.TemporaryDirectory(prefix="torch_dpflow-") as folder, ExitStack() as stack:
            address = stack.enter_context(autoscaled_cluster()) if self.side.has_flow else ""
            jobs = [
                Job(number=number, side=self.side, load=self.load, folder=folder, address=address)
                for number in range(self.side.jobs)
            ]
            told = _run_all(jobs)
            records = [np.load(job.records) for job in jobs]
        check(records, self.load.samples)
        read = np.concatenate(records)
        return {
            **{name: sum(one[name] for one in told) / len(told) for name in told[0]},
            "loads_per_sample": len(np.unique(read, axis=0)) / len(read),
            "remote_share": float(np.mean(read[:, 1] == OWN)),
        }


@contextmanager
def autoscaled_cluster() -> Iterator[str]:
    """A cluster whose flows have remote workers, as many as jobs need; its address."""
    fewest, most = FLOW_WORKERS
    variables = {
        OWN_VARIABLE: "1",
        "DPFLOW_AUTOSCALE_MIN": str(fewest),
        "DPFLOW_AUTOSCALE_MAX": str(most),
    }
    with ExitStack() as stack:
        os.environ.update(variables)
        try:
            address = stack.enter_context(started(platform="processes"))
        finally:
            for variable in variables:
                del os.environ[variable]
        yield address


def _run_all(jobs: list[Job]) -> list[dict[str, float]]:
    """Run a process for each job, begin their measured epochs together, and return the figures of each."""
    with ExitStack() as stack:
        processes = []
        for job in jobs:
            command = [sys.executable, "-m", "benchmarks.waiting", f"--job={job.text}"]
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            _line_of(process)
        for process in processes:
            assert process.stdin is not None
            print("go", file=process.stdin, flush=True)
        figures = [_line_of(process) for process in processes]
        for process in processes:
            process.wait(timeout=END_S)
    return figures


def _line_of(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a job of benchmarks.waiting ended with {process.wait()}: see above")
    return json.loads(line)


def check(records: "list[np.ndarray[Any, Any]]", samples: int) -> None:
    """Raise ValueError unless each job has read every sample once, and no more were loaded at once than allowed.

    Args:
        records: of each job what it has read, float64 [samples, 4]; see `TimedSamples`.
        samples: of an epoch.
    """
    for number, read in enumerate(records):
        counts = Counter(read[:, 0].astype(int).tolist())
        if counts != Counter(range(samples)):
            raise ValueError(f"job {number} read {len(counts)} of {samples} samples, {counts.total()} with repetitions")
    if (most := busiest(np.concatenate(records))) > PROCESSORS:
        raise ValueError(f"{most} samples were loaded at once on a host with {PROCESSORS} processors")


def busiest(records: "np.ndarray[Any, Any]") -> int:
    """How many of these samples were loaded at the same time by workers of the training host, at most."""
    local = records[records[:, 1] != OWN]
    # Ends before begins of the same moment.
    changes = sorted([*((end, -1) for end in local[:, 3]), *((begin, 1) for begin in local[:, 2])])
    return int(np.cumsum([0, *(change for _, change in changes)]).max())


def picture(comparison: Comparison) -> str:
    """Draw an epoch of each side: its steps, and the time in which its loop waits."""
    bars = []
    for side in SIDES:
        waiting_s, epoch_s = (comparison.median(side, metric) for metric in ("waiting_s", "epoch_s"))
        bars.append(Bar(side, [(PALE, epoch_s - waiting_s), (RED, waiting_s)], f"{waiting_s:.2f}"))
    rounds = len(comparison.rounds[comparison.baseline])
    note = f"Loading and steps are sleeps. Medians; rounds: {rounds} (python -m benchmarks.waiting)."
    return bar_picture("One epoch of one training loop", bars, [note], [(PALE, "training steps"), (RED, "waiting, s")])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.waiting", description=str(__doc__).splitlines()[0])
    parser.add_argument("--job", type=Job.from_text, help=argparse.SUPPRESS)
    parser.add_argument("--picture", type=Path, help="file for a picture of the epochs, as SVG")
    add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.job is not None:
        arguments.job.run()
        return
    load = Load(samples=256) if arguments.quick else Load()
    comparison = alternate(
        "waiting",
        f"{load.sample_s * 1e3:g} ms a sample, {load.step_s * 1e3:g} ms a step",
        {name: Run(side=side, load=load).measure for name, side in SIDES.items()},
        rounds=1 if arguments.quick else arguments.rounds,
        parameters={
            **asdict(load),
            "processors": PROCESSORS,
            "flow_workers": FLOW_WORKERS,
            "sides": {name: asdict(side) for name, side in SIDES.items()},
        },
    )
    publish([comparison], METRICS, arguments)
    if arguments.picture is not None:
        arguments.picture.write_text(picture(comparison), encoding="utf-8")


if __name__ == "__main__":
    main()
