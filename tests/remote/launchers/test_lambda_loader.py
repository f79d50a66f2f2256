"""A loader whose workers are held invocations of a function: the batches of local workers, whatever happens to them.

The control plane is ours and the environments are processes of this host; AWS's client and its runtime client are real.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.loader_cases import Unhurried, assert_same, epochs
from tests.remote.launchers.lambda_server import LambdaServer
from tests.remote.launchers.lambda_server.account import credentials, kept_server, no_leaks  # noqa: F401 - fixtures
from tests.remote.launchers.lambda_server.signatures import Credentials
from tests.remote.launchers.through_rotation import SlowCounted, read_through_rotation, record_drains
from tests.remote_cases import lose_one, names_of
from tests.shared_cluster import wait
from torch_dpflow import DPFlowDataLoader, LoaderOptions
from torch_dpflow.remote import Lambda
from torch_dpflow.remote.fleet import worker_states

pytest.importorskip("awslambdaric", reason="pip install 'torch_dpflow[test]'")

SEEDED = LoaderOptions(seeding="batch")


@pytest.fixture
def loader() -> Iterator[Callable[..., DPFlowDataLoader[Any]]]:
    made: list[DPFlowDataLoader[Any]] = []

    def make(dataset: Any = None, workers: int = 2, options: Any = SEEDED, **settings: Any) -> DPFlowDataLoader[Any]:
        platform = Lambda(max_workers=8, **settings)
        made.append(shuffled(dataset or Unhurried(24), workers, platform=platform, options=options))
        return made[-1]

    yield make
    for one in made:
        if one._iterator is not None:
            one._iterator._shutdown_workers()


def shuffled(dataset: Any, workers: int = 2, **arguments: Any) -> DPFlowDataLoader[Any]:
    return DPFlowDataLoader(
        dataset,
        batch_size=2,
        shuffle=True,
        num_workers=workers,
        persistent_workers=True,
        generator=torch.Generator().manual_seed(7),
        **{"options": SEEDED, **arguments},
    )


@pytest.fixture(scope="module")
def local(no_leaks_of_module: None) -> list[Any]:
    """What a loader with local workers gives."""
    loader = shuffled(Unhurried(24))
    try:
        return epochs(loader)
    finally:
        loader._iterator._shutdown_workers()  # type: ignore[union-attr]


def working(loader: DPFlowDataLoader[Any]) -> int:
    count: int = loader._iterator._shard.processes.working  # type: ignore[union-attr]
    return count


def workers(server: LambdaServer) -> list[int]:
    return [pid for sandbox in server.sandboxes for pid in sandbox.workers()]


def read(loader: DPFlowDataLoader[Any], meanwhile: Callable[[], None]) -> list[Any]:
    """Two epochs, as `epochs`; in the second something happens."""
    first = list(loader)
    iterator = iter(loader)
    begun = next(iterator)
    meanwhile()
    return [first, [begun, *iterator]]


def test_batches_equal_those_of_local_workers_through_a_kill(
    server: LambdaServer, loader: Callable[..., DPFlowDataLoader[Any]], local: list[Any]
) -> None:
    remote = loader()
    assert_same(read(remote, lambda: lose_one(remote, lambda: workers(server)[0])), local)
    assert remote.stats().restarts >= 1
    wait(lambda: working(remote) == 2, what="its successor")


@pytest.mark.slow
def test_the_loss_of_all_environments_costs_no_batch(
    server: LambdaServer, loader: Callable[..., DPFlowDataLoader[Any]], local: list[Any]
) -> None:
    remote = loader()

    def end_all() -> None:
        wait(lambda: working(remote) == 2, what="both workers")
        before = set(names_of(remote).values())
        server.end_environments()
        wait(lambda: not before & set(names_of(remote).values()), what="their end")

    assert_same(read(remote, end_all), local)
    assert remote.stats().restarts >= 2
    wait(lambda: working(remote) == 2, what="their successors")


@pytest.mark.slow
def test_starts_that_are_refused_leave_the_epoch_to_those_that_are_there(
    server: LambdaServer,
    loader: Callable[..., DPFlowDataLoader[Any]],
    local: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(server, "quota", 1)
    server.faults.append("throttle")
    before = server.requests["POST invocations"]
    remote = loader()
    assert_same(epochs(remote), local)
    wait(lambda: "quota" in caplog.text, what="the second one's refusal, after a pause")
    assert server.requests["POST invocations"] == before + 3, "who is refused for the quota does not ask at once"
    assert working(remote) == 1


@pytest.mark.slow
def test_an_invocation_that_comes_twice_works_once(
    server: LambdaServer, loader: Callable[..., DPFlowDataLoader[Any]], local: list[Any]
) -> None:
    server.faults.append("twice")
    done = len(server.done)
    remote = loader()

    def await_twin() -> None:
        wait(lambda: len(server.done) > done, what="the end of the second one")

    assert_same(read(remote, await_twin), local)
    answer = json.loads(server.done[done].body)
    assert answer["code"] == 0
    assert "another process is" in answer["report"]
    assert len(server.done) == done + 1
    assert remote.stats().restarts == 0
    wait(lambda: working(remote) == 2, what="both workers: who calls a loader that is closed leaves after 30 s")


@pytest.mark.slow
def test_starts_whose_answers_are_lost_are_not_repeated(
    server: LambdaServer, loader: Callable[..., DPFlowDataLoader[Any]], local: list[Any]
) -> None:
    server.faults += ["lose", "lose"]
    before = server.requests["POST invocations"]
    remote = loader()
    assert_same(epochs(remote), local)
    assert server.requests["POST invocations"] == before + 2
    wait(lambda: working(remote) == 2, what="both workers")


@pytest.mark.slow
def test_credentials_that_expire_pause_starts_until_there_are_others(
    server: LambdaServer,
    loader: Callable[..., DPFlowDataLoader[Any]],
    local: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_states, "DENIED_S", 0.2)
    remote, before = loader(), server.refused[403]

    def expire() -> None:
        wait(lambda: working(remote) == 2, what="both workers")
        server.credentials.expired = True
        os.kill(workers(server)[0], signal.SIGKILL)

    try:
        assert_same(read(remote, expire), local)
        wait(lambda: server.refused[403] > before, what="a start that is refused")
        assert working(remote) == 1, "who runs stays"
    finally:
        server.credentials = Credentials("AKIDNEXT", "an0ther", "next")
        for variable, text in server.env.items():
            monkeypatch.setenv(variable, text)
    wait(lambda: working(remote) == 2, what="its successor")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("lifetime", "workers", "for_s"), [("6s", 2, 20), ("60s", 4, 600)])
def test_workers_that_are_replaced_before_their_lifetime_ends_cost_no_sample(
    server: LambdaServer,
    loader: Callable[..., DPFlowDataLoader[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lifetime: str,
    workers: int,
    for_s: float,
) -> None:
    drains = record_drains(monkeypatch)
    # Environments for twice as many, which are kept: to start one takes longer than a short life leaves.
    first = loader(workers=2 * workers)
    iterator = iter(first)
    wait(lambda: working(first) == 2 * workers, what="all workers")
    first._iterator._shutdown_workers()  # type: ignore[union-attr]
    del iterator
    wait(lambda: not server.running, what="their end")
    (tmp_path / "log").touch()
    dataset = SlowCounted(64, str(tmp_path / "log"))
    # So that a batch is one worker's: one that an idle worker takes over may have begun meanwhile, and is loaded twice.
    remote = loader(dataset, workers, options=LoaderOptions(seeding="worker"), lifetime=lifetime)
    read_through_rotation(remote, dataset, drains, replaced=2 * workers, for_s=for_s)


@pytest.mark.slow
def test_a_loader_waits_for_a_cold_start(
    loader: Callable[..., DPFlowDataLoader[Any]],
    local: list[Any],
    server: LambdaServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.end_environments()
    monkeypatch.setattr(server, "cold_start_s", 2.0)
    assert_same(epochs(loader()), local)
