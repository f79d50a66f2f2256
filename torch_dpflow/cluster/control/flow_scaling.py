"""Numbers of workers and shards of all flows, their limits, and their worker-seconds. A pure state machine.

`autoscale` and `shard_scaling` decide for one flow; this module computes their input once a second, from the reports of
services.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from torch_dpflow.cluster.control.autoscale import Autoscaler, FlowCounts, JobCounts
from torch_dpflow.cluster.control.flow_processes import flow_parts, spread
from torch_dpflow.cluster.control.flow_registry import EndedJobs
from torch_dpflow.cluster.control.shard_scaling import ShardCounts, Shards, ShardScaler
from torch_dpflow.cluster.messages.coordinator import (
    MAX_SHARDS,
    MIN_MEMORY,
    AutoscaleLimits,
    ClusterLimits,
    FlowSpec,
    Part,
    WorkerSeconds,
)
from torch_dpflow.cluster.messages.node import ProcessView, by_flow

#: Maximum number of jobs of a flow whose worker-seconds are kept.
MAX_JOBS = 1024
#: Time between two steps of the autoscalers (seconds).
STEP_S = 1.0
#: How long a superfluous local worker keeps running (seconds). By then its shard has received the smaller number by a
#: heartbeat, and blames no sample for the worker's end.
LINGER_S = 2.0
#: Name of the limit "a shard's thread", as in `page_figures.FLOW_LIMITS`.
SHARD = "shard"


@dataclass
class _ScaledFlow:
    law: Autoscaler
    shards: ShardScaler = field(default_factory=ShardScaler)
    stepped_at: float = -math.inf
    #: Numbers of workers in the latest seconds, and when that was.
    targets: list[tuple[float, int]] = field(default_factory=list)
    limited_by: str = ""
    #: The shards' worker-seconds when they were last added, by shard and incarnation; and all that were, by job.
    seen: dict[tuple[str, int], float] = field(default_factory=dict)
    worker_s: float = 0.0
    by_job: dict[str, float] = field(default_factory=dict)
    #: Samples of each job at that time.
    samples: dict[str, int] = field(default_factory=dict)


class FlowScaling:
    """State machine that decides the numbers of workers and shards of all running flows. Not thread-safe.

    Args:
        limits: limits of all flows together. Without `limits.autoscale`, each flow gets the number of workers that it
            requests, or its fair part of `limits.workers` if all requests together exceed this.
        price_per_hour: price of a worker for one hour, for reports.
        ended: record of jobs that have left, which `observe` updates; None: a new record.
        wall_clock: returns the time, in seconds since 1970.
    """

    def __init__(
        self,
        limits: ClusterLimits,
        *,
        price_per_hour: float = 0.0,
        ended: EndedJobs | None = None,
        wall_clock: Callable[[], float] = float,
    ) -> None:
        self.ended, self._wall_clock = ended or EndedJobs(), wall_clock
        self._limits, self._autoscale = limits, limits.autoscale
        self._price = price_per_hour
        self._flows: dict[str, _ScaledFlow] = {}

    def begin(self, spec: FlowSpec, now: float) -> None:
        """Record that a job is about to read this flow."""
        self._of(spec).law.begin(now)

    def parts(self, running: Mapping[str, FlowSpec], hosts: int, unread: Collection[str]) -> dict[str, Part | None]:
        """Return each running flow's part of the cluster, by instance; None if nothing is left for the flow.

        hosts: number of hosts that run shards. unread: flows without jobs, as in `flow_parts`.
        """
        shards, targets = [*map(self.shards, running.values())], None
        if self._autoscale is not None:
            hosts, unread = min(hosts, self._autoscale.most), ()
            shards = [min(many, self._autoscale.most) for many in shards]
            targets = [*map(self.target, running.values())]
            # A shard without a worker could not load the samples of its keys.
            targets = [workers and max(workers, many, hosts) for workers, many in zip(targets, shards)]
        specs = [msgspec.structs.replace(spec, shards=many) for spec, many in zip(running.values(), shards)]
        parts = flow_parts(specs, self._limits, unread=unread, targets=targets)
        return {instance: part and spread(part, hosts) for instance, part in zip(running, parts)}

    def observe(
        self,
        running: Mapping[str, FlowSpec],
        processes: Sequence[ProcessView],
        parts: Mapping[str, Part | None],
        hosts: Mapping[str, int],
        now: float,
    ) -> bool:
        """Process reports of running flows; return whether a target number of workers or shards, or a limit, changed.

        parts: result of the method `parts`. hosts: number of processors of each host that runs shards, by name.
        """
        for instance in self._flows.keys() - running.keys():
            del self._flows[instance]
            self.ended.forget(instance, self._wall_clock())
        own, changed = by_flow(processes), False
        for instance, spec in running.items():
            flow = self._of(spec)
            if now - flow.stepped_at >= STEP_S:
                changed = self._step(flow, spec, own[instance], parts, hosts, now) or changed
        return changed

    def shards(self, spec: FlowSpec) -> int:
        """Return how many shards this flow should have."""
        return self._of(spec).shards.target if spec.shards is None else spec.shards

    def target(self, spec: FlowSpec) -> int:
        """Return how many workers this flow needs."""
        return self._of(spec).law.target

    def lingering(self, spec: FlowSpec, now: float) -> int:
        """Return the highest number of workers that this flow got in the last `LINGER_S`; 0 without autoscaling."""
        if self._autoscale is None:
            return 0
        return max((target for at, target in self._of(spec).targets if at > now - LINGER_S), default=0)

    def limited_by(self, instance: str) -> str:
        """Return the name of the limit of a flow's jobs, as in `FlowView.limited_by`; empty if it is not known."""
        flow = self._flows.get(instance)
        return "" if flow is None else flow.limited_by

    def worker_seconds(self, instance: str) -> WorkerSeconds:
        flow = self._flows.get(instance)
        if flow is None:
            return WorkerSeconds(0.0, {}, self._price)
        return WorkerSeconds(flow.worker_s, dict(flow.by_job), self._price)

    def _of(self, spec: FlowSpec) -> _ScaledFlow:
        flow = self._flows.get(spec.instance)
        if flow is None:
            flow = self._flows[spec.instance] = _ScaledFlow(Autoscaler(self._bounds(spec, 1), spec.workers))
        return flow

    def _bounds(self, spec: FlowSpec, flows: int) -> AutoscaleLimits:
        limits = self._autoscale
        if limits is None:
            return AutoscaleLimits(spec.workers, spec.workers)
        # The least number is one for all flows together, of which each has its part.
        return msgspec.structs.replace(limits, least=limits.least // flows)

    def _step(
        self,
        flow: _ScaledFlow,
        spec: FlowSpec,
        own: Sequence[ProcessView],
        parts: Mapping[str, Part | None],
        hosts: Mapping[str, int],
        now: float,
    ) -> bool:
        router = next((view for view in own if view.role == "router" and "jobs" in view.status), None)
        if flow.stepped_at == -math.inf:
            self._restore(flow, spec, router, own, len(parts), len(hosts))
        if router is None:
            return False  # no job can read
        flow.stepped_at = now
        counts = counts_of(router, own, processors=sum(hosts.values()))
        self._count(flow, own, counts)
        self.ended.observe(spec.instance, counts.readings, flow.limited_by, self._wall_clock())
        before = (flow.law.target, flow.shards.target, flow.limited_by)
        part = parts.get(spec.instance)
        if part is not None:
            flow.targets = [*((at, many) for at, many in flow.targets if at > now - LINGER_S), (now, part.workers)]
            if spec.shards is not None:  # the number to start with once it is no longer fixed
                flow.shards.restore(spec.shards)
            least, most = self._bounds_of_shards(spec, parts, hosts)
            flow.shards.step(counts, _serving(own), now, shards=part.shards, least=least, most=most)
        if flow.shards.target != before[1]:
            flow.law.forget_limit()
        if flow.shards.is_limit:
            counts = msgspec.structs.replace(counts, refused=SHARD)  # more workers would not help
        flow.law.bound(self._bounds(spec, len(parts)))
        limited_by = flow.law.step(counts, now)
        if limited_by == "cold start" and part is not None and counts.working >= part.workers:
            limited_by = "budget"  # other flows have the rest
        if self._autoscale is None and limited_by == "budget":
            limited_by = "workers"
        flow.limited_by = SHARD if flow.shards.is_limit else limited_by
        return before != (flow.law.target, flow.shards.target, flow.limited_by)

    def _bounds_of_shards(
        self, spec: FlowSpec, parts: Mapping[str, Part | None], hosts: Mapping[str, int]
    ) -> tuple[int, int]:
        part = parts[spec.instance]
        assert part is not None
        if spec.shards is not None:
            return part.shards, part.shards
        others = [one for one in parts.values() if one is not None and one is not part]
        workers = part.workers
        if self._autoscale is not None:  # a shard that is added gets a worker
            workers = max(workers, self._autoscale.most - sum(one.workers for one in others))
        most = min(workers, part.memory_bytes // MIN_MEMORY, spec.size, MAX_SHARDS, sum(hosts.values()))
        if self._limits.shards is not None:
            most = min(most, self._limits.shards - sum(one.shards for one in others))
        return len(hosts), most

    def _restore(
        self,
        flow: _ScaledFlow,
        spec: FlowSpec,
        router: ProcessView | None,
        own: Sequence[ProcessView],
        flows: int,
        hosts: int,
    ) -> None:
        """Continue with the numbers of workers and shards of an earlier coordinator, as far as they are known."""
        workers = _workers_of(own)
        if workers > flow.law.target:
            flow.law = Autoscaler(self._bounds(spec, flows), workers)
        shards = len(_serving(own)) if router is None else int(_number(router.status, "shards"))
        if shards > hosts:  # otherwise the hosts decide this number
            flow.shards.restore(shards)

    def _count(self, flow: _ScaledFlow, own: Sequence[ProcessView], counts: FlowCounts) -> None:
        """Add the worker-seconds since the last call; divide them among jobs by the samples that each has read."""
        passed = 0.0
        for view in own:
            if view.role == "shard":
                key = (view.id, view.incarnation)
                taken_s = _number(view.status, "remote_worker_s" if "remote_workers" in view.status else "worker_s")
                passed += max(0.0, taken_s - flow.seen.get(key, 0.0))
                flow.seen[key] = max(taken_s, flow.seen.get(key, 0.0))
        flow.worker_s += passed
        read = {name: max(0, one.samples - flow.samples.get(name, 0)) for name, one in counts.readings.items()}
        total = sum(read.values())
        if total:
            flow.samples = {name: one.samples for name, one in counts.readings.items()}
        for name, samples in read.items():
            share = samples / total if total else 1.0 / len(read)
            flow.by_job[name] = flow.by_job.get(name, 0.0) + passed * share
        while len(flow.by_job) > MAX_JOBS:
            del flow.by_job[next(iter(flow.by_job))]


def _workers_of(own: Sequence[ProcessView]) -> int:
    """Return how many workers a flow has now, local and remote ones."""
    return sum(view.role == "worker" for view in own) + sum(
        len(view.status.get("remote_workers", ())) for view in own if view.role == "shard"
    )


def _serving(own: Sequence[ProcessView]) -> Shards:
    """Return the counters of a flow's shards that own keys."""
    return {
        (view.id, view.incarnation): ShardCounts(
            *(_number(view.status, name) for name in ShardCounts.__struct_fields__)
        )
        for view in own
        if view.role == "shard" and view.status.get("keys")
    }


#: Fields of `FlowCounts` that are sums over shards, each under its name in their status.
_OF_SHARDS = ("requested", "due", "busy_s", "worker_s", "away_s", "late_s", "link_s", "working")


def counts_of(router: ProcessView, own: Sequence[ProcessView], *, processors: int) -> FlowCounts:
    """Return the `FlowCounts` of a flow, from the status of its processes.

    processors: number of processors of all hosts that run shards.
    """
    workers = [view.status for view in own if view.role == "worker"]
    shards = [view.status for view in own if view.role == "shard"]
    readings = router.status.get("readings")
    known = readings if isinstance(readings, Mapping) else {}
    return FlowCounts(
        jobs=int(_number(router.status, "jobs")),
        readings={
            str(name): JobCounts(int(_number(one, "samples")), _number(one, "stall_s"), _number(one, "reading_s"))
            for name, one in known.items()
        },
        loads=_sum(shards, "loads_done"),
        cpu_s=_sum(workers, "cpu_s"),
        queued_s=_sum(workers, "queued_s"),
        processors=processors if workers else 0,
        **{name: _sum(shards, name) for name in _OF_SHARDS},
        refused=next((str(one["limited_by"]) for one in shards if one.get("limited_by")), ""),
    )


def _sum(statuses: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(_number(status, name) for status in statuses)


def _number(status: Mapping[str, Any], name: str) -> float:
    value = status.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
