"""Calls and streams between processes: ids, deadlines, safe repetition, order, credit.

A client calls a method and waits for its answer, or opens a stream in which both sides send items in order.
Bodies are small and typed (msgpack), bulk travels in frames that nobody copies or looks into. A call is
repeated until it is answered or its deadline passes, and one server executes it at most once; a stream
delivers every item in its place or breaks.
"""

from __future__ import annotations

from torch_dpflow.remote.rpc.client import ClientOptions, PendingCall, RpcClient
from torch_dpflow.remote.rpc.client_session import Answer, ClientStats
from torch_dpflow.remote.rpc.client_stream import ClientStream
from torch_dpflow.remote.rpc.incoming import LATER, IncomingCall, IncomingStream, Later, Result, StreamHandler
from torch_dpflow.remote.rpc.server import RpcServer, ServerOptions
from torch_dpflow.remote.rpc.sessions import ServerStats

__all__ = [
    "LATER",
    "Answer",
    "ClientOptions",
    "ClientStats",
    "ClientStream",
    "IncomingCall",
    "IncomingStream",
    "Later",
    "PendingCall",
    "Result",
    "RpcClient",
    "RpcServer",
    "ServerOptions",
    "ServerStats",
    "StreamHandler",
]
