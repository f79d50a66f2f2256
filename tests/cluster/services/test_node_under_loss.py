"""A joined node and its coordinator through the loss of any message, restarts and expired leases."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.lossy import LossyNetwork
from torch_dpflow._core import threads
from torch_dpflow.cluster.control.supervision import Kill, Spawn, Supervisor, SupervisorInstruction
from torch_dpflow.cluster.messages.node import Desire, Launch, Running
from torch_dpflow.cluster.messages.shard import ShardSettings
from torch_dpflow.cluster.security.connection_file import find_cluster, generate_keys
from torch_dpflow.cluster.services import joined_nodes, joining_node
from torch_dpflow.cluster.services.joined_nodes import NODE_LEASE_S, JoinedNodes, node_table
from torch_dpflow.cluster.services.joining_node import CoordinatorLink, Joining
from torch_dpflow.cluster.services.service import ClusterPlace
from torch_dpflow.cluster.services.state_store import WriteBehindStore
from torch_dpflow.errors import UsageError
from torch_dpflow.ipc.messages.fields import Count
from torch_dpflow.ipc.messages.headers import PayloadOffer, Welcome, encode
from torch_dpflow.ipc.rpc import IncomingCall, Result
from torch_dpflow.ipc.transport import listen

KEYS = generate_keys("tcp://127.0.0.1:0")
PLACE = ClusterPlace(directory="/nowhere", host="127.0.0.1", keys=KEYS, token="t" * 32)
COORDINATOR, NODE = KEYS.address, PLACE.node_address
SETTINGS = msgspec.msgpack.encode(ShardSettings(1, 1 << 20))
FATES = ["delivered", "request lost", "answer lost", "answer delayed", "request repeated", "sessions dropped"]
FATES += ["restarted", "lease expired", "other processes"]


class Host:
    """The processes of a host and their real supervisor; each starts, and ends, at once."""

    def __init__(self, network: LossyNetwork) -> None:
        self.supervisor = Supervisor(lease_s=1e9)
        self.clock = network.clock
        #: Incarnations in the order of their starts, and by id the one that runs.
        self.started: list[int] = []
        self.running: dict[str, int] = {}
        self.is_stopped = False
        server = network.listen(NODE)
        server.register("changes", self._on_changes, body_type=Count)
        server.register("desire", self._on_desire, body_type=Desire)

    @property
    def is_vacant(self) -> bool:
        return not self.running

    def begin(self, token: str, incarnations: int) -> None:
        assert self.is_vacant, "what ran under the earlier generation has ended"
        self.supervisor.begin(incarnations)

    def stop(self) -> None:
        self.is_stopped = True

    def _on_changes(self, call: IncomingCall) -> Result:
        return Result(Running(self.supervisor.revision, self.supervisor.views()))

    def _on_desire(self, call: IncomingCall) -> None:
        self._apply(self.supervisor.desire(call.body.launches, self.clock()))

    def _apply(self, instructions: Sequence[SupervisorInstruction]) -> None:
        for one in instructions:
            if isinstance(one, Spawn):
                self.started.append(one.incarnation)
                assert one.launch.id not in self.running, "two processes of one id"
                self.running[one.launch.id] = one.incarnation
                self._apply(self.supervisor.on_started(one.launch.id, one.incarnation, 1, self.clock()))
            elif isinstance(one, Kill):
                del self.running[one.id]
                self._apply(self.supervisor.on_ended(one.id, one.incarnation, self.clock()))


class Cluster:
    """A coordinator's table of nodes, with one node, in a network that loses messages."""

    def __init__(self, network: LossyNetwork) -> None:
        self.network, self.shards, self.incarnation = network, 1, 0
        self.store = WriteBehindStore(lambda: None, "owner")  # type: ignore[arg-type, return-value]
        self.nodes: JoinedNodes
        network.on_fate = self.happen
        self.happen("restarted")

    @property
    def launches(self) -> list[Launch]:
        ids = [f"f:v1/shard-n-{number:03}" for number in range(self.shards)]
        return [Launch(id, "shard", b"", SETTINGS, "n") for id in ids]

    def happen(self, fate: str) -> None:
        if fate == "restarted":
            self.incarnation += 1
            server = self.network.listen(COORDINATOR)
            self.table = node_table(PLACE, self.incarnation)
            own: Any = SimpleNamespace(assigned_to=lambda node: self.launches, observed=[], changed=lambda: None)
            self.nodes = JoinedNodes(server, self.store, PLACE, self.table, own)
            self.nodes._clock = self.network.clock  # type: ignore[assignment]
        elif fate == "sessions dropped":
            for server in self.network.servers.values():
                server._sessions.clear()
        elif fate == "lease expired":
            self.network.now += NODE_LEASE_S
            self.nodes.poll()
        elif fate == "other processes":
            self.shards = self.shards % 3 + 1


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fates=st.lists(st.sampled_from(FATES), max_size=50))
def test_a_node_runs_what_its_coordinator_assigns_or_ends_with_the_reason(
    fates: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_node(fates, monkeypatch)


def run_node(fates: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    network = LossyNetwork(fates)
    cluster, host = Cluster(network), Host(network)
    clock: Any = SimpleNamespace(monotonic=network.clock, sleep=lambda _: None)
    for module in (joining_node, threads):
        monkeypatch.setattr(module, "time", clock)
    for module in (joining_node, joined_nodes):
        monkeypatch.setattr(module, "SERVICE", SimpleNamespace(warning=lambda *_: None, info=lambda *_: None))
    to_coordinator: Any = SimpleNamespace(
        address=COORDINATOR, connect=lambda **given: network.connect(COORDINATOR, **given)
    )
    to_node: Any = SimpleNamespace(node_address=NODE, connect=network.connect)
    monkeypatch.setattr(joining_node, "SILENCE_S", 1e9)
    joining = Joining(to_coordinator, KEYS, "n", "127.0.0.1")
    link = CoordinatorLink(joining, to_coordinator, to_node)
    link._node, link._joined = host, joining.join(1e9)  # type: ignore[assignment]
    host.begin(link._joined.token, link._joined.generation << 20)
    quiet = 0
    while quiet < 3 and not host.is_stopped:  # turns without a loss: report, receive, apply
        quiet = 0 if network.fates else quiet + 1
        try:
            link._turn()
        except Exception as error:
            link._on_error(error)
    if host.is_stopped:  # it may join again for 30 s, and says why it ends
        assert "no cluster answers at" in link.failure
        return
    assert sorted(host.running) == [launch.id for launch in cluster.launches]
    assert host.started == sorted({*host.started}), "each process has a higher incarnation than those before"
    assert min(host.running.values()) > link._joined.generation << 20
    assert cluster.table.usable == {"n": 1}
    assert {view.id for view in cluster.table.processes} == host.running.keys()


def test_a_cluster_of_another_release_is_named_at_once() -> None:
    """The coordinator is a listener that answers each message by a handshake of another version."""
    with closing(listen("tcp://127.0.0.1:0")) as coordinator:

        def answer() -> None:
            while (message := coordinator.receive(None)) is not None:
                coordinator.send(message[0], [encode(Welcome(99, PayloadOffer(1)))])

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            cluster = find_cluster(coordinator.address)
            with pytest.raises(UsageError, match=r"has version 99 of the protocol.*install the same release"):
                Joining(cluster, KEYS, "n", "127.0.0.1").join(1e9)
        finally:
            coordinator.wake()
            thread.join()
