"""The process of a sample shard: it registers with its router, and its node ends its workers."""

from __future__ import annotations

import queue
import threading
import time
from functools import partial

import msgspec

from torch_dpflow.backoff import Backoff
from torch_dpflow.errors import DPFlowError, ErrorKind, RemoteCallError
from torch_dpflow.log import SERVICE
from torch_dpflow.remote.process.locate import locate
from torch_dpflow.remote.process.serve import ask_in, serve
from torch_dpflow.remote.process.spec import ServiceSpec
from torch_dpflow.remote.process.suspend_aware_clock import SuspendAwareClock
from torch_dpflow.remote.rpc import RpcClient
from torch_dpflow.remote.shard.server import SampleShard
from torch_dpflow.remote.wire.node import Ending, ProcessView
from torch_dpflow.remote.wire.router import Enlist, RangeAssignment
from torch_dpflow.remote.wire.shard import ShardArguments, ShardSettings

#: How often a shard registers with its router, which is its heartbeat, seconds.
ENLIST_S = 1.0
#: How often a shard asks its node about workers whose end it cannot see, seconds.
WATCH_S = 1.0


class Enlistment:
    """A thread that keeps a shard in its router's table and assigns the shard its keys."""

    def __init__(self, service: ServiceSpec, shard: SampleShard, router: str) -> None:
        self._service = service
        self._shard = shard
        self._router = router
        #: The newest routing generation that the router has sent.
        self._generation = 0
        self._backoff = Backoff()
        threading.Thread(target=self._run, name="dpflow-enlist", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                self._keep(locate(self._service.place, self._router))
            except DPFlowError as error:
                if isinstance(error, RemoteCallError) and error.kind is ErrorKind.STALE_SHARD:
                    SERVICE.warning("shard replaced by another process (%s)", error)
                else:
                    SERVICE.warning("router does not answer (%s)", error)
            time.sleep(self._backoff.pause_s())

    def _keep(self, address: str) -> None:
        server = self._shard.server
        with self._service.place.connect(address, timeout_s=10.0) as router:
            while True:
                body = Enlist(
                    self._service.id,
                    self._service.incarnation,
                    server.address,
                    self._generation,
                    self._service.place.token,
                    self._shard.cache_samples,
                )
                range_: RangeAssignment = router.call("enlist", body, reply_type=RangeAssignment).body
                self._backoff.reset()
                self._generation = max(self._generation, range_.generation)
                server.post(lambda range_=range_: self._shard.assign(range_))  # type: ignore[misc]
                time.sleep(ENLIST_S)


class WorkerWatch:
    """A thread that has the node kill workers, and reports to the shard the ends that it cannot see itself."""

    # A pid means something within its host and pid namespace only. So the shard kills nothing: it names workers by
    # their number and incarnation, and only their node, which gave these out, signals processes.

    def __init__(self, service: ServiceSpec) -> None:
        self._service = service
        self._orders: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def end(self, worker: int, incarnation: int) -> None:
        """Have the node kill a worker, without waiting for it."""
        self._orders.put((worker, incarnation))

    def watch(self, shard: SampleShard) -> None:
        """Start the thread. To be called once."""
        threading.Thread(target=self._run, args=(shard,), name="dpflow-workers", daemon=True).start()

    def _run(self, shard: SampleShard) -> None:
        backoff = Backoff()
        with self._service.place.connect(self._service.place.node_address, timeout_s=10.0) as node:
            while True:
                try:
                    order = self._orders.get(timeout=WATCH_S)
                except queue.Empty:
                    order = None
                try:
                    if order is not None:
                        node.call("end", Ending(self._id_of(order[0]), order[1]))
                    self._report_ended(node, shard)
                    backoff.reset()
                except DPFlowError as error:
                    SERVICE.warning("node does not answer (%s)", error)
                    if order is not None:
                        self._orders.put(order)
                    time.sleep(backoff.pause_s())

    def _report_ended(self, node: RpcClient, shard: SampleShard) -> None:
        unwatched = ask_in(shard.server, lambda: shard.workers.unwatched)
        if not unwatched:
            return
        views: list[ProcessView] = node.call("processes", reply_type=list[ProcessView]).body
        running = {view.id: view.incarnation for view in views if view.runs}
        for worker, incarnation in unwatched.items():
            if running.get(self._id_of(worker)) != incarnation:
                shard.server.post(partial(shard.workers.ended, worker, incarnation))

    def _id_of(self, worker: int) -> str:
        return f"{self._service.id}/worker-{worker}"


def run(service: ServiceSpec) -> None:
    """Run a shard: the role of a node's process."""
    decoder = msgspec.msgpack.Decoder(ShardSettings)
    arguments = msgspec.msgpack.decode(service.arguments, type=ShardArguments)
    watch = WorkerWatch(service)
    shard = SampleShard(
        service.listen(),
        arguments.spec,
        decoder.decode(service.settings),
        token=service.place.token,
        end_worker=watch.end,
        clock=SuspendAwareClock(),
    )
    watch.watch(shard)
    Enlistment(service, shard, arguments.router)
    serve(
        service,
        shard.server,
        shard.status,
        shard.poll,
        settle=lambda settings: shard.apply_settings(decoder.decode(settings)),
    )
