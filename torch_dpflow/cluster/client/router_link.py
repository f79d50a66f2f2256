"""A job's side of its router: joins, draws and renews its lease, across restarts of the router."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from torch_dpflow._core.backoff import Backoff
from torch_dpflow._core.processes import has_ended, own_process
from torch_dpflow._core.threads import StopSignal
from torch_dpflow.cluster.client.delivery import Marks, mark
from torch_dpflow.cluster.client.options import Failover, JobDescription
from torch_dpflow.cluster.client.outage_log import OutageLog
from torch_dpflow.cluster.control.routing import RouteMap
from torch_dpflow.cluster.messages.coordinator import Access, Cost, CostRequest
from torch_dpflow.cluster.messages.node import ProcessView
from torch_dpflow.cluster.messages.router import (
    DrawSamples,
    EpochPlace,
    JobFigures,
    JobHeartbeat,
    JobHeartbeatReply,
    JobId,
    Join,
    Joined,
    NameHolder,
    ReportOrder,
    RoutingTable,
    StartEpoch,
)
from torch_dpflow.cluster.security.connection_file import Cluster
from torch_dpflow.errors import (
    DeadlineError,
    ErrorKind,
    OptionError,
    PeerLostError,
    RemoteCallError,
    UsageError,
)
from torch_dpflow.ipc.rpc import RpcClient
from torch_dpflow.samplers.indices import CompactArray, IndexArray, compact

T = TypeVar("T")
#: How long one call to a router may take before the job asks the coordinator for the router's address, seconds.
CALL_S = 5.0
#: The same for joining, which waits until every shard has registered, seconds.
JOIN_S = 20.0
#: The timeout of a call that has little patience left, seconds.
MIN_CALL_S = 0.5
#: The longest pauses between attempts, after the first and after many, seconds.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 0.5
#: How often the cost is asked for at most, how long an answer is waited for, and how long after one that has not
#: come it is asked for again, seconds: a coordinator may be away while jobs read.
COST_S, COST_CALL_S, COST_PAUSE_S = 1.0, 1.0, 30.0
#: How long an error of a sample waits for how its workers ended, seconds, and of how many workers it tells.
ENDS_CALL_S, MAX_ENDS = 2.0, 3
#: Errors after which the same call is tried again.
_TRANSIENT = (ErrorKind.FORGOTTEN, ErrorKind.OVERLOADED)


@dataclass(slots=True)
class _EpochAtRouter:
    """What has been drawn of an epoch."""

    number: int
    #: A bit for each sample, set where it has been drawn; and how many of them are set.
    drawn: Marks
    position: int

    @property
    def place(self) -> EpochPlace:
        return EpochPlace(self.number, self.position)


class RouterLink:
    """One job's connection to its flow's router. Any thread may call.

    A call is repeated for up to `reconnect_timeout_s`, also across restarts of the router and the coordinator. If
    another cluster has replaced the one that was joined, the call is repeated there. A restarted router gets all that it knew of
    the jobs from them, as they join.

    Args:
        cluster: has the coordinator.
        job: who joins.
        reconnect_timeout_s: how long a call is tried, seconds.
        failover: finds a cluster that has replaced the present one; None: no other cluster is tried.

    Raises:
        UsageError: the router or the coordinator refuses the job; the message has the reason.
        RemoteCallError: one of them fails over a call repeatedly.
        DeadlineError: they do not answer.
    """

    def __init__(
        self,
        cluster: Cluster,
        job: JobDescription,
        *,
        reconnect_timeout_s: float,
        failover: Failover | None = None,
    ) -> None:
        #: The one that was joined.
        self.cluster = cluster
        self.outages = OutageLog(job.flow, job.name, reconnect_timeout_s=reconnect_timeout_s)
        self._failover = failover
        self._job = job
        self._patience_s = reconnect_timeout_s
        #: When the present call gives up.
        self._deadline = 0.0
        # Tells the router this process from another one that uses the job's name.
        self._holder = secrets.randbits(63)
        # By the process, a later one of its host can tell that this one has ended, and take its name over.
        self._process = own_process()
        #: The random number of a process with the job's name that has ended; 0: none is known.
        self._replaces = 0
        self._generation = 0
        self._lock = threading.RLock()
        self._coordinator: RpcClient | None = None
        self._router: RpcClient | None = None
        #: The router's latest address; empty before it is known.
        self._address = ""
        #: The epoch that is being drawn, the one before, and whether the router knows this job's position in them.
        self._epoch: _EpochAtRouter | None = None
        self._before: _EpochAtRouter | None = None
        self._router_in_step = False
        #: Whether nothing of any epoch was read before the one that is being drawn.
        self._is_fresh = False
        #: An epoch that the job's own sampler orders, and what is left of its order.
        self._announced: tuple[int, CompactArray] | None = None
        #: What keeps the flow's jobs from reading faster, as its services say; empty: nothing that is known.
        self.limited_by = ""
        #: What the flow's workers have taken, and when the coordinator was asked for that.
        self.cost = Cost(0.0, 0.0)
        self._cost_requested_at = -math.inf
        #: Samples of an epoch, and the routing table.
        self.length = 0
        self.routes: RouteMap
        try:
            self._attempt(self._connected)
        except BaseException:
            self.close()
            raise

    @property
    def id(self) -> JobId:
        """The job's present id at the services."""
        rank = self._job.rank
        return JobId(self._job.reader, self._generation, self._job.instance, "" if rank is None else rank.job)

    def start_epoch(self, epoch: int, drawn: Marks, position: int, *, resumes: bool = False) -> None:
        """Begin to draw an epoch, of which the marked samples, `position` in all, have been drawn.

        resumes: whether it goes on from a saved state, which may be of its beginning.
        """
        with self._lock:
            self._is_fresh = self._epoch is None and not resumes
            self._before, self._announced = self._epoch, None
            self._epoch, self._router_in_step = _EpochAtRouter(epoch, drawn, position), False
            self._attempt(self._in_epoch)

    def announce(self, epoch: int, order: IndexArray) -> None:
        """Report what is left of an epoch whose order the job's own sampler decides, for the shards' caches."""
        with self._lock:
            self._announced = epoch, order.astype(compact(self._job.size))
            self._attempt(lambda: self._announce(self._connected()))

    def draw(self, count: int, given_up: StopSignal) -> IndexArray:
        """The next samples of the epoch, at most `count`; empty at its end. PeerLostError once it is given up."""
        with self._lock:
            return self._attempt(lambda: self._draw(count), given_up)

    def rejoin(self, stale: int, given_up: StopSignal | None = None, deadline: float | None = None) -> None:
        """Join again under a new generation, unless another thread has done so since generation `stale`.

        given_up: as for `draw`. deadline: when to give up, by `time.monotonic`; None: after `reconnect_timeout_s`.
        """
        with self._lock:
            if self._generation == stale:
                self._generation = 0
                # Even with nothing left to draw: other ranks may wait for this one's position.
                mend = self._connected if self._epoch is None else self._in_epoch
                self._attempt(mend, given_up, deadline)

    def refresh_routes(self, given_up: StopSignal | None = None, deadline: float | None = None) -> None:
        """Get the present routing table. Arguments as for `rejoin`."""
        with self._lock:
            self._attempt(self._refresh, given_up, deadline)

    def send_heartbeat(self, figures: JobFigures, *, reads: bool) -> None:
        """Renew the lease, report the job's figures, and get a new routing table where there is one.

        reads: whether the job is in the middle of an epoch. Between two it needs no services, which may be stopped
            then in favour of another flow: that they do not answer is not logged.

        One attempt; raises its error.
        """
        router = self._router
        if router is None:
            raise PeerLostError("the job has been closed")
        heartbeat = JobHeartbeat(self.id, figures, reads)
        try:
            reply: JobHeartbeatReply = router.call(
                "heartbeat", heartbeat, reply_type=JobHeartbeatReply, timeout_s=min(CALL_S, self._patience_s)
            ).body
        except (DeadlineError, PeerLostError) as error:
            self.outages.on_no_answer(error, quietly=not reads)
            raise
        self.outages.on_answer()
        self.limited_by = reply.limited_by
        if reply.generation != self.routes.generation:
            self.refresh_routes()

    def look_at_cost(self, *, every_s: float = COST_S) -> None:
        """Ask for the cost, unless that was done shortly before; where nobody answers, it stays as it was."""
        coordinator, now = self._coordinator, time.monotonic()
        if coordinator is None or self.outages.is_out or now - self._cost_requested_at < every_s:
            return
        self._cost_requested_at = now
        request = CostRequest(self._job.instance, self._job.reader)
        try:
            self.cost = coordinator.call("cost", request, reply_type=Cost, timeout_s=COST_CALL_S).body
        except (DeadlineError, PeerLostError, RemoteCallError):
            self._cost_requested_at = now + COST_PAUSE_S

    def how_workers_ended(self) -> str:
        """How the flow's workers have ended most lately, for people; empty where that is not known."""
        coordinator, mine = self._coordinator, f"{self._job.instance}/"
        if coordinator is None:
            return ""
        try:
            views = coordinator.call("processes", reply_type=list[ProcessView], timeout_s=ENDS_CALL_S).body
        except (DeadlineError, PeerLostError, RemoteCallError):
            return ""
        ends = [
            view.ended for view in views if view.ended and view.role == "worker" and view.id.startswith(mine)
        ]
        return "; ".join(dict.fromkeys(ends[:MAX_ENDS]))

    def interrupt(self) -> None:
        """Make the calls under way fail at once; the next ones connect again. Takes no lock."""
        for client in (self._router, self._coordinator):
            if client is not None:
                client.close()

    def close(self) -> None:
        """Leave, and disconnect. May be called twice."""
        router = self._router
        if router is not None and not self.outages.is_out:
            with suppress(DeadlineError, PeerLostError, RemoteCallError):  # the lease expires in any case
                router.call("leave", self.id, timeout_s=1.0)
        self._disconnect()

    # -- with the lock held ------------------------------------------------------------------------------

    def _attempt(
        self,
        call: Callable[[], T],
        given_up: StopSignal | None = None,
        deadline: float | None = None,
    ) -> T:
        """Repeat a call until it succeeds; each attempt first refreshes what the one before found out of date."""
        deadline = time.monotonic() + self._patience_s if deadline is None else deadline
        self._deadline = deadline
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        faults = 0
        if self.outages.is_out:
            self._disconnect()  # the router may have moved: another call to its old address would time out again
            self._look_for_cluster()
        given_up = given_up or StopSignal()
        while not given_up.is_set():
            try:
                result = call()
            except RemoteCallError as error:
                faults += error.kind is ErrorKind.INTERNAL
                self._note(error, deadline, faults)
                if error.kind is ErrorKind.RANKS_AWAITED:  # they may take as long as they like
                    self._deadline = deadline = max(deadline, time.monotonic() + self._patience_s)
            except (DeadlineError, PeerLostError) as error:
                self.outages.on_no_answer(error)
                if time.monotonic() >= deadline:
                    raise self.outages.deadline_error(error) from error
                self._disconnect()
                self._look_for_cluster()
            else:
                self.outages.on_success()
                return result
            given_up.wait(backoff.pause_s())
        raise PeerLostError("the epoch was given up while its router was asked")

    def _note(self, error: RemoteCallError, deadline: float, faults: int) -> None:
        """Note what the error shows to be out of date; raise an error that no retry can help."""
        self.outages.on_answer()
        match error.kind:
            case ErrorKind.STALE_JOB:
                self._generation = 0
            case ErrorKind.MISDIRECTED:
                self._leave_for_another()
            case ErrorKind.OUT_OF_STEP:
                self._router_in_step = False
            case ErrorKind.NAME_BUSY:
                self._replaces = self._ended_holder()
                self.outages.on_wait(error.text)
            case ErrorKind.UNKNOWN_FLOW if self._failover is not None:
                # A cluster that has lost its state listens at the address of ours.
                self._register_with(self.cluster)
            case ErrorKind.INTERNAL:
                # Every call of a job to its router or coordinator is safe to repeat.
                self.outages.on_fault(error, faults)
            case ErrorKind.USAGE | ErrorKind.UNKNOWN_FLOW:
                raise UsageError(error.text) from error
            case ErrorKind.RANKS_AWAITED:
                self.outages.on_wait(error.text, limit="for as long as they take")
                return
            case kind if kind in _TRANSIENT:
                self.outages.on_wait(error.text)
            case _:
                raise error
        if time.monotonic() > deadline:
            raise UsageError(f"{error.text} (waited {self._patience_s:g} s)") from error

    def _look_for_cluster(self) -> None:
        """Move to the cluster that has replaced ours, if one has: it knows neither the flow nor the job."""
        found = None if self._failover is None else self._failover.find()
        if self._failover is None or found is None or found == self.cluster:
            return
        self._register_with(found)

    def _register_with(self, cluster: Cluster) -> None:
        """Register the flow with this cluster and move there."""
        assert self._failover is not None
        with suppress(DeadlineError, PeerLostError, RemoteCallError):  # the next attempt tries again
            if self._failover.register(cluster, self._call_s):
                self.cluster = cluster
                self._leave_for_another()

    def _leave_for_another(self) -> None:
        """Locate the router again, which does not know the job."""
        self._disconnect()
        self._address, self._generation = "", 0

    def _connected(self) -> RpcClient:
        """The router, once the job has joined."""
        if self._router is None:
            self._address = self._locate()
            self._router = self.cluster.connect(self._address, timeout_s=CALL_S)
        if not self._generation:
            self._join(self._router)
        return self._router

    def _locate(self) -> str:
        """The router's address by the coordinator, or its latest one where the coordinator does not answer.

        A service restarts at its old address, so a job that reads need not wait for a coordinator.
        """
        access = Access(self._job.flow, self._job.version)
        if self._coordinator is None:
            self._coordinator = self.cluster.connect(timeout_s=self._patience_s)
        try:
            address: str = self._coordinator.call(
                "access", access, reply_type=str, timeout_s=self._call_s
            ).body
        except (DeadlineError, PeerLostError):
            if not self._address:
                raise
            return self._address
        return address

    def _ended_holder(self) -> int:
        """The random number of the process that has the job's name, if it has ended on this host; else 0."""
        router = self._router
        if router is not None:
            with suppress(DeadlineError, PeerLostError, RemoteCallError):  # the next attempt asks again
                name = self._job.reader
                found: NameHolder = router.call(
                    "holder", name, reply_type=NameHolder, timeout_s=self._call_s
                ).body
                return found.holder if has_ended(found.process) else 0
        return 0

    def _in_epoch(self) -> RpcClient:
        """The router, once it knows the job's position in its epoch."""
        router = self._connected()
        if not self._router_in_step:
            self._start(router)
        return router

    @property
    def _call_s(self) -> float:
        """The timeout of a call of this attempt."""
        return min(CALL_S, max(MIN_CALL_S, self._deadline - time.monotonic()))

    def _disconnect(self) -> None:
        """Forget the connections to router and coordinator, which may have moved."""
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
        )
        frames = [] if indices is None else [np.ascontiguousarray(indices, np.int64).tobytes()]
        timeout_s = min(JOIN_S, self._patience_s)
        joined: Joined = router.call("join", body, frames, reply_type=Joined, timeout_s=timeout_s).body
        self._generation, self._router_in_step = joined.generation, False
        self.length = joined.length
        self._take_routes(joined.table)
        if self._announced is not None:
            self._announce(router)

    def _announce(self, router: RpcClient) -> None:
        assert self._announced is not None
        epoch, order = self._announced
        router.call("announce", ReportOrder(self.id, epoch), [order.tobytes()], timeout_s=self._call_s)

    def _start(self, router: RpcClient) -> None:
        assert self._epoch is not None
        epochs = [self._epoch]
        # Ranks that are still in the epoch before can go on only when the router knows what this one had of it.
        if (
            self._before is not None
            and self._job.rank is not None
            and self._before.number < self._epoch.number
        ):
            epochs.append(self._before)
        fresh = self._is_fresh and not self._epoch.position
        body = StartEpoch(self.id, [epoch.place for epoch in epochs], fresh)
        frames = [epoch.drawn.tobytes() for epoch in epochs]
        router.call("start", body, frames, timeout_s=self._call_s)
        self._router_in_step = True

    def _draw(self, count: int) -> IndexArray:
        epoch = self._epoch
        assert epoch is not None
        if epoch.position == self.length:
            return np.empty(0, np.int64)
        router = self._in_epoch()
        draw = DrawSamples(self.id, epoch.number, epoch.position, count)
        answer = router.call("draw", draw, timeout_s=self._call_s)
        drawn = np.frombuffer(answer.frames[0], np.int64)
        mark(epoch.drawn, drawn)
        epoch.position += len(drawn)
        return drawn

    def _refresh(self) -> None:
        router = self._connected()
        self._take_routes(router.call("table", reply_type=RoutingTable, timeout_s=self._call_s).body)

    def _take_routes(self, table: RoutingTable) -> None:
        try:
            self.routes = RouteMap(table)
        except OptionError as error:
            raise PeerLostError(f"flow {self._job.flow!r} has no shards at the moment ({error})") from error
