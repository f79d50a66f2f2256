"""Bodies of the calls to a node, and of what it answers."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from torch_dpflow.remote.wire.body import Body
from torch_dpflow.remote.wire.fields import Count, Name, Text

#: Most processes of one node.
MAX_PROCESSES = 8192


class Launch(Body):
    """A process that a node is to keep running."""

    #: Unique in the node; a prefix up to a slash names a group.
    id: Name
    #: What it runs: a name of `services.roles.ROLES`.
    role: Name
    #: For the role, msgpack. Other arguments make another process of it.
    arguments: bytes = b""
    #: For the role, msgpack. What may change while the process runs: it hears of it in answer to a beat.
    settings: bytes = b""


class Desire(Body):
    """To a node: keep these running, and nothing else that was launched so."""

    launches: Annotated[list[Launch], msgspec.Meta(max_length=MAX_PROCESSES)]


class Ending(Body):
    """To a node: kill this worker. Where it is desired still, another takes its place."""

    id: Name
    incarnation: Count


class Beat(Body):
    """From a process of a node: it lives. Answered with `Standing`."""

    id: Name
    incarnation: Count
    #: Where it listens; empty where it does not.
    address: Text
    #: Figures for people and for the coordinator.
    status: dict[Name, Any]


class Standing(Body):
    """To a process of a node."""

    #: Whether it is to go on.
    wanted: bool
    #: Those of its launch, as they are now.
    settings: bytes = b""


class ProcessView(Body):
    """What a node knows of one of its processes."""

    id: Name
    role: Name
    #: Higher for each process that has run under this id.
    incarnation: Count
    #: Its number where it runs, for people; 0 while it does not run, or where it has none.
    pid: Count
    #: Empty until its first beat.
    address: Text
    status: dict[Name, Any]
    #: How often it has been started again.
    restarts: Count = 0
    runs: bool = True


class Running(Body):
    """From a node: what it runs. Answers `changes`, which names the revision that its caller has seen."""

    #: Higher whenever a process has begun, ended or said where it listens; 0 is before the first.
    revision: Count
    processes: Annotated[list[ProcessView], msgspec.Meta(max_length=MAX_PROCESSES)]
