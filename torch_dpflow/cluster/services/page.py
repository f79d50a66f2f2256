"""Live page of a cluster: a process that observes the node and the coordinator, and serves the page over HTTP.

The process calls both once a second. It gets the list of processes from the node, so the page can show that the
coordinator has died.
"""

from __future__ import annotations

import os
import socket
import time

from torch_dpflow._core.clocks import HEARTBEAT_S
from torch_dpflow._core.decoding import msgpack_decoder
from torch_dpflow.cluster.messages.coordinator import FlowView
from torch_dpflow.cluster.messages.node import ProcessView, Running
from torch_dpflow.cluster.monitoring.page_access import PagePlace, listen_at
from torch_dpflow.cluster.monitoring.page_figures import Observation, observation_of
from torch_dpflow.cluster.monitoring.page_history import PageHistory
from torch_dpflow.cluster.services.service import COORDINATOR, ClusterPlace, HeartbeatSender, ServiceSpec
from torch_dpflow.errors import DPFlowError, RemoteCallError
from torch_dpflow.ipc.rpc import RpcClient
from torch_dpflow.log import SERVICE

#: Interval of observations, timeout of a call, and interval between attempts to listen (seconds).
INTERVAL_S, ANSWER_S, RETRY_S = HEARTBEAT_S, 2 * HEARTBEAT_S, 2 * HEARTBEAT_S


class ClusterObserver:
    """Observer of a cluster, for the live page. While node or coordinator does not answer, the last values are kept."""

    def __init__(self, place: ClusterPlace) -> None:
        self._place = place
        self._node = place.connect(place.node_address, timeout_s=ANSWER_S)
        self._coordinator: RpcClient | None = None
        self._flows: list[FlowView] = []
        self._processes: list[ProcessView] = []
        #: Processes of joined nodes, which only the coordinator knows.
        self._joined: list[ProcessView] = []

    def observe(self) -> Observation:
        """Return the present state of the cluster. Waits for answers, up to three times `ANSWER_S`."""
        failure = ""
        try:
            self._processes = self._node.call("changes", 0, reply_type=Running).body.processes
            self._flows = self._request_flows()
        except RemoteCallError as error:
            failure = f"refuses: {error.text}"
        except DPFlowError:
            failure = "does not answer"
        return observation_of(self._flows, [*self._processes, *self._joined], failure)

    def _request_flows(self) -> list[FlowView]:
        address = next((view.address for view in self._processes if view.id == COORDINATOR), "")
        if address and (self._coordinator is None or self._coordinator.address != address):
            if self._coordinator is not None:
                self._coordinator.close()
            self._coordinator = self._place.connect(address, timeout_s=ANSWER_S)
        if self._coordinator is None:
            return self._flows  # it starts
        if self._place.keys is not None:
            views: list[ProcessView] = self._coordinator.call("processes", reply_type=list[ProcessView]).body
            self._joined = [view for view in views if view.node]
        flows: list[FlowView] = self._coordinator.call("flows", reply_type=list[FlowView]).body
        return flows


def run(service: ServiceSpec) -> None:
    """Serve the live page: the main function of its process."""
    from torch_dpflow.cluster.monitoring.page_server import PageServer  # needs an extra

    place = msgpack_decoder(PagePlace).decode(service.arguments)
    heartbeats = HeartbeatSender(service, place.url)
    listener = _listen(place, heartbeats)
    server = PageServer(listener, place.authenticator, PageHistory("cluster", socket.gethostname()))
    server.start()
    observer = ClusterObserver(service.place)
    while server.serves:
        began = time.monotonic()
        server.observe(observer.observe())
        heartbeats.on_iteration()
        time.sleep(max(0.0, began + INTERVAL_S - time.monotonic()))
    os._exit(1)  # the node starts another one


def _listen(place: PagePlace, heartbeats: HeartbeatSender) -> socket.socket:
    """Wait until the port is free, and listen. Another process may have taken the port before this process started."""
    is_logged = False
    while True:
        try:
            return listen_at(place.host, place.port)
        except OSError as error:
            if not is_logged:
                SERVICE.error("the page cannot listen at %s: %s", place.url, error.strerror or error)
        is_logged = True
        heartbeats.on_iteration()
        time.sleep(RETRY_S)
