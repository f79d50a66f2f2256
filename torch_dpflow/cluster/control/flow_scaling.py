"""Number of workers of each flow of a cluster, what limits it, and its worker-seconds. Pure.

`autoscale` decides for one flow; this module computes its input once a second, from the reports of services.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from torch_dpflow.cluster.control.autoscale import Autoscaler, Bounds, FlowCounts, JobCounts
from torch_dpflow.cluster.control.placement import max_min
from torch_dpflow.cluster.messages.coordinator import AutoscaleLimits, FlowSpec, WorkerSeconds
from torch_dpflow.cluster.messages.node import ProcessView
from torch_dpflow.ipc.messages.remote_worker import RemoteWorkerView

#: Most jobs of a flow whose worker-seconds are kept.
MAX_JOBS = 1024
#: Time between two steps of the autoscalers, seconds.
STEP_S = 1.0
#: How long a superfluous local worker stays, seconds: longer than the pause between heartbeats. By then its shard has
#: received the smaller number, and blames no sample for the worker's end.
LINGER_S = 2.0
#: States of remote workers that have been started and are not ready yet.
_COMING = ("requested", "starting", "on deck")


@dataclass
class _ScaledFlow:
    law: Autoscaler
    stepped_at: float = -math.inf
    #: Targets of the latest seconds, and when they were set.
    targets: list[tuple[float, int]] = field(default_factory=list)
    limited_by: str = ""
    #: The shards' worker-seconds when they were last added, by shard and incarnation; and all that were, by job.
    seen: dict[tuple[str, int], float] = field(default_factory=dict)
    worker_s: float = 0.0
    by_job: dict[str, float] = field(default_factory=dict)
    #: Samples of each job at that time.
    samples: dict[str, int] = field(default_factory=dict)


class FlowScaling:
    """Autoscalers of all running flows. Not thread-safe.

    Args:
        limits: of the workers of all flows; None: each flow has as many as it requests, and is only observed.
        price_per_hour: of a worker, for reports.
    """

    def __init__(self, limits: AutoscaleLimits | None, *, price_per_hour: float = 0.0) -> None:
        self._limits = limits
        self._price = price_per_hour
        self._flows: dict[str, _ScaledFlow] = {}

    @property
    def sets_numbers(self) -> bool:
        """Whether the numbers of workers are scaled; otherwise flows are only observed."""
        return self._limits is not None

    def begin(self, spec: FlowSpec, now: float) -> None:
        """Record that a job is about to read this flow."""
        self._of(spec).law.begin(now)

    def keep(self, running: Mapping[str, FlowSpec]) -> None:
        """Forget flows that do not run any more."""
        for instance in self._flows.keys() - running.keys():
            del self._flows[instance]

    def observe(self, running: Mapping[str, FlowSpec], processes: Sequence[ProcessView], now: float) -> bool:
        """Process reports of running flows; return whether a flow's number of workers or its limit has changed."""
        self.keep(running)
        own: dict[str, list[ProcessView]] = {}
        for view in processes:
            for instance in running:
                if view.id.startswith(f"{instance}/"):
                    own.setdefault(instance, []).append(view)
        changed = False
        for instance, spec in running.items():
            flow = self._of(spec)
            if now - flow.stepped_at >= STEP_S:
                changed = self._step(flow, spec, own.get(instance, []), len(running), now) or changed
        return changed

    def target(self, spec: FlowSpec) -> int:
        """Return how many workers this flow is to have."""
        return self._of(spec).law.target

    def lingering(self, spec: FlowSpec, now: float) -> int:
        """Return how many workers this flow has while superfluous ones are still being ended."""
        flow = self._of(spec)
        return max([flow.law.target, *(target for at, target in flow.targets if at > now - LINGER_S)])

    def limited_by(self, instance: str) -> str:
        """Return what limits the jobs of a flow; empty if nothing is known to."""
        flow = self._flows.get(instance)
        return "" if flow is None else flow.limited_by

    def worker_seconds(self, instance: str) -> WorkerSeconds:
        """Return the worker-seconds of a flow, in total and of each job."""
        flow = self._flows.get(instance)
        if flow is None:
            return WorkerSeconds(0.0, {}, self._price)
        return WorkerSeconds(flow.worker_s, dict(flow.by_job), self._price)

    def _of(self, spec: FlowSpec) -> _ScaledFlow:
        flow = self._flows.get(spec.instance)
        if flow is None:
            flow = self._flows[spec.instance] = _ScaledFlow(Autoscaler(self._bounds(spec, 1), spec.workers))
        return flow

    def _bounds(self, spec: FlowSpec, flows: int) -> Bounds:
        limits = self._limits
        if limits is None:
            return Bounds(least=spec.workers, most=spec.workers)
        # The least number is one for all flows together, of which each has its part.
        least = max_min([limits.least] * flows, limits.least)
        return Bounds(least=min(least), most=limits.most, hold_s=limits.hold_s)

    def _step(self, flow: _ScaledFlow, spec: FlowSpec, own: Sequence[ProcessView], flows: int, now: float) -> bool:
        if flow.stepped_at == -math.inf and (found := _workers_of(own)) > flow.law.target:
            # An earlier coordinator had more than the flow requests.
            flow.law = Autoscaler(self._bounds(spec, flows), found)
        router = next((view for view in own if view.role == "router" and "jobs" in view.status), None)
        if router is None:
            return False  # no job can read
        flow.stepped_at = now
        counts = counts_of(router, own, target=flow.law.target)
        self._count(flow, own, counts)
        flow.law.bound(self._bounds(spec, flows))
        before, limited_by = flow.law.target, flow.limited_by
        flow.targets = [*((at, many) for at, many in flow.targets if at > now - LINGER_S), (now, before)]
        flow.limited_by = flow.law.step(counts, now).limited_by
        if self._limits is None and flow.limited_by == "budget":
            flow.limited_by = "workers"
        return (before, limited_by) != (flow.law.target, flow.limited_by)

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
    """Return how many workers a flow has now, local and remote."""
    return sum(view.role == "worker" for view in own) + sum(
        len(view.status.get("remote_workers", ())) for view in own if view.role == "shard"
    )


def counts_of(router: ProcessView, own: Sequence[ProcessView], *, target: int) -> FlowCounts:
    """Return the figures of a flow, from the status of its processes. target: the intended number of workers."""
    shards = [view.status for view in own if view.role == "shard"]
    readings = router.status.get("readings")
    known = readings if isinstance(readings, Mapping) else {}
    working = int(_sum(shards, "working"))
    has_platform = any("remote_workers" in status for status in shards)
    members = [
        one for status in shards for one in msgspec.convert(status.get("remote_workers", []), list[RemoteWorkerView])
    ]
    return FlowCounts(
        jobs=int(_number(router.status, "jobs")),
        readings={
            str(name): JobCounts(int(_number(one, "samples")), _number(one, "stall_s"), _number(one, "reading_s"))
            for name, one in known.items()
        },
        requested=int(_sum(shards, "requested")),
        due=int(_sum(shards, "due")),
        loads=int(_sum(shards, "loads_done")),
        busy_s=_sum(shards, "busy_s"),
        worker_s=_sum(shards, "worker_s"),
        away_s=_sum(shards, "away_s"),
        late_s=_sum(shards, "late_s"),
        link_s=_sum(shards, "link_s"),
        working=working,
        coming=sum(one.state in _COMING for one in members) if has_platform else max(0, target - working),
        refused=next((str(one["limited_by"]) for one in shards if one.get("limited_by")), ""),
    )


def _sum(statuses: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(_number(status, name) for status in statuses)


def _number(status: Mapping[str, Any], name: str) -> float:
    value = status.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
