"""The coordinator of a cluster: its flows with life cycles and datasets, and the processes to run (thesis 4.3.2).

Jobs request the address of their router at the start, and then read without the coordinator. The coordinator's state is
in a state store; its node reports the running processes.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from torch_dpflow._core.decoding import msgpack_decoder
from torch_dpflow.cluster.control.flow_processes import launches_of
from torch_dpflow.cluster.control.flow_registry import EndedJobs, Flow, FlowRegistry
from torch_dpflow.cluster.control.flow_scaling import FlowScaling
from torch_dpflow.cluster.control.node_table import NodeTable
from torch_dpflow.cluster.messages.coordinator import (
    Access,
    ClusterLimits,
    ContentPiece,
    ContentRequest,
    Cost,
    CostRequest,
    FlowSpec,
    FlowView,
    Part,
    Scale,
)
from torch_dpflow.cluster.messages.node import Launch, ProcessView, by_flow
from torch_dpflow.cluster.services.contents import Contents, check_piece
from torch_dpflow.cluster.services.service import WorkerPlatform
from torch_dpflow.cluster.services.state_store import WriteBehindStore
from torch_dpflow.errors import DPFlowError, OptionError, UsageError
from torch_dpflow.ipc.messages.fields import OverloadedError, UnknownFlowError
from torch_dpflow.ipc.rpc import LATER, IncomingCall, Later, Result, RpcServer
from torch_dpflow.log import SERVICE
from torch_dpflow.remote.fleet.worker_listener import ports_in

#: Methods, and the types of their arguments.
METHODS: dict[str, Any] = {
    "register": FlowSpec,
    "store": ContentPiece,
    "content": ContentRequest,
    "access": Access,
    "scale": Scale,
    "delete": str,
    "cost": CostRequest,
    "flows": None,
    "ended": None,
    "processes": None,
}
#: How long a job's call waits for the router of its flow (seconds). Shorter than a job's timeout, so that the job
#: gets an answer from the coordinator even while services are starting.
ACCESS_S = 2.0
_encode = msgspec.msgpack.encode


@dataclass
class _WaitingCall:
    call: IncomingCall
    instance: str
    #: When it is answered even without a router (seconds).
    until: float


class Coordinator:
    """Coordinator of a cluster: serves registrations, accesses and queries. One thread drives it; no method blocks.

    Args:
        server: server at which the methods are registered; the caller runs it.
        store: store for the flows and the record of ended jobs.
        contents: store for contents (pickled datasets), which workers load.
        limits: limits of all flows together.
        worker_platform: platform that runs workers; None: nodes run them.
        nodes: nodes on other hosts; None: no other host can join.
        price_per_hour: price of a worker for one hour, for reports.
        host_bytes: memory of the cluster's only host; flows that request more are refused. None: no check.
    """

    def __init__(
        self,
        server: RpcServer,
        store: WriteBehindStore,
        contents: Contents,
        limits: ClusterLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
        worker_platform: WorkerPlatform | None = None,
        nodes: NodeTable | None = None,
        price_per_hour: float = 0.0,
        host_bytes: int | None = None,
    ) -> None:
        #: Called when the processes that should run may have changed.
        self.on_change: Callable[[], None] = lambda: None
        self._host_bytes = host_bytes
        self._worker_platform = worker_platform
        self._nodes = nodes
        self._post = server.post
        self._store = store
        self._contents = contents
        self._limits = (
            limits if worker_platform is None else replace(limits, shards=ports_in(worker_platform.listen_at))
        )
        self._clock = clock
        self._registry = FlowRegistry()
        ended = EndedJobs(store.get("ended") or b"")
        self._scaling = FlowScaling(self._limits, price_per_hour=price_per_hour, ended=ended, wall_clock=time.time)
        #: By instance: flows as they are stored, those whose services should run, and addresses of running routers.
        self._stored: dict[str, FlowSpec] = {}
        self._running: dict[str, FlowSpec] = {}
        self._routers: dict[str, str] = {}
        #: Processes of the cluster's own node.
        self.observed: list[ProcessView] = []
        #: The processes that should run, by node; None: to be computed. Each node requests its processes twice
        #: a second.
        self._launches: dict[str, list[Launch]] | None = None
        #: Whether the node has reported: an earlier coordinator may have started more than this one.
        self._has_observed = False
        self._waiting: list[_WaitingCall] = []
        self._restore()
        for name, body in METHODS.items():
            server.register(name, getattr(self, f"_on_{name}"), body_type=body)

    # -- what runs -------------------------------------------------------------------------------------------

    def desired(self) -> list[Launch]:
        """Return the flows' processes that the cluster's own node should run."""
        return self._by_node().get("", [])

    def assigned_to(self, node: str) -> list[Launch] | None:
        """Return the processes that a joined node should run; None until the cluster's own node has reported."""
        return self._by_node().get(node, []) if self._has_observed else None

    def changed(self) -> None:
        """Discard the computed lists of processes that should run, and call `on_change`."""
        self._launches = None
        self.on_change()

    def _by_node(self) -> dict[str, list[Launch]]:
        """Return the processes that should run on each node, computed at the latest change or observation."""
        if self._launches is not None:
            return self._launches
        found: defaultdict[str, list[Launch]] = defaultdict(list)
        views, unread = by_flow(self._processes), self._unread()
        for instance, part in self.parts().items():
            spec = self._running[instance]
            if part is None:
                continue
            for launch in launches_of(
                spec,
                part,
                views[instance],
                has_platform=self._worker_platform is not None,
                lingering=self._scaling.lingering(spec, self._clock()),
                limited_by=self._scaling.limited_by(instance),
                nodes=[*self._hosts],
                is_unread=instance in unread,
            ):
                found[launch.node].append(launch)
        self._launches = found
        return found

    def observe(self, processes: list[ProcessView]) -> None:
        """Record the processes of the cluster's own node, update the flows, and answer jobs that wait for a router."""
        now = self._clock()
        self.observed = processes
        self._has_observed = True
        self._routers = {}
        for view in processes:
            instance, _, kind = view.id.rpartition("/")
            if kind == "router":
                self._observe_router(instance, view, now)
        self._registry.tick(now)
        self._reconcile()
        self._launches = None
        if self._scaling.observe(self._running, self._processes, self.parts(), self._hosts, now):
            self.changed()
        if (packed := self._scaling.ended.take_packed()) is not None:
            self._store.put("ended", packed)
        self._answer_waiting(now)

    def views(self) -> tuple[list[FlowView], list[ProcessView]]:
        now, parts = self._clock(), self.parts()
        return [self._view(flow, parts, now) for flow in self._registry.flows], self._processes

    def _view(self, flow: Flow, parts: Mapping[str, Part | None], now: float) -> FlowView:
        name = flow.spec.instance
        limit, taken = self._scaling.limited_by(name), self._scaling.worker_seconds(name)
        return msgspec.structs.replace(flow.view(parts.get(name), now), limited_by=limit, workers_s=taken)

    @property
    def _processes(self) -> list[ProcessView]:
        return self.observed if self._nodes is None else [*self.observed, *self._nodes.processes]

    @property
    def _hosts(self) -> Mapping[str, int]:
        """Number of processors of each host that runs shards, by name."""
        joined = {} if self._nodes is None else self._nodes.usable
        return joined or {"": len(os.sched_getaffinity(0))}

    def parts(self, *, hosts: int = 0) -> dict[str, Part | None]:
        """Return each running flow's part of the cluster, by NAME:vVERSION; None for a flow if nothing is left for it.

        hosts: number of hosts to assume; 0: the present number.
        """
        return self._scaling.parts(self._running, hosts or len(self._hosts), self._unread())

    def _unread(self) -> set[str]:
        """Return the running flows that no job has used lately."""
        now = self._clock()
        running = [self._registry.find(instance) for instance in self._running]
        return {flow.spec.instance for flow in running if flow is not None and flow.is_unread(now)}

    def _observe_router(self, instance: str, view: ProcessView, now: float) -> None:
        jobs = view.status.get("jobs")
        is_up = bool(view.address and view.runs)
        if is_up and isinstance(jobs, int):
            before = self._registry.find(instance)
            if not jobs and before is not None and before.jobs:
                text = "no job reads the flow now; its workers have run %.0f worker-seconds"
                SERVICE.info(text, self._scaling.worker_seconds(instance).total, extra={"flow": instance})
            reading = view.status.get("reading")
            reading = reading if isinstance(reading, int) else None
        else:
            jobs = reading = None
        if self._registry.report(instance, jobs, now, reading=reading) and is_up:
            self._routers[instance] = view.address

    def _answer_waiting(self, now: float) -> None:
        still: list[_WaitingCall] = []
        for waiting in self._waiting:
            if (address := self._routers.get(waiting.instance)) is not None:
                waiting.call.answer(address)
            elif now < waiting.until:
                still.append(waiting)
            else:
                waiting.call.fail(OverloadedError(f"the services of flow {waiting.instance!r} are starting"))
        self._waiting = still

    def _reconcile(self) -> None:
        """Store the flows of the registry, and update the services that should run."""
        flows = {flow.spec.instance: flow.spec for flow in self._registry.flows}
        before, self._stored = self._stored, flows
        for instance, spec in flows.items():
            if spec is not before.get(instance):
                self._store.put(f"flow/{instance}", _encode(spec))
        for instance in before.keys() - flows.keys():
            self._store.delete(f"flow/{instance}")
            self._drop_content(before[instance].content)
        running = self._registry.running
        self._routers = {instance: at for instance, at in self._routers.items() if instance in running}
        if running != self._running:
            self._running = running
            self.changed()

    # -- calls -----------------------------------------------------------------------------------------------

    def _on_register(self, call: IncomingCall) -> Result:
        spec: FlowSpec = call.body
        self._check_ports(spec.shards or 1)
        self._check_memory(spec)
        flow = self._registry.register(spec, self._clock())
        self._reconcile()
        return Result(self._is_stored(flow))

    def _check_ports(self, shards: int) -> None:
        most = self._limits.shards
        if self._worker_platform is not None and most is not None and shards > most:
            raise UsageError(
                f"shards={shards}: each takes a port at which workers connect, and `dpflow up --worker-listen "
                f"{self._worker_platform.listen_at}` has {most}; give no more, or start it with more ports, as "
                "tcp://HOST:FIRST-LAST"
            )

    def _check_memory(self, spec: FlowSpec) -> None:
        if self._host_bytes is not None and spec.memory_bytes > self._host_bytes:
            raise OptionError(
                f"flow {spec.name!r}: memory_bytes={spec.memory_bytes:,}: the cluster's host has {self._host_bytes:,} "
                "bytes in all; give fewer, here or as the capacity of the ALSDCache around the dataset"
            )

    def _is_stored(self, flow: Flow) -> bool:
        return flow.spec.content in self._contents.digests

    def _on_store(self, call: IncomingCall) -> Result | Later:
        piece: ContentPiece = call.body
        check_piece(piece, call.frames)
        flows = self._registry.flows_of_content(piece.digest)
        if all(map(self._is_stored, flows)):  # one flow can have another content that was stored first
            return Result(piece.size if flows else None)

        def done(held: int) -> None:
            if held < piece.size:
                call.answer(held)
            else:
                self._post(lambda: self._finish_store(call, piece))

        self._contents.run(call, lambda files: files.receive(piece, call.frames[0]), done)
        return LATER

    def _finish_store(self, call: IncomingCall, piece: ContentPiece) -> None:
        """Record a completely received content as the content of its flows, and answer the call."""
        flows = self._registry.flows_of_content(piece.digest)
        try:
            for flow in flows:
                if flow.spec.content == piece.digest or not self._is_stored(flow):
                    self._registry.accept_content(flow, piece.digest)
            self._reconcile()
        except DPFlowError as error:
            call.fail(error)
            return
        self._drop_content(piece.digest)  # unless a flow uses it now
        call.answer(piece.size if flows else None)

    def _on_content(self, call: IncomingCall) -> Later:
        self._contents.run(call, lambda files: files.read(call.body), lambda read: call.answer(read[0], [read[1]]))
        return LATER

    def _on_access(self, call: IncomingCall) -> Result | Later:
        access: Access = call.body
        flow = self._registry.access(access.flow, access.version, self._clock())
        if not self._is_stored(flow):
            raise UnknownFlowError(f"the content of flow {access.flow!r} is not stored; store it first")
        self._free_capacity_for(flow)
        self._scaling.begin(flow.spec, self._clock())
        self._registry.start(flow)
        self._reconcile()
        self.changed()
        if (address := self._routers.get(flow.spec.instance)) is not None:
            return Result(address)
        self._waiting.append(_WaitingCall(call, flow.spec.instance, self._clock() + ACCESS_S))
        return LATER

    def _free_capacity_for(self, flow: Flow) -> None:
        """Stop unread flows until this flow fits the cluster's limits. Raises OverloadedError if it has to wait."""
        most = self._limits.flows
        if most is not None and not self._has_observed:
            raise OverloadedError("the coordinator has just started and does not know yet what runs; retry")
        if most is None or flow.spec.instance in self._running or len(self._running) < most:
            return
        while len(self._running) >= most and self._registry.stop_unread(self._clock()):
            self._reconcile()
        if len(self._running) >= most:
            raise OverloadedError(
                f"flow {flow.spec.name!r} cannot start: {most} flows take all workers, memory or ports of the cluster, "
                f"{sorted(self._running)}; finish or delete a half-read iterator of one, wait until one is idle, or "
                "start `dpflow up` with more workers"
            )

    def _on_scale(self, call: IncomingCall) -> Later:
        scale: Scale = call.body
        shards = None if scale.shards == "auto" else scale.shards
        for name, value in (("shards", shards), ("workers", scale.workers)):
            if self._limits.workers is not None and (value or 0) > self._limits.workers:
                raise UsageError(
                    f"{name}={value}: the cluster has {self._limits.workers} workers, and each shard takes one; "
                    "give no more, or start `dpflow up` with more"
                )
        self._check_ports(shards or 1)
        flow = self._registry.scale(scale.flow, scale.shards, scale.workers)
        self._reconcile()
        spec = flow.spec
        text = "flow scaled to %s shards and %d workers"
        SERVICE.info(text, spec.shards or "auto", spec.workers, extra={"flow": spec.instance})
        view = self._view(flow, self.parts(), self._clock())
        # Acknowledged when written: unlike a registration, it is not repeated after the death of this process.
        self._store.once_written(partial(_acknowledge, call, view))
        return LATER

    def _on_delete(self, call: IncomingCall) -> Later:
        # A repeated call finds the version deleted.
        self._registry.delete(call.body, self._clock())
        self._reconcile()
        self._store.once_written(partial(_acknowledge, call, None))
        return LATER

    def _on_flows(self, call: IncomingCall) -> Result:
        return Result(self.views()[0])

    def _on_ended(self, call: IncomingCall) -> Result:
        return Result(self._scaling.ended.views)

    def _on_cost(self, call: IncomingCall) -> Result:
        taken = self._scaling.worker_seconds(call.body.flow)
        return Result(Cost(taken.total, taken.by_job.get(call.body.job, 0.0)))

    def _on_processes(self, call: IncomingCall) -> Result:
        return Result(self._processes)

    # -- state -----------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        specs: list[FlowSpec] = []
        for key in self._store.find("flow/"):
            try:
                spec = msgpack_decoder(FlowSpec).decode(self._store.get(key) or b"")
                spec.check()
                if key != (own := f"flow/{spec.instance}"):  # of an older release
                    self._store.put(own, _encode(spec))
                    self._store.delete(key)
                specs.append(spec)
            except (msgspec.MsgspecError, OptionError) as error:
                SERVICE.error("state store: %s cannot be decoded and is ignored: %s", key, error)
        for spec in specs:
            self._registry.restore(spec, self._clock())
        self._stored = {spec.instance: spec for spec in specs}
        for digest in self._contents.digests - {flow.spec.content for flow in self._registry.flows}:
            self._contents.drop(digest)

    def _drop_content(self, digest: str) -> None:
        if not any(flow.spec.content == digest for flow in self._registry.flows):
            self._contents.drop(digest)


def _acknowledge(call: IncomingCall, answer: FlowView | None, failure: Exception | None) -> None:
    if failure is None:
        call.answer(answer)
    else:
        call.fail(
            UsageError(
                f"this is in force but not stored: {failure}. It is stored once the state store recovers, and lost if "
                "the coordinator ends before"
            )
        )
