"""A server of the pool as a process of a cluster's node, which starts another one when it ends."""

from __future__ import annotations

import os
import threading
import time

import msgspec

from torch_dpflow.cluster.services.heartbeat import HeartbeatSender
from torch_dpflow.cluster.services.spec import ServiceSpec
from torch_dpflow.errors import OptionError
from torch_dpflow.log import SERVICE
from torch_dpflow.pool.messages.protocol import find_directory
from torch_dpflow.pool.server.data_server import DataServer

#: The time between two looks at the server, and between attempts to have its address, seconds.
_LOOK_S, _RETRY_S = 0.5, 2.0


def run(service: ServiceSpec) -> None:
    """Serve until the process ends: the role of a node's process. Its arguments are the bytes of memory, msgpack."""
    memory_bytes = msgspec.msgpack.decode(service.arguments, type=int)
    heartbeats = HeartbeatSender(service, str(find_directory()))
    serving = threading.Thread(
        target=_opened(memory_bytes, heartbeats).serve, name="dpflow-pool", daemon=True
    )
    serving.start()
    while serving.is_alive():
        heartbeats.on_iteration()
        time.sleep(_LOOK_S)
    os._exit(1)  # another takes its place


def _opened(memory_bytes: int, heartbeats: HeartbeatSender) -> DataServer:
    """The server, once its address is free: another one may have it."""
    told = False
    while True:
        try:
            return DataServer(memory_bytes)
        except OptionError as error:
            if not told:
                SERVICE.error("the pool cannot be served: %s", error)
        told = True
        heartbeats.on_iteration()
        time.sleep(_RETRY_S)
