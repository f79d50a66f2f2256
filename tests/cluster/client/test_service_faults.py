"""A service that fails over a call: asked again where that is safe, told of as its own fault where it lasts.

Real servers in the places of coordinator, router and shard, whose methods fail as often as a test says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.client.failing_service import SIZE, FailingService
from tests.shared_cluster import wait
from torch_dpflow.cluster.client import inquiries, router_link, shard_link
from torch_dpflow.cluster.client.flow_registration import register
from torch_dpflow.cluster.client.open_job import JobOptions, SharedJob
from torch_dpflow.cluster.client.options import JobDescription
from torch_dpflow.cluster.client.outage_log import MAX_FAULTS, OutageLog
from torch_dpflow.cluster.messages.coordinator import FlowSpec
from torch_dpflow.cluster.security.connection_file import Cluster
from torch_dpflow.errors import DeadlineError, ErrorKind, RemoteCallError, UsageError
from torch_dpflow.ipc.messages.fields import (
    AwaitedRanksError,
    AwaitedWorkersError,
    LostWorkersError,
    OverloadedError,
    StaleRoutingError,
)
from torch_dpflow.ipc.transport import TransportOptions

#: More fetches than a job with pauses makes while it beats this often, and far fewer than one without.
MOST_FETCHES, HEARTBEATS = 100, 2


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FailingService]:
    with closing(FailingService(f"ipc://{tmp_path}/all")) as service:
        yield service


@pytest.fixture
def open_(service: FailingService) -> Iterator[Callable[..., SharedJob]]:
    with ExitStack() as jobs:

        def open_(ready: int = 1) -> SharedJob:
            return jobs.enter_context(opened(service, ready=ready))

        yield open_


@pytest.mark.parametrize("method", ["access", "join", "start", "draw", "fetch"])
def test_a_fault_that_passes_is_not_seen(service: FailingService, open_: Callable[[], SharedJob], method: str) -> None:
    service.faults[method] = 2
    assert list(open_().traverse(0)) == [[0, 1], [2, 3], [4, 5]]
    assert service.calls[method] >= 3


@pytest.mark.parametrize("method", ["heartbeat", "table", "draw", "fetch", "leave", "cost"])
def test_a_job_that_is_closed_waits_for_no_service(
    service: FailingService, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Services are there and do not answer, as when they are stopped; each call may wait for an hour."""
    for module in (router_link, shard_link):
        monkeypatch.setattr(module, "LEAVE_S", 3600.0)
    for module, name in ((router_link, "CALL_S"), (shard_link, "FETCH_S"), (inquiries, "COST_CALL_S")):
        monkeypatch.setattr(module, name, 3600.0)
    job = opened(service, reconnect_timeout_s=3600)
    service.generation = 2
    service.silent.add(method)
    if method in ("draw", "fetch"):
        job.traverse(0)
    if method not in ("leave", "cost"):
        wait(lambda: service.calls[method] >= 1, what="a call that is not answered")
    job.close()
    assert service.calls[method] >= 1


def test_heartbeats_go_on_while_a_draw_waits_for_other_ranks_and_the_table_changes(service: FailingService) -> None:
    service.faults["draw"], service.error = math.inf, AwaitedRanksError("rank 1 is awaited")
    with opened(service) as job:
        batches = job.traverse(0)
        wait(lambda: service.calls["draw"] >= 2, what="a draw that waits")
        service.generation = 2
        wait(lambda: service.calls["table"] >= 2, what="the table, fetched twice by heartbeats")
        service.faults["draw"] = 0
        assert list(batches) == [[0, 1], [2, 3], [4, 5]]


def opened(service: FailingService, *, ready: int = 1, reconnect_timeout_s: float = 60.0) -> SharedJob:
    cluster = Cluster(address=service.address, transport=TransportOptions())
    job = JobDescription(flow="f", version=1, name="job", seed=0, size=SIZE, batch_size=2)
    return SharedJob(cluster, job, list, JobOptions(ready=ready, reconnect_timeout_s=reconnect_timeout_s))


@pytest.mark.parametrize("error", [KeyError("no entry"), MemoryError("none left")], ids=type)
@pytest.mark.parametrize("method", ["join", "draw", "fetch"])
def test_a_fault_that_lasts_is_the_services_and_not_the_callers(
    service: FailingService, open_: Callable[[], SharedJob], method: str, error: Exception
) -> None:
    service.faults[method], service.error = float("inf"), error
    with pytest.raises(RemoteCallError, match="which is the service's fault") as caught:
        list(open_().traverse(0))
    assert caught.value.kind is ErrorKind.INTERNAL
    assert "in serve" in caught.value.text  # where it happened
    assert type(error).__name__ in caught.value.text
    assert service.calls[method] == MAX_FAULTS


@pytest.mark.parametrize("method", ["join", "draw", "fetch"])
def test_a_refusal_is_the_callers_and_not_asked_again(
    service: FailingService, open_: Callable[[], SharedJob], method: str
) -> None:
    service.faults[method], service.error = float("inf"), UsageError("there is no such sample")
    with pytest.raises(UsageError, match=r"^there is no such sample$"):
        list(open_().traverse(0))
    assert service.calls[method] == 1


@pytest.mark.parametrize(("error", "ends"), [(LostWorkersError, True), (AwaitedWorkersError, False)])
def test_a_job_says_why_nothing_is_loaded_and_waits_for_workers_that_are_lost_as_long_as_it_may(
    service: FailingService,
    error: type[Exception],
    ends: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    eventually: Callable[..., None],
) -> None:
    """Though a sample may take 600 s: nobody loads it."""
    monkeypatch.setattr("torch_dpflow.cluster.client.outage_log.SILENCE_S", 0.0)
    service.faults["fetch"], service.error = (
        float("inf"),
        error("0 of 2 workers run, limited by platform: away"),
    )
    cluster = Cluster(address=service.address, transport=TransportOptions())
    job = JobDescription(flow="f", version=1, name="job", seed=0, size=SIZE, batch_size=2)
    with SharedJob(cluster, job, list, JobOptions(task_timeout_s=600.0)) as opened:
        # Not before it has joined, which takes a busy machine longer.
        opened._options = replace(opened._options, reconnect_timeout_s=0.5)
        batches = opened.traverse(0)
        if ends:
            with pytest.raises(DeadlineError, match="limited by platform: away"):
                next(batches)
        else:
            eventually(lambda: service.calls["heartbeat"] >= HEARTBEATS, what="its heartbeats, as it waits")
            service.faults["fetch"] = 0
            assert list(batches) == [[0, 1], [2, 3], [4, 5]]
    limit = "and continues for up to reconnect_timeout_s=120 s in all: " if ends else ""
    assert re.search(f"has waited for [0-9]+ s(, |: ){limit}0 of 2 workers run, limited by", caplog.text)


def test_a_job_pauses_while_its_router_names_a_shard_that_is_none_of_its_flow(
    service: FailingService, open_: Callable[[], SharedJob], eventually: Callable[..., None]
) -> None:
    """Another flow's listens there by now: the table comes anew, and says the same."""
    service.faults["fetch"], service.error = (
        float("inf"),
        StaleRoutingError("a shard of 'other:v1', not of 'f:v1'"),
    )
    with closing(open_().traverse(0)) as batches:
        eventually(lambda: service.calls["heartbeat"] >= HEARTBEATS and service.calls["fetch"], what="its heartbeats")
        assert service.calls["fetch"] < MOST_FETCHES
    with pytest.raises(UsageError, match="was abandoned"):
        next(batches)


@pytest.mark.parametrize(("faults", "calls"), [(2, 3), (float("inf"), 5)])
def test_a_flow_is_registered_again_where_the_coordinator_fails(
    service: FailingService, faults: float, calls: int
) -> None:
    service.faults["register"] = faults
    cluster = Cluster(address=service.address, transport=TransportOptions())
    spec = FlowSpec(name="f", version=1, size=SIZE, content="0" * 64, fingerprint={})
    with nullcontext() if faults == 2 else pytest.raises(RemoteCallError, match="the service's fault"):
        register(cluster, spec, b"", reconnect_timeout_s=30)
    assert service.calls["register"] == calls


@pytest.mark.parametrize("faults", [2, float("inf")])
def test_a_content_is_brought_again_where_too_many_are_on_their_way_as_long_as_there_is_patience(
    service: FailingService, faults: float
) -> None:
    service.is_stored = False
    service.faults["store"], service.error = faults, OverloadedError("come again")
    cluster = Cluster(address=service.address, transport=TransportOptions())
    spec = FlowSpec(name="f", version=1, size=SIZE, content="0" * 64, fingerprint={})
    with nullcontext() if faults == 2 else pytest.raises(DeadlineError, match=r"'f': come again .waited 1 s"):
        register(cluster, spec, b"packed", reconnect_timeout_s=60 if faults == 2 else 1.0)
    assert faults != 2 or service.calls["store"] == 3


def test_who_registers_waits_for_a_coordinator_that_has_no_state_and_says_so(
    service: FailingService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in ("outage_log", "flow_registration"):
        monkeypatch.setattr(f"torch_dpflow.cluster.client.{module}.SILENCE_S", 0.05)
    service.faults["register"], service.error = float("inf"), OverloadedError("the state store is away")
    spec = FlowSpec(name="f", version=1, size=SIZE, content="0" * 64, fingerprint={})
    for address, reason, line in (
        (service.address, "the state store is away", "has waited for [0-9]+ s, .* the state store is away"),
        (f"{service.address}-none", "no cluster answers at", "no answer from its services for [0-9]+ s"),
    ):
        cluster = Cluster(address=address, transport=TransportOptions())
        with pytest.raises(DeadlineError, match=reason):
            register(
                cluster,
                spec,
                b"",
                reconnect_timeout_s=1.0,
                outages=OutageLog("f", "j", reconnect_timeout_s=1.0),
            )
        assert re.search(line, caplog.text)
    # An error has a traceback, whose frames refer to all that called.
    assert not [one for one in caplog.records if any(isinstance(part, Exception) for part in one.args or ())]


def test_a_sample_that_waits_for_the_memory_of_later_ones_comes(
    service: FailingService, open_: Callable[..., SharedJob]
) -> None:
    """The shard answers fetches in the order in which it can, and holds what it has given out until it is released."""
    service.held_for = {3, 4, 5, 6}  # tickets of the two batches behind the first one
    assert list(open_(ready=3).traverse(0)) == [[0, 1], [2, 3], [4, 5]]
    assert service.calls["fetch"] == 3
