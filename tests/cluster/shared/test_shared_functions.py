"""Flows whose workers are invocations of a function, or pods: started by the provisioner, as many as jobs need, to
none.

The control planes are ours and instances are processes of this host; vendors' clients and the entries are real.
"""

from __future__ import annotations

import os
import signal

import pytest
from click.testing import CliRunner

from tests.cluster.shared.function_cluster import Endless, FunctionCluster, up
from tests.cluster.shared.test_shared_platform import Join, kept, keys, working
from tests.cluster_command import CommandedCluster
from tests.remote.launchers.function_doubles import FunctionDouble, function_double
from tests.shared_cluster import open_job, wait
from tests.shared_datasets import SlowNumbers
from tests.worker_cases import has_ended
from torch_dpflow.cli.main import root


@pytest.fixture
def cluster(functions: FunctionCluster) -> CommandedCluster:
    return functions.cluster


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Instances stay for the next test, and the vendor's client keeps its connections."""


def test_each_sample_comes_once_while_the_provisioner_and_then_all_members_are_killed(
    functions: FunctionCluster,
    join: Join,
    flow: str,
) -> None:
    cluster, double = functions.cluster, functions.double
    job = Endless(join(flow, SlowNumbers(1_000_000, 0.02), batch_size=8, workers=2))
    job.until(lambda: len(working(cluster, flow)) >= 2, "two members")
    killed = cluster.kill("provisioner")
    job.until(lambda: kept(cluster, but=killed) >= 1, "another provisioner, which knows them")
    job.until(lambda: working(cluster, flow), "a member")
    assert not double.failed(), "who was warm stays"
    double.kill_all()
    job.until(lambda: double.failed() and working(cluster, flow), "their successors")
    job.finish()


@pytest.mark.slow
def test_members_go_with_the_last_job_and_come_with_the_next(
    functions: FunctionCluster,
    join: Join,
    flow: str,
) -> None:
    double = functions.double
    for _ in range(2):
        job = join(flow, SlowNumbers(24, 0.01), batch_size=8, workers=2)
        assert sorted(keys(job.traverse(0))) == list(range(24))
        assert double.live()
        job.close()
        wait(lambda: not double.live(), what="the end of members that nobody needs")


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["fc", "lambda", "kubernetes"])
def test_nothing_is_left_running_after_the_heads_death(
    platform: str, tmp_path_factory: pytest.TempPathFactory, flow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with function_double(platform) as double:
        cluster = up(double, tmp_path_factory)
        job = open_job(flow, SlowNumbers(4000, 0.05), address=cluster.address, batch_size=8, workers=2)
        keys([next(job.traverse(0))])
        services = [view.pid for view in cluster.processes()]
        os.kill(cluster.pid, signal.SIGKILL)
        wait(lambda: all(map(has_ended, services)), what="the end of all services")
        wait(lambda: not double.workers(), what="the end of all workers")
        if platform == "kubernetes":  # pods that have ended stay for whoever lists them next
            double.server.ahead_s = -3600.0
            listed(double, monkeypatch)
            wait(lambda: not double.live() and not double.server.secrets, what="nothing that is left of them")
        assert not double.live()
        job.close()


def listed(double: FunctionDouble, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `dpflow workers PLATFORM` says."""
    for name, value in double.env.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(root, ["workers", double.platform])
    assert result.exit_code == 0, result.output
    return result.output
