"""Clients and sockets that nobody closed: what becomes of them, and where."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress

import pytest

from torch_dpflow.errors import DeadlineError
from torch_dpflow.ipc.rpc import RpcClient
from torch_dpflow.ipc.transport import connect
from torch_dpflow.ipc.transport.zeromq import contexts


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Garbage stays until a test has it collected."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_client_that_is_dropped_waits_for_no_collector(ipc_address: str, uncollected: None) -> None:
    client = RpcClient(ipc_address)
    client.begin("unanswered")
    gone = weakref.ref(client._connection)
    del client
    assert gone() is None


class Held:
    """Something of a caller's."""


def test_a_call_that_fails_keeps_nothing_of_its_caller(ipc_address: str, uncollected: None) -> None:
    def failing() -> weakref.ref[Held]:
        held = Held()
        with RpcClient(ipc_address) as client, suppress(DeadlineError):
            client.call("unanswered", timeout_s=0.01)
        return weakref.ref(held)

    assert failing()() is None


def test_a_socket_is_collected_by_whoever_holds_the_contexts_lock(ipc_address: str, uncollected: None) -> None:
    users = contexts.shared._users
    circle: list[object] = [connect(ipc_address)]
    circle.append(circle)
    assert contexts.shared._users == users + 1
    del circle

    def collect() -> None:
        with contexts.shared._lock:
            gc.collect()

    collector = threading.Thread(target=collect, daemon=True)
    collector.start()
    collector.join(150)
    assert not collector.is_alive()
    assert contexts.shared._users == users
