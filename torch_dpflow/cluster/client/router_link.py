"""Client connection to a flow's router: joins, draws samples and renews the lease, across restarts of the router."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import numpy as np

from torch_dpflow._core.backoff import Backoff
from torch_dpflow._core.clocks import LEASE_S
from torch_dpflow._core.processes import has_ended, own_process
from torch_dpflow._core.threads import StopSignal
from torch_dpflow.cluster.client.epoch_cursor import DrawnEpoch, EpochCursor, Marks
from torch_dpflow.cluster.client.inquiries import FlowInquiries
from torch_dpflow.cluster.client.options import Failover, JobDescription
from torch_dpflow.cluster.client.outage_log import FIRST_PAUSE_S, LONGEST_PAUSE_S, MIN_CALL_S, OutageLog
from torch_dpflow.cluster.control.routing import RouteMap
from torch_dpflow.cluster.messages.coordinator import Access
from torch_dpflow.cluster.messages.router import (
    DrawSamples,
    JobFigures,
    JobHeartbeat,
    JobHeartbeatReply,
    JobId,
    Join,
    Joined,
    NameHolder,
    ReadByAll,
    ReportOrder,
    RoutingTable,
    StartEpoch,
)
from torch_dpflow.cluster.security.connection_file import Cluster
from torch_dpflow.errors import DeadlineError, ErrorKind, OptionError, PeerLostError, RemoteCallError, UsageError
from torch_dpflow.ipc.messages.fields import MAX_RANKS
from torch_dpflow.ipc.rpc import RpcClient
from torch_dpflow.samplers.indices import CompactArray, IndexArray, compact, mark

T = TypeVar("T")
#: Timeout of a call to a router (seconds); then the job gets the router's address from the coordinator again.
CALL_S = LEASE_S
#: Timeout of joining, which waits until every shard has registered (seconds).
JOIN_S = 20.0
#: Timeout of leaving a router or a shard (seconds).
LEAVE_S = 0.5
#: How long `read_by_all` repeats its request without an answer (seconds).
READ_BY_ALL_S = 3.0


class RouterLink:
    """Connection of one job to its flow's router. Any thread may call.

    Most calls are repeated for up to `reconnect_timeout_s`, even across restarts of the router and the coordinator, and
    without a limit while other ranks are awaited. If another cluster has replaced the joined one, calls go there.

    Args:
        failover: finds a cluster that has replaced the present cluster; None: no other cluster is tried.
        closed: signal that ends repetition, with UsageError. Use `interrupt` to end running calls.

    Raises:
        UsageError: the router or the coordinator rejects the job; the message contains the reason.
        RemoteCallError: a call fails repeatedly in the router or the coordinator.
        DeadlineError: the router or the coordinator does not answer.
    """

    def __init__(
        self,
        cluster: Cluster,
        job: JobDescription,
        *,
        reconnect_timeout_s: float,
        failover: Failover | None = None,
        closed: StopSignal | None = None,
    ) -> None:
        self._closed = closed or StopSignal()
        self.cluster = cluster
        self.outages = OutageLog(job.flow, job.name, reconnect_timeout_s=reconnect_timeout_s)
        self._failover = failover
        self._job = job
        self._timeout_s = reconnect_timeout_s
        #: Deadline of the present call.
        self._deadline = 0.0
        #: Distinguishes this process from others that use the job's name.
        self._holder = secrets.randbits(63)
        #: Identity by which a later process of this host detects that this one has ended, and takes over its name.
        self._process = own_process()
        #: The `_holder` of each process of the job that is known to have ended.
        self._replaces: list[int] = []
        #: Latest generation of this process's `JobId`, and whether the process has to join again.
        self._generation, self._is_stale = 0, True
        #: Not held during pauses between attempts: other ranks may be awaited for any time, and heartbeats must go on.
        self._lock = threading.Lock()
        self._coordinator: RpcClient | None = None
        self._router: RpcClient | None = None
        #: The router's latest address; empty before it is known.
        self._address = ""
        #: The present epoch, the one before, and whether the router knows this job's position in them.
        self._epoch: DrawnEpoch | None = None
        self._before: DrawnEpoch | None = None
        self._router_in_step = False
        #: Whether nothing was read of any epoch before the present one.
        self._is_fresh = False
        #: Epoch whose order the job's own sampler has decided, and this order.
        self._announced: tuple[int, CompactArray] | None = None
        #: Name of what limits the flow's jobs, as in `FlowView`; empty if not known.
        self.limited_by = ""
        #: Number of jobs that have read the flow; 0 before it is known.
        self.jobs = 0
        self.inquiries = FlowInquiries(job, lambda: None if self.outages.is_out else self._coordinator)
        #: Number of samples of an epoch; for a rank, of its part.
        self.length = 0
        self.routes: RouteMap
        try:
            with self._lock:
                self._attempt(self._connected)
        except BaseException:
            self.close()
            raise

    @property
    def id(self) -> JobId:
        """Id under which this process is known to the router and the shards; it changes when the job joins again."""
        rank = self._job.rank
        return JobId(self._job.reader, self._generation, self._job.instance, "" if rank is None else rank.job)

    def start_epoch(self, at: EpochCursor, *, resumes: bool = False) -> None:
        """Begin an epoch at this position, and report it to the router. resumes: the position is of a saved state."""
        with self._lock:
            self._is_fresh = self._epoch is None and not resumes
            self._before, self._announced = self._epoch, None
            self._epoch = at.drawn()
            self._router_in_step = False
            self._attempt(self._in_epoch)

    def announce(self, epoch: int, order: IndexArray) -> None:
        """Send the router an epoch's order that the job's own sampler has decided, for the shards' caches."""
        with self._lock:
            self._announced = epoch, order.astype(compact(self._job.size))
            self._attempt(lambda: self._announce(self._connected()))

    def draw(self, count: int, given_up: StopSignal) -> IndexArray:
        """Draw up to `count` samples; none at the epoch's end. Among its errors: PeerLostError if `given_up` is set."""
        with self._lock:
            epoch = self._epoch
            assert epoch is not None
            return self._attempt(lambda: self._draw(epoch, count), given_up)

    @property
    def is_replaced(self) -> bool:
        """Whether the job's address now names a cluster that is not the joined one."""
        found = None if self._failover is None else self._failover.find()
        return found not in (None, self.cluster)

    @property
    def in_order(self) -> int:
        """Number of samples at the epoch's start whose order follows from seed and epoch alone."""
        return 0 if self._epoch is None else self._epoch.in_order

    def read_by_all(self, epoch: int, position: int) -> Marks | None:
        """Return bits of the samples that all ranks have read when each has read `position` samples; None if not known.

        Waits at most `READ_BY_ALL_S`, and never for the calls of other threads.
        """
        deadline = time.monotonic() + READ_BY_ALL_S
        while (left_s := deadline - time.monotonic()) > 0 and not self.outages.is_out:
            router = self._router
            with suppress(DeadlineError, PeerLostError, RemoteCallError):
                if router is not None:
                    answer = router.call("read_by_all", ReadByAll(self.id, epoch, position), timeout_s=left_s)
                    return np.array(np.frombuffer(answer.frames[0], np.uint8)) if answer.frames else None
            time.sleep(FIRST_PAUSE_S)
        return None

    def rejoin(self, stale: int, given_up: StopSignal | None = None, deadline: float | None = None) -> None:
        """Join again under a new generation. Do nothing if the present generation is no longer `stale`.

        given_up: as in `draw`. deadline: end of attempts, by `time.monotonic`; None: after `reconnect_timeout_s`.
        """
        with self._lock:
            if self._generation == stale:
                self._is_stale = True
                self._attempt(self._in_step, given_up, deadline)

    def refresh_routes(self, given_up: StopSignal | None = None, deadline: float | None = None) -> None:
        """Fetch the present routing table into `routes`. Arguments as for `rejoin`."""
        with self._lock:
            self._attempt(lambda: self._fetch_routes(self._in_step(), self._call_s), given_up, deadline)

    def send_heartbeat(self, figures: JobFigures, *, reads: bool) -> None:
        """Renew the lease, report the job's figures, and fetch the routing table if it has changed.

        Repeats no call, and never waits for the calls of other threads.

        reads: whether the job is in the middle of an epoch. Between two epochs the flow's services may be stopped in
            favour of another flow, so a missing answer is not logged.

        Raises DPFlowError if the router is not connected, does not answer, or if the call fails there.
        """
        router = self._router
        if router is None:
            raise PeerLostError("the router is being located again")
        heartbeat = JobHeartbeat(self.id, figures, reads)
        try:
            reply: JobHeartbeatReply = router.call(
                "heartbeat", heartbeat, reply_type=JobHeartbeatReply, timeout_s=min(CALL_S, self._timeout_s)
            ).body
        except (DeadlineError, PeerLostError) as error:
            self.outages.on_no_answer(error, quietly=not reads)
            raise
        self.outages.on_answer()
        self.limited_by, self.jobs = reply.limited_by, reply.jobs
        if reply.generation != self.routes.generation:
            self._fetch_routes(router, min(CALL_S, self._timeout_s))

    def interrupt(self) -> None:
        """Close the connections: running calls fail at once, and later calls connect again. Takes no lock."""
        for client in (self._router, self._coordinator):
            if client is not None:
                client.close()

    def close(self) -> None:
        """Disconnect, and leave the flow first if its services answer. May be called twice."""
        router = self._router
        if router is not None and not self.outages.is_out:
            with suppress(DeadlineError, PeerLostError, RemoteCallError):  # the lease expires anyway
                router.call("leave", self.id, timeout_s=LEAVE_S)
        self._disconnect()

    # -- with the lock held ------------------------------------------------------------------------------

    def _attempt(self, call: Callable[[], T], given_up: StopSignal | None = None, deadline: float | None = None) -> T:
        """Repeat a call until it succeeds. Each attempt first refreshes what was out of date in the attempt before."""
        deadline = time.monotonic() + self._timeout_s if deadline is None else deadline
        backoff: Backoff | None = None
        faults = 0
        if self.outages.is_out:
            self._disconnect()  # the router may have moved: another call to its old address would time out again
            self._look_for_cluster()
        given_up = given_up or self._closed
        while not (given_up.is_set() or self._closed.is_set()):
            self._deadline = deadline
            try:
                result = call()
            except RemoteCallError as error:
                faults += error.kind is ErrorKind.INTERNAL
                self._mend(error, self.outages.on_error(error, faults), deadline)
                if error.kind is ErrorKind.RANKS_AWAITED:  # they may take as long as they like
                    deadline = max(deadline, time.monotonic() + self._timeout_s)
            except (DeadlineError, PeerLostError) as error:
                if given_up.is_set() or self._closed.is_set():
                    break  # `interrupt` has failed the call, and not an outage
                self.outages.on_no_answer(error)
                if time.monotonic() >= deadline:
                    raise self.outages.deadline_error(error) from error
                self._disconnect()
                self._look_for_cluster()
            else:
                self.outages.on_success()
                return result
            backoff = backoff or Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
            self._lock.release()
            try:
                given_up.wait(backoff.pause_s())
            finally:
                self._lock.acquire()
        if given_up.is_set() and given_up is not self._closed:
            raise PeerLostError("the epoch was abandoned during a call to its router")
        raise UsageError("its job was closed during a call to the router; open another job")

    def _mend(self, error: RemoteCallError, kind: ErrorKind | None, deadline: float) -> None:
        """Record, for the next attempt, what this error shows to be out of date."""
        match kind:
            case ErrorKind.STALE_JOB:
                self._is_stale = True
            case ErrorKind.MISDIRECTED:
                self._leave_for_another()
            case ErrorKind.OUT_OF_STEP:
                self._router_in_step = False
            case ErrorKind.NAME_BUSY:
                self._replaces = self._ended_holders()
            case ErrorKind.UNKNOWN_FLOW if self._failover is None:
                raise UsageError(error.text) from error
            case ErrorKind.UNKNOWN_FLOW:
                # A cluster that has lost its state listens at the address of ours.
                self._register_with(self.cluster)
        if time.monotonic() > deadline and kind is not ErrorKind.RANKS_AWAITED:
            raise UsageError(f"{error.text} (waited {self._timeout_s:g} s)") from error

    def _look_for_cluster(self) -> None:
        """Move to the cluster that has replaced ours, if there is one, and register flow and job there."""
        found = None if self._failover is None else self._failover.find()
        if found is not None and found != self.cluster:
            self._register_with(found)

    def _register_with(self, cluster: Cluster) -> None:
        assert self._failover is not None
        with suppress(DeadlineError, PeerLostError, RemoteCallError):  # the next attempt tries again
            if self._failover.register(cluster, self._call_s):
                self.cluster = cluster
                self._leave_for_another()

    def _leave_for_another(self) -> None:
        """Drop the connection: the next attempt locates the router again, and joins."""
        self._disconnect()
        self._address, self._generation, self._is_stale = "", 0, True

    def _connected(self) -> RpcClient:
        """Return the client of the router, after joining if necessary."""
        if self._router is None:
            self._router = self.cluster.connect(self._locate(), timeout_s=CALL_S)
        if self._is_stale:
            self._join(self._router)
        return self._router

    def _locate(self) -> str:
        """Return the router's address from the coordinator, or the last known address if the coordinator is silent.

        A service restarts at its old address, so a job that reads need not wait for a coordinator.
        """
        access = Access(self._job.flow, self._job.version)
        if self._coordinator is None:
            self._coordinator = self.cluster.connect(timeout_s=self._timeout_s)
        try:
            self._address = self._coordinator.call("access", access, reply_type=str, timeout_s=self._call_s).body
        except (DeadlineError, PeerLostError):
            if not self._address:
                raise
        return self._address

    def _ended_holders(self) -> list[int]:
        """Return the `_holder` of each process of the job that has ended on this host."""
        router, rank = self._router, self._job.rank
        if router is not None:
            with suppress(DeadlineError, PeerLostError, RemoteCallError):  # the next attempt requests it again
                name, kind = self._job.reader if rank is None else rank.job, list[NameHolder]
                found: list[NameHolder] = router.call("holders", name, reply_type=kind, timeout_s=self._call_s).body
                return [one.holder for one in found if has_ended(one.process)][:MAX_RANKS]
        return []

    def _in_step(self) -> RpcClient:
        """Return the client of the router, which knows the job's position in its epoch if the router draws one.

        A rank with nothing left to draw also reports its position: other ranks may wait for it.
        """
        return self._connected() if self._epoch is None else self._in_epoch()

    def _in_epoch(self) -> RpcClient:
        """Return the client of the router, after reporting the job's position in its epoch if necessary."""
        router = self._connected()
        if not self._router_in_step:
            self._start(router)
        return router

    @property
    def _call_s(self) -> float:
        return min(CALL_S, max(MIN_CALL_S, self._deadline - time.monotonic()))

    def _disconnect(self) -> None:
        self.interrupt()
        self._router = self._coordinator = None

    def _join(self, router: RpcClient) -> None:
        indices, rank = self._job.indices, self._job.rank
        body = Join(
            self._job.reader,
            self._job.instance,
            self._holder,
            self._job.seed,
            self._job.batch_size,
            rank,
            indices is not None,
            self._job.independence,
            self._job.weight,
            self._process,
            self._replaces,
            self._generation,
        )
        frames = [] if indices is None else [np.ascontiguousarray(indices, np.int64).tobytes()]
        timeout_s = min(JOIN_S, self._timeout_s)
        joined: Joined = router.call("join", body, frames, reply_type=Joined, timeout_s=timeout_s).body
        self._take_routes(joined.table)
        self._generation, self._is_stale, self._router_in_step = joined.generation, False, False
        self.length = joined.length
        if self._announced is not None:
            self._announce(router)

    def _announce(self, router: RpcClient) -> None:
        assert self._announced is not None
        epoch, order = self._announced
        router.call("announce", ReportOrder(self.id, epoch), [order.tobytes()], timeout_s=self._call_s)

    def _start(self, router: RpcClient) -> None:
        assert self._epoch is not None
        epochs = [self._epoch]
        # Ranks that are still in the epoch before can continue only when the router knows what this one had of it.
        before = None if self._job.rank is None else self._before
        if before is not None and before.number < self._epoch.number:
            epochs.append(before)
        fresh = self._is_fresh and not self._epoch.position
        body = StartEpoch(self.id, [epoch.place for epoch in epochs], fresh)
        frames = [frame for epoch in epochs for frame in epoch.frames()]
        router.call("start", body, frames, timeout_s=min(JOIN_S, self._timeout_s))
        self._router_in_step = True

    def _draw(self, epoch: DrawnEpoch, count: int) -> IndexArray:
        if self._epoch is not epoch:
            raise UsageError(f"epoch {epoch.number} was abandoned: the job has begun another one")
        if epoch.position == epoch.length:
            return np.empty(0, np.int64)
        router = self._in_epoch()
        draw = DrawSamples(self.id, epoch.number, epoch.position, count)
        answer = router.call("draw", draw, reply_type=int, timeout_s=self._call_s)
        epoch.in_order = max(epoch.in_order, answer.body)
        drawn = np.frombuffer(answer.frames[0], np.int64)
        mark(epoch.drawn, drawn)
        epoch.position += len(drawn)
        return drawn

    def _fetch_routes(self, router: RpcClient, timeout_s: float) -> None:
        self._take_routes(router.call("table", reply_type=RoutingTable, timeout_s=timeout_s).body)

    def _take_routes(self, table: RoutingTable) -> None:
        try:
            self.routes = RouteMap(table)
        except OptionError as error:
            raise PeerLostError(f"flow {self._job.flow!r}: no shards at the moment ({error})") from error
