"""A loader whose workers are invocations of a function: the same batches as of local workers, whatever happens to them.

The control plane is ours and the instances are processes of this host; the vendor's client and the entry are real.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.loader_cases import Indices, Unhurried, assert_same, epochs
from tests.remote.launchers.fc_server.account import KEYS, keys, no_leaks  # noqa: F401 - fixtures
from tests.remote.launchers.fc_server.instances import Instance, freeze, thaw
from tests.remote.launchers.fc_server.invocations import Task
from tests.remote.launchers.fc_server.server import Fault, FunctionServer
from tests.remote.launchers.through_rotation import SlowCounted, read_through_rotation, record_drains
from tests.remote_cases import lose_one
from tests.shared_cluster import wait
from tests.support.hosts import Hosts
from torch_dpflow import DPFlowDataLoader, LoaderOptions
from torch_dpflow.loader import private_shard
from torch_dpflow.remote import FunctionCompute
from torch_dpflow.remote.fleet import lifecycle, worker_states
from torch_dpflow.remote.launchers.fc_deploy import deploy

pytest.importorskip("alibabacloud_fc20230330", reason="pip install 'torch_dpflow[fc]'")

SEEDED = LoaderOptions(seeding="batch")


@pytest.fixture(scope="module")
def server() -> Iterator[FunctionServer]:
    with FunctionServer(KEYS, cold_start_s=0.0) as server:
        yield server


@pytest.fixture
def fc(server: FunctionServer, keys: None) -> Callable[..., FunctionCompute]:  # noqa: F811 - the fixture
    def make(**settings: Any) -> FunctionCompute:
        spec = FunctionCompute(**{"max_workers": 8, "endpoint": server.endpoint, **settings})
        assert [*deploy(spec, "r/i:1")]
        return spec

    return make


@pytest.fixture
def loader(fc: Callable[..., FunctionCompute]) -> Iterator[Callable[..., DPFlowDataLoader[Any]]]:
    made: list[DPFlowDataLoader[Any]] = []

    def make(
        workers: int = 2, dataset: Any = None, options: LoaderOptions = SEEDED, **settings: Any
    ) -> DPFlowDataLoader[Any]:
        made.append(shuffled(dataset or Unhurried(24), workers, options, platform=fc(**settings)))
        return made[-1]

    yield make
    for one in made:
        if one._iterator is not None:
            one._iterator._shutdown_workers()


def shuffled(
    dataset: Any, workers: int = 2, options: LoaderOptions = SEEDED, platform: FunctionCompute | None = None
) -> DPFlowDataLoader[Any]:
    return DPFlowDataLoader(
        dataset,
        batch_size=2,
        shuffle=True,
        num_workers=workers,
        persistent_workers=True,
        generator=torch.Generator().manual_seed(7),
        options=options,
        platform=platform,
    )


def working(loader: DPFlowDataLoader[Any]) -> int:
    count: int = loader._iterator._shard.processes.working  # type: ignore[union-attr]
    return count


def instances(server: FunctionServer) -> list[Instance]:
    """Those in which a worker runs."""
    return [task.instance for task in server.live() if task.instance and task.instance.workers()]


def kill_one(server: FunctionServer) -> None:
    os.kill(instances(server)[0].workers()[0], signal.SIGKILL)


def read(loader: DPFlowDataLoader[Any], meanwhile: Callable[[], None], epoch: int = 1) -> list[Any]:
    """Two epochs, as `epochs`; after a batch of one of them something happens."""
    seen = []
    for number in range(2):
        iterator = iter(loader)
        batches = [next(iterator)]
        if number == epoch:
            meanwhile()
        seen.append([*batches, *iterator])
    return seen


@pytest.fixture
def local() -> Iterator[list[Any]]:
    """What a loader with local workers gives."""
    loader = shuffled(Unhurried(24))
    yield epochs(loader)
    loader._iterator._shutdown_workers()  # type: ignore[union-attr]


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "LEASE_S", 3.0)


def test_batches_equal_those_of_local_workers_through_a_kill(
    server: FunctionServer, loader: Callable[..., DPFlowDataLoader[Any]], local: list[Any]
) -> None:
    remote = loader()
    assert_same(read(remote, lambda: lose_one(remote, lambda: instances(server)[0].workers()[0])), local)
    assert remote.stats().restarts >= 1


@pytest.mark.slow
def test_a_frozen_worker_is_replaced_and_leaves_once_it_is_thawed(
    server: FunctionServer, loader: Callable[..., DPFlowDataLoader[Any]], local: list[Any], short_lease: None
) -> None:
    remote = loader()
    frozen: list[Task] = []

    def freeze_one() -> None:
        wait(lambda: working(remote) == 2, what="both workers")
        frozen.append(server.live()[0])
        freeze(frozen[0].instance)
        server.fault("StopAsyncTask", *[Fault(503, "ServiceUnavailable")] * 1000)

    try:
        assert_same(read(remote, freeze_one), local)
        wait(lambda: working(remote) == 2, what="its successor")
        assert frozen[0].status == "Running"
        thaw(frozen[0].instance)
        wait(lambda: frozen[0].status == "Succeeded", what="its leaving")
    finally:
        server.faults.clear()
    assert '"code":0' in frozen[0].answer


def test_starts_that_are_refused_leave_the_epoch_to_those_that_are_there(
    server: FunctionServer,
    loader: Callable[..., DPFlowDataLoader[Any]],
    local: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(server, "quota", 1)
    server.fault("InvokeFunction", Fault(429, "Throttling.User", retry_after_ms=100))
    remote, before = loader(), len(server.log)
    assert_same(epochs(remote), local)
    wait(lambda: "quota" in caplog.text, what="the second one's refusal, after a pause")
    asked = [status for action, status in server.log[before:] if action == "InvokeFunction"]
    assert asked.count(202) == 1
    assert working(remote) == 1


@pytest.mark.slow
def test_credentials_that_expire_pause_starts_until_there_are_others(
    server: FunctionServer,
    loader: Callable[..., DPFlowDataLoader[Any]],
    local: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    short_lease: None,
) -> None:
    monkeypatch.setattr(worker_states, "DENIED_S", 0.2)
    remote = loader()

    def expire() -> None:
        wait(lambda: working(remote) == 2, what="both workers")
        monkeypatch.setattr(server.keys["AKtest"], "expired", True)
        kill_one(server)

    try:
        assert_same(read(remote, expire), local)
        wait(lambda: ("InvokeFunction", 403) in server.log, what="a start that is refused")
        assert working(remote) == 1, "who runs stays"
    finally:
        monkeypatch.setattr(server.keys["AKtest"], "expired", False)
    wait(lambda: working(remote) == 2, what="its successor")


def test_starts_whose_answers_are_lost_or_that_come_late_are_started_once(
    server: FunctionServer,
    loader: Callable[..., DPFlowDataLoader[Any]],
    local: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "late_s", 0.5)
    server.fault("InvokeFunction", Fault(lose=True), Fault(lose=True))
    remote, before = loader(), len(server.log)
    assert_same(epochs(remote), local)
    wait(lambda: len(server.live()) == 2, what="both workers: one may have loaded all")
    assert [action for action, _ in server.log[before:]].count("InvokeFunction") == 2


class Keys(Indices):
    """Item `i` is the security token of whoever loads it."""

    def __getitem__(self, index: int) -> str:
        return os.environ.get("ALIBABA_CLOUD_SECURITY_TOKEN", "")


def test_a_worker_has_the_keys_of_its_own_invocation_and_is_admitted_at_once(
    server: FunctionServer, loader: Callable[..., DPFlowDataLoader[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not at the next tick, which may be half a second later.
    monkeypatch.setattr(private_shard, "TICK_S", 3600.0)
    remote = loader(dataset=Keys(8), role="acs:ram::1:role/data")
    tokens = {token for batch in remote for token in batch}
    assert tokens <= {f"token-for-{task.id}" for task in server.live()}
    assert tokens


@pytest.mark.slow
@pytest.mark.hosts
def test_functions_on_another_host_are_started_by_their_images_own_command(
    keys: None,  # noqa: F811 - the fixture
    local: list[Any],
) -> None:
    path = {"PYTHONPATH": str(Path(__file__).parents[3])}
    with (
        Hosts(1) as hosts,
        FunctionServer(KEYS, fork=False, prefix=hosts[0].prefix, near=hosts[0].address, env=path) as there,
    ):
        spec = FunctionCompute(max_workers=2, endpoint=there.endpoint)
        assert [*deploy(spec, "r/i:1")]
        remote = shuffled(Unhurried(24), 2, replace(SEEDED, listen=f"tcp://{hosts.address}:0"), spec)
        assert_same(read(remote, lambda: kill_one(there)), local)
        remote._iterator._shutdown_workers()  # type: ignore[union-attr]
        wait(lambda: not there.live(), what="the end of all workers")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("lifetime", "workers", "for_s"), [("6s", 2, 20), ("60s", 4, 600)])
def test_workers_that_are_replaced_before_their_lifetime_ends_cost_no_sample(
    loader: Callable[..., DPFlowDataLoader[Any]],
    server: FunctionServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lifetime: str,
    workers: int,
    for_s: float,
) -> None:
    drains = record_drains(monkeypatch)
    (tmp_path / "log").touch()
    dataset = SlowCounted(64, str(tmp_path / "log"))
    # So that a batch is one worker's: one that an idle worker takes over may have begun meanwhile, and is loaded twice.
    pinned = LoaderOptions(seeding="worker")
    remote = loader(dataset=dataset, workers=workers, options=pinned, lifetime=lifetime)
    read_through_rotation(remote, dataset, drains, replaced=2 * workers, for_s=for_s)
