"""Two shards that register with their router through the loss of any message: each key has one owner in the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.lossy import LossyListener, LossyNetwork
from torch_dpflow.cluster.messages.coordinator import FlowSpec
from torch_dpflow.cluster.messages.router import SHARD_LEASE_S, RouterSettings
from torch_dpflow.cluster.messages.shard import ShardSettings
from torch_dpflow.cluster.services import router as router_module
from torch_dpflow.cluster.services.router import Router
from torch_dpflow.cluster.shard import run
from torch_dpflow.cluster.shard import server as shard_server
from torch_dpflow.cluster.shard.run import RouterCalls
from torch_dpflow.cluster.shard.server import SampleShard
from torch_dpflow.errors import DPFlowError

SPEC = FlowSpec(name="f", version=1, size=100, content="a" * 64, fingerprint={})
ADDRESS, SHARDS = "lossy://router", ["f:v1/shard-000", "f:v1/shard-001"]
FATES = ["delivered", "request lost", "answer lost", "answer delayed", "request repeated", "sessions dropped"]
FATES += ["restarted", "lease expired", "one shard", "two shards"]


class NoThread:
    """In the place of the thread that registers: the test makes its calls."""

    def __init__(self, call: Callable[[], None], *_: Any, **__: Any) -> None:
        pass

    def wake(self) -> None:
        pass

    def start(self) -> None:
        pass


class Flow:
    """A router in a network that loses messages, and its two shards."""

    def __init__(self, network: LossyNetwork) -> None:
        self.network, self.expected, self.incarnation = network, SHARDS, 0
        self.router: Router
        network.on_fate = self.happen
        self.happen("restarted")
        place: Any = SimpleNamespace(token="t", connect=network.connect)
        self.shards: list[tuple[SampleShard, RouterCalls]] = []
        for name in SHARDS:
            listener = LossyListener()
            listener.address = f"lossy://{name}"
            settings = ShardSettings(1, 1 << 20)
            shard = SampleShard(
                listener, SPEC, settings, token="t", end_worker=lambda *_: None, clock=self.network.clock
            )
            service: Any = SimpleNamespace(id=name, incarnation=1, place=place)
            self.shards.append((shard, RouterCalls(service, shard, "router")))

    def happen(self, fate: str) -> None:
        if fate == "restarted":
            self.incarnation += 1
            server = self.network.listen(ADDRESS)
            settings, clock = RouterSettings(self.expected), self.network.clock
            self.router = Router(server, SPEC, settings, token="t", incarnation=self.incarnation, clock=clock)
        elif fate == "sessions dropped":
            self.network.servers[ADDRESS]._sessions.clear()
        elif fate == "lease expired":
            self.network.now += SHARD_LEASE_S
            self.router.poll()
        elif fate in ("one shard", "two shards"):
            self.expected = SHARDS[: 1 if fate == "one shard" else 2]
            self.router.apply_settings(RouterSettings(self.expected))

    def turn(self) -> None:
        for shard, calls in self.shards:
            with suppress(DPFlowError):  # the thread calls again
                calls._register()
            shard.server.step(0.0)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fates=st.lists(st.sampled_from(FATES), max_size=50))
def test_each_key_has_one_owner_in_the_end(fates: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    register_through(fates, monkeypatch)


def register_through(fates: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PeriodicCall", NoThread)
    monkeypatch.setattr("torch_dpflow.cluster.services.service.locate", lambda *_, **__: ADDRESS)
    for module in (router_module, shard_server):
        monkeypatch.setattr(
            module, "SERVICE", SimpleNamespace(warning=lambda *_, **__: None, info=lambda *_, **__: None)
        )
    network = LossyNetwork(fates)
    flow = Flow(network)
    while network.fates:
        flow.turn()
    for _ in range(3):  # to register, to get the range, and for the other to get it
        flow.turn()
    assert flow.router.status()["complete"]
    table = flow.router._routing.table
    assert [route.shard for route in table.routes] == flow.expected
    owned = {(one._range.first, one._range.end) for one, _ in flow.shards if one._owned}
    assert owned == {(route.first, route.end) for route in table.routes}
    assert {one._range.generation for one, _ in flow.shards} == {table.generation}
