"""Transport over ZeroMQ's ROUTER and DEALER. No other package of the library imports zmq."""

from __future__ import annotations

from torch_dpflow.ipc.transport.zeromq.contexts import draw_key_pair
from torch_dpflow.ipc.transport.zeromq.sockets import ZeroMQConnection, ZeroMQListener

__all__ = ["ZeroMQConnection", "ZeroMQListener", "draw_key_pair"]
