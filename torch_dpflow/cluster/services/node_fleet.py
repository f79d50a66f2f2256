"""Provisioner of nodes that a platform runs, such as Ray actors, for `dpflow up --platform --nodes`.

This process is the only one with the platform's library and credentials. The coordinator decides on the number of
nodes, and knows which have joined; `remote.fleet` decides about starts, replacements and ends. The provisioner saves no
state: nodes end with this process, and its successor starts new nodes.
"""

from __future__ import annotations

import logging
import secrets
import select
from random import SystemRandom
from typing import Any, cast

import msgspec

from torch_dpflow._core.clocks import HEARTBEAT_S
from torch_dpflow._core.threads import SuspendAwareClock
from torch_dpflow.cluster.messages.node import FleetTarget, NodeFleet
from torch_dpflow.cluster.services import joining_node
from torch_dpflow.cluster.services.joining_node import LEAVE_S, NodeLaunchSpec
from torch_dpflow.cluster.services.service import COORDINATOR, HeartbeatSender, ServiceClient, ServiceSpec
from torch_dpflow.errors import DPFlowError
from torch_dpflow.log import SERVICE
from torch_dpflow.remote.fleet.lifecycle import Fleet
from torch_dpflow.remote.fleet.worker_states import (
    CheckWorker,
    Fail,
    FleetInstruction,
    Report,
    StartWorker,
    StopWorker,
    WorkerState,
)
from torch_dpflow.remote.launchers.contract import Ended, NodePlatform, Refused, prefix_of
from torch_dpflow.workers.platform import RETRY_S

#: The interval between reports to the coordinator, and the timeout of a report (seconds).
REPORT_S, ANSWER_S = HEARTBEAT_S / 2, 3 * HEARTBEAT_S
#: How long a node may take to leave, until its jobs have left it and its processes have ended (seconds).
NODE_LEAVE_S = LEAVE_S + 15.0


class PlatformNodes:
    """Nodes that a platform runs: starts, watches and ends them. One thread drives this object.

    Args:
        service: specification of this process.
        spec: settings of the platform.

    Raises:
        MissingExtraError, OptionError, PlatformError: see `NodePlatform.open_nodes`.
    """

    def __init__(self, service: ServiceSpec, spec: NodePlatform) -> None:
        self._place, self._spec = service.place, spec
        assert service.place.keys is not None
        self._keys = msgspec.structs.replace(service.place.keys, certificates=None, version=1)
        self._platform = spec.open_nodes(joining_node.__name__)
        self._prefix = prefix_of(service.place.cluster)
        # Not the group of an earlier provisioner, whose nodes may not have ended yet.
        group = prefix_of(service.place.cluster, secrets.token_hex(5))
        self._fleet = Fleet(group, self._platform.limits, draw=SystemRandom().random, drain_s=NODE_LEAVE_S)
        self._clock = SuspendAwareClock()
        self._coordinator = ServiceClient(service.place, COORDINATOR, timeout_s=ANSWER_S, locate_s=ANSWER_S)
        #: Number of nodes that should run, and why fewer do.
        self._wanted, self._shortage = 0, ""
        #: When to start nodes again after a failure (seconds).
        self._retry_at = float("inf")

    def wait(self) -> None:
        """Wait until the platform reports the start or end of a node, at most `REPORT_S`."""
        poller = select.poll()
        poller.register(self._platform.wakeup_fd, select.POLLIN)
        poller.poll(1000 * REPORT_S)

    def turn(self) -> None:
        """Handle the platform's reports, report to the coordinator, and start and stop nodes accordingly."""
        now = self._clock()
        # Before the coordinator's answer: a node that the end of the cluster has ended must not be replaced.
        for outcome in self._platform.take():
            self._fleet.handle(outcome, now)
            match outcome:
                case Ended(name, end):
                    level = logging.INFO if end.code == 0 else logging.WARNING
                    SERVICE.log(level, "node %s on platform %s has ended: %s", name, self._spec.name, end)
                case Refused(_, error):
                    self._shortage = str(error)  # the fleet reports the first one of a kind only
        target = self._report()
        if target is not None and target.ends:
            return
        if target is not None:
            self._apply(target, now)
        if now >= self._retry_at:
            self._retry_at = float("inf")
            self._fleet.retry()
        for instruction in self._fleet.tick(now):
            self._obey(instruction, now)

    def status(self) -> dict[str, Any]:
        nodes = sum(one.arrived and one.state.holds_place for one in self._fleet.workers)
        return {"platform": self._spec.name, "nodes": nodes, "wanted": self._wanted, "shortage": self._shortage}

    def _report(self) -> FleetTarget | None:
        """Report the nodes to the coordinator; return its answer, or None if it does not answer."""
        names = [one.name for one in self._fleet.workers]
        leaving = [one.name for one in self._fleet.workers if one.state is WorkerState.DRAINING]
        report = NodeFleet(self._place.token, self._prefix, names, leaving)
        try:
            target: FleetTarget = self._coordinator.call("node_fleet", report, FleetTarget).body
        except DPFlowError as error:
            SERVICE.debug("the coordinator does not answer, retrying (%s)", error)
            return None
        return target

    def _apply(self, target: FleetTarget, now: float) -> None:
        self._wanted = target.wanted
        self._fleet.target(target.wanted)
        joined = {*target.joined}
        for node in self._fleet.workers:
            if not node.arrived and node.name in joined:
                self._fleet.arrived(node.name, "", now)
                self._fleet.ready(node.name)
            elif node.arrived and node.name not in joined:  # it has left, or its lease has expired
                self._fleet.goodbye(node.name, now)

    def _obey(self, instruction: FleetInstruction, now: float) -> None:
        match instruction:
            case StartWorker(name):
                SERVICE.info("node %s is requested of platform %s", name, self._spec.name)
                self._platform.start(name, self._launch_spec(name))
            case CheckWorker(name):
                self._platform.suspect(name)
            case StopWorker(name, why):
                self._platform.stop(name, why)
            case Report(limited_by, text):
                self._shortage = text
                if limited_by:
                    SERVICE.warning("fewer than %d nodes run, limited by %s: %s", self._wanted, limited_by, text)
                else:
                    SERVICE.info("all %d nodes run", self._wanted)
            case Fail(text):
                self._shortage, self._retry_at = text, now + RETRY_S
                SERVICE.error("no node runs on platform %s, next try in %g s: %s", self._spec.name, RETRY_S, text)
            case _:
                pass  # about connections of workers: nodes have theirs to the coordinator

    def _launch_spec(self, name: str) -> bytes:
        keys = msgspec.structs.replace(self._keys, address=self._coordinator.address)
        spec = NodeLaunchSpec(name, keys, self._spec.workers_each, self._place.log)
        return msgspec.msgpack.encode(spec)


def run(service: ServiceSpec) -> None:
    """Run a provisioner of nodes: the main function of its process."""
    heartbeats = HeartbeatSender(service, "")
    nodes = PlatformNodes(service, cast(NodePlatform, service.platform))
    while True:
        nodes.turn()
        heartbeats.status = nodes.status()
        heartbeats.on_iteration()
        nodes.wait()
