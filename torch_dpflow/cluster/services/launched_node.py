"""The program of a node that a platform runs, such as in a Ray actor: see `node_fleet`."""

from __future__ import annotations

import sys

import msgspec

from torch_dpflow._core.decoding import msgpack_decoder
from torch_dpflow.cluster.security.connection_file import ConnectionFile
from torch_dpflow.cluster.services.joining_node import JoiningNode
from torch_dpflow.cluster.services.joining_options import NodeOptions
from torch_dpflow.cluster.services.node_host import stopped_by_signals
from torch_dpflow.errors import DPFlowError
from torch_dpflow.log import LogOptions
from torch_dpflow.workers.fork_server import end_fork_server

#: What a platform's launcher runs.
MODULE = __name__


class NodeLaunchSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that the node receives at its start, msgpack."""

    name: str
    #: With the cluster's address and its server key.
    keys: ConnectionFile
    processors: int
    preload: list[str]
    log: LogOptions


def run(launch_spec: bytes) -> int:
    """Run a node until it has left or the cluster ends, and return its exit code. In a process of its own."""
    spec = msgpack_decoder(NodeLaunchSpec).decode(launch_spec)
    given = {name: getattr(spec, name) for name in ("name", "processors", "preload", "log")}
    try:
        node = JoiningNode(NodeOptions(join=spec.keys, **given))
        with stopped_by_signals(node.stop):
            node.serve()
    except DPFlowError as error:
        print(error, file=sys.stderr)  # the platform reports the last output
        return 1
    finally:
        end_fork_server()
    return 0
