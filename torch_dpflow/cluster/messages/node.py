"""Bodies of the calls to a node, and of those by which a node on another host joins a cluster."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from torch_dpflow.ipc.messages.fields import MAX_NAME, Body, Count, Name, Seconds, Text

#: Most processes of one node.
MAX_PROCESSES = 8192
#: In the status of a coordinator that refuses all calls because it has no state yet: the reason; empty: it starts.
WAITING = "waiting"


class Launch(Body):
    """A process that a node is to keep running."""

    #: Unique in the node; a prefix up to a slash names a group.
    id: Name
    #: What it runs: a name of `cluster.services.service.ROLES`.
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


#: Most nodes that join one cluster.
MAX_NODES = 256
#: How long a cluster that ends waits until all joined nodes know, seconds: they report twice a second.
TELL_S = 2.0
#: A node's name; it is a part of the ids of its shards.
NODE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"

NodeName: TypeAlias = Annotated[str, msgspec.Meta(pattern=NODE_NAME)]


class NodeJoin(Body):
    """To a coordinator: this host is to run shards and workers. Answered with `NodeJoined`."""

    name: NodeName
    #: Tells its process from any other of its name: it may ask again where an answer was lost.
    process: Name
    #: Of torch_dpflow.
    release: Name
    #: As of `remote.shipping.fit.versions_here`.
    versions: Annotated[dict[Name, Name], msgspec.Meta(max_length=32)]
    #: That it has the key by which services listen: see `cluster.security.connection_file`.
    proof: Name
    #: Of its host, where its shards listen; for people, as is the number of processors.
    address: Name
    processors: Count


class NodeJoined(Body):
    """The node is the cluster's."""

    #: Grows with each node that joins; incarnations of its processes begin with it.
    generation: Count
    #: As of `ClusterPlace`.
    token: Text


class NodeReport(Body):
    """To a coordinator, again and again: what a joined node runs. Answered with `NodeOrders`."""

    name: NodeName
    generation: Count
    token: Text
    #: "leaving": it takes no more shards, and ends when it has none. "gone": it ends now.
    standing: Literal["here", "leaving", "gone"]
    processes: Annotated[list[ProcessView], msgspec.Meta(max_length=MAX_PROCESSES)]


class NodeOrders(Body):
    """What a joined node is to run."""

    #: Otherwise the cluster has given it up, and it is to end all it runs before it joins again.
    is_known: bool
    #: Whether the cluster ends.
    ends: bool = False
    launches: Annotated[list[Launch], msgspec.Meta(max_length=MAX_PROCESSES)] = []
    #: Where processes of the cluster's first host listen, by their ids.
    elsewhere: dict[Name, Text] = {}


class NodeRecord(Body):
    """A joined node, as the coordinator stores it."""

    #: As of `ClusterPlace`: after a restart it is the same, and a cluster that is started anew has another.
    cluster: Name
    name: NodeName
    #: As of `NodeJoin`.
    process: Name
    generation: Count
    address: Name
    processors: Count


class NodeView(Body):
    """What a coordinator knows of a joined node, for people."""

    name: NodeName
    address: Name
    processors: Count
    #: "here" or "leaving", as it has reported itself; "awaited" by a coordinator that has started anew.
    standing: Name
    #: For how long it has not reported.
    silent_s: Seconds
    shards: Count
    workers: Count
