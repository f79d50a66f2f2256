"""Faults at random, one after the other, while several jobs read: nothing is lost, nothing comes twice."""

from __future__ import annotations

import os
import random
import signal
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.chaos.chaos_jobs import ChaosJob
from tests.shared_cluster import TestCluster, wait
from torch_dpflow.errors import DPFlowError

#: Seconds for which a process is frozen, at most; longer than that its node kills it.
FROZEN_S = 3.0


def fault(cluster: TestCluster, chance: random.Random) -> str:
    """Kill or freeze one process of the cluster; what was done."""
    try:
        views = [view for view in cluster.processes() if view.address or view.role == "worker"]
    except DPFlowError:
        return ""  # the coordinator has been hit just now
    view = chance.choice(views)
    with suppress(ProcessLookupError):
        if chance.random() < 0.7:
            os.kill(view.pid, signal.SIGKILL)
            return f"killed {view.role}"
        os.kill(view.pid, signal.SIGSTOP)
        thaw = threading.Timer(chance.uniform(0.1, FROZEN_S), _thaw, (view.pid,))
        thaw.start()
        thaw.join()
        return f"froze {view.role}"
    return ""


def _thaw(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_epoch_is_whole_whatever_is_hit(cluster: TestCluster, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    jobs = [
        ChaosJob.start(
            cluster,
            tmp_path,
            flow="chaos/random",
            number=number,
            size=3000,
            epochs=2,
            cost_s=0.002,
            step_s=0.01 * number,
            shards=2,
            workers=4,
        )
        for number in range(4)
    ]
    wait(lambda: all(job.batches() >= 5 for job in jobs), within_s=90, what="the first batches")
    done: list[str] = []
    pause = threading.Event()
    while any(job.process.poll() is None for job in jobs) and len(done) < 200:
        pause.wait(chance.uniform(0.1, 0.8))
        done.append(fault(cluster, chance))
    for job in jobs:
        job.finish(timeout_s=400)
    print(
        f"{len([one for one in done if one])} faults; longest stall {max(j.longest_stall_s() for j in jobs):.1f} s"
    )
