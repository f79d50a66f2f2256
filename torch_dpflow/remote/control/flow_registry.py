"""The flows of a cluster and their life cycle (thesis 4.3.2, figure 4-7).

A pure state machine: each call returns what to do, in order; there is no socket, thread or clock inside.

::

    register ──> CREATED ──access──> (services start) ──> READY <──> ACCESSED
                    │                                       │ nobody for idle_s
                    │                                       v
                    │<───────────────────────────────────  IDLE ──access──> (services start) ──> READY
                    └──delete──> DELETED <──delete──────────┘

A flow is known by its name, and of its versions the highest is in force. A lower one is refused, the same
one with another fingerprint too. Jobs that read a version when a higher one comes read on: its services stay
until the last of them has left.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from torch_dpflow.errors import UsageError
from torch_dpflow.remote.wire.coordinator import MAX_LIFE, FlowView, LifeStep, Part
from torch_dpflow.remote.wire.errors import UnknownFlowError
from torch_dpflow.remote.wire.flow_spec import FlowSpec

#: Most flows of a cluster, versions that are still read included.
MAX_FLOWS = 4096
#: A flow that nobody has read or asked for in so long gives way to others, seconds.
UNREAD_S = 5.0
#: How long services that were asked for may take to come up before they are given up, seconds.
STARTING_S = 120.0
#: How long the services of a version that another has replaced stay when nobody reads it, seconds: after its router has
#: started anew jobs take so long to come back to it.
REPLACED_S = 15.0
#: Most contents of one flow that are remembered as announced.
MAX_ANNOUNCED = 64


class FlowState(enum.Enum):
    """Where a flow is in its life."""

    CREATED = "created"
    READY = "ready"
    ACCESSED = "accessed"
    IDLE = "idle"
    DELETED = "deleted"


class StartFlow(msgspec.Struct, frozen=True):
    """Have a router and shards for this flow; they may be there."""

    spec: FlowSpec


class StopFlow(msgspec.Struct, frozen=True):
    """End the services of this instance, if there are any."""

    instance: str


class SaveFlow(msgspec.Struct, frozen=True):
    """Keep this flow where it outlives the process."""

    spec: FlowSpec


class ForgetFlow(msgspec.Struct, frozen=True):
    """Keep this flow no longer."""

    spec: FlowSpec


FlowInstruction: TypeAlias = StartFlow | StopFlow | SaveFlow | ForgetFlow


@dataclass(slots=True)
class Flow:
    """One version of a flow, as the registry knows it."""

    spec: FlowSpec
    state: FlowState = FlowState.CREATED
    #: Jobs that read it, as its router last said.
    jobs: int = 0
    #: When somebody last read it or asked for it, seconds.
    touched: float = 0.0
    #: Whether a higher version is in force.
    replaced: bool = False
    #: Whether services have been asked for and have not come up.
    starting: bool = False
    #: The latest states and when the flow came into them, seconds; the one that it is in last.
    life: deque[tuple[FlowState, float]] = field(default_factory=lambda: deque(maxlen=MAX_LIFE))
    #: Descriptions that agree with this one and whose content may come, by content; the latest last.
    announced: dict[str, FlowSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.life.append((self.state, self.touched))

    def enter(self, state: FlowState, now: float) -> None:
        """Be in this state from now on."""
        if state is not self.state:
            self.state = state
            self.life.append((state, now))

    def is_unread(self, now: float) -> bool:
        """Whether its services run and nobody reads it; jobs that have just come count."""
        return self.state is FlowState.READY and now - self.touched >= UNREAD_S

    def view(self, part: Part | None, now: float) -> FlowView:
        """For people, with what it has of the cluster while its services run."""
        waits = self.state is FlowState.READY and not self.replaced
        return FlowView(
            self.spec,
            self.state.value,
            self.jobs,
            self.replaced,
            [LifeStep(state.value, max(0.0, now - since)) for state, since in self.life],
            part,
            max(0.0, self.touched + self.spec.idle_s - now) if waits else None,
        )


class FlowRegistry:
    """Decides who may register what, and when services start and end. Not thread-safe.

    Times are seconds on any one clock that does not run backwards.
    """

    def __init__(self) -> None:
        self._flows: dict[str, Flow] = {}
        #: The instance in force, by name.
        self._current: dict[str, str] = {}

    @property
    def flows(self) -> list[Flow]:
        """Every version that is in force or still read, in the order in which they came."""
        return list(self._flows.values())

    def restore(self, spec: FlowSpec, now: float) -> None:
        """Take up a flow that was kept. What its services do will be heard of them."""
        current = self.find(spec.name)
        if current is None or current.spec.version < spec.version:
            self._put_in_force(Flow(spec, touched=now))

    def find(self, name: str) -> Flow | None:
        """The version of a flow that is in force."""
        instance = self._current.get(name)
        return None if instance is None else self._flows[instance]

    def register(self, spec: FlowSpec, now: float) -> list[FlowInstruction]:
        """A job describes the flow that it is going to read.

        Raises:
            OptionError: the description is not possible.
            UsageError: a higher version is in force, or the same one is and differs.
        """
        spec.check()
        current = self.find(spec.name)
        if current is None:
            if len(self._flows) >= MAX_FLOWS:
                raise UsageError(
                    f"{len(self._flows)} flows are registered, the most there may be; delete some"
                )
            return self._put_in_force(Flow(spec, touched=now))
        if spec.version < current.spec.version:
            raise UsageError(
                f"flow {spec.name!r}: version {spec.version} is refused, version {current.spec.version} is "
                "in force; use that one or a higher one"
            )
        if spec.version > current.spec.version:
            return self._put_in_force(Flow(spec, touched=now))
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
        return []

    def flow_of_content(self, content: str) -> Flow | None:
        """The flow for which somebody has announced this content."""
        for flow in self._flows.values():
            if flow.spec.content == content or content in flow.announced:
                return flow
        return None

    def accept_content(self, flow: Flow, content: str) -> list[FlowInstruction]:
        """This content, which was announced, has come as the flow's first: it is what the flow loads.

        Descriptions that agree may still differ in the bytes of what is loaded, and who registered first may have
        died before it brought its own.
        """
        taken = flow.announced.get(content, flow.spec)
        flow.announced.clear()
        if taken.content == flow.spec.content:
            return []
        flow.spec = taken
        return [SaveFlow(taken)]

    def access(self, name: str, version: int, now: float) -> tuple[Flow, list[FlowInstruction]]:
        """A job wants to read; its services are started unless they run.

        Raises:
            UnknownFlowError: there is no such flow, or none of this version yet.
            UsageError: a higher version is in force, and nobody reads this one any more.
        """
        newest = self.find(name)
        if newest is None or newest.spec.version < version:
            known = "none" if newest is None else f"version {newest.spec.version}"
            raise UnknownFlowError(
                f"flow {name!r}, version {version}, is not in force ({known} is); register it"
            )
        # One that has been replaced and is still read may have lost its router.
        flow = self._flows.get(f"{name}@{version}")
        if flow is None:
            raise UsageError(
                f"flow {name!r}, version {version}, is not in force (version {newest.spec.version} is); read that one"
            )
        flow.touched = now
        if flow.state in (FlowState.READY, FlowState.ACCESSED):
            return flow, []
        flow.starting = True
        return flow, [StartFlow(flow.spec)]

    def report(self, instance: str, jobs: int, now: float) -> list[FlowInstruction]:
        """The router of this instance is up and serves so many jobs."""
        flow = self._flows.get(instance)
        if flow is None:
            return [StopFlow(instance)]
        # While services start nobody can read, however long it takes.
        if jobs or flow.jobs or flow.starting:
            flow.touched = now
        flow.starting = False
        flow.jobs = jobs
        flow.enter(FlowState.ACCESSED if jobs else FlowState.READY, now)
        return []

    def scale(self, name: str, shards: int, workers: int | None) -> tuple[Flow, list[FlowInstruction]]:
        """A person gives this flow other numbers of shards and workers.

        workers: of all shards together; None: as many as it has, but one for each shard at least.

        Raises:
            UsageError: there is no such flow.
            OptionError: the numbers are not possible.
        """
        flow = self._known(name)
        if workers is None:
            workers = max(flow.spec.workers, shards)
        scaled = msgspec.structs.replace(flow.spec, shards=shards, workers=workers)
        scaled.check()
        flow.spec = scaled
        return flow, [SaveFlow(scaled)]

    def stop_unread(self, now: float) -> list[FlowInstruction]:
        """There is no room for another flow: end the services of the one that nobody has read for longest."""
        unread = [flow for flow in self._flows.values() if flow.is_unread(now)]
        if not unread:
            return []
        longest = min(unread, key=lambda flow: flow.touched)
        longest.enter(FlowState.IDLE, now)
        return [StopFlow(longest.spec.instance)]

    def delete(self, name: str, now: float) -> list[FlowInstruction]:
        """A person does not want this flow any more.

        Raises:
            UsageError: there is none, or jobs read it.
        """
        flow = self._known(name)
        if flow.state is FlowState.ACCESSED:
            raise UsageError(f"flow {name!r} is read by {flow.jobs} jobs; end them first")
        flow.enter(FlowState.DELETED, now)
        del self._current[name]
        del self._flows[flow.spec.instance]
        return [StopFlow(flow.spec.instance), ForgetFlow(flow.spec)]

    def tick(self, now: float) -> list[FlowInstruction]:
        """Time has passed: end the services that nobody has used for long."""
        out: list[FlowInstruction] = []
        for instance, flow in list(self._flows.items()):
            patience = REPLACED_S if flow.replaced else flow.spec.idle_s
            if flow.starting:
                patience = max(patience, STARTING_S)
            idle = flow.starting or flow.state is FlowState.READY
            unused = idle and now - flow.touched >= patience
            asleep = flow.state in (FlowState.CREATED, FlowState.IDLE) and not flow.starting
            if flow.replaced and (unused or asleep):
                del self._flows[instance]
                out += [StopFlow(instance), ForgetFlow(flow.spec)]
            elif unused:
                flow.enter(FlowState.IDLE, now)
                flow.starting = False
                out.append(StopFlow(instance))
        return out

    def _known(self, name: str) -> Flow:
        flow = self.find(name)
        if flow is None:
            raise UsageError(f"flow {name!r} is not registered; registered are {sorted(self._current)}")
        return flow

    def _put_in_force(self, flow: Flow) -> list[FlowInstruction]:
        earlier = self.find(flow.spec.name)
        if earlier is not None:
            earlier.replaced = True
        self._flows[flow.spec.instance] = flow
        self._current[flow.spec.name] = flow.spec.instance
        return [SaveFlow(flow.spec)]

    def validate(self) -> None:
        """Check every invariant; O(flows), for tests. Raises AssertionError."""
        for instance, flow in self._flows.items():
            assert flow.spec.instance == instance
            assert (flow.state is FlowState.ACCESSED) == (flow.jobs > 0)
            assert flow.state is not FlowState.DELETED
            assert flow.replaced == (self._current.get(flow.spec.name) != instance)
        for name, instance in self._current.items():
            versions = [flow.spec.version for flow in self._flows.values() if flow.spec.name == name]
            assert self._flows[instance].spec.version == max(versions)
