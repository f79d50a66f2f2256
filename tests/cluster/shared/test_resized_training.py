"""Another torchrun resumes a killed one with other ranks, batches and workers: each sample once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.shared.resized_training import EPOCHS, SIZE, loader_of
from tests.new_process import ROOT
from tests.shared_cluster import TestCluster, wait

SIZES = [(8, 4, 2), (3, 5, 1), (5, 2, 3), (1, 8, 2), (4, 6, 1)]


def torchrun(ranks: int, given: dict[str, Any], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    command.append(f"--log-dir={log.parent}")
    path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    with log.open("ab") as output:
        return subprocess.Popen(
            [*command, "-m", "tests.cluster.shared.resized_training", json.dumps(given)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def kill(training: subprocess.Popen[bytes]) -> None:
    """Kill torchrun and its ranks, which have sessions of their own."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for pid, parent in (map(int, line.split()) for line in listed.splitlines()):
        children.setdefault(parent, []).append(pid)
    family = [training.pid]
    for pid in family:
        family += children.get(pid, [])
    for pid in family:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    training.wait()


@contextmanager
def killed(folder: Path, ranks: int, given: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """A training that is killed in the end, and once it has saved a checkpoint if it is to save one."""
    latest, log = folder / "latest", folder / "log"
    before = latest.stat().st_ino if latest.exists() else 0
    training = torchrun(ranks, {**given, "folder": str(folder)}, log)
    try:
        if given["checkpoint"] > 0:
            wait(
                lambda: training.poll() is not None or (latest.exists() and latest.stat().st_ino != before),
                what="a checkpoint",
            )
            assert training.poll() is None, log.read_text()
        yield training
    finally:
        kill(training)


def train(folder: Path, sizes: list[tuple[int, int, int]], given: dict[str, Any]) -> list[list[list[int]]]:
    """What the ranks have read, by rank and epoch; all but the last run are killed after a checkpoint."""
    for number, (ranks, batch_size, workers) in enumerate(sizes):
        is_last = number == len(sizes) - 1
        run = {**given, "batch_size": batch_size, "workers": workers, "all_states": number % 2}
        with killed(folder, ranks, {**run, "checkpoint": -1 if is_last else 3 + number}) as training:
            if is_last:
                training.wait(timeout=600)
                assert training.returncode == 0, (folder / "log").read_text()
    read: list[list[list[int]]] = json.loads((folder / "read").read_text())
    return read


def check(read: list[list[list[int]]]) -> None:
    for epoch in range(EPOCHS):
        samples = [*chain.from_iterable(part[epoch] for part in read)]
        assert set(samples) == set(range(SIZE))
        assert len(samples) - SIZE < len(read), "the end is evened out once"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sampler", ["DistributedSampler", "DynaGCSSampler"])
@pytest.mark.parametrize("named", [False, True])
def test_five_sizes_of_a_killed_training_read_each_epoch_once(
    cluster: TestCluster, flow: str, tmp_path: Path, sampler: str, named: bool
) -> None:
    name = flow if named else None
    check(train(tmp_path, SIZES, {"flow": flow, "address": cluster.address, "name": name, "sampler": sampler}))


def test_a_killed_training_of_two_ranks_goes_on_with_one(cluster: TestCluster, flow: str, tmp_path: Path) -> None:
    given = {"flow": flow, "address": cluster.address, "name": flow, "sampler": "DistributedSampler"}
    with killed(tmp_path, 2, {**given, "batch_size": 7, "workers": 2, "all_states": False, "checkpoint": 3}):
        pass
    saved = json.loads((tmp_path / "latest").read_text())
    loader = loader_of({**given, "batch_size": 5, "workers": 1}, num_replicas=1, rank=0)
    loader.load_state_dict(saved["states"][1])
    loader.sampler.set_epoch(saved["epoch"])  # type: ignore[attr-defined]
    rest = [int(key) for _, labels in loader for key in labels]
    assert sorted(saved["read"][0] + rest) == list(range(SIZE))
