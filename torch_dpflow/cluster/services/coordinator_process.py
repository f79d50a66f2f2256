"""Process of a coordinator: loads its state, serves calls, and sends its node the list of processes to run."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch_dpflow._core.decoding import msgpack_decoder
from torch_dpflow._core.threads import PeriodicCall
from torch_dpflow.cluster.messages.coordinator import CoordinatorArguments
from torch_dpflow.cluster.messages.node import END_NOTICE_S, WAITING, Desire, Running
from torch_dpflow.cluster.services.contents import Contents
from torch_dpflow.cluster.services.coordinator import METHODS, Coordinator
from torch_dpflow.cluster.services.joined_nodes import NODE_METHODS, JoinedNodes, node_table
from torch_dpflow.cluster.services.service import DesiredProcesses, HeartbeatSender, ServiceSpec, ask_in, serve
from torch_dpflow.cluster.services.state_store import WriteBehindStore, open_store
from torch_dpflow.ipc.memory.headroom import Headroom
from torch_dpflow.ipc.messages.fields import OverloadedError
from torch_dpflow.ipc.rpc import LATER, IncomingCall, Later, RpcServer


class Reconciler:
    """Link of a coordinator to its node: one thread observes the running processes, another sends the desired ones."""

    def __init__(self, service: ServiceSpec, server: RpcServer, coordinator: Coordinator) -> None:
        self._node = service.place.connect(service.place.node_address, timeout_s=10.0)
        self._server, self._coordinator = server, coordinator
        #: Latest observed revision of the node's processes; 0 before the first.
        self._seen = 0
        self._desired = DesiredProcesses(self._node)
        self._applier = PeriodicCall(
            self._apply, math.inf, "dpflow-desire", what="sending the node the desired processes"
        )
        coordinator.on_change = self._applier.wake
        # Without a pause: the node answers as soon as anything changes, or after half a second with new figures. So an
        # idle cluster takes 6 ms of processor time a second; polling took 15.
        PeriodicCall(self._observe, 0.0, "dpflow-observe", what="observing the node's processes").start()

    def _observe(self) -> None:
        running: Running = self._node.call("changes", self._seen, reply_type=Running).body
        ask_in(self._server, partial(self._coordinator.observe, running.processes))
        self._seen = running.revision
        self._applier.wake()
        # Not earlier: before its first observation a coordinator desires nothing, which would end all processes.
        if not self._applier.is_alive():
            self._applier.start()

    def _apply(self) -> None:
        self._desired.send(Desire(ask_in(self._server, self._coordinator.desired)))


#: Longest wait for a message (seconds): usually, and while the state is being loaded.
IDLE_POLL_S, LOADING_POLL_S = 0.5, 0.02


def run(service: ServiceSpec) -> None:
    """Run a coordinator: the main function of its process."""
    arguments = msgpack_decoder(CoordinatorArguments).decode(service.arguments)
    server = RpcServer(service.listen(arguments.address))
    nodes: list[JoinedNodes] = []
    server.register("stop", lambda call: _stop_node(service, server, nodes, call), body_type=None)
    heartbeats = HeartbeatSender(service, server.address, status={WAITING: ""})
    state = WriteBehindStore(lambda: open_store(arguments.state), arguments.owner)
    _load(state, server, heartbeats)
    # In the cluster's directory and not in the state store: a pickled dataset may hold credentials of a storage, and
    # jobs that need it upload it again.
    contents = Contents(Path(service.place.directory, "state.contents"))
    table = node_table(service.place, service.incarnation)
    coordinator = Coordinator(
        server,
        state,
        contents,
        arguments.limits,
        worker_platform=service.place.worker_platform,
        nodes=table,
        price_per_hour=arguments.price_per_hour,
        host_bytes=Headroom().total() if service.place.host is None else None,
    )
    joined = JoinedNodes(server, state, service.place, table, coordinator, limits=arguments.nodes)
    nodes.append(joined)
    Reconciler(service, server, coordinator)
    if arguments.metrics:
        from torch_dpflow.cluster.monitoring.metrics_server import serve_metrics

        serve_metrics(arguments.metrics, lambda: ask_in(server, coordinator.views))
    serve(service, server, poll=joined.poll, poll_s=IDLE_POLL_S, heartbeats=heartbeats)


def _load(state: WriteBehindStore, server: RpcServer, heartbeats: HeartbeatSender) -> None:
    """Load the state. Until it is loaded, refuse every call with the reason.

    Until then stored flows, which jobs may be reading, are unknown. So no flow can be registered, scaled or deleted.
    """

    def refuse(call: IncomingCall) -> None:
        raise OverloadedError(f"{state.failure or 'the coordinator is starting'}; retry")

    def serve_meanwhile() -> None:
        server.step(LOADING_POLL_S)
        heartbeats.on_iteration()
        if state.failure is not None:
            heartbeats.status = {WAITING: str(state.failure)}

    for name in (*METHODS, *NODE_METHODS):
        server.register(name, refuse)
    state.load(serve_meanwhile)
    heartbeats.report({})


def _stop_node(service: ServiceSpec, server: RpcServer, nodes: Sequence[JoinedNodes], call: IncomingCall) -> Later:
    """Stop the node and all its processes, including this process, after the joined nodes have been notified."""

    def stop() -> None:
        until = time.monotonic() + END_NOTICE_S
        for joined in nodes:
            ask_in(server, joined.end)
            while not ask_in(server, joined.all_notified) and time.monotonic() < until:
                time.sleep(END_NOTICE_S / 40)
        with service.place.connect(service.place.node_address) as node:
            node.call("stop")

    # Answered first: the transport sends messages in order.
    call.answer(None)
    threading.Thread(target=stop, name="dpflow-stop", daemon=True).start()
    return LATER
