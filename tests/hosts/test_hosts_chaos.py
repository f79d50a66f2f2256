"""Workers on four hosts for minutes, killed every ten seconds, frozen and cut off: every epoch is the local loader's.

.venv/bin/python -m pytest -n 0 -s tests/hosts/test_hosts_chaos.py --timeout 3600 [--disturbed-s 300]
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tests.hosts.recorded_hosts import Marked, Recorded, shuffled
from tests.hosts.through_faults import STALL_S, Gaps, longest, read_through, report_kills
from tests.new_process import ROOT
from tests.shared_cluster import wait
from tests.support.hosts import Host, Hosts

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

HOSTS, SIZE = 4, 2000
KILL_EVERY_S = 10.0
#: When the other faults begin, as a share of the whole time, and how long they last, seconds.
FREEZE, SHORT_CUT, LONG_CUT = (0.1, 20.0), (0.3, 5.0), (0.5, 60.0)
#: A fault is felt for so long after its end: a lease has to lapse, and a member to start; seconds.
FELT_S = 15.0


@dataclass(eq=False)
class Disturbance(threading.Thread):
    """Does what the schedule says to hosts, until it is over."""

    hosts: Hosts
    seconds: float
    kills: list[float] = field(default_factory=list)
    #: From when to when something else was wrong, seconds.
    others: list[tuple[float, float]] = field(default_factory=list)
    error: Exception | None = None

    def __post_init__(self) -> None:
        super().__init__(name="disturbance")
        self._draw = random.Random(13)

    def run(self) -> None:
        """The thread's body."""
        began = time.monotonic()
        due: list[tuple[float, Callable[[], None]]] = [(at, self._kill) for at in self._every(KILL_EVERY_S)]
        one, other = self.hosts[0], self.hosts[1]
        for (share, lasts_s), begin, end in (
            (FREEZE, one.freeze, one.thaw),
            (SHORT_CUT, other.cut, other.mend),
            (LONG_CUT, other.cut, other.mend),
        ):
            at = share * self.seconds
            due += [(at, begin), (at + lasts_s, end)]
            self.others.append((began + at, began + at + lasts_s + FELT_S))
        try:
            for at, act in sorted(due, key=lambda pair: pair[0]):
                time.sleep(max(0.0, began + at - time.monotonic()))
                act()
        except Exception as error:
            self.error = error

    def _every(self, seconds: float) -> list[float]:
        return [number * seconds for number in range(1, int(self.seconds / seconds) + 1)]

    def _kill(self) -> None:
        """End the member of one host in four."""
        host: Host = self._draw.choice(self.hosts[2:])
        pids = host.pids()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        if pids:
            self.kills.append(time.monotonic())


def test_every_epoch_is_the_local_loaders(disturbed_s: float) -> None:
    with Hosts(HOSTS) as hosts:
        remote = shuffled(Marked(SIZE, 0.02), HOSTS, platform=Recorded.of(hosts))
        local = shuffled(Marked(SIZE), 2)
        disturbance = Disturbance(hosts, disturbed_s)
        epochs, gaps = read_through(remote, local, disturbance)
        assert disturbance.error is None
        report(gaps, disturbance, epochs)
        remote._iterator._shutdown_workers()
        local._iterator._shutdown_workers()
        wait(lambda: not [pid for host in hosts for pid in host.pids()], what="the members' end")
        for host in hosts:
            # Of a member that was killed; the next one there would remove it.
            assert len(list(host.folder.iterdir())) <= 1
            sweep = "from torch_dpflow._core.processes import sweep; sweep()"
            subprocess.run([*host.prefix, sys.executable, "-c", sweep], env={"PYTHONPATH": str(ROOT)}, check=True)
            assert not list(host.folder.iterdir())


def report(gaps: Gaps, disturbance: Disturbance, epochs: int) -> None:
    """Print the stalls, and check those after a kill alone."""
    print(f"\n{epochs} epochs of {SIZE} samples, {len(disturbance.kills)} kills; longest stalls in seconds:")
    for begin, end in disturbance.others:
        print(f"  {end - begin - FELT_S:4.0f} s of freeze or cut: {longest(gaps, begin, end):.1f}")
    alone = [
        at for at in disturbance.kills if not any(begin - STALL_S <= at <= end for begin, end in disturbance.others)
    ]
    report_kills(gaps, alone)
