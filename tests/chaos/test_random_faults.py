"""Faults at random while jobs read: nothing is lost, nothing comes twice, nobody waits for ever.

Workers, shards, the router, the coordinator and the jobs themselves are killed, or frozen with their connections
open; a job that was killed comes back with its last `state_dict`. Samples hang, and the wall clocks of the cluster
and of its jobs step by up to ten minutes, to and fro. The long test does 200 faults to 8 jobs, and prints what was
done and how long jobs had to wait after it; in another one the keys of the storage expire as well::

    .venv/bin/python -m pytest -m slow -s tests/chaos/test_random_faults.py

In 28 trials of 5 jobs the cluster itself is ended and started again too, with another address in its connection file::

    .venv/bin/python -m pytest -m slow -s tests/chaos/test_random_faults.py -k restarts
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.chaos_jobs import ChaosJob, Nursery
from tests.chaos.clocks import Clock
from tests.chaos.expiring_keys import ExpiringKeys
from tests.chaos.faults import Chaos
from tests.chaos.stalls import stalls_of, table
from tests.shared_cluster import TestCluster, wait
from tests.worker_cases import has_ended

#: How long a worker may be at one sample, seconds.
TASK_TIMEOUT_S = 3.0


@pytest.fixture
def clocks(tmp_path: Path) -> tuple[Clock, Clock]:
    """Of the cluster and of its jobs."""
    return Clock(tmp_path / "theirs", "cluster's"), Clock(tmp_path / "ours", "jobs'")


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExpiringKeys]:
    """Of an S3 that the workers of clusters read from which are started after it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with ExpiringKeys(tmp_path, 1200, lifetime_s=2.0) as started:
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(started.file))
        yield started


@pytest.fixture
def cluster(tmp_path: Path, clocks: tuple[Clock, Clock]) -> Iterator[TestCluster]:
    """A cluster of the test's own."""
    started = TestCluster.start(tmp_path, path=clocks[0].path)
    yield started
    started.stop()


@pytest.fixture
def nursery(clocks: tuple[Clock, Clock]) -> Iterator[Nursery]:
    """What jobs are forked of."""
    started = Nursery(path=clocks[1].path)
    yield started
    started.close()


def survive(
    cluster: TestCluster,
    nursery: Nursery,
    folder: Path,
    clocks: tuple[Clock, Clock],
    *,
    jobs: int,
    faults: int,
    longest_s: float,
    most_pause_s: float,
    seed: int,
    size: int,
    keys: ExpiringKeys | None = None,
    restart: Callable[[random.Random], tuple[str, str, float]] | None = None,
) -> str:
    """Strike while jobs read; every fourth job has a plan of its own. What happened, for people.

    restart: ends the cluster and has it start again.
    """
    started = [
        ChaosJob.start(
            nursery,
            cluster,
            folder,
            flow="chaos/random",
            number=number,
            size=size,
            epochs=2,
            endless=True,
            ordered=number % 4 == 3,
            cost_s=0.002,
            step_s=0.008 * (1 + number % 4),
            shards=2,
            workers=4,
            task_timeout_s=TASK_TIMEOUT_S,
            store="" if keys is None else keys.store,
            endpoint="" if keys is None else keys.endpoint,
        )
        for number in range(jobs)
    ]
    wait(lambda: all(job.batches() >= 5 for job in started), what="the first batches")
    began = time.monotonic()

    def hang(_: random.Random) -> tuple[str, str, float]:
        (folder / "hang").touch()
        return "hang", "sample", TASK_TIMEOUT_S

    others = [hang, *(clock.step for clock in clocks), *([] if restart is None else [restart] * 3)]
    chaos = Chaos(cluster, started, random.Random(seed), longest_s=longest_s, others=others)
    try:
        chaos.run(faults, most_s=most_pause_s)
    finally:
        chaos.thaw()
        (folder / "hang").unlink(missing_ok=True)
        (folder / "enough").touch()
    epochs = sum(job.finish(timeout_s=300) for job in started)
    stalls = stalls_of(started, chaos.faults)
    title = f"{len(chaos.faults)} faults in {time.monotonic() - began:.0f} s, {jobs} jobs, {epochs} epochs of {size}"
    return f"{title}: each sample once\n{table(stalls, chaos.faults, began)}"


def test_every_epoch_is_whole_whatever_is_hit(
    cluster: TestCluster, nursery: Nursery, tmp_path: Path, clocks: tuple[Clock, Clock]
) -> None:
    print(
        survive(
            cluster,
            nursery,
            tmp_path,
            clocks,
            jobs=4,
            faults=6,
            longest_s=1.5,
            most_pause_s=0.6,
            seed=0,
            size=240,
        )
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2])
def test_two_hundred_faults(
    cluster: TestCluster, nursery: Nursery, tmp_path: Path, clocks: tuple[Clock, Clock], seed: int
) -> None:
    print()
    print(
        survive(
            cluster,
            nursery,
            tmp_path,
            clocks,
            jobs=8,
            faults=200,
            longest_s=15.0,
            most_pause_s=1.5,
            seed=seed,
            size=1200,
        )
    )


@pytest.mark.slow
def test_keys_of_a_storage_expire_meanwhile(
    keys: ExpiringKeys, cluster: TestCluster, nursery: Nursery, tmp_path: Path, clocks: tuple[Clock, Clock]
) -> None:
    """Each is good for two seconds, and a worker that is frozen wakes up with one that has expired."""
    told = survive(
        cluster,
        nursery,
        tmp_path,
        clocks,
        jobs=4,
        faults=40,
        longest_s=5.0,
        most_pause_s=1.0,
        seed=3,
        size=1200,
        keys=keys,
    )
    print(f"\n{keys.expired} keys expired, {keys.refused} requests were made with one that had\n{told}")
    assert keys.expired >= 10
    assert keys.refused >= 10


class Restarts:
    """Ends a cluster and starts it again, while other faults go on. Its connection file names another address then.

    Args:
        start: starts the next cluster in the place of the one that has ended.
    """

    def __init__(self, cluster: TestCluster, start: Callable[[], TestCluster]) -> None:
        self._cluster, self._start = cluster, start
        self._thread = threading.Thread()
        self._errors: list[BaseException] = []
        self.count = 0

    def begin(self, chance: random.Random) -> tuple[str, str, float]:
        """End it, by SIGTERM or SIGKILL, and have it start up to three seconds later; a fault."""
        number, pause_s = chance.choice([signal.SIGTERM, signal.SIGKILL]), chance.uniform(0.0, 3.0)
        if self._thread.is_alive():
            return "skip", "restart", 0.0
        self._thread = threading.Thread(target=self._run, args=(number, pause_s))
        self._thread.start()
        self.count += 1
        return f"restart ({number.name})", "cluster", pause_s

    def finish(self) -> None:
        """Wait until the cluster runs again. Raises what made it fail."""
        if self._thread.ident is not None:
            self._thread.join()
        if self._errors:
            raise self._errors[0]

    def _run(self, number: int, pause_s: float) -> None:
        try:
            os.kill(self._cluster.pid, number)
            wait(lambda: has_ended(self._cluster.pid), what="the cluster's end")
            time.sleep(pause_s)
            self._cluster.pid = self._start().pid
        except BaseException as error:
            self._errors.append(error)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(28))
def test_no_job_is_lost_in_trials_with_restarts_of_the_cluster(
    cluster: TestCluster, nursery: Nursery, tmp_path: Path, clocks: tuple[Clock, Clock], seed: int
) -> None:
    restarts = Restarts(cluster, lambda: TestCluster.start(tmp_path, path=clocks[0].path))
    try:
        told = survive(
            cluster,
            nursery,
            tmp_path,
            clocks,
            jobs=5,
            faults=25,
            longest_s=8.0,
            most_pause_s=1.0,
            seed=100 + seed,
            size=600,
            restart=restarts.begin,
        )
    finally:
        restarts.finish()
    print(f"\ntrial {seed}: 5 jobs, {restarts.count} restarts, 0 jobs lost; {told}")
