"""The contract suite of transports: subclass `TransportContract`, name an address, and let pytest collect it.

::

    class TestMyTransport(TransportContract):
        def new_address(self, tmp_path):
            return "mine://somewhere"
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torch_dpflow.errors import MessageError, PeerLostError, StateError
from torch_dpflow.ipc.transport import Connection, Frame, Listener, TransportOptions, connect, listen

#: Time limit of each wait, seconds.
TIMEOUT_S = 60.0


class TransportContract:
    """The contract of `torch_dpflow.ipc.transport.base`, as tests."""

    #: How the two sides are made; a subclass may add keys.
    listener_options = TransportOptions()
    connection_options = TransportOptions()

    def new_address(self, tmp_path: Path) -> str:
        """Return an address that has no listener. A fixed port or name must be a new one for each test."""
        raise NotImplementedError(f"{type(self).__name__} must say where to listen")

    @pytest.fixture
    def endpoints(self) -> Iterator[list[Any]]:
        """Endpoints that the test opens; they are closed after it."""
        opened: list[Any] = []
        yield opened
        for endpoint in opened:
            endpoint.close()

    @pytest.fixture
    def open_listener(self, tmp_path: Path, endpoints: list[Any]) -> Callable[..., Listener]:
        """Return a function that listens at a new address, or a given one. Keywords replace transport options."""

        def open_listener(address: str | None = None, **changes: Any) -> Listener:
            options = replace(self.listener_options, **changes)
            listener = listen(address or self.new_address(tmp_path), options=options)
            endpoints.append(listener)
            return listener

        return open_listener

    @pytest.fixture
    def open_connection(self, endpoints: list[Any]) -> Callable[..., Connection]:
        """Return a function that connects to an address. Keywords replace transport options."""

        def open_connection(address: str, identity: bytes | None = None, **changes: Any) -> Connection:
            options = replace(self.connection_options, **changes)
            connection = connect(address, identity=identity, options=options)
            endpoints.append(connection)
            return connection

        return open_connection

    @pytest.fixture
    def pair(
        self, open_listener: Callable[..., Listener], open_connection: Callable[..., Connection]
    ) -> tuple[Listener, Connection]:
        """A listener and a connection from which it has received a message."""
        listener = open_listener()
        connection = open_connection(listener.address)
        greet(listener, connection)
        return listener, connection

    @pytest.mark.parametrize("size", [0, 1, 8_192, 8_193, 131_072, 3_000_000])
    def test_message_of_any_size_crosses_unchanged(self, pair: tuple[Listener, Connection], size: int) -> None:
        listener, connection = pair
        content = os.urandom(size)
        frames: list[Frame] = [b"header", content, bytearray(content), memoryview(content)]
        connection.send(frames)
        peer, received = next_message(listener)
        assert peer == connection.identity
        assert [bytes(frame) for frame in received] == [b"header", content, content, content]
        assert listener.send(peer, received)
        assert [bytes(frame) for frame in answered(connection)] == [b"header", content, content, content]

    def test_memory_of_any_shape_crosses_as_its_bytes(self, pair: tuple[Listener, Connection]) -> None:
        listener, connection = pair
        doubles: Any = memoryview(bytearray(range(240))).cast("d", shape=[5, 6])
        connection.send([doubles])
        assert bytes(next_message(listener)[1][0]) == bytes(range(240))

    @pytest.mark.parametrize("size", [10, 200_000])
    def test_received_frames_are_writable_and_not_shared(self, pair: tuple[Listener, Connection], size: int) -> None:
        listener, connection = pair
        sent = bytearray(size)
        connection.send([sent])
        frame = next_message(listener)[1][0]
        frame[:] = b"\x01" * size
        assert bytes(sent) == bytes(size)
        assert bytes(frame) == b"\x01" * size

    def test_messages_of_one_connection_keep_their_order(self, pair: tuple[Listener, Connection]) -> None:
        listener, connection = pair
        for number in range(500):
            connection.send([b"%d" % number, bytes(number * 40)])
        received = [int(bytes(next_message(listener)[1][0])) for _ in range(500)]
        assert received == list(range(500))

    def test_each_peer_gets_its_own_answers(
        self, open_listener: Callable[..., Listener], open_connection: Callable[..., Connection]
    ) -> None:
        listener = open_listener()
        connections = [open_connection(listener.address, b"peer-%d" % n) for n in range(3)]
        for connection in connections:
            connection.send([b"from " + connection.identity])
        for _ in connections:
            peer, frames = next_message(listener)
            assert bytes(frames[0]) == b"from " + peer
            assert listener.send(peer, [b"to " + peer])
        for connection in connections:
            assert bytes(answered(connection)[0]) == b"to " + connection.identity

    def test_identities_that_are_drawn_differ(
        self, open_listener: Callable[..., Listener], open_connection: Callable[..., Connection]
    ) -> None:
        listener = open_listener()
        assert open_connection(listener.address).identity != open_connection(listener.address).identity

    def test_receive_returns_none_when_nothing_comes(self, pair: tuple[Listener, Connection]) -> None:
        for endpoint in pair:
            assert endpoint.receive(0) is None
            assert endpoint.receive(0.01) is None

    def test_wake_ends_a_receive_that_waits(self, pair: tuple[Listener, Connection]) -> None:
        for endpoint in pair:
            waker = threading.Thread(target=endpoint.wake)
            waker.start()
            assert endpoint.receive(TIMEOUT_S) is None
            waker.join()

    def test_wake_beforehand_ends_one_receive_only(self, pair: tuple[Listener, Connection]) -> None:
        listener, connection = pair
        listener.wake()
        started = time.monotonic()
        assert listener.receive(TIMEOUT_S) is None
        assert time.monotonic() - started < TIMEOUT_S
        connection.send([b"after"])
        assert bytes(next_message(listener)[1][0]) == b"after"

    def test_watched_descriptor_ends_a_receive_that_waits(self, pair: tuple[Listener, Connection]) -> None:
        listener, connection = pair
        descriptor = os.eventfd(0)
        try:
            listener.watch(descriptor)
            os.eventfd_write(descriptor, 1)
            assert listener.receive(TIMEOUT_S) is None
            connection.send([b"comes through"])
            while (message := listener.receive(TIMEOUT_S)) is None:
                pass
            assert bytes(message[1][0]) == b"comes through"
        finally:
            listener.close()
            os.close(descriptor)

    def test_a_message_is_not_lost_to_a_wake(self, pair: tuple[Listener, Connection]) -> None:
        listener, connection = pair
        connection.send([b"there"])
        listener.wake()
        message = listener.receive(TIMEOUT_S) or listener.receive(TIMEOUT_S)
        assert message is not None
        assert bytes(message[1][0]) == b"there"

    def test_connection_may_come_before_its_listener(
        self,
        tmp_path: Path,
        open_listener: Callable[..., Listener],
        open_connection: Callable[..., Connection],
    ) -> None:
        first = open_listener()
        address = first.address
        first.close()
        connection = open_connection(address)
        connection.send([b"early"])
        listener = open_listener(address)
        peer, frames = next_message(listener)
        assert (peer, bytes(frames[0])) == (connection.identity, b"early")

    def test_connection_finds_a_listener_that_was_restarted(
        self, pair: tuple[Listener, Connection], open_listener: Callable[..., Listener]
    ) -> None:
        first, connection = pair
        first.close()
        listener = open_listener(first.address)
        greet(listener, connection)
        assert listener.send(connection.identity, [b"again"])
        assert bytes(answered(connection)[0]) == b"again"

    def test_send_to_an_unknown_peer_is_refused(self, pair: tuple[Listener, Connection]) -> None:
        assert not pair[0].send(b"unknown", [b"data"])

    def test_send_to_a_peer_that_has_gone_is_refused(self, pair: tuple[Listener, Connection]) -> None:
        listener, connection = pair
        connection.close()
        assert eventually(lambda: not listener.send(connection.identity, [b"data"]), listener)

    def test_peer_that_returns_under_its_identity_is_reached(
        self, pair: tuple[Listener, Connection], open_connection: Callable[..., Connection]
    ) -> None:
        listener, first = pair
        first.close()
        second = open_connection(listener.address, first.identity)
        greet(listener, second)
        assert eventually(lambda: listener.send(second.identity, [b"welcome back"]), listener)
        assert bytes(answered(second)[0]) == b"welcome back"

    def test_listener_refuses_an_address_that_is_taken(
        self, pair: tuple[Listener, Connection], open_listener: Callable[..., Listener]
    ) -> None:
        with pytest.raises(Exception, match="cannot listen"):
            open_listener(pair[0].address)

    def test_peer_that_does_not_read_is_refused_after_a_while(
        self, open_listener: Callable[..., Listener], open_connection: Callable[..., Connection]
    ) -> None:
        listener = open_listener(queue_messages=2)
        connection = open_connection(listener.address, queue_messages=2)
        greet(listener, connection)
        attempts = (listener.send(connection.identity, [b"x" * 65_536]) for _ in range(2_000))
        assert 2 <= sum(1 for _ in itertools.takewhile(bool, attempts)) < 2_000
        assert bytes(answered(connection)[0][:1]) == b"x"

    def test_sending_nowhere_fails_after_a_while(
        self, open_listener: Callable[..., Listener], open_connection: Callable[..., Connection]
    ) -> None:
        listener = open_listener()
        listener.close()
        connection = open_connection(listener.address, queue_messages=2, send_timeout_s=0.05)
        with pytest.raises(PeerLostError, match="took nothing"):
            send_often(connection, 2_000)

    def test_message_of_too_many_frames_is_dropped_and_counted(
        self, open_listener: Callable[..., Listener], open_connection: Callable[..., Connection]
    ) -> None:
        listener = open_listener(max_frames=3)
        connection = open_connection(listener.address)
        connection.send([b"x"] * 4)
        connection.send([b"y"] * 3)
        assert [bytes(frame) for frame in next_message(listener)[1]] == [b"y"] * 3
        assert listener.dropped == 1

    def test_frame_that_is_too_long_never_arrives(
        self, open_listener: Callable[..., Listener], open_connection: Callable[..., Connection]
    ) -> None:
        listener = open_listener(max_frame_bytes=1_000)
        connection = open_connection(listener.address)
        greet(listener, connection)
        connection.send([b"x" * 1_001])
        greet(listener, connection)

    def test_message_that_cannot_go_whole_is_refused(
        self, open_listener: Callable[..., Listener], open_connection: Callable[..., Connection]
    ) -> None:
        listener = open_listener(max_frames=3, max_frame_bytes=1_000)
        connection = open_connection(listener.address, max_frames=3, max_frame_bytes=1_000)
        greet(listener, connection)
        for frames in ([], [b"x"] * 4, [b"x" * 1_001], [memoryview(b"abcd")[::2]]):
            with pytest.raises(MessageError):
                connection.send(frames)
            with pytest.raises(MessageError):
                listener.send(connection.identity, frames)
        connection.send([b"still whole"])
        assert [bytes(frame) for frame in next_message(listener)[1]] == [b"still whole"]

    def test_closed_endpoints_say_so(self, pair: tuple[Listener, Connection]) -> None:
        listener, connection = pair
        for endpoint in pair:
            endpoint.close()
            endpoint.close()
            endpoint.wake()
            with pytest.raises(PeerLostError, match="closed"):
                endpoint.receive(0)
        with pytest.raises(PeerLostError, match="closed"):
            listener.send(connection.identity, [b"x"])
        with pytest.raises(PeerLostError, match="closed"):
            connection.send([b"x"])

    @pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
    def test_forked_child_leaves_the_parents_endpoints_alone(self, pair: tuple[Listener, Connection]) -> None:
        listener, connection = pair
        child = os.fork()
        if child == 0:
            os._exit(_misbehave(listener, connection))
        assert os.waitpid(child, 0)[1] == 0
        connection.send([b"still here"])
        peer, frames = next_message(listener)
        assert bytes(frames[0]) == b"still here"
        assert listener.send(peer, [b"and here"])
        assert bytes(answered(connection)[0]) == b"and here"


def send_often(connection: Connection, times: int) -> None:
    """Send `times` messages of 64 KiB."""
    for _ in range(times):
        connection.send([b"x" * 65_536])


def next_message(listener: Listener) -> tuple[bytes, list[memoryview]]:
    """Return the listener's next message; fail the test if none arrives."""
    message = listener.receive(TIMEOUT_S)
    assert message is not None, f"nothing came to {listener.address} within {TIMEOUT_S} s"
    return message


def answered(connection: Connection) -> list[memoryview]:
    """Return the connection's next message; fail the test if none arrives."""
    frames = connection.receive(TIMEOUT_S)
    assert frames is not None, f"nothing came back within {TIMEOUT_S} s"
    return frames


def greet(listener: Listener, connection: Connection) -> None:
    """Send until a message of the connection arrives; some may be lost with an earlier listener."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        connection.send([b"greeting"])
        message = listener.receive(0.2)
        if message is not None:
            break
    else:
        raise AssertionError(f"no greeting came to {listener.address} within {TIMEOUT_S} s")
    while message is not None:  # those that came late
        assert bytes(message[1][0]) == b"greeting"
        message = listener.receive(0)


def eventually(holds: Callable[[], bool], listener: Listener) -> bool:
    """Receive messages until `holds` returns True; return whether it did in time."""
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        if time.monotonic() > deadline:
            return False
        listener.receive(0.01)
    return True


def _misbehave(listener: Listener, connection: Connection) -> int:
    """Call every method of the parent's endpoints in a forked child; return the exit status."""
    uses: list[Callable[[], object]] = [
        lambda: listener.receive(0),
        lambda: connection.receive(0),
        lambda: listener.send(connection.identity, [b"x"]),
        lambda: connection.send([b"x"]),
    ]
    for status, use in enumerate(uses, start=1):
        try:
            use()
        except StateError:
            continue
        return status
    for endpoint in (listener, connection):
        endpoint.wake()
        with closing(endpoint):
            pass
    return 0
