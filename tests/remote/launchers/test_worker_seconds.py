"""Worker-seconds as they are reported, beside what the double would bill: of a loader and of a flow, through kills."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cluster.shared.function_cluster import told
from tests.cluster_command import CommandedCluster
from tests.loader_cases import Unhurried
from tests.remote.launchers.function_doubles import NEEDED, FunctionDouble, function_double
from tests.shared_cluster import open_job, wait
from tests.shared_datasets import SlowNumbers
from torch_dpflow import DPFlowDataLoader
from torch_dpflow.cluster.client.options import JobOptions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

#: For how long is read, how often one is killed, and by how much the accounts may differ.
FOR_S, KILL_S, SHARE = 60.0, 10.0, 0.02


@pytest.fixture(params=["fc", "lambda"])
def double(request: pytest.FixtureRequest) -> Iterator[FunctionDouble]:
    pytest.importorskip(NEEDED[request.param])
    with function_double(request.param, cold_start_s=2.0) as double, pytest.MonkeyPatch.context() as patch:
        for name, value in double.env.items():
            patch.setenv(name, value)
        yield double


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """The vendors' clients keep their connections."""


class Killer:
    """Kills something now and then while somebody reads."""

    def __init__(self, *kills: Callable[[], object]) -> None:
        self._kills = kills
        self._begun = time.monotonic()
        self.killed = 0

    def goes_on(self) -> bool:
        passed_s = time.monotonic() - self._begun
        if passed_s > KILL_S * (self.killed + 1):
            self._kills[self.killed % len(self._kills)]()
            self.killed += 1
        return passed_s < FOR_S


def compare(reported_s: float, double: FunctionDouble, killed: int) -> None:
    billed_s = double.billed_s()
    print(
        f"{double.platform}: {reported_s:.1f} worker-seconds reported, {billed_s:.1f} billed: "
        f"{100 * (reported_s / billed_s - 1):+.2f}%, {killed} kills"
    )
    assert reported_s == pytest.approx(billed_s, rel=SHARE)


def test_those_of_a_loader_are_those_that_are_billed(double: FunctionDouble) -> None:
    loader: Any = DPFlowDataLoader(
        Unhurried(400),
        batch_size=2,
        num_workers=4,
        persistent_workers=True,
        platform={"fc": fc, "lambda": aws}[double.platform](double),
    )
    try:
        next(iter(loader))
        killer = Killer(double.kill_one)
        while killer.goes_on():
            for _ in loader:
                if not killer.goes_on():
                    break
        print(f"{loader.stats().worker_s:.1f} of {double.billed_s():.1f} while they run")
    finally:
        if loader._iterator is not None:
            loader._iterator._shutdown_workers()
    wait(lambda: not double.live(), what="the end of all workers")
    compare(loader.stats().worker_s, double, killer.killed)


def fc(double: FunctionDouble) -> Any:
    from torch_dpflow.remote import FunctionCompute

    return FunctionCompute(**double.settings)


def aws(double: FunctionDouble) -> Any:
    from torch_dpflow.remote import Lambda

    return Lambda(**double.settings)


def test_those_of_a_flow_are_those_that_are_billed(
    double: FunctionDouble, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("c")
    (folder / "dpflow.toml").write_text(f"{double.toml()}price_per_hour = 3.6\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPFLOW_CONFIG", str(folder / "dpflow.toml"))
        cluster = CommandedCluster.up(folder, "--platform", double.platform, "--autoscale", "0:4")
    try:
        read_and_compare(cluster, double)
    finally:
        cluster.stop()


def read_and_compare(cluster: CommandedCluster, double: FunctionDouble) -> None:
    dataset, options = SlowNumbers(1_000_000, 0.02), JobOptions(idle_s=300.0)
    with open_job("billed", dataset, address=cluster.address, options=options, batch_size=8, workers=4) as job:
        batches = job.traverse(0)
        next(batches)
        killer = Killer(double.kill_one, double.kill_all, lambda: cluster.kill("provisioner"))
        while killer.goes_on():
            next(batches)
    wait(lambda: not double.live(), what="the end of all workers")
    figures: list[dict[str, Any]] = [{}]

    def is_told() -> bool:
        listed = told(cluster)
        figures.append(listed["flows"][0])
        return figures[-1] == figures[-2] and not any(listed["workers"].values())

    wait(is_told, what="the last heartbeat")
    taken_s = figures[-1]["worker_seconds"]
    compare(taken_s, double, killer.killed)
    # Less than all: none of them is that of workers who stay a little after the last job.
    assert 0 < sum(figures[-1]["jobs"].values()) <= taken_s
    assert figures[-1]["cost"] == pytest.approx(taken_s / 1000)
