"""Several jobs that read the same images at once: each with workers of its own (torch), or one loading for all.

Every job is a process. The total of workers is the same on both sides. All jobs begin together, or one after the
other by a share of an epoch. A job's step is a stated sleep, as of a training loop that waits for its accelerator.

    python -m benchmarks.sharing --jobs 1,2,4
    python -m benchmarks.sharing --jobs 4 --stagger 0.25 --kept
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil

from benchmarks.loader import IMAGES, SPECIFICATION, warm_page_cache
from benchmarks.report import Comparison, Figures, Metric, add_arguments, alternate, publish
from examples.natural_images import generate
from torch_dpflow.remote.cluster_address import find_cluster
from torch_dpflow.remote.protocol import ProcessView

#: Workers of all jobs together.
WORKERS = 4
#: A sample is 224 x 224 x 3 bytes.
SAMPLE_BYTES = 224 * 224 * 3
METRICS = (
    Metric(name="samples_per_s", label="samples/s, all jobs"),
    Metric(name="decodes_per_sample", label="decodes/sample", higher_is_better=False),
    Metric(name="cpu_ms_per_sample", label="CPU ms/sample", higher_is_better=False),
    Metric(name="stall_share", label="stall share", higher_is_better=False, spec=".0%"),
    Metric(name="total_mib", label="peak MiB, all processes", higher_is_better=False, spec=",.0f"),
)


class Meter:
    """Adds up processor time and memory of this process's descendants, from now on."""

    def __init__(self) -> None:
        self._cpu: dict[int, float] = {}
        self._base: dict[int, float] = {}
        self._peak = 0.0
        self._stopped = threading.Event()
        self._sample(self._base)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> tuple[float, float]:
        """Seconds of processor time, and the highest sum of memory (shared pages count once), MiB."""
        self._sample(self._cpu)
        self._stopped.set()
        self._thread.join()
        return sum(used - self._base.get(pid, 0.0) for pid, used in self._cpu.items()), self._peak

    def _run(self) -> None:
        while not self._stopped.wait(0.2):
            self._sample(self._cpu)

    def _sample(self, into: dict[int, float]) -> None:
        memory = 0.0
        for process in psutil.Process().children(recursive=True):
            try:
                times = process.cpu_times()
                into[process.pid] = times.user + times.system
                memory += process.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        self._peak = max(self._peak, memory / 2**20)


@contextmanager
def cluster() -> Iterator[str]:
    """A cluster of this process's own; the path of its connection file."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/connection"
        code = (
            "import sys; from torch_dpflow.remote.services.local_cluster import *\n"
            "LocalCluster(ClusterOptions(connection_file=sys.argv[1])).serve()"
        )
        with subprocess.Popen([sys.executable, "-c", code, path]) as node:
            while not Path(path).exists():
                time.sleep(0.05)
            try:
                yield path
            finally:
                descendants = psutil.Process(node.pid).children(recursive=True)
                node.kill()
                psutil.wait_procs(descendants, timeout=10)


def loads(address: str) -> int:
    """Samples that the cluster has loaded."""
    with find_cluster(address).connect() as coordinator:
        views = coordinator.call("processes", reply_type=list[ProcessView]).body
    return sum(view.status["loads"] for view in views if view.role == "shard" and view.status)


def run(side: str, jobs: int, arguments: argparse.Namespace) -> Figures:
    """Run all jobs once."""
    if side == "torch":
        return run_jobs(side, jobs, arguments, "")
    with cluster() as address:
        return run_jobs(side, jobs, arguments, address)


def run_jobs(side: str, jobs: int, arguments: argparse.Namespace, address: str) -> Figures:
    running = [start(side, number, jobs, arguments, address) for number in range(jobs)]
    try:
        return measure(running, arguments, address)
    finally:
        for job in running:
            job.kill()
            job.communicate()


def measure(running: list[subprocess.Popen[str]], arguments: argparse.Namespace, address: str) -> Figures:
    """Let the jobs begin, and wait for what they have to tell."""
    for job in running:
        assert job.stdout is not None
        job.stdout.readline()
    time.sleep(1.5)  # figures of the first epoch reach the coordinator once in a second
    before = loads(address) if address else 0
    meter = Meter()
    pause_s = arguments.stagger * arguments.samples * arguments.step_ms / 1e3 / 32
    for number, job in enumerate(running):
        assert job.stdin is not None
        time.sleep(pause_s if number else 0.0)
        job.stdin.write("go\n")
        job.stdin.flush()
    told = [json.loads(job.stdout.readline()) for job in running if job.stdout is not None]
    cpu_s, peak = meter.stop()
    samples = sum(one["samples"] for one in told)
    if address:
        time.sleep(1.5)
    decodes = loads(address) - before if address else samples
    elapsed = max(one["ended"] for one in told) - min(one["begun"] for one in told)
    return {
        "samples_per_s": samples / elapsed,
        "decodes_per_sample": decodes / samples,
        "cpu_ms_per_sample": cpu_s / samples * 1e3,
        "stall_share": sum(one["stall_s"] / (one["ended"] - one["begun"]) for one in told) / len(running),
        "total_mib": peak,
    }


def start(
    side: str, number: int, jobs: int, arguments: argparse.Namespace, address: str
) -> subprocess.Popen[str]:
    workers = WORKERS // jobs if side == "torch" else WORKERS
    memory = max(16 << 20, int(arguments.cache * arguments.samples * SAMPLE_BYTES))
    step_ms = arguments.step_ms * (1 + arguments.spread * number)
    command = [sys.executable, "-m", "benchmarks.sharing_job", side, f"--images={arguments.images}"]
    command += [f"--number={number}", f"--samples={arguments.samples}", f"--epochs={arguments.epochs}"]
    command += [f"--workers={workers}", f"--step-ms={step_ms}", f"--address={address}", f"--memory={memory}"]
    command += [f"--cache-samples={int(arguments.cache * arguments.samples)}"]
    if arguments.kept:
        command.append("--kept")
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def compare(jobs: int, arguments: argparse.Namespace) -> Comparison:
    """Both sides in turn."""
    return alternate(
        "sharing",
        f"{jobs} jobs, stagger {arguments.stagger:.0%}, step {arguments.step_ms:g} ms",
        {side: partial(run, side, jobs, arguments) for side in ("torch", "dpflow")},
        rounds=1 if arguments.quick else arguments.rounds,
        parameters={
            name: getattr(arguments, name)
            for name in ("samples", "epochs", "stagger", "cache", "kept", "spread")
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharing", description=__doc__)
    parser.add_argument("--jobs", default="1,2,4", help="numbers of jobs (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=960, help="samples of an epoch")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=0.0, help="sleep after each batch")
    parser.add_argument("--stagger", type=float, default=0.0, help="share of an epoch between two starts")
    parser.add_argument("--spread", type=float, default=0.0, help="how much slower each next job's step is")
    parser.add_argument("--cache", type=float, default=0.25, help="share of the samples that are kept")
    parser.add_argument("--kept", action="store_true", help="samples are the same every time")
    add_arguments(parser, rounds=3)
    arguments = parser.parse_args()
    arguments.images = IMAGES
    generate(IMAGES, SPECIFICATION)
    warm_page_cache(IMAGES)
    publish([compare(int(jobs), arguments) for jobs in arguments.jobs.split(",")], METRICS, arguments)


if __name__ == "__main__":
    main()
