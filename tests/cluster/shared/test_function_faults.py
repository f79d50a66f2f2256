"""Flows on functions of which something fails: refusals, lost answers, freezes, expired credentials, wrong clocks.

All of it is slow: most of these faults are told by a lease or a pause of half a minute.
"""

from __future__ import annotations

import os
import re
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.shared.function_cluster import Endless, FunctionCluster, told, up
from tests.cluster.shared.test_shared_platform import Join, working
from tests.cluster_command import CommandedCluster
from tests.new_process import ROOT
from tests.remote.launchers.fc_server.instances import freeze, thaw
from tests.remote.launchers.fc_server.server import Fault
from tests.remote.launchers.function_doubles import function_double
from tests.shared_cluster import open_job, wait
from tests.shared_datasets import SlowNumbers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def cluster(functions: FunctionCluster) -> CommandedCluster:
    return functions.cluster


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Instances stay for the next test, and the vendor's client keeps its connections."""


@pytest.fixture
def job(functions: FunctionCluster, join: Join, flow: str) -> Endless:
    wait(lambda: not functions.double.live(), what="the end of the members of the test before")
    return Endless(join(flow, SlowNumbers(1_000_000, 0.02), batch_size=8, workers=2))


def limited_by(cluster: CommandedCluster, flow: str) -> str:
    return next((one["limited_by"] for one in told(cluster)["flows"] if one["flow"] == f"{flow}:v1"), "")


def test_a_quota_leaves_the_epoch_to_those_that_are_there_and_is_told(
    functions: FunctionCluster, job: Endless, flow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, double = functions.cluster, functions.double
    monkeypatch.setattr(double.server, "quota", 1)
    job.until(lambda: limited_by(cluster, flow) == "quota", "the quota, as what limits the flow")
    job.until(lambda: len(working(cluster, flow)) == 1, "the only member, as the heartbeat tells it")
    asked, began = double.starts(), time.monotonic()
    job.until(lambda: len(job.read) > 200, "samples")
    assert double.starts() <= asked + 1 + (time.monotonic() - began) // 60, "one try a minute above it"
    monkeypatch.undo()
    job.finish()


def test_throttled_starts_and_lost_answers_start_each_member_once(
    functions: FunctionCluster, job: Endless, flow: str
) -> None:
    double = functions.double
    if double.platform == "fc":
        double.server.fault("InvokeFunction", Fault(429, "Throttling.User", retry_after_ms=200), Fault(lose=True))
    else:
        double.server.faults += ["throttle", "lose"]
    job.until(lambda: len(working(functions.cluster, flow)) >= 2, "two members")
    assert double.live() <= 4
    job.finish()


def test_an_invocation_that_comes_twice_works_once(functions: FunctionCluster, job: Endless, flow: str) -> None:
    double = functions.double
    if double.platform != "lambda":
        pytest.skip("the platform refuses a second one under a name")
    done, failed = len(double.server.done), double.failed()
    double.server.faults.append("twice")
    job.until(lambda: len(double.server.done) > done, "the end of the second one")
    assert b"another process is" in double.server.done[done].body
    assert double.failed() == failed
    job.finish()


def test_credentials_that_expire_pause_starts_until_they_are_renewed(
    functions: FunctionCluster, job: Endless, flow: str
) -> None:
    cluster, double = functions.cluster, functions.double
    if double.platform == "kubernetes":
        pytest.skip("its double has one token, which does not expire")
    job.until(lambda: len(working(cluster, flow)) >= 2, "two members")
    key: Any = double.server.keys["AKtest"] if double.platform == "fc" else double.server.credentials
    key.expired = True
    try:
        double.kill_one()
        job.until(lambda: limited_by(cluster, flow) == "credentials", "a start that is refused")
        job.until(lambda: working(cluster, flow), "who runs stays")
        before = {*working(cluster, flow)}
    finally:
        key.expired = False
    job.until(lambda: {*working(cluster, flow)} - before, "a successor, half a minute later")
    job.finish()


def test_a_frozen_member_is_replaced_and_leaves_once_it_is_thawed(
    functions: FunctionCluster, job: Endless, flow: str
) -> None:
    cluster, double = functions.cluster, functions.double
    if double.platform != "fc":
        pytest.skip("the platform freezes nothing that works")
    job.until(lambda: len(working(cluster, flow)) >= 2, "two members")
    task = double.server.tasks[next(iter(working(cluster, flow)))]
    double.server.fault("StopAsyncTask", *[Fault(503, "ServiceUnavailable")] * 1000)
    freeze(task.instance)
    try:
        job.until(lambda: working(cluster, flow) and task.id not in working(cluster, flow), "its lease's end")
        assert task.status == "Running"
        thaw(task.instance)
        wait(lambda: task.status == "Succeeded", what="its leaving")
    finally:
        double.server.faults.clear()
        thaw(task.instance)
    job.finish()


#: Python imports a module of this name first of all, and what looks at the clock here is Python.
CLOCK = """
import time

_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + {offset}
time.time_ns = lambda: _time_ns() + {offset} * 10**9
"""


class ByAnotherClock(SlowNumbers):
    """Fails where the clock is right."""

    def __init__(self, offset: int) -> None:
        super().__init__(1_000_000, 0.02)
        self.offset = offset

    def __getitem__(self, index: int) -> Any:
        assert round(time.time() - time.clock_gettime(time.CLOCK_REALTIME)) == self.offset
        return super().__getitem__(index)


@pytest.mark.parametrize("offset", [600, -600])
def test_clocks_ten_minutes_off_change_nothing(
    offset: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, flow: str
) -> None:
    """Members' one way, the cluster's the other."""
    for name, seconds in (("theirs", offset), ("ours", -offset)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sitecustomize.py").write_text(CLOCK.format(offset=seconds))
    with function_double("fc", env={"PYTHONPATH": f"{tmp_path / 'theirs'}{os.pathsep}{ROOT}"}) as double:
        cluster = up(double, tmp_path_factory, {"PYTHONPATH": str(tmp_path / "ours")})
        with open_job(flow, ByAnotherClock(offset), address=cluster.address, batch_size=8, workers=2) as opened:
            job = Endless(opened)
            job.until(lambda: len(working(cluster, flow)) >= 2, "two members")
            assert not double.failed()
            killed = cluster.kill(f"{flow}:v1/shard")
            job.until(lambda: killed not in [view.pid for view in cluster.processes("shard")], "its successor")
            double.kill_all()
            job.until(lambda: working(cluster, flow), "members")
            job.finish()
        cluster.stop()
        wait(lambda: not double.live(), what="the end of all members")
    said = re.findall(r"time=(\S+)Z ", cluster.log.read_text())[-1]
    off_s = (datetime.fromisoformat(said) - datetime.now(timezone.utc).replace(tzinfo=None)).total_seconds()
    assert abs(off_s + offset) < 300, "the cluster's own clock is the other way"
