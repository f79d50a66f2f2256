"""A loader on a real Ray for minutes, one of its four actors killed every ten seconds: every epoch is the local one.

.venv/bin/python -m pytest -n 0 -s tests/remote/launchers/test_ray_chaos.py --timeout 3600 [--disturbed-s 300]
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import dataclass, field

import pytest

from tests.hosts.recorded_hosts import Marked, shuffled
from tests.hosts.through_faults import read_through, report_kills
from tests.remote.launchers.local_ray import names_in, needs_ray, ray_of, start_node, workers
from tests.shared_cluster import wait
from torch_dpflow.remote import Ray
from torch_dpflow.remote.launchers.ray import RayLauncher

pytestmark = [pytest.mark.slow, needs_ray]

ACTORS, SIZE, SECONDS = 4, 2000, 0.02
KILL_EVERY_S = 10.0
#: Of each actor, so that all and their successors have room on any machine.
SHARE = 0.1


@dataclass(eq=False)
class Kills(threading.Thread):
    """SIGKILL for an actor, which takes its worker along, or for a worker by itself, until it is over."""

    seconds: float
    at: list[float] = field(default_factory=list)
    error: Exception | None = None

    def __post_init__(self) -> None:
        super().__init__(name="kills")
        self._draw = random.Random(13)

    def run(self) -> None:
        """The thread's body."""
        began = time.monotonic()
        try:
            for number in range(1, int(self.seconds / KILL_EVERY_S) + 1):
                time.sleep(max(0.0, began + number * KILL_EVERY_S - time.monotonic()))
                found = sorted(workers().items())
                if found:
                    worker, actor = self._draw.choice(found)
                    os.kill(actor if number % 4 else worker, signal.SIGKILL)
                    self.at.append(time.monotonic())
        except Exception as error:
            self.error = error


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Instead of the check of all tests, as in `test_ray`: the test itself looks for workers."""


def test_every_epoch_is_the_local_loaders(pytestconfig: pytest.Config) -> None:
    with ray_of(start_node(1)):
        remote = shuffled(Marked(SIZE, SECONDS), ACTORS, platform=Ray(cpus=SHARE))
        local = shuffled(Marked(SIZE), 2)
        kills = Kills(pytestconfig.getoption("--disturbed-s"))
        epochs, gaps = read_through(remote, local, kills)
        assert kills.error is None
        restarts = remote.stats().restarts
        remote._iterator._shutdown_workers()
        local._iterator._shutdown_workers()
        launcher = RayLauncher(Ray(cpus=SHARE))
        wait(lambda: not names_in(launcher) and not workers(), what="the end of all workers")
        print(f"\n{epochs} epochs of {SIZE} samples, {restarts} restarts")
        report_kills(gaps, kills.at)
