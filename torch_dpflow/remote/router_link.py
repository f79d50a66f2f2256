"""A job's side of its router: joining, drawing, staying known, whatever becomes of the router."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from torch_dpflow.errors import DeadlineError, OptionError, PeerLostError, RemoteCallError, UsageError
from torch_dpflow.remote.cluster_address import Cluster
from torch_dpflow.remote.protocol import (
    Access,
    Draw,
    JobBeat,
    JobFigures,
    JobId,
    Join,
    Joined,
    RoutingTable,
    StartEpoch,
)
from torch_dpflow.remote.refusals import OutOfStepError, StaleJobError
from torch_dpflow.remote.routing import RouteMap
from torch_dpflow.remote.rpc import RpcClient
from torch_dpflow.samplers.indices import IndexArray

T = TypeVar("T")
#: How long one call to a router may take before the coordinator is asked where the router is now, seconds.
CALL_S = 5.0
#: The same for joining, which waits until every shard is there, seconds.
JOIN_S = 20.0
#: The pause between attempts, seconds.
PAUSE_S = 0.1


@dataclass(frozen=True, kw_only=True)
class JobDescription:
    """Who a job is, the same for as long as it lives."""

    flow: str
    version: int
    name: str
    seed: int
    batch_size: int
    #: Its samples; None: all of the flow.
    indices: IndexArray | None
    traverses: bool


class RouterLink:
    """One job's connection to its flow's router. Any thread may call.

    Every call goes on through the restart of the router and of the coordinator, for up to `patience_s`.

    Args:
        cluster: where the coordinator is.
        job: who joins.
        patience_s: how long a call tries, seconds; then it raises DeadlineError or PeerLostError.
        stream: that of a job which goes on, None for a new one.

    Raises:
        UsageError: the router or the coordinator refuses the job, and says why.
    """

    def __init__(
        self, cluster: Cluster, job: JobDescription, *, patience_s: float, stream: int | None = None
    ) -> None:
        self._cluster = cluster
        self._job = job
        self._patience_s = patience_s
        self._stream = stream
        self._generation = 0
        self._lock = threading.RLock()
        self._coordinator = cluster.connect(timeout_s=patience_s)
        self._router: RpcClient | None = None
        #: Where it was last; empty before it was found.
        self._address = ""
        self._epoch: int | None = None
        #: Which samples of the epoch have been drawn, one bit each; and how many.
        self._drawn: npt.NDArray[np.uint8] | None = None
        self._position = 0
        #: Whether the router has been told of the epoch, as far as is known.
        self._started = False
        #: Samples of an epoch, and the routing table.
        self.length = 0
        self.routes: RouteMap
        try:
            self._attempt(self._join)
        except BaseException:
            self.close()
            raise

    @property
    def id(self) -> JobId:
        """By what services know the job now."""
        return JobId(self._job.name, self._generation)

    @property
    def stream(self) -> int:
        """Which of the flow's jobs it is, for what is drawn by chance."""
        assert self._stream is not None
        return self._stream

    def start_epoch(self, epoch: int, drawn: npt.NDArray[np.uint8], position: int) -> None:
        """Begin to draw an epoch, of which the marked samples, `position` of them, have been drawn."""
        with self._lock:
            self._epoch, self._drawn, self._position = epoch, drawn, position
            self._started = False
            self._attempt(self._in_step)

    def draw(self, count: int) -> IndexArray:
        """The next samples of the epoch, at most `count`; empty at its end."""
        with self._lock:
            return self._attempt(lambda: self._draw(count))

    def rejoin(self, stale: int) -> None:
        """Come back under a new generation, unless another thread has since `stale` was found out of date."""
        with self._lock:
            if self._generation == stale:
                self._attempt(self._join)

    def refresh_routes(self) -> None:
        """Get the routing table that is in force."""
        with self._lock:
            self._attempt(self._refresh)

    def beat(self, figures: JobFigures) -> None:
        """Stay known, tell how the job does, and hear of a new routing table.

        One attempt; raises what it meets with.
        """
        router = self._router
        if router is None:
            raise PeerLostError("the job has been closed")
        beat = JobBeat(self.id, figures)
        generation: int = router.call("beat", beat, reply_type=int, timeout_s=CALL_S).body
        if generation != self.routes.generation:
            self.refresh_routes()

    def close(self) -> None:
        """Leave, and disconnect. May be called twice."""
        router, self._router = self._router, None
        if router is not None:
            with suppress(DeadlineError, PeerLostError, RemoteCallError):  # else its lease lapses
                router.call("leave", self.id, timeout_s=1.0)
            router.close()
        self._coordinator.close()

    # -- with the lock held ------------------------------------------------------------------------------

    def _attempt(self, call: Callable[[], T]) -> T:
        """Make a call that mends what it finds out of date, until it succeeds."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return call()
            except RemoteCallError as error:
                self._note(error)
                if time.monotonic() > deadline:
                    raise UsageError(str(error)) from error
            except (DeadlineError, PeerLostError):
                if time.monotonic() > deadline:
                    raise
                self._drop_router()
            time.sleep(PAUSE_S)

    def _note(self, error: RemoteCallError) -> None:
        """What the router knows otherwise is told it anew by the next attempt."""
        if error.kind == StaleJobError.__name__:
            self._generation = 0
        elif error.kind != OutOfStepError.__name__:
            raise UsageError(str(error)) from error
        self._started = False

    def _connected(self) -> RpcClient:
        if self._router is None:
            self._address = self._locate()
            self._router = self._cluster.connect(self._address, timeout_s=CALL_S)
        if not self._generation:
            self._join()
        return self._router

    def _locate(self) -> str:
        """Where the coordinator says that the router is; where it was, if the coordinator is away too.

        Services come back where they were, and a job that reads is not to wait for a coordinator.
        """
        access = Access(self._job.flow, self._job.version)
        timeout_s = CALL_S if self._address else self._patience_s
        try:
            address: str = self._coordinator.call("access", access, reply_type=str, timeout_s=timeout_s).body
        except (DeadlineError, PeerLostError):
            if not self._address:
                raise
            return self._address
        return address

    def _drop_router(self) -> None:
        """The router does not answer: it may be elsewhere by now."""
        router, self._router = self._router, None
        if router is not None:
            router.close()

    def _in_step(self) -> RpcClient:
        """The router, which knows of the epoch what is known here."""
        router = self._connected()
        if not self._started:
            assert self._epoch is not None
            assert self._drawn is not None
            frames = [self._drawn.tobytes()] if self._position else []
            router.call("start", StartEpoch(self.id, self._epoch), frames)
            self._started = True
        return router

    def _join(self) -> None:
        self._generation = time.time_ns()
        self._started = False
        router = self._connected()
        indices = self._job.indices
        body = Join(
            self.id,
            self._job.seed,
            self._job.batch_size,
            self._stream,
            indices is not None,
            self._job.traverses,
        )
        frames = [] if indices is None else [np.ascontiguousarray(indices, np.int64).tobytes()]
        timeout_s = min(JOIN_S, self._patience_s)
        joined: Joined = router.call("join", body, frames, reply_type=Joined, timeout_s=timeout_s).body
        self._stream, self.length = joined.stream, joined.length
        self._take_routes(joined.table)

    def _draw(self, count: int) -> IndexArray:
        assert self._epoch is not None
        assert self._drawn is not None
        if self._position == self.length:
            return np.empty(0, np.int64)
        router = self._in_step()
        answer = router.call("draw", Draw(self.id, self._epoch, self._position, count))
        drawn = np.frombuffer(answer.frames[0], np.int64)
        np.bitwise_or.at(self._drawn, drawn >> 3, (128 >> (drawn & 7)).astype(np.uint8))
        self._position += len(drawn)
        return drawn

    def _refresh(self) -> None:
        self._take_routes(self._connected().call("table", reply_type=RoutingTable).body)

    def _take_routes(self, table: RoutingTable) -> None:
        try:
            self.routes = RouteMap(table)
        except OptionError as error:
            raise PeerLostError(f"flow {self._job.flow!r} has no shards at the moment ({error})") from error
