"""Bodies of the calls to a node, and of its answers."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from torch_dpflow.ipc.messages.fields import MAX_NAME, Body, Count, Name, Text

#: Most processes of one node.
MAX_PROCESSES = 8192
#: In the status of a coordinator that refuses all calls because it has no state yet: the reason; empty: it starts.
WAITING = "waiting"


class Launch(Body):
    """A process that a node is to keep running."""

    #: Unique in the node; a prefix up to a slash names a group.
    id: Name
    #: What it runs: a name of `cluster.services.roles.ROLES`.
    role: Name
    #: For the role, msgpack. Where they change, another process replaces this one.
    arguments: bytes = b""
    #: For the role, msgpack. They may change while the process runs, which gets them in the answer to its heartbeat: so
    #: a flow grows and shrinks without a restart, which would lose its pool.
    settings: bytes = b""
    #: The joined node that is to run it; empty: the cluster's own.
    node: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""


class Desire(Body):
    """To a node: keep these running, and end all others that were launched so."""

    launches: Annotated[list[Launch], msgspec.Meta(max_length=MAX_PROCESSES)]
    #: Where processes of another host listen, by their ids, for those that ask where.
    elsewhere: dict[Name, Text] = {}


class Ending(Body):
    """To a node: kill this worker. Where it is still desired, another takes its place."""

    id: Name
    incarnation: Count


class Heartbeat(Body):
    """From a process of a node. Answered with `HeartbeatReply`."""

    id: Name
    incarnation: Count
    #: Where it listens; empty where it does not.
    address: Text
    #: Figures for people and for the coordinator.
    status: dict[Name, Any]


class HeartbeatReply(Body):
    """The answer to `Heartbeat`."""

    #: Whether the process is to go on running.
    desired: bool
    #: The present settings of its launch.
    settings: bytes = b""


class ProcessView(Body):
    """What a node knows of one of its processes."""

    id: Name
    role: Name
    #: Counts the processes that have had this id.
    incarnation: Count
    #: Its process id on its host, for people; 0 while it does not run, or where it has none.
    pid: Count
    #: Empty until its first heartbeat.
    address: Text
    status: dict[Name, Any]
    #: How often it has been restarted.
    restarts: Count = 0
    runs: bool = True
    #: How the process before it ended, for people; empty: there was none.
    ended: Text = ""
    #: The joined node that runs it; empty: the cluster's own.
    node: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""


class Running(Body):
    """A node's answer to `changes`, which names the revision that its caller has seen: what the node runs."""

    #: Grows whenever a process begins, ends or reports its address; 0 is before the first.
    revision: Count
    processes: Annotated[list[ProcessView], msgspec.Meta(max_length=MAX_PROCESSES)]
    #: As of `Desire`.
    elsewhere: dict[Name, Text] = {}
