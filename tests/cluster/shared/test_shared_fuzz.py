"""Every service of a living cluster is told nonsense while a job reads: it goes on, nothing grows, nobody restarts.

The long test sends 100,000 messages, and bytes that are none::

    .venv/bin/python -m pytest -m slow -s tests/cluster/shared/test_shared_fuzz.py
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import psutil
import pytest

from tests.cluster.shared.hostile import Fiend, Fuzzer, bursts, raw_noise, send_raw
from tests.shared_cluster import TestCluster, wait
from tests.shared_datasets import Numbers
from torch_dpflow.cluster.client.open_job import SharedJob
from torch_dpflow.cluster.messages.node import ProcessView
from torch_dpflow.cluster.security.connection_file import find_cluster
from torch_dpflow.errors import RemoteCallError

ROLES = ("coordinator", "router", "shard")
SIZE = 500
#: The job that reads.
READER = "reader"
#: Messages that one connection sends.
BURST = 200
#: What a service's memory may grow by after the first fifth of the messages, bytes.
MAX_GROWTH = 48 << 20


@pytest.fixture(scope="module")
def cluster(cluster_of_file: TestCluster) -> TestCluster:
    return cluster_of_file


class Reader:
    """A job that reads one epoch after the other, and checks each."""

    def __init__(self, job: SharedJob) -> None:
        self._job = job
        self.epochs = 0
        self._reads, self._enough = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._reads.wait()

    def _run(self) -> None:
        try:
            while not self._enough.is_set():
                self._reads.set()
                keys = [int(key) for _, labels in self._job.traverse(self.epochs) for key in labels]
                assert sorted(keys) == list(range(SIZE)), f"epoch {self.epochs}"
                self.epochs += 1
        except BaseException as error:
            self._error = error

    def finish(self) -> int:
        self._enough.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.epochs


def is_of(flow: str, view: ProcessView) -> bool:
    """Whether the flow counts on it; those of other tests' flows end meanwhile."""
    return view.role == "coordinator" or view.id.startswith(f"{flow}:v")


def services(cluster: TestCluster, flow: str) -> dict[str, ProcessView]:
    return {view.role: view for view in cluster.processes() if view.address and is_of(flow, view)}


def pids(cluster: TestCluster, flow: str) -> dict[str, int]:
    return {view.id: view.pid for view in cluster.running() if is_of(flow, view)}


def counted(cluster: TestCluster, flow: str) -> dict[str, int]:
    """What each service has counted as malformed."""
    return {role: view.status.get("malformed", 0) for role, view in services(cluster, flow).items()}


def still_answers(cluster: TestCluster, view: ProcessView) -> None:
    """It has read what came before, and answers."""
    with (
        find_cluster(cluster.address).connect(view.address, timeout_s=30.0) as client,
        pytest.raises(RemoteCallError, match="no method 'alive'"),
    ):
        client.call("alive")


def memory(views: dict[str, ProcessView]) -> dict[str, int]:
    return {role: psutil.Process(view.pid).memory_info().rss for role, view in views.items()}


def fuzz(cluster: TestCluster, job: SharedJob, flow: str, *, messages: int, raw: int, seed: int) -> str:
    """Send so many messages, and connect so often with other bytes, to all services by turns. What happened."""
    chance = random.Random(seed)
    first = job.traverse(0)
    next(first)
    first.close()
    wait(lambda: set(services(cluster, flow)) == set(ROLES), what="all services")
    wait(lambda: len(pids(cluster, flow)) == len(ROLES) + 2, what="both workers")
    views = services(cluster, flow)
    spec = cluster.flows()[f"{flow}:v1"].spec
    fuzzer = Fuzzer(chance, spec, READER, views["shard"].id)
    before = pids(cluster, flow)
    reader = Reader(job)
    try:
        _send(cluster, views, fuzzer, chance, messages // 5, raw // 5)
        settled = memory(views)
        _send(cluster, views, fuzzer, chance, messages - messages // 5, raw - raw // 5)
        grown = {role: now - settled[role] for role, now in memory(views).items()}
    finally:
        epochs = reader.finish()
    assert epochs > 0
    assert pids(cluster, flow) == before, "a process was started again"
    assert set(services(cluster, flow)) == set(ROLES), cluster.log.read_text()
    wait(lambda: all(counted(cluster, flow).values()), what="a count of what was malformed")
    growth = {role: f"{grown[role] / 2**20:+.1f} MiB" for role in ROLES}
    assert all(grown[role] < MAX_GROWTH for role in ROLES), growth
    malformed = counted(cluster, flow)
    return f"{messages} messages, {raw} raw connections, {epochs} epochs: {malformed=}, memory {growth}"


def _send(
    cluster: TestCluster,
    views: dict[str, ProcessView],
    fuzzer: Fuzzer,
    chance: random.Random,
    messages: int,
    raw: int,
) -> None:
    options = find_cluster(cluster.address).transport
    sent = noises = 0
    for number, burst in enumerate(bursts(messages, BURST)):
        view = views[ROLES[number % len(ROLES)]]
        fiend = Fiend(view.address, options, chance)
        fiend.say([fuzzer.message(view.role) for _ in range(burst)])
        sent += burst
        while noises < raw * sent // messages:
            send_raw(view.address, raw_noise(chance))
            noises += 1
        still_answers(cluster, view)
        fiend.close()


def test_a_job_reads_on_while_services_are_told_nonsense(
    cluster: TestCluster, join: Callable[..., SharedJob], flow: str
) -> None:
    job = join(flow, Numbers(SIZE), batch_size=10, name=READER)
    print(fuzz(cluster, job, flow, messages=3000, raw=60, seed=0))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_messages(cluster: TestCluster, join: Callable[..., SharedJob], flow: str) -> None:
    job = join(flow, Numbers(SIZE), batch_size=10, name=READER)
    print()
    print(fuzz(cluster, job, flow, messages=100_000, raw=2000, seed=1))
