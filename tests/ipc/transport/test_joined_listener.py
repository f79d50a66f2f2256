"""Two listeners as one: the contract for peers of the first, and what there is besides for those of the second."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.transports import TIMEOUT_S, TransportContract, next_message
from torch_dpflow.ipc.transport import Connection, Listener, connect
from torch_dpflow.ipc.transport.zeromq import ZeroMQListener
from torch_dpflow.ipc.transport.zeromq.joined import JoinedListener


class TestJoined(TransportContract):
    def new_address(self, tmp_path: Path) -> str:
        return f"ipc://{tmp_path}/first"

    @pytest.fixture
    def open_listener(self, tmp_path: Path, endpoints: list[Any]) -> Callable[..., Listener]:
        def open_listener(address: str | None = None, **changes: Any) -> Listener:
            options = replace(self.listener_options, **changes)
            first = ZeroMQListener(address or self.new_address(tmp_path), options)
            second = ZeroMQListener("tcp://127.0.0.1:0", options)
            endpoints.append(JoinedListener(first, second, lambda peer: False))
            return endpoints[-1]

        return open_listener


@pytest.fixture
def both(tmp_path: Path) -> Iterator[tuple[JoinedListener, ZeroMQListener]]:
    """A joined listener, and its second part, whose peers have a `b` in front."""
    first = ZeroMQListener(f"ipc://{tmp_path}/first", TransportContract.listener_options)
    second = ZeroMQListener("tcp://127.0.0.1:0", TransportContract.listener_options)
    joined = JoinedListener(first, second, lambda peer: peer.startswith(b"b"))
    yield joined, second
    joined.close()


def hello_of(address: str, identity: bytes) -> Connection:
    connection = connect(address, identity=identity)
    connection.send([identity])
    return connection


def test_peers_of_either_are_heard_and_answered_where_they_are(
    both: tuple[JoinedListener, ZeroMQListener],
) -> None:
    joined, second = both
    peers = [hello_of(joined.address, b"a"), hello_of(second.address, b"b")]
    assert {next_message(joined)[0] for _ in peers} == {b"a", b"b"}
    for peer in peers:
        assert joined.send(peer.identity, [b"to " + peer.identity])
        frames = peer.receive(TIMEOUT_S)
        assert frames is not None
        assert bytes(frames[0]) == b"to " + peer.identity
        peer.close()


def test_neither_waits_until_the_other_has_nothing(both: tuple[JoinedListener, ZeroMQListener]) -> None:
    joined, second = both
    peers = [hello_of(joined.address, b"a"), hello_of(second.address, b"b")]
    for peer in peers:
        for _ in range(20):
            peer.send([b"more"])
    waiting = {b"a": 21, b"b": 21}
    while all(waiting.values()):
        waiting[next_message(joined)[0]] -= 1
    for peer in peers:
        peer.close()
    assert joined.dropped == 0


def test_who_calls_at_the_wrong_one_is_not_heard(both: tuple[JoinedListener, ZeroMQListener]) -> None:
    joined, second = both
    astray, right = hello_of(second.address, b"a"), hello_of(joined.address, b"a-too")
    assert next_message(joined)[0] == b"a-too"
    while not joined.dropped:
        joined.receive(0.01)
    astray.close()
    right.close()


def test_what_wakes_the_second_wakes_both_once(both: tuple[JoinedListener, ZeroMQListener]) -> None:
    joined, second = both
    waker = threading.Thread(target=second.wake)
    waker.start()
    assert joined.receive(TIMEOUT_S) is None
    waker.join()
    assert joined.receive(0.01) is None
    peer = hello_of(second.address, b"b")
    assert next_message(joined)[0] == b"b"
    peer.close()
