"""The flows of a cluster, their life cycle (thesis 4.3.2, figure 4-7), and the jobs that have left them.

A pure state machine without a socket, thread or clock inside. The coordinator stores `flows`, and runs the services of
`running`.

::

    register ──> CREATED ──access──> (services start) ──> READY <──> ACCESSED
                    │                                       │ no job for idle_s
                    │                                       v
                    │<───────────────────────────────────  IDLE ──access──> (services start) ──> READY
                    └──delete──> DELETED <──delete──────────┘

A flow is identified by its name and version, and each version has separate services while jobs read it. The same
version with different content is refused. The highest version of a name stays registered until it is deleted, which is
allowed while no job reads it. A lower version is removed some time after its last job has left.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from torch_dpflow._core.clocks import LEASE_S, START_S
from torch_dpflow._core.decoding import msgpack_decoder
from torch_dpflow.cluster.control.autoscale import JobCounts
from torch_dpflow.cluster.messages.coordinator import MAX_ENDED, MAX_LIFE, EndedJob, FlowSpec, FlowView, LifeStep, Part
from torch_dpflow.errors import UsageError
from torch_dpflow.ipc.messages.fields import UnknownFlowError

#: Maximum number of flows of a cluster, each version counted.
MAX_FLOWS = 4096
#: A flow that no job has used for this long may be stopped in favour of another (seconds).
UNREAD_S = LEASE_S
#: How long the services of a flow may take to start (seconds).
STARTING_S = 2 * START_S
#: How long the services of a lower version run without a job (seconds): after a restart of its router, jobs take up to
#: this time to rejoin.
LOWER_S = 3 * LEASE_S
#: Maximum number of contents that jobs can announce for one flow.
MAX_ANNOUNCED = 64


class FlowState(enum.Enum):
    """State of a flow in its life cycle."""

    CREATED = "created"
    READY = "ready"
    ACCESSED = "accessed"
    IDLE = "idle"
    DELETED = "deleted"


@dataclass(slots=True)
class Flow:
    """Record of one version of a flow."""

    spec: FlowSpec
    state: FlowState = FlowState.CREATED
    #: Number of jobs that read the flow, as its router last reported.
    jobs: int = 0
    #: When a job last had the flow open or accessed it (seconds).
    last_used: float = 0.0
    #: Number of jobs in the middle of an epoch; and when a job last was in an epoch or accessed the flow (seconds).
    reading: int = 0
    last_read: float = 0.0
    #: Whether a higher version is registered.
    replaced: bool = False
    #: Whether its services have been requested and do not run yet.
    starting: bool = False
    #: The latest states and when the flow entered them (seconds); the present one last.
    life: deque[tuple[FlowState, float]] = field(default_factory=lambda: deque(maxlen=MAX_LIFE))
    #: Later registrations that agree with `spec`, by the digest of their content; the latest last.
    announced: dict[str, FlowSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.life.append((self.state, self.last_used))

    def enter(self, state: FlowState, now: float) -> None:
        if state is not self.state:
            self.state = state
            self.life.append((state, now))

    @property
    def runs(self) -> bool:
        """Whether the flow's services should run."""
        return self.starting or self.state in (FlowState.READY, FlowState.ACCESSED)

    @property
    def is_stopped(self) -> bool:
        """Whether the flow's services have been stopped; services that still run are about to end."""
        return self.state is FlowState.IDLE and not self.starting

    def is_unread(self, now: float) -> bool:
        """Return whether the flow's services run and no job has used the flow for `UNREAD_S`."""
        return self.state is FlowState.READY and now - self.last_used >= UNREAD_S

    def may_give_way(self, now: float) -> bool:
        """Return whether the flow's running services can be stopped for another flow: no job was in an epoch lately."""
        if self.is_unread(now):
            return True
        is_open = self.state is FlowState.ACCESSED and not self.replaced and not self.reading
        return is_open and now - self.last_read >= UNREAD_S

    def view(self, part: Part | None, now: float) -> FlowView:
        """Return the flow's state for display. part: its part of the cluster; None while its services do not run."""
        waits = self.state is FlowState.READY and not self.replaced
        return FlowView(
            msgspec.structs.replace(self.spec, parts={}),
            self.state.value,
            self.jobs,
            self.replaced,
            [LifeStep(state.value, max(0.0, now - since)) for state, since in self.life],
            part,
            idle_in_s=max(0.0, self.last_used + self.spec.idle_s - now) if waits else None,
        )


class FlowRegistry:
    """Registry of flows: accepts or refuses registrations, starts and stops services. Not thread-safe.

    Times are seconds on one monotonic clock.
    """

    def __init__(self) -> None:
        self._flows: dict[str, Flow] = {}

    @property
    def flows(self) -> list[Flow]:
        """All versions of all flows, in the order of registration."""
        return list(self._flows.values())

    @property
    def running(self) -> dict[str, FlowSpec]:
        """Flows whose services should run, by instance (name and version)."""
        return {instance: flow.spec for instance, flow in self._flows.items() if flow.runs}

    def restore(self, spec: FlowSpec, now: float) -> None:
        """Add a flow from the state store. Its state follows from reports of its services, if these run."""
        if spec.instance not in self._flows:
            self._add(Flow(spec, last_used=now))

    def find(self, name: str) -> Flow | None:
        """Return the flow "name:v2", or the highest version of "name"; None if no such flow is registered."""
        found = (flow for flow in self._flows.values() if flow.spec.name == name and not flow.replaced)
        return self._flows.get(name) or next(found, None)

    def register(self, spec: FlowSpec, now: float) -> Flow:
        """Register a flow for a job, and return it.

        Raises:
            OptionError: the description `spec` is invalid.
            UsageError: the same version is registered with another description, or there are too many flows.
        """
        spec.check()
        current = self._flows.get(spec.instance)
        if current is None:
            if len(self._flows) >= MAX_FLOWS:
                raise UsageError(f"{len(self._flows)} flows are registered, the most there may be; delete some")
            self._add(Flow(spec, last_used=now))
            return self._flows[spec.instance]
        current.last_used = max(now, current.last_used)
        difference = spec.difference(current.spec)
        if difference:
            raise UsageError(
                f"flow {spec.name!r}: version {spec.version} is registered and differs: {difference}. "
                f'Describe it the same way, or read it as flow="{spec.name}:v{spec.version + 1}"'
            )
        current.announced.pop(spec.content, None)
        current.announced[spec.content] = spec
        if len(current.announced) > MAX_ANNOUNCED:
            del current.announced[next(iter(current.announced))]
        return current

    def flows_of_content(self, content: str) -> list[Flow]:
        """Return the flows that have this content, or for which jobs have announced it."""
        return [flow for flow in self._flows.values() if flow.spec.content == content or content in flow.announced]

    def accept_content(self, flow: Flow, content: str) -> None:
        """Make `content` the flow's content. Call this for the first content of the flow that is completely uploaded.

        Registrations that agree can have contents that differ in bytes.
        """
        if content in flow.announced and content != flow.spec.content:
            flow.spec = flow.announced[content]
        flow.announced.clear()

    def access(self, name: str, version: int, now: float) -> Flow:
        """Record that a job is about to read a flow, and return the flow. Then call `start`.

        Raises UnknownFlowError if this version of the flow is not registered.
        """
        flow = self._flows.get(f"{name}:v{version}")
        if flow is None:
            raise UnknownFlowError(f"flow {name!r}, version {version}, is not registered; register it")
        flow.last_used = flow.last_read = now
        return flow

    def start(self, flow: Flow) -> None:
        """Mark that a flow's services should run, so that `running` contains it. No effect if they run."""
        flow.starting = flow.starting or not flow.runs

    def report(self, instance: str, jobs: int | None, now: float, *, reading: int | None = None) -> bool:
        """Process a report of a flow's router; return whether the flow's services should run.

        jobs: number of jobs that the router serves; None: the router is not up.
        reading: number of these jobs that are in the middle of an epoch; None: all.
        """
        flow = self._flows.get(instance)
        if flow is None or flow.is_stopped:
            return False  # it is about to end
        if jobs is None:
            self.start(flow)
            return True
        # Time during which the services start does not count as idle: no job could read.
        if jobs or flow.jobs or flow.starting:
            flow.last_used = now
        flow.starting = False
        reading = jobs if reading is None else reading
        if reading or flow.reading:
            flow.last_read = now
        flow.jobs, flow.reading = jobs, reading
        flow.enter(FlowState.ACCESSED if jobs else FlowState.READY, now)
        return True

    def scale(self, name: str, shards: int | Literal["auto"] | None, workers: int | None) -> Flow:
        """Change a flow's numbers of shards and workers, and return it.

        name: see `find`.
        shards: number of shards; "auto": the number that the jobs' reading speed needs. None: no change.
        workers: number of workers of all shards together; None: no change, but at least one for each shard.

        Raises:
            UsageError: there is no such flow.
            OptionError: the numbers are invalid.
        """
        flow = self._known(name)
        number = flow.spec.shards if shards is None else None if shards == "auto" else shards
        if workers is None:
            workers = max(flow.spec.workers, number or 1)
        scaled = msgspec.structs.replace(flow.spec, shards=number, workers=workers)
        scaled.check()
        flow.spec = scaled
        return flow

    def stop_unread(self, now: float) -> bool:
        """Stop the services of the flow that has not been read for longest; return False if no flow can be stopped.

        Flows without jobs are stopped first, then flows whose jobs are between two epochs; the next epoch starts them.
        """
        unread = [flow for flow in self._flows.values() if flow.may_give_way(now)]
        if not unread:
            return False
        longest = min(unread, key=lambda flow: (flow.jobs > 0, flow.last_read))
        longest.jobs = longest.reading = 0
        longest.enter(FlowState.IDLE, now)
        return True

    def delete(self, instance: str, now: float) -> None:
        """Delete this version of a flow, if it exists. Raises UsageError if jobs read it or no version is named."""
        flow = self._flows.get(instance)
        if flow is None:
            if ":" not in instance:
                raise UsageError(f"flow {instance!r:.80}: name the version to delete, as in {instance!r:.80}:v1")
            return
        if flow.state is FlowState.ACCESSED:
            raise UsageError(f"flow {instance!r} is read by {flow.jobs} jobs; end them first")
        flow.enter(FlowState.DELETED, now)
        self._remove(flow)

    def tick(self, now: float) -> None:
        """Stop the services of flows that no job has used for `idle_s` or longer; remove unused lower versions."""
        for flow in self.flows:
            idle_s = LOWER_S if flow.replaced else flow.spec.idle_s
            # A lower version that was just registered, or restored after a restart, may be about to be accessed.
            if flow.starting or (flow.replaced and flow.state is FlowState.CREATED):
                idle_s = max(idle_s, STARTING_S)
            is_over = flow.state is not FlowState.ACCESSED and now - flow.last_used >= idle_s
            if flow.replaced and is_over:
                self._remove(flow)
            elif is_over and flow.runs:
                flow.enter(FlowState.IDLE, now)
                flow.starting = False

    def _known(self, name: str) -> Flow:
        flow = self.find(name)
        if flow is None:
            known = sorted(f"{one.spec.name}:v{one.spec.version}" for one in self._flows.values())
            raise UsageError(f"flow {name!r:.80} is not registered; registered are {known}")
        return flow

    def _add(self, flow: Flow) -> None:
        self._flows[flow.spec.instance] = flow
        self._rank(flow.spec.name)

    def _remove(self, flow: Flow) -> None:
        del self._flows[flow.spec.instance]
        self._rank(flow.spec.name)

    def _rank(self, name: str) -> None:
        """Find the highest version of a flow after a change. O(flows)."""
        versions = [flow for flow in self._flows.values() if flow.spec.name == name]
        highest = max((flow.spec.version for flow in versions), default=0)
        for flow in versions:
            flow.replaced = flow.spec.version < highest


#: A job that waits for at most this share of its time is limited by its training, and not by its flow.
LITTLE_STALL = 0.05


class EndedJobs:
    """Record of the latest ended jobs, at most `MAX_ENDED`. If a job with the same name starts, its record is removed.

    Args:
        packed: bytes that `take_packed` returned in an earlier process; empty at first.
    """

    def __init__(self, packed: bytes = b"") -> None:
        #: Ended jobs by (flow, job), the latest last.
        self._ended: dict[tuple[str, str], EndedJob] = {}
        #: Latest counts of the jobs of each flow, and the flow's latest known limit.
        self._seen: dict[str, tuple[Mapping[str, JobCounts], str]] = {}
        self._has_changed = False
        with suppress(msgspec.MsgspecError):  # of another release: it is for display only
            self._ended |= {(one.flow, one.job): one for one in msgpack_decoder(list[EndedJob]).decode(packed)}

    @property
    def views(self) -> list[EndedJob]:
        """The ended jobs, in the order in which they ended."""
        return list(self._ended.values())

    def observe(self, flow: str, readings: Mapping[str, JobCounts], limited_by: str, at: float) -> None:
        """Record the counts of a flow's jobs. Jobs that were in the previous counts and are missing now have ended.

        limited_by: what limited the flow before these counts. at: the time, in seconds since 1970.
        """
        before, known = self._seen.get(flow, ({}, ""))
        limit = limited_by or known
        for job in before.keys() - readings.keys():
            counts = before[job]
            if counts.samples:
                by = "job" if counts.stall_s <= LITTLE_STALL * counts.reading_s else limit
                self._ended.pop((flow, job), None)
                self._ended[flow, job] = EndedJob(
                    flow, job, int(at), counts.samples, counts.stall_s, counts.reading_s, by
                )
                self._has_changed = True
        for job in readings:
            self._has_changed |= self._ended.pop((flow, job), None) is not None
        self._seen[flow] = readings, limit
        while len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def forget(self, flow: str, at: float) -> None:
        """Record that a flow's services have ended, and all its jobs with them."""
        self.observe(flow, {}, "", at)
        del self._seen[flow]

    def take_packed(self) -> bytes | None:
        """Return the record as bytes for the state store; None if it has not changed since the last call."""
        has_changed, self._has_changed = self._has_changed, False
        return msgspec.msgpack.encode(self.views) if has_changed else None
