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
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from torch_dpflow.errors import UsageError
from torch_dpflow.remote.flow_spec import FlowSpec

#: Most flows of a cluster, versions that are still read included.
MAX_FLOWS = 4096
#: Most contents of one flow that are remembered as announced.
MAX_OFFERS = 64


class FlowState(enum.Enum):
    """Where a flow is in its life."""

    CREATED = "created"
    READY = "ready"
    ACCESSED = "accessed"
    IDLE = "idle"
    DELETED = "deleted"


class Start(msgspec.Struct, frozen=True):
    """Have a router and shards for this flow; they may be there."""

    spec: FlowSpec


class Stop(msgspec.Struct, frozen=True):
    """End the services of this instance, if there are any."""

    instance: str


class Save(msgspec.Struct, frozen=True):
    """Keep this flow where it outlives the process."""

    spec: FlowSpec


class Forget(msgspec.Struct, frozen=True):
    """Keep this flow no longer."""

    spec: FlowSpec


Instruction: TypeAlias = Start | Stop | Save | Forget


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
    #: Descriptions that agree with this one and whose content may come, by content; the latest last.
    offers: dict[str, FlowSpec] = field(default_factory=dict)


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

    def register(self, spec: FlowSpec, now: float) -> list[Instruction]:
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
                "Describe it the same way, or raise the version"
            )
        current.offers.pop(spec.content, None)
        current.offers[spec.content] = spec
        if len(current.offers) > MAX_OFFERS:
            del current.offers[next(iter(current.offers))]
        return []

    def offered(self, content: str) -> Flow | None:
        """The flow for which somebody has announced this content."""
        for flow in self._flows.values():
            if flow.spec.content == content or content in flow.offers:
                return flow
        return None

    def settle(self, flow: Flow, content: str) -> list[Instruction]:
        """This content, which was announced, has come as the flow's first: it is what the flow loads.

        Descriptions that agree may still differ in the bytes of what is loaded, and who registered first may have
        died before it brought its own.
        """
        taken = flow.offers.get(content, flow.spec)
        flow.offers.clear()
        if taken.content == flow.spec.content:
            return []
        flow.spec = taken
        return [Save(taken)]

    def access(self, name: str, version: int, now: float) -> tuple[Flow, list[Instruction]]:
        """A job wants to read; its services are started unless they run.

        Raises:
            UsageError: there is no such flow, or this version is not in force.
        """
        flow = self.find(name)
        if flow is None or flow.spec.version != version:
            known = "none" if flow is None else f"version {flow.spec.version}"
            raise UsageError(f"flow {name!r}, version {version}, is not in force ({known} is); register it")
        flow.touched = now
        if flow.state in (FlowState.READY, FlowState.ACCESSED):
            return flow, []
        flow.starting = True
        return flow, [Start(flow.spec)]

    def report(self, instance: str, jobs: int, now: float) -> list[Instruction]:
        """The router of this instance is up and serves so many jobs."""
        flow = self._flows.get(instance)
        if flow is None:
            return [Stop(instance)]
        flow.starting = False
        if jobs or flow.jobs:
            flow.touched = now
        flow.jobs = jobs
        flow.state = FlowState.ACCESSED if jobs else FlowState.READY
        return []

    def down(self, instance: str) -> None:
        """The services of this instance have ended without being told to."""
        flow = self._flows.get(instance)
        if flow is not None and flow.state is not FlowState.CREATED:
            flow.state, flow.jobs = FlowState.IDLE, 0

    def delete(self, name: str) -> list[Instruction]:
        """A person does not want this flow any more.

        Raises:
            UsageError: there is none, or jobs read it.
        """
        flow = self.find(name)
        if flow is None:
            raise UsageError(f"flow {name!r} is not registered; registered are {sorted(self._current)}")
        if flow.state is FlowState.ACCESSED:
            raise UsageError(f"flow {name!r} is read by {flow.jobs} jobs; end them first")
        flow.state = FlowState.DELETED
        del self._current[name]
        del self._flows[flow.spec.instance]
        return [Stop(flow.spec.instance), Forget(flow.spec)]

    def tick(self, now: float) -> list[Instruction]:
        """Time has passed: end the services that nobody has used for long."""
        out: list[Instruction] = []
        for instance, flow in list(self._flows.items()):
            patience = 0.0 if flow.replaced else flow.spec.idle_s
            unused = flow.state is FlowState.READY and now - flow.touched >= patience
            if flow.replaced and (unused or flow.state in (FlowState.CREATED, FlowState.IDLE)):
                del self._flows[instance]
                out += [Stop(instance), Forget(flow.spec)]
            elif unused:
                flow.state = FlowState.IDLE
                out.append(Stop(instance))
        return out

    def _put_in_force(self, flow: Flow) -> list[Instruction]:
        earlier = self.find(flow.spec.name)
        if earlier is not None:
            earlier.replaced = True
        self._flows[flow.spec.instance] = flow
        self._current[flow.spec.name] = flow.spec.instance
        return [Save(flow.spec)]

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
