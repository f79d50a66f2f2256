"""Shard of a shared flow: its sample cache, its workers, and the jobs that read from it (thesis 4.3.4, figure 4-11).

A task is one sample here, and one batch in the private shard of a loader.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from torch_dpflow.caches import make_policy
from torch_dpflow.cluster.cache.objects import Arrival, CacheInstruction, Cancel, Load, RequestId, Serve
from torch_dpflow.cluster.cache.sample_cache import SampleCache
from torch_dpflow.cluster.control.lookaheads import LookaheadParts, ShardLookaheads
from torch_dpflow.cluster.messages.coordinator import FlowSpec
from torch_dpflow.cluster.messages.router import (
    JOB_LEASE_S,
    MAX_JOBS,
    JobId,
    JobLookahead,
    LookaheadRequest,
    RangeAssignment,
)
from torch_dpflow.cluster.messages.shard import MAX_WANTS, POISONED, SAMPLE, WORKERLESS, Ask, Served, ShardSettings
from torch_dpflow.cluster.shard.worker_messages import DetachedPayload, WorkerDemultiplexer
from torch_dpflow.cluster.shard.workers import OUTAGE_S, ShardWorkers
from torch_dpflow.errors import UsageError
from torch_dpflow.ipc.messages.fields import OverloadedError, StaleJobError, StaleRoutingError
from torch_dpflow.ipc.messages.headers import PayloadGroup
from torch_dpflow.ipc.messages.payload_groups import group_payloads
from torch_dpflow.ipc.rpc import LATER, IncomingCall, Later, RpcServer, ServerOptions
from torch_dpflow.ipc.rpc.leases import Leases, Renewal
from torch_dpflow.ipc.transport import Listener
from torch_dpflow.ipc.transport.link_time import LinkTime
from torch_dpflow.log import SERVICE
from torch_dpflow.remote.fleet.remote_workers import RemoteWorkers

#: Maximum frames and bytes of one answer. A job fetches the samples that did not fit by another call.
MAX_FRAMES, MAX_ANSWER_BYTES = 2048, 256 << 20
#: How long a shard that no longer owns keys waits for its jobs to leave (seconds).
LINGER_S = 20.0


@dataclass(slots=True)
class _Reader:
    """Process that reads from the shard: a job, or a rank of a job."""

    job: str
    #: The tickets of samples that it has requested and not received.
    open: set[int] = field(default_factory=set)
    latest: int = 0


class SampleShard:
    """Shard that serves samples to the jobs of one flow. One thread drives it.

    Args:
        listener: listener to which jobs and workers connect; closed with the shard's server.
        settings: the shard's share of the flow's workers and memory.
        token: token of the node that starts the shard's workers.
        end_worker: called with the number and incarnation of a worker that should be killed.
    """

    def __init__(
        self,
        listener: Listener,
        spec: FlowSpec,
        settings: ShardSettings,
        *,
        token: str,
        end_worker: Callable[[int, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec, self._flow = spec, spec.instance
        self._clock, self._began = clock, clock()
        #: The shard's workers, for the server's thread only.
        self.workers = ShardWorkers(
            listener,
            spec.content,
            settings.workers,
            self._on_loaded,
            end=end_worker,
            task_timeout_s=spec.task_timeout_s,
            clock=clock,
        )
        self._cache = self._make_cache(settings)
        self._jobs = Leases(lease_s=JOB_LEASE_S)
        self._lookaheads = ShardLookaheads(spec.instance, spec.size)
        #: Called when a lookahead should be requested from the router.
        self.on_lookahead_due: Callable[[], None] = lambda: None
        self._readers: dict[str, _Reader] = {}
        self._range = RangeAssignment(0, 0, spec.size)
        self._has_owned = False
        #: When it lost its last keys (seconds).
        self._retired_at: float | None = None
        self._requests = itertools.count(1)
        self._calls: dict[RequestId, IncomingCall] = {}
        #: Earliest time at which waiting calls are answered with the reason why nothing is loaded.
        self._report_at = 0.0
        #: The keys whose last load was poisoned.
        self._poisoned: set[int] = set()
        self._served = self._served_bytes = 0
        #: Samples that jobs have requested; seconds in which their fetches waited for loads, counted until.
        self._requested = 0
        self._late_s, self._counted_at = 0.0, clock()
        self._listener = WorkerDemultiplexer(listener, token, self._on_worker)
        self.server = RpcServer(self._listener, options=ServerOptions(shared_bytes=1 << 29))
        #: For how long samples were in transit to jobs, at the latest status (seconds).
        self._link, self._link_s = LinkTime.of(self.server.address), 0.0
        self.server.register("want", self._on_want, body_type=Ask)
        self.server.register("fetch", self._on_fetch, body_type=Ask)
        self.server.register("heartbeat", self._on_heartbeat, body_type=JobId)
        self.server.register("leave", self._on_leave, body_type=JobId)

    def poll(self) -> None:
        """Expire leases, apply time limits, and answer fetches. Call this periodically, in the server's thread."""
        now = self._clock()
        self._late_s += len({call.body.job.name for call in self._calls.values()}) * (now - self._counted_at)
        self._counted_at = now
        self.workers.poll()
        self._cache.concurrency = self.workers.concurrency
        for name in self._jobs.expire(self._clock()):
            SERVICE.info("job lease expired; its requests were cancelled", extra={"job": name})
            self._remove_job(name)
        self.workers.flush()
        self._report_outage(now)

    def _report_outage(self, now: float) -> None:
        """Answer waiting fetches with an error while no worker works. Jobs log the reason, and fetch again."""
        if self._calls and now >= self._report_at and (outage := self.workers.outage()) is not None:
            self._report_at = now + OUTAGE_S
            calls, self._calls = self._calls, {}
            for call in calls.values():
                call.fail(outage)

    def apply_settings(self, settings: ShardSettings) -> None:
        """Set the shard's number of workers and its memory. Call this in the server's thread."""
        self.workers.resize(settings.workers)
        self._cache.concurrency = self.workers.concurrency
        self._apply(self._cache.resize(settings.memory_bytes))

    def serve_remote(self, serve: Callable[[], bool], remote: RemoteWorkers) -> None:
        """Use remote workers, which connect to another listener. Call this once, in the server's thread.

        serve: handles waiting messages of remote workers, and returns whether there may be more. The server's thread
            calls it before it waits for messages, and when remote workers have sent some.
        """
        for source in remote.listener.sources:
            self._listener.watch(source)
        self._listener.serve_remote = serve
        self.workers.serve(remote)

    @property
    def size(self) -> int:
        return self._spec.size

    @property
    def cache_samples(self) -> int:
        """Number of samples that the shard's cache can hold; 0 while unknown. Any thread may call."""
        return self._cache.cache_samples

    def assign(self, range_: RangeAssignment) -> None:
        """Set the keys that the shard owns, as the router has assigned them. Call this in the server's thread.

        Samples whose keys other shards own now are removed from pending requests, which are answered without them. Jobs
        then request these samples from the new owners. Only an assignment of a newer generation changes the keys.
        """
        if not range_.retired:
            self._retired_at = None
        elif self._retired_at is None:
            if self._has_owned:  # a new shard may register before its router expects it
                SERVICE.info("shard retired; it owns no keys any more and ends once its jobs have left")
            self._retired_at = self._clock()
        if range_.generation <= self._range.generation:
            return
        self._range = range_
        self._has_owned = self._has_owned or self._owned > 0
        self._lookaheads.assign(range_.first, range_.end)
        self._note_due()
        for job, reader in self._readers.items():
            foreign = self._cache.tickets_outside(job, range_.first, range_.end)
            reader.open.difference_update(foreign)
            self._apply(self._cache.release(job, foreign))

    def lookahead_requests(self) -> list[LookaheadRequest]:
        """Return the lookaheads to request from the router now. Call this in the server's thread."""
        return self._lookaheads.requests()

    def lookaheads_failed(self, requests: list[LookaheadRequest]) -> None:
        """Record failed requests: `lookahead_requests` returns them again. Call this in the server's thread."""
        self._lookaheads.failed(requests)

    def take_lookahead(self, request: LookaheadRequest, answer: JobLookahead, parts: LookaheadParts | None) -> None:
        """Pass a new lookahead in the router's answer to the cache's policy. Call this in the server's thread."""
        lookahead = self._lookaheads.answered(request, answer, parts)
        if lookahead is not None:
            self._cache.hint(request.job, lookahead, weight=answer.weight)

    def status(self) -> dict[str, Any]:
        """Return the shard's status: counters and present numbers, by name. Call this in the server's thread."""
        cache = self._cache.statistics()
        self._link_s += self._link.passed_s()
        return {
            **self.workers.figures(),
            **asdict(cache),
            "times": self.workers.times,
            "requested": self._requested,
            "due": cache.loads + cache.drawn + cache.queued,
            "late_s": self._late_s,
            "link_s": self._link_s,
            "served": self._served,
            "served_bytes": self._served_bytes,
            "generation": self._range.generation,
            "keys": self._owned,
            "drained": self._is_drained(),
            # Processor time and not time between polls: a thread that waits for a processor is not the limit.
            "thread_s": time.thread_time(),
            "serving_s": self._clock() - self._began,
        }

    @property
    def _owned(self) -> int:
        """Number of keys that the router has assigned to the shard."""
        return self._range.end - self._range.first if self._range.generation else 0

    def _is_drained(self) -> bool:
        """Return whether the shard owns no keys and no job reads from it."""
        since = self._retired_at
        return since is not None and (not self._jobs.members or self._clock() - since > LINGER_S)

    # -- jobs ------------------------------------------------------------------------------------------------

    def _on_want(self, call: IncomingCall) -> None:
        ask: Ask = call.body
        self._apply(self._want(self._accept(ask, len(ask.tickets))))

    def _on_fetch(self, call: IncomingCall) -> Later:
        ask: Ask = call.body
        self._apply(self._want(self._accept(ask, ask.ahead)))
        self._fetch(call, _tickets_of(ask, self._poisoned) or [ticket for ticket, _ in ask.awaited])
        return LATER

    def _fetch(self, call: IncomingCall, tickets: list[int]) -> None:
        """Answer a call with the samples of these tickets once they are loaded.

        Raises UsageError if its job did not request them.
        """
        ask: Ask = call.body
        request = next(self._requests)
        self._calls[request] = call
        try:
            out = self._cache.fetch(ask.job.name, request, tickets)
        except UsageError:
            del self._calls[request]
            raise
        self._apply(out)

    def _accept(self, ask: Ask, ahead: int) -> Ask:
        """Check a request, and release the samples that its job reports as received.

        Returns the request. If the job has too many open requests, some of its last `ahead` samples are left out: the
        job fetches these when it needs them.
        """
        if len(ask.tickets) != len(ask.keys):
            raise UsageError(f"{len(ask.tickets)} tickets for {len(ask.keys)} samples: one for each is required")
        if ask.ahead > len(ask.tickets):
            raise UsageError(
                f"ahead={ask.ahead}: at most {len(ask.tickets)}, the number of requested samples, are allowed"
            )
        if ask.keys and max(ask.keys) >= self._spec.size:
            raise UsageError(f"sample {max(ask.keys)}: flow {self._spec.name!r} has {self._spec.size} samples")
        self._renew_lease(ask.job)
        if ask.routing < self._range.generation:
            raise StaleRoutingError(
                f"routing generation {ask.routing} is out of date, {self._range.generation} is in force"
            )
        job = ask.job.name
        reader = self._readers[job]
        opened, is_late = reader.open, ask.number < reader.latest
        reader.latest = max(reader.latest, ask.number)
        opened.difference_update(ask.taken)
        self._apply(self._cache.release(job, ask.taken))
        if len(opened) + len(ask.tickets) <= MAX_WANTS and not is_late:
            return ask
        awaited, ahead = len(ask.tickets) - ahead, 0 if is_late else ahead
        # Samples that it waits for may have been requested before. If they were refused, they would never be released.
        total = len(opened) + len([ticket for ticket in ask.tickets[:awaited] if ticket not in opened])
        if total > 2 * MAX_WANTS:
            raise OverloadedError(f"job {job!r} has requested {total} samples; {2 * MAX_WANTS} are allowed")
        most = awaited + min(ahead, max(0, MAX_WANTS - total))
        return msgspec.structs.replace(ask, tickets=ask.tickets[:most], keys=ask.keys[:most], ahead=most - awaited)

    def _want(self, ask: Ask) -> list[CacheInstruction]:
        job = ask.job.name
        reader = self._readers[job]
        counts = self._lookaheads.wanted(job, reader.job, ask.epoch, ask.keys)
        self._note_due()
        out = self._cache.want(job, zip(ask.tickets, ask.keys), ask.draw, counts=counts)
        # Last: a rejected request would count against the job's limit for as long as it lives.
        self._requested -= len(reader.open)
        reader.open.update(ask.tickets)
        self._requested += len(reader.open)
        return out

    def _note_due(self) -> None:
        if self._lookaheads.is_due:
            self.on_lookahead_due()

    def _on_heartbeat(self, call: IncomingCall) -> None:
        self._renew_lease(call.body)

    def _on_leave(self, call: IncomingCall) -> None:
        job: JobId = call.body
        self._check_flow(job)
        if self._jobs.leave(job.name, job.generation, self._clock()):
            self._remove_job(job.name)

    def _renew_lease(self, job: JobId) -> None:
        """Renew a job's lease, or grant it one and add the job."""
        self._check_flow(job)
        if job.name not in self._readers and len(self._readers) >= MAX_JOBS:
            raise OverloadedError(f"{len(self._readers)} jobs read from this shard, the most that are allowed")
        renewal = self._jobs.renew(job.name, job.generation, self._clock())
        if renewal is Renewal.STALE:
            newest = self._jobs.newest(job.name)
            raise StaleJobError(f"job {job.name!r}: generation {newest} is newer, or its lease has expired")
        if renewal is Renewal.REPLACED:
            self._remove_job(job.name)
        if renewal is not Renewal.RENEWED:
            reader = self._readers[job.name] = _Reader(job.job or job.name)
            self._cache.join(job.name, reader.job)

    def _check_flow(self, job: JobId) -> None:
        # A service of another flow may listen at this address after the job's own shard has ended.
        if job.flow != self._flow:
            raise StaleRoutingError(f"this is a shard of flow {self._flow!r}, and not of {job.flow!r}")

    def _remove_job(self, job: str) -> None:
        reader = self._readers.pop(job, None)
        self._lookaheads.leave(job, job if reader is None else reader.job)
        self._apply(self._cache.leave(job))

    # -- loading and serving -----------------------------------------------------------------------------

    def _on_worker(self, peer: bytes, frames: list[memoryview]) -> None:
        self.workers.on_message(peer, frames)
        self.workers.flush()

    def _on_loaded(self, arrived: list[tuple[int, DetachedPayload]]) -> None:
        poisoned = [load for load, payload in arrived if payload.kind in (POISONED, WORKERLESS)]
        lost = {key for load in poisoned if (key := self._cache.key_of(load)) is not None}
        if self._poisoned:
            self._poisoned.difference_update([self._cache.key_of(load) for load, _ in arrived])
        arrivals = [Arrival(load, payload, payload.nbytes, payload.kind == SAMPLE) for load, payload in arrived]
        self._apply(self._cache.loaded(arrivals))
        self._poisoned |= lost
        for key in lost:
            self._answer_poisoned(key)

    def _answer_poisoned(self, poisoned: int) -> None:
        """Answer each fetch that waits for a poisoned sample with only this sample's error.

        The sample's batch fails whatever its other samples do, and each of these could kill three more workers.
        """
        for request, call in list(self._calls.items()):
            tickets = _tickets_of(call.body, {poisoned})
            if tickets and self._calls.pop(request, None) is not None:
                try:
                    self._fetch(call, tickets)
                except UsageError:  # released since
                    call.answer(Served([]), [])

    def _apply(self, instructions: list[CacheInstruction]) -> None:
        loads: list[Load] = []
        for instruction in instructions:
            match instruction:
                case Load():
                    loads.append(instruction)
                case Serve(request, samples):
                    call = self._calls.pop(request, None)
                    if call is not None:  # otherwise it has been answered with a poisoned sample
                        self._serve(call, samples)
                case Cancel(cancelled):
                    self.workers.cancel(cancelled)
        if loads:
            self.workers.load(loads)

    def _serve(self, call: IncomingCall, samples: list[tuple[int, DetachedPayload]]) -> None:
        """Answer a call with these samples, or with the first of them if they do not fit into one message."""
        count = frames = nbytes = 0
        for _, payload in samples:
            frames, nbytes = frames + len(payload.frames), nbytes + payload.nbytes
            if count and (nbytes > MAX_ANSWER_BYTES or frames > MAX_FRAMES):
                nbytes -= payload.nbytes
                break
            count += 1
        groups, parts = group_payloads(
            [(ticket, one.kind, one.table, one.frames) for ticket, one in samples[:count]], PayloadGroup
        )
        received = [payload for _, payload in samples[:count] if payload.is_sample]  # the others are errors
        self._served += len(received)
        self._served_bytes += sum([payload.nbytes for payload in received])
        # In each answer, so that a job that ends before its first heartbeat also has them.
        call.answer(Served(groups, self._served, self.workers.decodes, self.workers.times), parts)

    def _make_cache(self, settings: ShardSettings) -> SampleCache:
        return SampleCache(
            capacity_bytes=settings.memory_bytes,
            concurrency=self.workers.concurrency,
            repeatable=self._spec.repeatable,
            staged=self._spec.staged,
            policy=None if self._spec.policy == "none" else self._make_policy,
        )

    def _make_policy(self, budget: int) -> Any:
        return make_policy(self._spec.policy, max_bytes=budget, keys=self._spec.size)


def _tickets_of(ask: Ask, keys: set[int]) -> list[int]:
    return [ticket for ticket, key in ask.awaited if key in keys] if keys else []
