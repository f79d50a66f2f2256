"""The router of a flow: its routing table, its jobs and their sampling group.

Thesis 4.3.3, figures 4-8 to 4-10.
"""

from __future__ import annotations

import hmac
import itertools
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from torch_dpflow.errors import UsageError
from torch_dpflow.remote.flow_spec import FlowSpec
from torch_dpflow.remote.membership import Heard, Leave, Lost, Membership, Stale, Tick
from torch_dpflow.remote.protocol import (
    Draw,
    Enlist,
    JobBeat,
    JobFigures,
    JobId,
    Join,
    Joined,
    RoutingTable,
    StartEpoch,
)
from torch_dpflow.remote.refusals import OutOfStepError, StaleJobError, StaleShardError
from torch_dpflow.remote.routing import Routing
from torch_dpflow.remote.rpc import LATER, IncomingCall, Later, Result, RpcServer
from torch_dpflow.remote.services.awake_clock import AwakeClock
from torch_dpflow.remote.services.post import SERVICE, ServicePost, serve
from torch_dpflow.samplers import sampling_group
from torch_dpflow.samplers.indices import IndexArray

#: How long a job, or a shard, may be silent before it is taken for dead, seconds.
JOB_LEASE_S, SHARD_LEASE_S = 15.0, 5.0
#: Most jobs of one flow.
MAX_JOBS = 1024


class RouterSettings(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What of a router may change while it runs."""

    #: The shards that are to own keys.
    shards: list[str]


class Router:
    """Serves one flow's jobs. One thread drives it.

    Everything that it knows of a job the job knows too: after a restart jobs join anew and say what they have
    of their epoch, and the group is as good as before.

    Args:
        server: methods are registered with it; the caller serves.
        spec: the flow.
        settings: which shards are to own its keys.
        token: of the node that starts its shards.
    """

    def __init__(
        self,
        server: RpcServer,
        spec: FlowSpec,
        settings: RouterSettings,
        *,
        token: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._token = token
        self._clock = clock
        self._group = sampling_group(
            spec.strategy, spec.size, capacity=spec.cache_samples or None, seed=spec.seed
        )
        self._routing = Routing(size=spec.size, expected=settings.shards, lease_s=SHARD_LEASE_S)
        self._jobs = Membership(lease_s=JOB_LEASE_S)
        #: By job: samples in each epoch, the epoch that it is in, and which of the flow's jobs it is.
        self._lengths: dict[str, int] = {}
        self._epochs: dict[str, int] = {}
        self._streams: dict[str, int] = {}
        #: By job: what it has said of its reading.
        self._figures: dict[str, JobFigures] = {}
        #: Calls that wait for the table to be complete.
        self._waiting: list[tuple[IncomingCall, Joined]] = []
        for name, handler, body in (
            ("enlist", self._on_enlist, Enlist),
            ("join", self._on_join, Join),
            ("start", self._on_start, StartEpoch),
            ("draw", self._on_draw, Draw),
            ("beat", self._on_beat, JobBeat),
            ("leave", self._on_leave, JobId),
        ):
            server.register(name, handler, body_type=body)
        server.register("table", self._on_table, body_type=None, remembered=False)

    def settle(self, settings: RouterSettings) -> None:
        """Shards come or go. In the server's thread."""
        SERVICE.info("its keys are for %s", ", ".join(settings.shards))
        self._routing.expect(settings.shards)
        self.turn()

    def turn(self) -> None:
        """Look at what time has brought about."""
        now = self._clock()
        for shard in self._routing.tick(now):
            SERVICE.warning("it is lost; others own its keys", extra={"shard": shard.rpartition("/")[2]})
        for change in self._jobs.handle(Tick(now)):
            if isinstance(change, Lost):
                SERVICE.info("it is silent and taken for dead", extra={"job": change.peer})
                self._forget(change.peer)
        if self._waiting and self._routing.complete:
            waiting, self._waiting = self._waiting, []
            for call, joined in waiting:
                joined.table = self._routing.table
                call.answer(joined)

    def status(self) -> dict[str, Any]:
        """Figures for the coordinator and for people."""
        jobs = self._jobs.members
        return {
            "jobs": len(jobs),
            "names": sorted(jobs),
            "readings": {name: msgspec.structs.asdict(one) for name, one in self._figures.items()},
            "generation": self._routing.generation,
            "complete": self._routing.complete,
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
                f"shard {shard.shard!r}, incarnation {shard.incarnation}, was taken for dead or has been replaced"
            )
        self.turn()
        return Result(range_)

    def _on_table(self, call: IncomingCall) -> Result:
        table: RoutingTable = self._routing.table
        return Result(table)

    # -- jobs ------------------------------------------------------------------------------------------------

    def _on_join(self, call: IncomingCall) -> Result | Later:
        join: Join = call.body
        indices = _indices(call.frames) if join.has_indices else None
        if len(self._lengths) >= MAX_JOBS and join.job.name not in self._lengths:
            raise UsageError(f"flow {self._spec.name!r} has {MAX_JOBS} jobs, the most there may be")
        for change in self._jobs.handle(Heard(join.job.name, join.job.generation, self._clock())):
            if isinstance(change, Stale):
                raise StaleJobError(f"job {join.job.name!r}: generation {change.newest} is newer")
            if isinstance(change, Lost):
                self._forget(change.peer)
        name = join.job.name
        if name not in self._lengths:
            self._lengths[name] = self._admit(join, indices)
        joined = Joined(self._streams[name], self._lengths[name], self._routing.table)
        if self._routing.complete:
            return Result(joined)
        self._waiting.append((call, joined))
        return LATER

    def _admit(self, join: Join, indices: IndexArray | None) -> int:
        name = join.job.name
        try:
            if join.traverses:
                self._group.join(name, indices, seed=join.seed, batch_size=join.batch_size)
        except UsageError:
            self._jobs.handle(Leave(name, join.job.generation, self._clock()))
            raise
        self._streams[name] = self._free_stream() if join.stream is None else join.stream
        return self._spec.size if indices is None else len(indices)

    def _free_stream(self) -> int:
        """The first number that no job has: who reads alone has the same each time, whoever was there before."""
        taken = set(self._streams.values())
        return next(number for number in itertools.count() if number not in taken)

    def _on_start(self, call: IncomingCall) -> Result:
        start: StartEpoch = call.body
        self._heard(start.job)
        done = np.empty(0, np.int64)
        if call.frames:
            bits = np.frombuffer(call.frames[0], np.uint8)
            if len(bits) != -(-self._spec.size // 8):
                raise UsageError(f"{len(bits)} bytes of marks: {-(-self._spec.size // 8)} are required")
            done = np.flatnonzero(np.unpackbits(bits, count=self._spec.size))
        self._group.start_epoch(start.job.name, start.epoch, done=done)
        self._epochs[start.job.name] = start.epoch
        return Result(self._group.remaining(start.job.name))

    def _on_draw(self, call: IncomingCall) -> Result:
        draw: Draw = call.body
        self._heard(draw.job)
        name = draw.job.name
        known = (self._epochs.get(name), self._lengths[name] - self._group.remaining(name))
        if known != (draw.epoch, draw.position):
            raise OutOfStepError(
                f"job {name!r} has drawn {draw.position} samples of epoch {draw.epoch}, its router knows of "
                f"epoch {known[0]} and {known[1]} samples; start the epoch anew with what you have"
            )
        indices = self._group.next(name, draw.count, self._clock())
        return Result(None, [np.ascontiguousarray(indices).tobytes()])

    def _on_beat(self, call: IncomingCall) -> Result:
        beat: JobBeat = call.body
        self._heard(beat.job)
        if beat.figures is not None:
            self._figures[beat.job.name] = beat.figures
        return Result(self._routing.generation)

    def _on_leave(self, call: IncomingCall) -> None:
        job: JobId = call.body
        for change in self._jobs.handle(Leave(job.name, job.generation, self._clock())):
            if isinstance(change, Lost):
                self._forget(job.name)

    def _heard(self, job: JobId) -> None:
        """A job that has joined lives. StaleJobError for one that has not."""
        if self._jobs.members.get(job.name) != job.generation:
            raise StaleJobError(f"job {job.name!r} is not known (any more); join anew")
        self._jobs.handle(Heard(job.name, job.generation, self._clock()))

    def _forget(self, job: str) -> None:
        self._lengths.pop(job, None)
        self._epochs.pop(job, None)
        self._streams.pop(job, None)
        self._figures.pop(job, None)
        if job in self._group.jobs:
            self._group.leave(job)


def _indices(frames: list[memoryview]) -> IndexArray:
    if len(frames) != 1 or frames[0].nbytes % 8:
        raise UsageError("a job's samples are one frame of int64")
    return np.frombuffer(frames[0], np.int64)


def run(post: ServicePost) -> None:
    """Be a router: the role of a node's process."""
    decoder = msgspec.msgpack.Decoder(RouterSettings)
    spec = msgspec.msgpack.decode(post.arguments, type=FlowSpec)
    server = RpcServer(post.listen())
    router = Router(server, spec, decoder.decode(post.settings), token=post.place.token, clock=AwakeClock())
    serve(
        post,
        server,
        router.status,
        router.turn,
        settle=lambda settings: router.settle(decoder.decode(settings)),
    )
