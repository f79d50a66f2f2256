"""Bodies of the calls by which a node on another host joins a cluster, and of the coordinator's answers."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from torch_dpflow.cluster.messages.node import MAX_PROCESSES, Launch, ProcessView
from torch_dpflow.ipc.messages.fields import Body, Count, Name, Seconds, Text

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
    #: That it has the key by which services listen: see `cluster.security.node_proof`.
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
