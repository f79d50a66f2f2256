"""Ray, a real one that this module starts: its launcher keeps the contract, and a loader's workers are its actors."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from click.testing import CliRunner, Result

from tests.cluster_command import CommandedCluster
from tests.contracts.launchers import (
    CLUSTER,
    PROGRAM,
    SECRET,
    LauncherContract,
    caller,
    launch_spec_to,
    name_of,
)
from tests.holdings import own_threads
from tests.loader_cases import Augmented, assert_same, epochs
from tests.remote.launchers.fates import end_of
from tests.remote.launchers.local_ray import names_in, needs_ray, ray_of, start_node, workers
from tests.remote_cases import lose_one
from tests.shared_cluster import PATIENCE_S, free_port, open_job, wait
from tests.shared_datasets import SlowNumbers
from torch_dpflow import DPFlowDataLoader, LoaderOptions
from torch_dpflow.cli.main import root
from torch_dpflow.cluster.services.local_cluster import ClusterOptions
from torch_dpflow.errors import (
    OptionError,
    PlatformError,
    QuotaError,
    RejectedError,
    UnavailableError,
)
from torch_dpflow.remote import Ray
from torch_dpflow.remote.launchers.contract import Launcher, prefix_of
from torch_dpflow.remote.launchers.ray import RayLauncher

#: So that several fit on any machine.
SHARE = 0.1
CPUS = 4

pytestmark = needs_ray
slow = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[Any]:
    """A cluster of one node, for the whole module."""
    with ray_of(start_node(CPUS)) as ray:
        yield ray


@pytest.fixture(autouse=True)
def no_leaks(ray: Any) -> Iterator[None]:
    """Instead of the check of all tests: Ray keeps sockets and processes as it likes. Of ours nothing is left."""
    before = own_threads()
    yield
    wait(lambda: not names_in(launcher_of()) and not workers(), what="the end of all workers")
    wait(lambda: not own_threads() - before, what="the end of the test's threads")


def launcher_of(detached: bool = False, **settings: Any) -> RayLauncher:
    return RayLauncher(Ray(**{"cpus": SHARE, "wait_s": PATIENCE_S, **settings}), module=PROGRAM, detached=detached)


@slow
class TestRay(LauncherContract):
    starter = multiprocessing.get_context("spawn")  # Ray does not survive a fork

    def new_launcher(self, module: str) -> Launcher:
        return RayLauncher(Ray(cpus=SHARE), module=module, detached=True)

    def refusing(self) -> Mapping[type[PlatformError], Callable[[], Launcher]]:
        return {
            RejectedError: lambda: launcher_of(runtime_env={"working_dir": "/nowhere"}),
            QuotaError: self.without_room,
        }

    def without_room(self) -> Launcher:
        import ray

        self.holder = ray.remote(num_cpus=SHARE)(Holder).remote()
        ray.get(self.holder.__ray_ready__.remote())
        return launcher_of(cpus=CPUS, wait_s=0.1)


class Holder:
    """An actor that takes its room and does nothing."""


# --- ends ---


@slow
@pytest.mark.parametrize("victim", ["worker", "actor"])
def test_a_killed_process_is_told_to_have_ended(listener: socket.socket, victim: str) -> None:
    launcher = launcher_of()
    launcher.start(name_of(0), launch_spec_to(listener), deadline_s=PATIENCE_S)
    with caller(listener) as (connection, _):
        ((worker, actor),) = workers().items()
        os.kill(worker if victim == "worker" else actor, signal.SIGKILL)
        assert connection.recv(1) == b"", "the worker ends with its actor"
        end = end_of(launcher, name_of(0))
    assert (end.signal == signal.SIGKILL and end.place == f"pid {worker}") or "died" in end.report
    assert (end.signal is None) == (victim == "actor")


@pytest.mark.slow
def test_nothing_is_asked_of_ray_once_this_process_has_left_it(ray: Any) -> None:
    """Ray would connect again, or start a cluster, from a thread of ours."""
    launcher = launcher_of()
    launcher._ray = Left()
    launcher._started[name_of(0)] = None, None
    assert "ray.shutdown()" in launcher.look({name_of(0): None, name_of(1): None})[name_of(0)].end.report
    launcher.stop(name_of(0), None)
    for call in (lambda: launcher.start(name_of(1), b"", deadline_s=1.0), lambda: launcher.list("")):
        with pytest.raises(RejectedError, match=r"has left Ray, by ray.shutdown\(\)"):
            call()


class Left:
    """The module `ray` after a shutdown, of which nothing else may be used."""

    @staticmethod
    def is_initialized() -> bool:
        return False


@slow
def test_workers_end_with_the_process_that_started_them(listener: socket.socket) -> None:
    starter = multiprocessing.get_context("spawn").Process(target=start_one_and_stay, args=(launch_spec_to(listener),))
    starter.start()
    with caller(listener) as (connection, _):
        starter.kill()
        starter.join()
        assert connection.recv(1) == b""


def start_one_and_stay(launch_spec: bytes) -> None:
    launcher = launcher_of()
    launcher.start(name_of(0), launch_spec, deadline_s=PATIENCE_S)
    time.sleep(PATIENCE_S)


@slow
def test_an_actor_whose_name_is_taken_is_the_worker(ray: Any, listener: socket.socket) -> None:
    first, second = launcher_of(), launcher_of()
    for launcher in (first, second):
        assert launcher.start(name_of(0), launch_spec_to(listener), deadline_s=PATIENCE_S) == name_of(0)
    with caller(listener):
        assert len(workers()) == 1
        assert second.look({name_of(0): name_of(0)})[name_of(0)].end is None
        second.stop(name_of(0), None)
    assert "ray.kill" in end_of(first, name_of(0)).report


# --- room ---


def test_a_start_without_room_says_what_the_cluster_has(ray: Any, listener: socket.socket) -> None:
    launcher = launcher_of(cpus=CPUS / 2)
    for number in range(2):
        launcher.start(name_of(number), launch_spec_to(listener), deadline_s=PATIENCE_S)
    wait(lambda: not ray.available_resources().get("CPU"), what="Ray's word that all is taken")
    launcher._wait_s = 0.5
    for number, wanted in ((2, 3), (3, 4)):  # the second one without a wait
        told = rf"{name_of(number)} .* 2 of {wanted} actors run; the cluster has 4 CPUs, 0 free"
        with pytest.raises(QuotaError, match=told) as raised:
            launcher.start(name_of(number), launch_spec_to(listener), deadline_s=PATIENCE_S)
    assert "takes 2: cpus=1 or more nodes" in str(raised.value)
    launcher.stop(name_of(3), None)
    stranger = f"{prefix_of(CLUSTER, 'f' * 10)}7-1"
    for name, told in ((name_of(2), "2 of 3 actors"), (stranger, "0 of 1 actors")):
        with pytest.raises(QuotaError, match=told):  # of those that its own fleet wants now
            launcher.start(name, launch_spec_to(listener), deadline_s=PATIENCE_S)
    *_, room = launcher.check()
    assert not room.good
    assert (
        room.text == "1 node has 4 CPUs: room for 2 workers in all, of 2 CPUs each, and for none now, with 0 CPUs free"
    )
    assert sorted(names_in(launcher)) == [name_of(0), name_of(1)]
    for number in range(2):
        launcher.stop(name_of(number), None)


@pytest.mark.parametrize(
    ("needs", "told"),
    [
        ({"memory": "900TiB"}, r"no node of the cluster has more than [\d.]+ GiB of memory: give less"),
        ({"resources": {"loader": 1}}, "takes 0.1 CPUs, 1 of 'loader', .* more than 0 of 'loader'"),
    ],
)
def test_what_no_node_has_is_named_and_not_tried_again(
    listener: socket.socket, needs: dict[str, Any], told: str
) -> None:
    launcher = launcher_of(**needs, wait_s=0.1)
    with pytest.raises(RejectedError, match=told):
        launcher.start(name_of(0), launch_spec_to(listener), deadline_s=PATIENCE_S)
    *_, room = launcher.check()
    assert not room.good
    assert "room for 0 workers" in room.text


@slow
def test_actors_leave_the_placement_group_of_a_trial(ray: Any, listener: socket.socket) -> None:
    """As in Ray Tune, whose trials take all that their group has."""
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def trial(launch_spec: bytes) -> str:
        launcher = RayLauncher(Ray(cpus=SHARE), module=PROGRAM)
        launcher.start(name_of(0), launch_spec, deadline_s=PATIENCE_S)
        return str(end_of(launcher, name_of(0)))

    group = placement_group([{"CPU": 1}])
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    ended = ray.remote(trial).options(num_cpus=1, scheduling_strategy=strategy).remote(launch_spec_to(listener))
    with caller(listener):
        pass
    assert "exited with code 0" in ray.get(ended)
    remove_placement_group(group)


@slow
def test_the_runtime_env_reaches_workers_and_the_launch_spec_does_not_leak(listener: socket.socket) -> None:
    launcher = launcher_of(runtime_env={"env_vars": {"DPF_TRY": "there"}})
    launcher.start(name_of(0), launch_spec_to(listener), deadline_s=PATIENCE_S)
    with caller(listener):
        (pid,) = workers()
        process = psutil.Process(pid)
        assert process.environ()["DPF_TRY"] == "there"
        assert SECRET not in f"{process.environ()} {process.cmdline()}"
        launcher.stop(name_of(0), None)


# --- settings ---


def test_addresses_are_this_hosts_and_the_clusters_own(ray: Any) -> None:
    settings = Ray()
    assert settings.listen_at() == f"tcp://{ray.util.get_node_ip_address()}:0"
    settings.check_listen("tcp://127.0.0.1:0")  # the cluster has no other node
    with pytest.raises(OptionError, match="tcp"):
        settings.check_listen("ipc:///tmp/listener")
    with pytest.raises(OptionError, match="in the Ray cluster at"):
        Ray(address="10.9.8.7:6379").open()
    cluster = ray.get_runtime_context().gcs_address
    port = cluster.rpartition(":")[2]
    for mine in (cluster, f"localhost:{port}", f"127.0.0.1:{port}"):  # Ray makes this node's IP of these
        Ray(address=mine).listen_at()
    with pytest.raises(OptionError, match="in the Ray cluster at"):
        Ray(address=f"localhost:{int(port) - 1}").open()
    assert all(finding.good for finding in launcher_of().check())
    assert not Ray(runtime_env={"working_dir": "."}).sends_code
    assert Ray(runtime_env={"pip": ["simplejpeg"]}).sends_code


def test_a_process_outside_is_told_how_to_reach_a_cluster() -> None:
    """All in one, which takes seconds to load Ray."""
    script = (
        "import sys\n"
        "from torch_dpflow.remote import Ray\n"
        "for address in sys.argv[1:]:\n"
        "    try: Ray(address=address).open()\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
    )
    env = {**os.environ, "RAY_ADDRESS": "ray://head:10001"}
    addresses = ["", "127.0.0.1:1", "nonsense", ":6379", "127.0.0.1:99999"]
    done = subprocess.run(
        [sys.executable, "-c", script, *addresses], env=env, capture_output=True, text=True, check=True
    )
    client, closed, *wrong = done.stdout.splitlines()
    assert client.startswith("OptionError RAY_ADDRESS='ray://head:10001': Ray Client")
    assert "ray job submit" in client
    assert "UnavailableError no Ray cluster answers at '127.0.0.1:1': start one with `ray start --head`" in closed
    assert len(wrong) == 3
    for line in wrong:
        assert "OptionError" in line
        assert "HOST:PORT, as 10.0.0.5:6379" in line


@slow
@pytest.mark.parametrize("wrong", [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "", "HOME": "/nowhere"}])
def test_a_cluster_that_wants_a_token_is_told_as_such(wrong: dict[str, str]) -> None:
    script = "from torch_dpflow.remote import Ray; Ray().open()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **wrong},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.splitlines()[-1].startswith("torch_dpflow.errors.DeniedError: the Ray cluster at '")
    assert "set RAY_AUTH_MODE=token, and have the cluster's token in RAY_AUTH_TOKEN" in done.stderr


def test_a_ray_that_was_killed_is_told_at_once(tmp_path: Path) -> None:
    """Its address stays in a file, and Ray itself tries it for minutes."""
    dead = f"127.0.0.1:{free_port()}"
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(dead)
    # No process is found: that of these tests would go before.
    (tmp_path / "1").mkdir()
    script = (
        f"import ray, psutil; psutil.PROCFS_PATH = {str(tmp_path)!r}\nfrom torch_dpflow.remote import Ray; Ray().open()"
    )
    env = {name: text for name, text in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**env, "RAY_TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    told = done.stderr.splitlines()[-1]
    assert "UnavailableError: no Ray cluster answers at '" in told
    assert f"{dead.partition(':')[2]}', as ray_current_cluster in Ray's temporary directory says" in told


def test_naming_the_platform_does_not_load_ray() -> None:
    script = "import sys; from torch_dpflow.remote import Ray; Ray(); assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


# --- the command line ---


def dpflow(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Result:
    monkeypatch.setenv("DPFLOW_PLATFORM_RAY_CPUS", str(SHARE))
    return CliRunner().invoke(root, arguments)


@slow
def test_a_check_tries_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    told = dpflow(monkeypatch, "check", "ray")
    assert told.exit_code == 0, told.output
    assert "WRONG" not in told.output
    for text in ("answers", "room for 40 workers", "same versions", "ms from request", "one worker sends"):
        assert text in told.output
    monkeypatch.setenv("DPFLOW_PLATFORM_RAY_MEMORY", "900TiB")
    told = dpflow(monkeypatch, "check", "ray")
    assert told.exit_code == 1
    assert "WRONG 1 node has 4 CPUs" in told.output


def test_what_is_left_can_be_listed_and_swept(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = launcher_of(detached=True)
    launcher.start(name_of(0), launch_spec_to(listener), deadline_s=PATIENCE_S)
    with caller(listener) as (connection, _):
        assert name_of(0) in dpflow(monkeypatch, "workers", "ray").output
        assert f"would end {name_of(0)}" in dpflow(monkeypatch, "sweep", "ray").output
        assert dpflow(monkeypatch, "sweep", "ray", "--cluster", "ffffffff").output == "0 ended\n"
        assert dpflow(monkeypatch, "sweep", "ray", "--cluster", CLUSTER).output == "1 ended\n"
        assert connection.recv(1) == b""


# --- a loader ---


@pytest.mark.parametrize("victim", ["worker", pytest.param("actor", marks=pytest.mark.slow)])
def test_batches_equal_those_of_local_workers_through_a_kill(victim: str) -> None:
    def shuffled(**arguments: Any) -> DPFlowDataLoader[Any]:
        generator = torch.Generator().manual_seed(7)
        arguments = {"num_workers": 2, "persistent_workers": True, **arguments}
        return DPFlowDataLoader(Augmented(24), batch_size=2, shuffle=True, generator=generator, **arguments)

    remote = shuffled(platform=Ray(cpus=SHARE), options=LoaderOptions(seeding="batch"))
    local = shuffled(options=LoaderOptions(seeding="batch"))
    assert_same(epochs(remote), epochs(local))
    iterator, expected = iter(remote), list(local)
    seen = [next(iterator)]
    lose_one(remote, lambda: next(iter(workers().items()))[victim == "actor"])
    assert_same([*seen, *iterator], expected)
    assert remote.stats().restarts >= 1
    names = names_in(launcher_of())
    assert names
    remote._iterator._shutdown_workers()
    assert not set(names) & set(names_in(launcher_of()))
    local._iterator._shutdown_workers()


@slow
def test_a_script_that_is_told_to_end_ends_its_workers_before_ray_leaves() -> None:
    """Its own handler of SIGTERM is called, and Ray's, which writes a stack and aborts, is not."""
    script = (
        "import os, signal, sys, torch\n"
        "from torch_dpflow import DPFlowDataLoader\n"
        "from torch_dpflow.remote import Ray\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        f"loader = DPFlowDataLoader(torch.arange(100_000), num_workers=2, platform=Ray(cpus={SHARE}))\n"
        "for number, _ in enumerate(loader):\n"
        "    if number == 9: os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    for noise in ("SIGTERM", "left Ray", "limited by", "unexpected system error"):
        assert noise not in done.stdout + done.stderr


@pytest.mark.slow
def test_jobs_share_the_samples_of_a_flow_whose_workers_are_actors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPFLOW_PLATFORM_RAY_CPUS", str(SHARE))
    cluster = CommandedCluster.up(tmp_path, "--platform", "ray")
    dataset = SlowNumbers(120, 0.02)
    jobs = [open_job("shared", dataset, address=cluster.address, batch_size=8, workers=2) for _ in range(2)]
    reading = [job.traverse(0) for job in jobs]
    first = [next(batches) for batches in reading]
    wait(lambda: len(workers()) == 2, what="both workers")
    os.kill(next(iter(workers())), signal.SIGKILL)
    for (_, labels), batches in zip(first, reading):
        keys = [int(key) for key in labels] + [int(key) for _, labels in batches for key in labels]
        assert sorted(keys) == list(range(120))
    for job in jobs:
        job.close()
    cluster.stop()


def test_a_cluster_does_not_start_where_its_ray_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UnavailableError, match="no Ray cluster answers at '127"):
        ClusterOptions(platform="ray")


def test_nodes_that_no_node_of_ray_can_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFLOW_PLATFORM_RAY_CPUS", str(CPUS + 1))
    message = f"it takes {CPUS + 1} CPUs, and no node of the cluster has more than {CPUS} CPUs"
    with pytest.raises(OptionError, match=f"no node fits into the Ray cluster: {message}"):
        ClusterOptions(platform="ray", nodes="2")


@pytest.mark.slow
def test_a_mapper_goes_on_through_a_kill() -> None:
    pytest.importorskip("torchdata.nodes", reason="torchdata is not installed")
    from tests.node_cases import check_kills

    check_kills(Ray(cpus=SHARE), 120)


@pytest.mark.slow
def test_trials_of_the_example_share_what_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from examples import trials_on_ray

    monkeypatch.setattr(sys, "argv", ["trials_on_ray", "--loaders", "1"])
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.setenv("DPFLOW_PLATFORM_RAY_CPUS", "")
    trials_on_ray.main()
    read, loaded = map(int, re.findall(r"(\d+) samples read, (\d+) loaded", capsys.readouterr().out)[0])
    assert read == 4 * trials_on_ray.EPOCHS * len(trials_on_ray.Digits(train=True))
    assert 0 < loaded <= read


@pytest.mark.slow
def test_an_example_uses_the_ray_that_runs_on_this_host(ray: Any) -> None:
    script = "from examples.train_on_ray import *; join_ray(2); print(ray.get_runtime_context().gcs_address)"
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ray.get_runtime_context().gcs_address
