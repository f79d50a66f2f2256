"""Remote calls between processes, with deadlines and repetition.

A client calls a method and waits for its answer. Bodies are small and typed (msgpack); bulk data travels in frames,
which are not parsed. The client repeats a call until it is answered or its deadline passes. A server stores nothing
about answered calls, so a call whose answer is lost runs twice: each method must change nothing the second time
(`tests/cluster/services/test_repeated_calls.py` makes every call of every service twice).
"""

from __future__ import annotations

from torch_dpflow.ipc.rpc.call_service import LATER, IncomingCall, Later, Result, ServerStats
from torch_dpflow.ipc.rpc.client import ClientOptions, PendingCall, RpcClient
from torch_dpflow.ipc.rpc.client_session import Answer, ClientStats
from torch_dpflow.ipc.rpc.server import RpcServer, ServerOptions

__all__ = [
    "LATER",
    "Answer",
    "ClientOptions",
    "ClientStats",
    "IncomingCall",
    "Later",
    "PendingCall",
    "Result",
    "RpcClient",
    "RpcServer",
    "ServerOptions",
    "ServerStats",
]
