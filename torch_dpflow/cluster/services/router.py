"""Router of a flow: routing table, jobs and their sampling group (thesis 4.3.3, figures 4-8 to 4-10)."""

from __future__ import annotations

import hmac
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np

from torch_dpflow._core.decoding import msgpack_decoder
from torch_dpflow._core.threads import SuspendAwareClock
from torch_dpflow.cluster.control.joint_order import Held
from torch_dpflow.cluster.control.lookaheads import HORIZON, MAX_WHOLE, KnownEpoch, joint_order
from torch_dpflow.cluster.control.reader_names import ReaderNames
from torch_dpflow.cluster.control.routing import Routing
from torch_dpflow.cluster.messages.coordinator import FlowSpec
from torch_dpflow.cluster.messages.router import (
    JOB_LEASE_S,
    MAX_JOBS,
    SHARD_LEASE_S,
    DrawSamples,
    JobHeartbeat,
    JobHeartbeatReply,
    JobId,
    JobLookahead,
    JobRank,
    Join,
    Joined,
    LookaheadRequest,
    NameHolder,
    ReadByAll,
    RegisterShard,
    ReportOrder,
    RouterSettings,
    RoutingTable,
    StartEpoch,
)
from torch_dpflow.cluster.services import router_jobs
from torch_dpflow.cluster.services.router_jobs import Finish, FlowJob, Reader, Restoring
from torch_dpflow.cluster.services.service import ServiceSpec, serve
from torch_dpflow.errors import UsageError
from torch_dpflow.ipc.messages.fields import MisdirectedError, Name, StaleShardError
from torch_dpflow.ipc.rpc import LATER, IncomingCall, Later, Result, RpcServer
from torch_dpflow.log import SERVICE
from torch_dpflow.lookahead import Lookahead
from torch_dpflow.samplers import sampling_group
from torch_dpflow.samplers.indices import IndexArray, compact

_NOTHING: IndexArray = np.empty(0, np.int64)
#: The sampling group's cache capacity is corrected if it differs from what the shards report by more than this share.
RESIZED_SHARE = 0.1


class Router:
    """Router that serves the jobs of one flow. One thread drives it.

    The router saves no state. After its restart, jobs join again and report what they have read in their epoch, which
    restores the sampling group.

    Args:
        server: server at which the methods are registered; the caller runs it.
        settings: first settings, including the shards that own the flow's keys.
        token: token of the node that starts the flow's shards.
        incarnation: incarnation of this process, above the incarnations of all earlier routers of this flow.
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
        self._spec, self._flow = spec, spec.instance
        self._restoring = Restoring(server.post)
        # Above all generations of earlier routers, without a clock: clocks differ between hosts, and may be set back.
        first = (incarnation << 32) + 1
        self._generations = itertools.count(first)
        self._token = token
        self._clock = clock
        self._began = clock()
        self._group = sampling_group(spec.strategy, spec.size, capacity=spec.cache_samples or None, seed=spec.seed)
        self._shards, self._limited_by = settings.shards, settings.limited_by
        self._routing = Routing(size=spec.size, expected=settings.shards, lease_s=SHARD_LEASE_S, first=first)
        self._names = ReaderNames(lease_s=JOB_LEASE_S)
        #: By reader name, and by job name.
        self._readers: dict[str, Reader] = {}
        self._jobs: dict[str, FlowJob] = {}
        self._jobs_seen = 0
        #: By shard: the generation at its latest report, and how many samples its cache can hold; 0 if not known.
        self._reported: dict[str, tuple[int, int]] = {}
        #: Calls that wait for a complete table, with their deadlines (seconds).
        self._waiting: list[tuple[IncomingCall, Joined, float]] = []
        alone = self._restoring.alone
        for name, handler, body in (
            ("register_shard", self._on_register_shard, RegisterShard),
            ("join", alone(self._on_join), Join),
            ("start", alone(self._on_start), StartEpoch),
            ("draw", alone(self._on_draw), DrawSamples),
            ("announce", alone(self._on_announce), ReportOrder),
            ("heartbeat", self._on_heartbeat, JobHeartbeat),
            ("leave", alone(self._on_leave), JobId),
            ("table", self._on_table, None),
            ("holders", self._on_holders, Name),
            ("read_by_all", alone(self._on_read_by_all), ReadByAll),
            ("lookahead", alone(self._on_lookahead), LookaheadRequest),
        ):
            server.register(name, handler, body_type=body)
        #: Counts draws: each may change the lookahead of jobs without a fixed order.
        self._draws = 0

    def apply_settings(self, settings: RouterSettings) -> None:
        """Apply new settings. Call this in the server's thread."""
        self._limited_by = settings.limited_by
        if settings.shards == self._shards:
            return
        self._shards = settings.shards
        SERVICE.info("keys assigned to shards %s", ", ".join(settings.shards))
        self._routing.expect(settings.shards)
        self.poll()

    def poll(self) -> None:
        """Expire leases, and answer calls that wait for a complete routing table. Call this in the server's thread."""
        now = self._clock()
        for shard in self._routing.tick(now):
            text = "shard lease expired; its keys were reassigned"
            SERVICE.warning(text, extra={"shard": shard.rpartition("/")[2]})
        for name in () if self._restoring.is_running else self._names.expire(now):
            SERVICE.info("job lease expired; its place in the sampling group was dropped", extra={"job": name})
            self._remove_reader(name)
        self._answer_waiting(now)

    def _answer_waiting(self, now: float) -> None:
        if self._routing.complete:
            waiting, self._waiting = self._waiting, []
            for call, joined, _ in waiting:
                joined.table = self._routing.table
                call.answer(joined)
        else:  # a caller whose call timed out repeats it, and each call holds its indices in memory
            self._waiting = [one for one in self._waiting if now < one[2]]

    def status(self) -> dict[str, Any]:
        """Return the router's status: values on jobs, cache, shards and waiting calls, by name."""
        jobs = sorted(self._jobs)
        return {
            "jobs": len(jobs),
            "jobs_seen": self._jobs_seen,
            "names": jobs,
            "reading": len({reader.job for reader in self._readers.values() if not reader.rests}),
            "cache_samples": self._group.capacity,
            "readings": {
                name: msgspec.structs.asdict(one.figures) for name, one in self._readers.items() if one.figures
            },
            "generation": self._routing.generation,
            "complete": self._routing.complete,
            "shards": len(self._shards),
            "waiting": len(self._waiting),
        }

    # -- shards ----------------------------------------------------------------------------------------------

    def _on_register_shard(self, call: IncomingCall) -> Result:
        shard: RegisterShard = call.body
        if not hmac.compare_digest(shard.token.encode(), self._token.encode()):
            raise UsageError(f"shard {shard.shard!r} was not started by this cluster's node")
        range_ = self._routing.register(shard.shard, shard.incarnation, shard.address, self._clock())
        if range_ is None:
            raise StaleShardError(f"shard {shard.shard!r}, incarnation {shard.incarnation}, has been replaced")
        # Most calls are heartbeats, which must not cost a look at all shards.
        known = self._routing.generation, shard.cache_samples
        if not self._restoring.is_running and self._reported.get(shard.shard) != known:
            self._reported[shard.shard] = known
            self._resize_group()
        self._answer_waiting(self._clock())
        return Result(range_)

    def _resize_group(self) -> None:
        """Set the group's cache capacity to the sum that the shards report, unless the user has set it."""
        sizes = [self._reported.get(route.shard, (0, 0))[1] for route in self._routing.table.routes]
        if self._spec.cache_samples or not sizes or 0 in sizes:
            return
        capacity = min(self._spec.size, sum(sizes))
        if abs(capacity - self._group.capacity) > RESIZED_SHARE * self._group.capacity:
            self._group.resize(capacity)

    def _on_table(self, call: IncomingCall) -> Result:
        table: RoutingTable = self._routing.table
        return Result(table)

    def _on_lookahead(self, call: IncomingCall) -> Result:
        request: LookaheadRequest = call.body
        self._check_flow(request.flow)
        if not request.first < request.end <= self._spec.size:
            raise UsageError(
                f"a lookahead of the keys {request.first} to {request.end}: the flow has {self._spec.size} samples"
            )
        job = self._jobs.get(request.job)
        known = None if job is None else self._known_epoch(request.job, job, request.horizon)
        if job is None or known is None:
            return Result(JobLookahead(0, 0))
        ahead = known.ahead
        state = (
            ahead.epoch,
            ahead.complete,
            len(job.order.done),
            len(job.announced),
            None if ahead.complete else self._draws,
        )
        if state != job.known:
            job.known, job.version = state, next(self._generations)
        if job.version == request.version:
            return Result(JobLookahead(ahead.epoch, job.version, ahead.complete))
        answer, arrays = known.cut(request.first, request.end, self._spec.size)
        answer.version, answer.weight = job.version, job.weight
        return Result(answer, [array.tobytes() for array in arrays])

    def _known_epoch(self, name: str, job: FlowJob, horizon: int) -> KnownEpoch | None:
        """Return the newest epoch of a job, as far as the router knows it; None before the first epoch.

        horizon: number of next samples that are enough, if the flow has many samples.
        """
        if job.announced:
            order = joint_order(job.announced, job.shares.replicas)
            if len(job.announced) == job.shares.replicas:
                ahead = Lookahead.of_order(order, epoch=job.announced_epoch)
            else:
                ahead = Lookahead(epoch=job.announced_epoch, length=self._spec.size, certain=order)
            return KnownEpoch(ahead, order[:0], order[:0])
        most = min(HORIZON, horizon) if self._spec.size > MAX_WHOLE else None
        drawn = job.order.drawn(most)
        if self._group.remaining(name) or len(drawn):
            done = job.order.done if most is None else drawn[:0]
            return KnownEpoch(self._group.lookahead(name, horizon=most), drawn, done)
        return None

    # -- jobs ------------------------------------------------------------------------------------------------

    def _on_join(self, call: IncomingCall) -> Result | Later | None:
        join: Join = call.body
        self._check_flow(join.flow)
        name, now = join.reader, self._clock()
        indices = router_jobs.indices_in(call.frames) if join.has_indices else None
        if len(self._readers) >= MAX_JOBS and name not in self._readers:
            raise UsageError(f"flow {self._spec.name!r} has {MAX_JOBS} readers, the maximum")
        self._remove_ended(join.rank.job if join.rank else name, join.replaces, now)
        generation = self._names.generation_of(name) or 0
        if generation <= join.after or self._names.holder(name)[0] != join.holder:
            generation = next(self._generations)
        if self._names.admit(name, generation, join.holder, now, process=join.process):
            self._remove_reader(name)
        if name in self._readers:
            return self._joined(call, generation)
        describe = partial(self._describe, call, generation, indices)
        return self._restoring.run(call, describe) if self._is_long(indices is not None) else describe()()

    def _joined(self, call: IncomingCall, generation: int) -> Result | Later:
        """Answer the call of a reader that has joined, once the routing table is complete."""
        reader = self._readers[call.body.reader]
        joined = Joined(generation, self._jobs[reader.job].shares.per_rank, self._routing.table)
        if self._routing.complete:
            return Result(joined)
        self._waiting.append((call, joined, self._clock() + call.timeout_s))
        return LATER

    def _is_long(self, passes: bool) -> bool:
        """Return whether a call would occupy the thread for too long. passes: whether it passes over all samples."""
        return passes and self._spec.size > MAX_WHOLE

    def _on_holders(self, call: IncomingCall) -> Result:
        return Result([NameHolder(*self._names.holder(name)) for name in self._readers_of(call.body)])

    def _readers_of(self, job: str) -> list[str]:
        return [name for name, reader in self._readers.items() if reader.job == job]

    def _remove_ended(self, job: str, ended: list[int], now: float) -> None:
        """Remove the readers of a job whose processes are known to have ended."""
        for name in self._readers_of(job) if ended else ():
            generation = self._names.generation_of(name) or 0
            if self._names.holder(name)[0] in ended and self._names.leave(name, generation, now):
                self._remove_reader(name)

    def _describe(self, call: IncomingCall, generation: int, indices: IndexArray | None) -> Finish:
        """Do the part of a join that passes over the job's samples; return the function that then adds the reader."""
        join: Join = call.body
        rank = join.rank or JobRank(join.reader, 0, 1)
        try:
            if rank.rank >= rank.replicas:
                raise UsageError(f"rank {rank.rank} of {rank.replicas}: ranks count from 0")
            members = router_jobs.set_digest(indices)
            job = self._jobs.get(rank.job) or router_jobs.new_job(self._group, join, rank, indices, members)
        except UsageError as error:
            return partial(self._add_reader, call, generation, rank, error)
        return partial(self._add_reader, call, generation, rank, job, members)

    def _add_reader(
        self, call: IncomingCall, generation: int, rank: JobRank, job: FlowJob | UsageError, members: bytes = b""
    ) -> Result | Later:
        join, now = call.body, self._clock()
        try:
            if isinstance(job, UsageError):
                raise job
            if rank.job in self._jobs:
                renewed = max(map(self._names.renewed_at, self._readers_of(rank.job)))
                job.check(join, rank, members, renewed=renewed, now=now)
            else:
                self._jobs[rank.job], self._jobs_seen = job, self._jobs_seen + 1
        except UsageError:
            self._names.leave(join.reader, generation, now)
            raise
        self._names.keep(join.reader, generation, now)
        self._readers[join.reader] = Reader(rank.job, rank.rank)
        return self._joined(call, generation)

    def _on_start(self, call: IncomingCall) -> Result | Later | None:
        start: StartEpoch = call.body
        reader = self._renew_lease(start.job)
        reader.rests = False
        needed = sum(1 + place.has_earlier for place in start.places)
        if len(call.frames) != needed:
            raise UsageError(f"{len(call.frames)} bitmaps for {len(start.places)} epochs: {needed} are required")
        job = self._jobs[reader.job]
        job.announced = {}

        def restore() -> Finish:
            samples = (router_jobs.samples_in(frame, self._spec.size) for frame in call.frames)
            held = [
                Held(place.epoch, place.position, next(samples), next(samples) if place.has_earlier else _NOTHING)
                for place in start.places
            ]
            job.order.start(reader.rank, held, reader=start.job.name, fresh=start.fresh)
            return lambda: None

        # The first of several ranks to finish has the rest of its epoch drawn for the others.
        passes = bool(job.members) or job.shares.replicas > 1 or any(frame.nbytes for frame in call.frames)
        return self._restoring.run(call, restore) if self._is_long(passes) else restore()()

    def _on_announce(self, call: IncomingCall) -> None:
        announced: ReportOrder = call.body
        reader = self._renew_lease(announced.job)
        dtype = compact(self._spec.size)
        if len(call.frames) != 1 or call.frames[0].nbytes % np.dtype(dtype).itemsize:
            raise UsageError("a job's order is one frame of its samples' numbers")
        order = np.array(np.frombuffer(call.frames[0], dtype))
        if len(order) and not (order.min() >= 0 and order.max() < self._spec.size):
            raise UsageError(
                f"the order has samples {order.min()} to {order.max()}: the flow has 0 to {self._spec.size - 1}"
            )
        job = self._jobs[reader.job]
        if announced.epoch != job.announced_epoch:
            if job.announced and announced.epoch < job.announced_epoch and job.shares.replicas > 1:
                return  # another rank is in the next epoch already
            job.announced_epoch, job.announced = announced.epoch, {}
        earlier = job.announced.get(reader.rank)
        if earlier is None or not np.array_equal(earlier, order):  # a repeated report is not another lookahead
            job.announced[reader.rank] = order
            job.known = ()

    def _on_draw(self, call: IncomingCall) -> Result:
        draw: DrawSamples = call.body
        reader = self._renew_lease(draw.job)
        job = self._jobs[reader.job]
        order = job.order
        now = self._clock()
        # By then the ranks of an earlier router have joined this one and reported what they have.
        alone = now - self._began >= JOB_LEASE_S
        left = self._group.remaining(reader.job)
        indices = order.draw(reader.rank, draw.epoch, draw.position, draw.count, now, alone=alone)
        self._draws += self._group.remaining(reader.job) != left  # not a draw that runs again
        in_order = self._group.in_order(reader.job) if job.shares.replicas == 1 else 0
        return Result(in_order, [indices.tobytes()])

    def _on_read_by_all(self, call: IncomingCall) -> Result:
        request: ReadByAll = call.body
        reader = self._renew_lease(request.job)
        marks = self._jobs[reader.job].order.read_by_all(request.epoch, request.position)
        return Result(None, [] if marks is None else [marks.tobytes()])

    def _on_heartbeat(self, call: IncomingCall) -> Result:
        heartbeat: JobHeartbeat = call.body
        reader = self._renew_lease(heartbeat.job)
        reader.rests, reader.figures = not heartbeat.reads, heartbeat.figures or reader.figures
        return Result(JobHeartbeatReply(self._routing.generation, self._limited_by, self._jobs_seen))

    def _on_leave(self, call: IncomingCall) -> None:
        job: JobId = call.body
        self._check_flow(job.flow)
        if self._names.leave(job.name, job.generation, self._clock()):
            self._remove_reader(job.name)

    def _renew_lease(self, job: JobId) -> Reader:
        """Renew the lease of a reader and return the reader. Raises StaleJobError if the reader has no lease."""
        self._check_flow(job.flow)
        self._names.keep(job.name, job.generation, self._clock())
        return self._readers[job.name]

    def _check_flow(self, flow: str) -> None:
        # After the router of the job's flow has ended, another one may listen at its address.
        if flow != self._flow:
            raise MisdirectedError(f"this is the router of flow {self._flow!r}, and not of {flow!r}")

    def _remove_reader(self, name: str) -> None:
        reader = self._readers.pop(name, None)
        if reader is None:
            return
        self._jobs[reader.job].order.leave(reader.rank, name)
        if all(other.job != reader.job for other in self._readers.values()):
            self._group.leave(reader.job)
            del self._jobs[reader.job]


def run(service: ServiceSpec) -> None:
    """Run a router: the main function of its process."""
    decoder = msgpack_decoder(RouterSettings)
    spec = msgpack_decoder(FlowSpec).decode(service.arguments)
    server = RpcServer(service.listen())
    router = Router(
        server,
        spec,
        decoder.decode(service.settings),
        token=service.place.token,
        incarnation=service.incarnation,
        clock=SuspendAwareClock(),
    )
    serve(
        service,
        server,
        status=router.status,
        poll=router.poll,
        apply_settings=lambda settings: router.apply_settings(decoder.decode(settings)),
    )
