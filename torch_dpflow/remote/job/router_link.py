"""A job's side of its router: joining, drawing, staying known, whatever becomes of the router."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from torch_dpflow.backoff import Backoff
from torch_dpflow.errors import (
    DeadlineError,
    ErrorKind,
    OptionError,
    PeerLostError,
    RemoteCallError,
    UsageError,
)
from torch_dpflow.remote.access.cluster_address import Cluster
from torch_dpflow.remote.job.epoch_cursor import Marks, mark
from torch_dpflow.remote.job.job_description import Home, JobDescription
from torch_dpflow.remote.job.outage_log import Contact
from torch_dpflow.remote.job.route_map import RouteMap
from torch_dpflow.remote.job.stop_signal import StopSignal
from torch_dpflow.remote.rpc import RpcClient
from torch_dpflow.remote.wire.coordinator import Access
from torch_dpflow.remote.wire.router import (
    DrawSamples,
    EpochPlace,
    JobBeat,
    JobFigures,
    JobId,
    Join,
    Joined,
    RoutingTable,
    StartEpoch,
)
from torch_dpflow.samplers.indices import IndexArray

T = TypeVar("T")
#: How long one call to a router may take before the coordinator is asked where the router is now, seconds.
CALL_S = 5.0
#: The same for joining, which waits until every shard is there, seconds.
JOIN_S = 20.0
#: The least that it may take, however little patience is left, seconds.
LEAST_CALL_S = 0.5
#: The longest pauses between attempts, after the first and after many, seconds.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 0.5
#: What time mends.
_PASSING = (ErrorKind.NAME_BUSY, ErrorKind.RANKS_AWAITED, ErrorKind.FORGOTTEN, ErrorKind.OVERLOADED)


@dataclass(slots=True)
class _EpochAtRouter:
    """What has been drawn of an epoch."""

    number: int
    #: Which samples, one bit each; and how many.
    drawn: Marks
    position: int

    @property
    def place(self) -> EpochPlace:
        return EpochPlace(self.number, self.position)


class RouterLink:
    """One job's connection to its flow's router. Any thread may call.

    Every call goes on through the restart of the router and of the coordinator, for up to `patience_s`; where
    another cluster has come in the place of the one that was joined, it goes on there.

    Args:
        cluster: where the coordinator is.
        job: who joins.
        patience_s: how long a call tries, seconds.
        home: where to look for a cluster that has come in the place of the one before; None: nowhere.

    Raises:
        UsageError: the router or the coordinator refuses the job, and says why.
        RemoteCallError: one of them fails over a call, again and again.
        DeadlineError: they do not answer.
    """

    def __init__(
        self,
        cluster: Cluster,
        job: JobDescription,
        *,
        patience_s: float,
        home: Home | None = None,
    ) -> None:
        #: The one that was joined.
        self.cluster = cluster
        self.contact = Contact(job.flow, job.name, patience_s=patience_s)
        self._home = home
        self._job = job
        self._patience_s = patience_s
        #: Until when the attempt goes that is made now.
        self._deadline = 0.0
        self._holder = secrets.randbits(63)
        self._generation = 0
        self._lock = threading.RLock()
        self._coordinator: RpcClient | None = None
        self._router: RpcClient | None = None
        #: Where it was last; empty before it was found.
        self._address = ""
        #: The epoch that is drawn, the one before, and whether the router has been told where we are.
        self._epoch: _EpochAtRouter | None = None
        self._before: _EpochAtRouter | None = None
        self._told = False
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
        """By what services know the job now."""
        return JobId(self._job.reader, self._generation, self._job.instance)

    def start_epoch(self, epoch: int, drawn: Marks, position: int) -> None:
        """Begin to draw an epoch, of which the marked samples, in `position` places, have been drawn."""
        with self._lock:
            self._before = self._epoch
            self._epoch, self._told = _EpochAtRouter(epoch, drawn, position), False
            self._attempt(self._in_epoch)

    def draw(self, count: int, given_up: StopSignal) -> IndexArray:
        """The next samples of the epoch, at most `count`; empty at its end. PeerLostError once it is given up."""
        with self._lock:
            return self._attempt(lambda: self._draw(count), given_up)

    def rejoin(self, stale: int, given_up: StopSignal | None = None, deadline: float | None = None) -> None:
        """Come back under a new generation, unless another thread has since `stale` was found out of date.

        given_up: as for `draw`. deadline: until when to try, by `time.monotonic`; None: for `patience_s`.
        """
        with self._lock:
            if self._generation == stale:
                self._generation = 0
                # Other ranks may wait to hear where this one is, also where it has nothing left to draw.
                mend = self._connected if self._epoch is None else self._in_epoch
                self._attempt(mend, given_up, deadline)

    def refresh_routes(self, given_up: StopSignal | None = None, deadline: float | None = None) -> None:
        """Get the routing table that is in force. Arguments as for `rejoin`."""
        with self._lock:
            self._attempt(self._refresh, given_up, deadline)

    def beat(self, figures: JobFigures) -> None:
        """Stay known, tell how the job does, and hear of a new routing table.

        One attempt; raises what it meets with.
        """
        router = self._router
        if router is None:
            raise PeerLostError("the job has been closed")
        beat = JobBeat(self.id, figures)
        try:
            generation: int = router.call(
                "beat", beat, reply_type=int, timeout_s=min(CALL_S, self._patience_s)
            ).body
        except (DeadlineError, PeerLostError) as error:
            self.contact.missed(error)
            raise
        self.contact.heard()
        if generation != self.routes.generation:
            self.refresh_routes()

    def interrupt(self) -> None:
        """Make the calls that are under way fail at once; the next ones connect anew. Without the lock."""
        for client in (self._router, self._coordinator):
            if client is not None:
                client.close()

    def close(self) -> None:
        """Leave, and disconnect. May be called twice."""
        router = self._router
        if router is not None and not self.contact.is_lost:
            with suppress(DeadlineError, PeerLostError, RemoteCallError):  # else its lease lapses
                router.call("leave", self.id, timeout_s=1.0)
        self._disconnect()

    # -- with the lock held ------------------------------------------------------------------------------

    def _attempt(
        self,
        call: Callable[[], T],
        given_up: StopSignal | None = None,
        deadline: float | None = None,
    ) -> T:
        """Make a call until it succeeds; what it finds out of date, the next attempt mends first."""
        deadline = time.monotonic() + self._patience_s if deadline is None else deadline
        self._deadline = deadline
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        faults = 0
        if self.contact.is_lost:
            self._disconnect()  # the router may be elsewhere: to ask it once more would take as long again
            self._look_for_cluster()
        while given_up is None or not given_up.is_set():
            try:
                result = call()
            except RemoteCallError as error:
                faults += error.kind is ErrorKind.INTERNAL
                self._note(error, deadline, faults)
            except (DeadlineError, PeerLostError) as error:
                self.contact.missed(error)
                if time.monotonic() >= deadline:
                    raise self.contact.given_up(error) from error
                self._disconnect()
                self._look_for_cluster()
            else:
                self.contact.served()
                return result
            if given_up is None:
                time.sleep(backoff.pause_s())
            else:
                given_up.wait(backoff.pause_s())
        raise PeerLostError("the epoch was given up while its router was asked")

    def _note(self, error: RemoteCallError, deadline: float, faults: int) -> None:
        """Take down what a refusal finds out of date; raise what nothing mends."""
        self.contact.heard()
        match error.kind:
            case ErrorKind.STALE_JOB:
                self._generation = 0
            case ErrorKind.MISDIRECTED:
                self._leave_for_another()
            case ErrorKind.OUT_OF_STEP:
                self._told = False
            case ErrorKind.UNKNOWN_FLOW if self._home is not None:
                # A cluster has started anew where ours was, and kept nothing.
                self._register_with(self.cluster)
            case ErrorKind.INTERNAL:
                # Every call of a job to its router or coordinator may be made twice.
                self.contact.failed(error, faults)
            case ErrorKind.USAGE | ErrorKind.UNKNOWN_FLOW:
                raise UsageError(error.text) from error
            case kind if kind in _PASSING:
                self.contact.put_off(error.text)
            case _:
                raise error
        if time.monotonic() > deadline:
            raise UsageError(f"{error.text} (waited {self._patience_s:g} s)") from error

    def _look_for_cluster(self) -> None:
        """Go to the cluster that has come in the place of ours, if one has: it knows neither flow nor job."""
        found = None if self._home is None else self._home.find()
        if self._home is None or found is None or found == self.cluster:
            return
        self._register_with(found)

    def _register_with(self, cluster: Cluster) -> None:
        """Go on at this cluster, which does not know the flow."""
        assert self._home is not None
        with suppress(DeadlineError, PeerLostError, RemoteCallError):  # else it is tried again
            self._home.register(cluster, self._call_s)
            self.cluster = cluster
            self._leave_for_another()

    def _leave_for_another(self) -> None:
        """The router is to be looked for, and does not know the job."""
        self._disconnect()
        self._address, self._generation = "", 0

    def _connected(self) -> RpcClient:
        """The router, which the job has joined."""
        if self._router is None:
            self._address = self._locate()
            self._router = self.cluster.connect(self._address, timeout_s=CALL_S)
        if not self._generation:
            self._join(self._router)
        return self._router

    def _locate(self) -> str:
        """Where the coordinator says that the router is; where it was, if the coordinator is away too.

        Services come back where they were, and a job that reads is not to wait for a coordinator.
        """
        access = Access(self._job.flow, self._job.version)
        timeout_s = self._call_s if self._address else self._patience_s
        if self._coordinator is None:
            self._coordinator = self.cluster.connect(timeout_s=self._patience_s)
        try:
            address: str = self._coordinator.call("access", access, reply_type=str, timeout_s=timeout_s).body
        except (DeadlineError, PeerLostError):
            if not self._address:
                raise
            return self._address
        return address

    def _in_epoch(self) -> RpcClient:
        """The router, which knows where the job is in its epoch."""
        router = self._connected()
        if not self._told:
            self._start(router)
        return router

    @property
    def _call_s(self) -> float:
        """How long a call of this attempt may take."""
        return min(CALL_S, max(LEAST_CALL_S, self._deadline - time.monotonic()))

    def _disconnect(self) -> None:
        """Router and coordinator may be elsewhere by now."""
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
        )
        frames = [] if indices is None else [np.ascontiguousarray(indices, np.int64).tobytes()]
        timeout_s = min(JOIN_S, self._patience_s)
        joined: Joined = router.call("join", body, frames, reply_type=Joined, timeout_s=timeout_s).body
        self._generation, self._told = joined.generation, False
        self.length = joined.length
        self._take_routes(joined.table)

    def _start(self, router: RpcClient) -> None:
        assert self._epoch is not None
        epochs = [self._epoch]
        # What other ranks have left of the epoch before can be told only with what this one had of it.
        if (
            self._before is not None
            and self._job.rank is not None
            and self._before.number < self._epoch.number
        ):
            epochs.append(self._before)
        body = StartEpoch(self.id, [epoch.place for epoch in epochs])
        frames = [epoch.drawn.tobytes() for epoch in epochs]
        router.call("start", body, frames, timeout_s=self._call_s)
        self._told = True

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
