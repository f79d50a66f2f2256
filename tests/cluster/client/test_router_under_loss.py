"""A job and its router, and shards that register, through the loss of any message: each sample once, in one order."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.lossy import LossyNetwork
from torch_dpflow.cluster.client import outage_log, router_link
from torch_dpflow.cluster.client.epoch_cursor import EpochCursor
from torch_dpflow.cluster.client.options import JobDescription
from torch_dpflow.cluster.client.router_link import RouterLink
from torch_dpflow.cluster.messages.coordinator import Access, FlowSpec
from torch_dpflow.cluster.messages.router import JOB_LEASE_S, JobFigures, RouterSettings
from torch_dpflow.cluster.services import router as router_module
from torch_dpflow.cluster.services.router import Router
from torch_dpflow.errors import DPFlowError, RemoteCallError
from torch_dpflow.ipc.rpc import Result
from torch_dpflow.samplers.indices import IndexArray

SIZE, DRAWN, EPOCHS = 20, 6, 2
SPEC = FlowSpec(name="f", version=1, size=SIZE, content="a" * 64, fingerprint={})
JOB = JobDescription(flow="f", version=1, name="job", seed=3, size=SIZE, batch_size=2)
ADDRESS = "lossy://router"
LOSSES = ["delivered", "request lost", "answer lost", "answer delayed", "request repeated"]


class Services:
    """A coordinator and a router at one address, with one shard, in a network that loses messages."""

    def __init__(self, fates: Sequence[str]) -> None:
        self.network = LossyNetwork(fates)
        self.network.on_fate = self.happen
        self.incarnation = 0
        self.router: Router
        self.happen("router restarted")

    def happen(self, fate: str) -> None:
        """Do what an exchange is to meet. A delivered one lets the shard register that has lost its lease."""
        is_new = fate == "router restarted"
        if fate == "sessions dropped":
            self.network.servers[ADDRESS]._sessions.clear()
        elif fate == "time passed":
            self.network.now += JOB_LEASE_S
            self.router.poll()
        elif is_new:
            self.incarnation += 1
            server = self.network.listen(ADDRESS)
            server.register("access", lambda call: Result(ADDRESS), body_type=Access)
            settings, clock = RouterSettings(["s"]), self.network.clock
            self.router = Router(server, SPEC, settings, token="t", incarnation=self.incarnation, clock=clock)
        if is_new or (fate == "delivered" and not self.router._routing.table.routes):
            self.router._routing.register("s", 1, "lossy://shard", self.network.now)
            self.router.poll()


def read(fates: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return the samples of each epoch, in the order in which the job draws them."""
    services = Services(fates)
    network = services.network
    clock: Any = SimpleNamespace(monotonic=network.clock, sleep=lambda _: None)
    monkeypatch.setattr(router_link, "time", clock)
    monkeypatch.setattr(router_link.Backoff, "pause_s", lambda _: 0.0)
    for module, logger in ((outage_log, "LOADER"), (router_module, "SERVICE")):
        monkeypatch.setattr(module, logger, SimpleNamespace(warning=lambda *_, **__: None, info=lambda *_, **__: None))
    cluster: Any = SimpleNamespace(connect=lambda address=ADDRESS, **_: network.connect(address))
    link = RouterLink(cluster, JOB, reconnect_timeout_s=600.0)
    epochs: list[list[int]] = []
    for number in range(EPOCHS):
        cursor = EpochCursor(JOB, number)
        link.start_epoch(cursor)
        drawn: list[int] = []
        while part := drawn_part(link):
            drawn += part
            beat(link)
        epochs.append(drawn)
    link.close()
    # Nothing is pending without an owner: what was abandoned has expired.
    services.happen("time passed")
    assert services.router.status()["jobs"] == services.router.status()["waiting"] == 0
    assert all(not one.running for one in network.servers[ADDRESS]._sessions._sessions.values())
    return epochs


def drawn_part(link: RouterLink) -> list[int]:
    drawn: IndexArray = link.draw(DRAWN, link._closed)
    return [int(one) for one in drawn]


def beat(link: RouterLink) -> None:
    """Send a heartbeat, as the job's other thread does."""
    try:
        link.send_heartbeat(JobFigures(0.0, 0.0, 0, 0, 0), reads=True)
    except RemoteCallError:
        link.rejoin(link.id.generation)
    except DPFlowError:
        link.refresh_routes()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fates=st.lists(st.sampled_from([*LOSSES, "sessions dropped"]), max_size=40))
def test_a_job_draws_the_same_through_any_loss(fates: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(fates, monkeypatch) == read([], monkeypatch)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fates=st.lists(st.sampled_from([*LOSSES, "router restarted", "time passed", "sessions dropped"]), max_size=40))
def test_a_job_draws_each_sample_once_through_restarts_of_its_router_and_lost_leases(
    fates: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [sorted(epoch) for epoch in read(fates, monkeypatch)] == [[*range(SIZE)]] * EPOCHS
