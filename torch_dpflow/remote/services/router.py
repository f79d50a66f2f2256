"""The router of a flow: its routing table, its jobs and their sampling group.

Thesis 4.3.3, figures 4-8 to 4-10.
"""

from __future__ import annotations

import hmac
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from torch_dpflow.errors import UsageError
from torch_dpflow.remote.control.joint_order import Held, JointOrder
from torch_dpflow.remote.control.name_leases import NameLeases
from torch_dpflow.remote.control.routing import Routing
from torch_dpflow.remote.process.spec import SERVICE, ServicePost, serve
from torch_dpflow.remote.process.suspend_aware_clock import SuspendAwareClock
from torch_dpflow.remote.rpc import LATER, IncomingCall, Later, Result, RpcServer
from torch_dpflow.remote.wire.errors import MisdirectedError, StaleShardError
from torch_dpflow.remote.wire.flow_spec import FlowSpec
from torch_dpflow.remote.wire.limits import UNNAMED
from torch_dpflow.remote.wire.router import (
    JOB_LEASE_S,
    MAX_JOBS,
    SHARD_LEASE_S,
    DrawSamples,
    Enlist,
    JobBeat,
    JobFigures,
    JobId,
    JobRank,
    Join,
    Joined,
    RouterSettings,
    RoutingTable,
    StartEpoch,
)
from torch_dpflow.samplers import sampling_group
from torch_dpflow.samplers.indices import IndexArray
from torch_dpflow.samplers.ranks import RankShares

#: By how much of it the group's reckoning of the caches may be wrong before it is mended.
RESIZED_SHARE = 0.1


@dataclass(frozen=True)
class _Reader:
    """One process that reads: a job, or a rank of one."""

    job: str
    rank: int


@dataclass(frozen=True)
class _Job:
    """What the ranks of a job read together."""

    order: JointOrder
    shares: RankShares
    seed: int
    #: None: every sample of the flow.
    indices: IndexArray | None

    def check(self, join: Join, rank: JobRank, indices: IndexArray | None) -> None:
        """Raise UsageError unless this rank describes the job as those before it."""
        mine = (self.shares.replicas, self.shares.drop_last, self.seed)
        theirs = (rank.replicas, rank.drop_last, join.seed)
        for name, here, there in zip(("num_replicas", "drop_last", "seed"), mine, theirs):
            if here != there:
                raise UsageError(
                    f"rank {rank.rank} of job {rank.job!r} joins with {name}={there!r}, other ranks have {here!r}; "
                    "all must have the same, and another job another name"
                )
        if not np.array_equal(_as_set(self.indices), _as_set(indices)):
            raise UsageError(
                f"rank {rank.rank} of job {rank.job!r} joins with other samples than its other ranks"
            )


class Router:
    """Serves one flow's jobs. One thread drives it.

    Everything that it knows of a job the job knows too: after a restart jobs join anew and say what they have
    of their epoch, and the group is as good as before.

    Args:
        server: methods are registered with it; the caller serves.
        spec: the flow.
        settings: which shards are to own its keys.
        token: of the node that starts its shards.
        incarnation: higher than that of any router of this flow before. What it gives out begins with it, and so is
            newer than what they gave out, whatever any clock says.
    """

    def __init__(
        self,
        server: RpcServer,
        spec: FlowSpec,
        settings: RouterSettings,
        *,
        token: str,
        incarnation: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._generations = itertools.count((incarnation << 32) + 1)
        self._token = token
        self._clock = clock
        self._group = sampling_group(
            spec.strategy, spec.size, capacity=spec.cache_samples or None, seed=spec.seed
        )
        self._routing = Routing(size=spec.size, expected=settings.shards, lease_s=SHARD_LEASE_S)
        self._name_leases = NameLeases(lease_s=JOB_LEASE_S)
        #: By the name under which it reads, and by that of the job.
        self._readers: dict[str, _Reader] = {}
        self._jobs: dict[str, _Job] = {}
        #: By the name under which it reads: what it has said of its reading.
        self._figures: dict[str, JobFigures] = {}
        #: By shard: how many samples its cache can hold, 0 where that is not known.
        self._rooms: dict[str, int] = {}
        #: Calls that wait for the table to be complete, and when their callers give up, seconds.
        self._waiting: list[tuple[IncomingCall, Joined, float]] = []
        for name, handler, body in (
            ("enlist", self._on_enlist, Enlist),
            ("join", self._on_join, Join),
            ("start", self._on_start, StartEpoch),
            ("draw", self._on_draw, DrawSamples),
            ("beat", self._on_beat, JobBeat),
            ("leave", self._on_leave, JobId),
        ):
            server.register(name, handler, body_type=body)
        server.register("table", self._on_table, body_type=None, remembered=False)

    def apply_settings(self, settings: RouterSettings) -> None:
        """Shards come or go. In the server's thread."""
        SERVICE.info("its keys are for %s", ", ".join(settings.shards))
        self._routing.expect(settings.shards)
        self.poll()

    def poll(self) -> None:
        """Look at what time has brought about."""
        now = self._clock()
        for shard in self._routing.tick(now):
            SERVICE.warning("it is lost; others own its keys", extra={"shard": shard.rpartition("/")[2]})
        for name in self._name_leases.tick(now):
            SERVICE.info("it is silent and taken for dead", extra={"job": name})
            self._forget(name)
        self._answer_waiting(now)

    def _answer_waiting(self, now: float) -> None:
        if self._routing.complete:
            waiting, self._waiting = self._waiting, []
            for call, joined, _ in waiting:
                joined.table = self._routing.table
                call.answer(joined)
        elif self._waiting:  # a job that has given up asks again, and its samples' indices come with it
            self._waiting = [one for one in self._waiting if now < one[2]]

    def status(self) -> dict[str, Any]:
        """Figures for the coordinator and for people."""
        jobs = sorted(self._jobs)
        return {
            "jobs": len(jobs),
            "names": jobs,
            "cache_samples": self._group.capacity,
            "readings": {name: msgspec.structs.asdict(one) for name, one in self._figures.items()},
            "generation": self._routing.generation,
            "complete": self._routing.complete,
            "waiting": len(self._waiting),
        }

    # -- shards ----------------------------------------------------------------------------------------------

    def _on_enlist(self, call: IncomingCall) -> Result:
        shard: Enlist = call.body
        if not hmac.compare_digest(shard.token.encode(), self._token.encode()):
            raise UsageError(f"shard {shard.shard!r} was not started by this cluster's node")
        range_ = self._routing.enlist(
            shard.shard, shard.incarnation, shard.address, self._clock(), known=shard.generation
        )
        if range_ is None:
            raise StaleShardError(
                f"shard {shard.shard!r}, incarnation {shard.incarnation}, has been replaced"
            )
        self._rooms[shard.shard] = shard.room
        self._fit_group()
        self.poll()
        return Result(range_)

    def _fit_group(self) -> None:
        """Have the group reckon with what the caches can hold, where nobody has said how much that is."""
        rooms = [self._rooms.get(route.shard, 0) for route in self._routing.table.routes]
        if self._spec.cache_samples or not rooms or 0 in rooms:
            return
        capacity = min(self._spec.size, sum(rooms))
        if abs(capacity - self._group.capacity) > RESIZED_SHARE * self._group.capacity:
            self._group.resize(capacity)

    def _on_table(self, call: IncomingCall) -> Result:
        table: RoutingTable = self._routing.table
        return Result(table)

    # -- jobs ------------------------------------------------------------------------------------------------

    def _on_join(self, call: IncomingCall) -> Result | Later:
        join: Join = call.body
        self._check_flow(join.flow)
        name, now = join.reader, self._clock()
        indices = _indices(call.frames) if join.has_indices else None
        if len(self._readers) >= MAX_JOBS and name not in self._readers:
            raise UsageError(f"flow {self._spec.name!r} has {MAX_JOBS} readers, the most there may be")
        generation = next(self._generations)
        if self._name_leases.admit(name, generation, join.holder, now):
            self._forget(name)
        if name not in self._readers:
            try:
                self._admit(join, indices)
            except UsageError:
                self._name_leases.leave(name, generation, now)
                raise
        joined = Joined(generation, self._jobs[self._readers[name].job].shares.per_rank, self._routing.table)
        if self._routing.complete:
            return Result(joined)
        self._waiting.append((call, joined, now + call.patience_s))
        return LATER

    def _admit(self, join: Join, indices: IndexArray | None) -> None:
        rank = join.rank or JobRank(join.reader, 0, 1)
        if rank.rank >= rank.replicas:
            raise UsageError(f"rank {rank.rank} of {rank.replicas}: ranks count from 0")
        job = self._jobs.get(rank.job)
        if job is None:
            self._found(join, rank, indices)
        else:
            job.check(join, rank, indices)
        self._readers[join.reader] = _Reader(rank.job, rank.rank)

    def _found(self, join: Join, rank: JobRank, indices: IndexArray | None) -> None:
        """The first rank of a job joins."""
        batch = join.batch_size * rank.replicas
        named = not rank.job.startswith(UNNAMED)
        self._group.join(rank.job, indices, seed=join.seed, batch_size=batch, named=named)
        shares = RankShares(
            self._spec.size if indices is None else len(indices), rank.replicas, rank.drop_last
        )
        self._jobs[rank.job] = _Job(JointOrder(self._group, rank.job, shares), shares, join.seed, indices)

    def _on_start(self, call: IncomingCall) -> None:
        start: StartEpoch = call.body
        reader = self._heard(start.job)
        if len(call.frames) != len(start.places):
            raise UsageError(f"{len(call.frames)} frames of marks for {len(start.places)} epochs")
        held = [
            Held(place.epoch, place.position, self._marked(frame))
            for place, frame in zip(start.places, call.frames)
        ]
        self._jobs[reader.job].order.start(reader.rank, held)

    def _marked(self, marks: memoryview) -> IndexArray:
        bits = np.frombuffer(marks, np.uint8)
        if len(bits) != -(-self._spec.size // 8):
            raise UsageError(f"{len(bits)} bytes of marks: {-(-self._spec.size // 8)} are required")
        return np.flatnonzero(np.unpackbits(bits, count=self._spec.size))

    def _on_draw(self, call: IncomingCall) -> Result:
        draw: DrawSamples = call.body
        reader = self._heard(draw.job)
        order = self._jobs[reader.job].order
        indices = order.draw(reader.rank, draw.epoch, draw.position, draw.count, self._clock())
        return Result(None, [indices.tobytes()])

    def _on_beat(self, call: IncomingCall) -> Result:
        beat: JobBeat = call.body
        self._heard(beat.job)
        if beat.figures is not None:
            self._figures[beat.job.name] = beat.figures
        return Result(self._routing.generation)

    def _on_leave(self, call: IncomingCall) -> None:
        job: JobId = call.body
        self._check_flow(job.flow)
        if self._name_leases.leave(job.name, job.generation, self._clock()):
            self._forget(job.name)

    def _heard(self, job: JobId) -> _Reader:
        """A process that has joined lives. StaleJobError for one that has not."""
        self._check_flow(job.flow)
        self._name_leases.heard(job.name, job.generation, self._clock())
        return self._readers[job.name]

    def _check_flow(self, flow: str) -> None:
        if flow != self._spec.instance:
            raise MisdirectedError(f"this is the router of flow {self._spec.instance!r}, and not of {flow!r}")

    def _forget(self, name: str) -> None:
        self._figures.pop(name, None)
        reader = self._readers.pop(name, None)
        if reader is not None and all(other.job != reader.job for other in self._readers.values()):
            self._group.leave(reader.job)
            del self._jobs[reader.job]


def _indices(frames: list[memoryview]) -> IndexArray:
    if len(frames) != 1 or frames[0].nbytes % 8:
        raise UsageError("a job's samples are one frame of int64")
    return np.frombuffer(frames[0], np.int64)


def _as_set(indices: IndexArray | None) -> IndexArray:
    return np.empty(0, np.int64) if indices is None else np.sort(indices)


def run(post: ServicePost) -> None:
    """Be a router: the role of a node's process."""
    decoder = msgspec.msgpack.Decoder(RouterSettings)
    spec = msgspec.msgpack.decode(post.arguments, type=FlowSpec)
    server = RpcServer(post.listen())
    router = Router(
        server,
        spec,
        decoder.decode(post.settings),
        token=post.place.token,
        incarnation=post.incarnation,
        clock=SuspendAwareClock(),
    )
    serve(
        post,
        server,
        router.status,
        router.poll,
        settle=lambda settings: router.apply_settings(decoder.decode(settings)),
    )
