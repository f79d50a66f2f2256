"""Servers in a thread of their own, and clients of theirs, over every transport."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torch_dpflow.ipc.rpc import ClientOptions, RpcClient, RpcServer, ServerOptions
from torch_dpflow.ipc.transport import TransportOptions, listen


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where to listen: each transport in turn."""
    return f"ipc://{tmp_path}/rpc" if request.param == "ipc" else "tcp://127.0.0.1:0"


@pytest.fixture
def ipc_address(tmp_path: Path) -> str:
    """Where to listen for a test that needs no more than one transport."""
    return f"ipc://{tmp_path}/rpc"


@pytest.fixture
def start_server() -> Iterator[Callable[..., RpcServer]]:
    """Start a server in a thread: `prepare` registers its methods."""
    started: list[tuple[RpcServer, threading.Thread]] = []

    def start(
        address: str,
        prepare: Callable[[RpcServer], None],
        transport: TransportOptions | None = None,
        **options: Any,
    ) -> RpcServer:
        listener = listen(address, options=transport or TransportOptions())
        server = RpcServer(listener, options=ServerOptions(**options))
        prepare(server)
        thread = threading.Thread(target=server.serve)
        thread.start()
        started.append((server, thread))
        return server

    yield start
    for server, thread in started:
        server.stop()
        thread.join()
        server.close()


@pytest.fixture
def open_client() -> Iterator[Callable[..., RpcClient]]:
    """Make a client with options as the keywords say."""
    opened: list[RpcClient] = []

    def open_client(address: str, transport: TransportOptions | None = None, **options: Any) -> RpcClient:
        client = RpcClient(address, options=ClientOptions(**options), transport=transport)
        opened.append(client)
        return client

    yield open_client
    for client in opened:
        client.close()
