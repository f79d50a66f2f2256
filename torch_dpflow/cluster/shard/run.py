"""Process of a sample shard, with its calls to the router and to the node."""

from __future__ import annotations

import gc
import math
import os
import queue
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torch_dpflow._core.clocks import HEARTBEAT_S
from torch_dpflow._core.decoding import msgpack_decoder
from torch_dpflow._core.threads import PeriodicCall, SuspendAwareClock
from torch_dpflow.cluster.control.lookaheads import LookaheadParts
from torch_dpflow.cluster.messages.node import Ending, Running
from torch_dpflow.cluster.messages.router import JobLookahead, LookaheadRequest, RangeAssignment, RegisterShard
from torch_dpflow.cluster.messages.shard import ShardArguments, ShardSettings
from torch_dpflow.cluster.services.service import ServiceClient, ServiceSpec, WorkerPlatform, ask_in, serve
from torch_dpflow.cluster.shard.provisioned_workers import ProvisionedWorkers
from torch_dpflow.cluster.shard.server import SampleShard
from torch_dpflow.errors import DPFlowError, ErrorKind, RemoteCallError
from torch_dpflow.log import SERVICE

#: Interval at which a shard registers with its router, as its heartbeat, and the timeout of that call (seconds).
REGISTER_S, REGISTER_TIMEOUT_S = HEARTBEAT_S, 10.0
#: Timeout of a request for a lookahead (seconds).
LOOKAHEAD_S = 30.0
#: Interval at which a shard requests from its node which workers run, if it cannot detect their ends (seconds).
WATCH_S = HEARTBEAT_S
#: How long a shard may take to end its remote workers (seconds).
LEAVE_S = 8.0
#: Number of new objects after which the garbage collector runs in a shard. With Python's 700 it took a seventh of the
#: time, although reference counts free nearly all objects.
GC_OBJECTS = 50_000


class LookaheadCalls:
    """Thread that requests lookaheads for a shard from the router, and passes the answers to the shard."""

    # Apart from the registration: it waits for the threads of shard and router, which may be busy for a second each.
    # Meanwhile the shard must not be taken for dead.

    def __init__(self, service: ServiceSpec, shard: SampleShard, router: str) -> None:
        self._shard, self._router = shard, ServiceClient(service.place, router, timeout_s=LOOKAHEAD_S)
        self.thread = PeriodicCall(
            self._request_all, math.inf, "dpflow-lookahead", what="requesting lookaheads from the router"
        )
        shard.on_lookahead_due = self.thread.wake
        self.thread.start()

    def _request_all(self) -> None:
        requests = ask_in(self._shard.server, self._shard.lookahead_requests)
        try:
            for request in requests:
                self._get_lookahead(request)
        except DPFlowError:
            ask_in(self._shard.server, partial(self._shard.lookaheads_failed, requests))
            raise

    def _get_lookahead(self, request: LookaheadRequest) -> None:
        try:
            answer = self._router.call("lookahead", request, JobLookahead)
        except RemoteCallError as error:  # of the lookahead alone; the shard works without
            if error.kind is ErrorKind.OVERLOADED:  # the router restores an order
                raise
            SERVICE.warning("no lookahead of job %r (%s)", request.job, error)
            return
        parts = LookaheadParts.of(answer.frames, self._shard.size)
        self._shard.server.post(partial(self._shard.take_lookahead, request, answer.body, parts))


class RouterCalls:
    """Thread that registers a shard with its router, and informs the shard which keys the router has assigned to it."""

    def __init__(self, service: ServiceSpec, shard: SampleShard, router: str) -> None:
        self._service, self._shard = service, shard
        self._router = ServiceClient(service.place, router, timeout_s=REGISTER_TIMEOUT_S)
        self.thread = PeriodicCall(self._register, REGISTER_S, "dpflow-register", what="registering with the router")
        self.thread.wake()
        self.thread.start()

    def _register(self) -> None:
        service, server = self._service, self._shard.server
        body = RegisterShard(
            service.id, service.incarnation, server.address, service.place.token, self._shard.cache_samples
        )
        range_: RangeAssignment = self._router.call("register_shard", body, RangeAssignment).body
        server.post(partial(self._shard.assign, range_))


class WorkerWatch:
    """Thread that calls the node for a shard: to kill workers, and to find out which workers have ended."""

    # A pid is valid within its host and pid namespace only. So the shard kills nothing: it names workers by their
    # number and incarnation, and only their node, which assigned these, signals processes.

    def __init__(self, service: ServiceSpec) -> None:
        self._service = service
        self._shard: SampleShard
        self._node = service.place.connect(service.place.node_address, timeout_s=10.0)
        #: Number and incarnation of the workers that should end.
        self._orders: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._thread = PeriodicCall(
            self._call_node, WATCH_S, "dpflow-workers", what="requesting the state of workers from the node"
        )

    def end(self, worker: int, incarnation: int) -> None:
        """Request the node to kill a worker, without waiting for the worker's end."""
        self._orders.put((worker, incarnation))
        self._thread.wake()

    def watch(self, shard: SampleShard) -> None:
        """Start the thread, which reports to `shard` the ends of workers that `shard` cannot detect. Call once."""
        self._shard = shard
        self._thread.start()

    def _call_node(self) -> None:
        while not self._orders.empty():
            worker, incarnation = order = self._orders.get()
            try:
                self._node.call("end", Ending(self._id_of(worker), incarnation))
            except DPFlowError:
                self._orders.put(order)
                raise
        self._report_ended()

    def _report_ended(self) -> None:
        workers, server = self._shard.workers, self._shard.server
        unwatched = ask_in(server, lambda: workers.unwatched)
        if not unwatched:
            return
        views: Running = self._node.call("changes", 0, reply_type=Running).body
        running = {view.id: view.incarnation for view in views.processes if view.runs}
        for worker, incarnation in unwatched.items():
            if running.get(self._id_of(worker)) != incarnation:
                server.post(partial(workers.ended, worker, incarnation))

    def _id_of(self, worker: int) -> str:
        return f"{self._service.id}/worker-{worker}"


def run(service: ServiceSpec) -> None:
    """Run a shard: the main function of its process."""
    if service.place.worker_platform is not None:
        _run_with_platform(service, service.place.worker_platform)
        return
    watch = WorkerWatch(service)
    shard = _shard_of(service, watch.end)
    shard.workers.report_file = service.place.report_file
    watch.watch(shard)
    _serve(service, shard)


def _run_with_platform(service: ServiceSpec, platform: WorkerPlatform) -> None:
    signal.signal(signal.SIGTERM, _on_sigterm)
    arguments = msgpack_decoder(ShardArguments).decode(service.arguments)
    shard = _shard_of(service, lambda *_: None)  # its platform ends its workers
    fleet = ProvisionedWorkers(service, platform, shard, arguments.spec.content)
    try:
        _serve(service, shard, fleet.status)
    except SystemExit:
        fleet.close()
        os._exit(0)  # the platform's library may have threads that an interpreter's end would wait for


def _on_sigterm(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def _leave() -> None:
    """End the remote workers of this shard, and then this process."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LEAVE_S)


def _shard_of(service: ServiceSpec, end_worker: Callable[[int, int], None]) -> SampleShard:
    arguments = msgpack_decoder(ShardArguments).decode(service.arguments)
    shard = SampleShard(
        service.listen(),
        arguments.spec,
        msgpack_decoder(ShardSettings).decode(service.settings),
        token=service.place.token,
        end_worker=end_worker,
        clock=SuspendAwareClock(),
    )
    RouterCalls(service, shard, arguments.router)
    if arguments.spec.policy != "none":
        LookaheadCalls(service, shard, arguments.router)
    return shard


def _serve(service: ServiceSpec, shard: SampleShard, figures: Callable[[], dict[str, Any]] | None = None) -> None:
    """Serve a shard until the process ends. figures: returns further status of a shard with remote workers."""
    gc.set_threshold(GC_OBJECTS)
    decoder = msgpack_decoder(ShardSettings)
    serve(
        service,
        shard.server,
        status=shard.status if figures is None else lambda: {**shard.status(), **figures()},
        poll=shard.poll,
        apply_settings=lambda settings: shard.apply_settings(decoder.decode(settings)),
        leave=(lambda: None) if figures is None else _leave,
    )
