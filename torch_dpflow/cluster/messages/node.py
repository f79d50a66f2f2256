"""Bodies of the calls to a node, and of the calls by which a node of another host joins a cluster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from torch_dpflow._core.clocks import HEARTBEAT_S
from torch_dpflow.ipc.messages.fields import MAX_NAME, Body, Count, Name, Seconds, Text

#: Maximum number of processes of one node.
MAX_PROCESSES = 8192
#: Maximum number of modules that a node imports once for a flow's workers, which import other modules themselves.
MAX_IMPORTS = 256
#: Maximum number of nodes that join one cluster.
MAX_NODES = 256
#: Pattern of the names of nodes, which are parts of the ids of the nodes' shards.
NODE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
#: How long a cluster that ends waits for the reports of joined nodes, which come twice a second (seconds).
END_NOTICE_S = 2 * HEARTBEAT_S
#: Key in the status of a coordinator that has no state yet and refuses all calls. Value: why; empty while it starts.
WAITING = "waiting"

NodeName: TypeAlias = Annotated[str, msgspec.Meta(pattern=NODE_NAME)]


class FlowImports(Body):
    """Modules that the workers of a flow import."""

    #: Installed modules, which a node imports in this order, once for all its workers of the flow.
    modules: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_IMPORTS)]
    #: The user's own top-level modules, which each worker imports itself.
    own: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_IMPORTS)]
    #: Current directory of the user's script, and name of the script.
    directory: Text
    script: Text


class Launch(Body):
    """Description of a process that a node should keep running."""

    #: Id, unique in the node. Ids of a flow's processes begin with the flow's name and version, such as "NAME:v1/".
    id: Name
    #: A name of `cluster.services.service.ROLES`.
    role: Name
    #: Arguments of the role, as msgpack. If they change, a new process replaces this one.
    arguments: bytes = b""
    #: Settings of the role, as msgpack. The process receives changed settings in answers to its heartbeats. So a flow
    #: is scaled without a restart, which would lose its cache.
    settings: bytes = b""
    #: Name of the joined node that should run the process; empty: the cluster's own node.
    node: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""
    #: Whether the process is started again if it ends soon after its start.
    needed: bool = True
    #: Modules to import once for all workers of the flow. None: not known, or the flow has only one worker.
    imports: FlowImports | None = None


class Desire(Body):
    """To a node: keep these processes running, and end all other processes that earlier calls have launched."""

    launches: Annotated[list[Launch], msgspec.Meta(max_length=MAX_PROCESSES)]
    #: Addresses of processes on other hosts, by id, for processes of this node that need to connect.
    elsewhere: dict[Name, Text] = {}


class Ending(Body):
    """To a node: kill this worker. If the worker is still desired, another worker replaces it."""

    id: Name
    incarnation: Count


class Heartbeat(Body):
    """To a node, from each of its processes, periodically. Answered with `HeartbeatReply`."""

    id: Name
    incarnation: Count
    #: Address at which the process listens; empty if it does not listen.
    address: Text
    #: Figures for display and for the coordinator.
    status: dict[Name, Any]


class HeartbeatReply(Body):
    """Answer to `Heartbeat`: whether the process should continue, and with which settings."""

    #: Whether the process should continue.
    desired: bool
    #: Present settings of the process, as in `Launch`.
    settings: bytes = b""


class ProcessView(Body):
    """State of one of a node's processes, as the node reports it."""

    id: Name
    role: Name
    #: Number that is higher than that of every earlier process with this id.
    incarnation: Count
    #: Process id on its host, for display; 0 while it does not run, or if it has none.
    pid: Count
    #: Empty until its first heartbeat.
    address: Text
    status: dict[Name, Any]
    restarts: Count = 0
    runs: bool = True
    #: How the previous process of this id ended: `str(End)` on the first line, then a report. Empty if there was none.
    ended: Text = ""
    #: Name of the joined node that runs the process; empty: the cluster's own node.
    node: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""


def instance_of(id: str) -> str:
    """Return the flow's name and version in a process's id; empty if the process belongs to no flow."""
    name, _, rest = id.partition(":")
    return f"{name}:{rest.partition('/')[0]}" if rest else ""


def by_flow(processes: Iterable[ProcessView]) -> Mapping[str, list[ProcessView]]:
    """Return the processes of each flow, by the flow's name and version; under "", processes that belong to no flow."""
    found: defaultdict[str, list[ProcessView]] = defaultdict(list)
    for view in processes:
        found[instance_of(view.id)].append(view)
    return found


class Running(Body):
    """Answer of a node to the call `changes`: its processes. The call contains the last known `revision`, or 0."""

    #: Grows whenever the desired processes change, or a process starts, ends or reports a new address.
    revision: Count
    processes: Annotated[list[ProcessView], msgspec.Meta(max_length=MAX_PROCESSES)]
    #: As in `Desire`.
    elsewhere: dict[Name, Text] = {}


class NodeJoin(Body):
    """To a coordinator: this host can run shards and workers. Answered with `NodeJoined`."""

    name: NodeName
    #: Random id of the node's process. A call that is repeated by the same process gets the same answer.
    process: Name
    #: The node's version of torch_dpflow.
    release: Name
    #: As returned by `remote.shipping.compatibility.versions_here`.
    versions: Annotated[dict[Name, Name], msgspec.Meta(max_length=32)]
    #: Proof that it has the server key: see `connection_file.node_proof`.
    proof: Name
    #: Address of its host, at which its shards listen; for display.
    address: Name
    processors: Count


class NodeJoined(Body):
    """Answer to `NodeJoin`: the node belongs to the cluster now."""

    #: Grows with each node that joins. Incarnations of the node's processes begin above a multiple of this number.
    generation: Count
    #: As in `ClusterPlace`.
    token: Text


class NodeReport(Body):
    """To a coordinator, periodically: the processes of a joined node. Answered with `NodeAssignment`."""

    name: NodeName
    generation: Count
    token: Text
    #: "leaving": it accepts no more shards and ends once it has none. "gone": it ends now.
    standing: Literal["here", "leaving", "gone"]
    processes: Annotated[list[ProcessView], msgspec.Meta(max_length=MAX_PROCESSES)]


class NodeAssignment(Body):
    """Answer to `NodeReport`: processes that the node should run."""

    #: False if the node does not belong to the cluster any more; it then stops all processes and joins again.
    is_known: bool
    #: Whether the cluster ends.
    ends: bool = False
    #: Whether the node should leave, because fewer nodes are needed.
    leaves: bool = False
    desire: Desire = msgspec.field(default_factory=lambda: Desire([]))


class NodeFleet(Body):
    """To a coordinator, from its provisioner, periodically: nodes that a platform runs. Answered with `FleetTarget`."""

    #: As in `ClusterPlace`.
    token: Text
    #: Prefix of the names of all nodes that the platform has run for this cluster. A joined node with this prefix that
    #: is not in `nodes` has ended.
    prefix: NodeName
    #: Nodes that were requested and have not ended.
    nodes: Annotated[list[NodeName], msgspec.Meta(max_length=MAX_NODES)]
    #: Nodes among them that should leave once jobs have left their shards.
    leaving: Annotated[list[NodeName], msgspec.Meta(max_length=MAX_NODES)]


class FleetTarget(Body):
    """Answer to `NodeFleet`: how many nodes the platform should run, and which of its nodes have joined."""

    #: How many nodes the platform should run.
    wanted: Count
    #: The platform's nodes that are in the cluster.
    joined: list[NodeName]
    ends: bool = False


class NodeRecord(Body):
    """Record of a joined node, in the form in which the coordinator stores it."""

    #: Id of the cluster, `ClusterPlace.cluster`: the same after a restart of the coordinator, new in a new cluster.
    cluster: Name
    name: NodeName
    #: As in `NodeJoin`.
    process: Name
    generation: Count
    address: Name
    processors: Count


class NodeView(Body):
    """State of a joined node, as the coordinator reports it, for display."""

    name: NodeName
    address: Name
    processors: Count
    #: "here" or "leaving", as reported; "awaited" if the coordinator has restarted since the last report.
    standing: Name
    #: Seconds since the latest report.
    silent_s: Seconds
    shards: Count
    workers: Count
