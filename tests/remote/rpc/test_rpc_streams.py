"""Streams between a server and its clients, over real transports."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from torch_dpflow.errors import (
    DeadlineError,
    DPFlowError,
    ErrorKind,
    PeerLostError,
    RemoteCallError,
    StateError,
)
from torch_dpflow.remote.rpc import IncomingStream, RpcClient, RpcServer, StreamHandler

StartServer = Callable[..., RpcServer]
OpenClient = Callable[..., RpcClient]


class Echo(StreamHandler):
    """Sends every item back as soon as it may, and ends when the client has."""

    def __init__(self, stream: IncomingStream) -> None:
        if stream.body == "refuse":
            raise PermissionError("not today")
        self.stream = stream
        self.due: list[tuple[Any, list[memoryview]]] = []
        self.closing = False

    def received(self, body: Any, frames: list[memoryview]) -> None:
        if body == "break":
            raise ZeroDivisionError("broken by item")
        self.due.append((body, frames))
        self.writable()

    def writable(self) -> None:
        while self.due and self.stream.credit:
            self.stream.send(*self.due.pop(0))
        if self.closing and not self.due:
            self.stream.end()

    def ended(self) -> None:
        self.closing = True
        self.writable()


class Flood(StreamHandler):
    """Sends as many items as it may, for ever, and counts them."""

    sent = 0
    error: DPFlowError | None = None
    over = threading.Event()

    def __init__(self, stream: IncomingStream) -> None:
        self.stream = stream
        type(self).over.clear()

    def writable(self) -> None:
        while self.stream.credit:
            self.stream.send(type(self).sent)
            type(self).sent += 1

    def lost(self, error: DPFlowError) -> None:
        type(self).error = error
        type(self).over.set()


def prepare(server: RpcServer) -> None:
    server.register_stream("echo", Echo)
    server.register_stream("numbers", Echo, item_type=int)
    server.register_stream("flood", Flood)


@pytest.fixture
def client(address: str, start_server: StartServer, open_client: OpenClient) -> RpcClient:
    return open_client(start_server(address, prepare, ping_s=0.05).address)


def test_items_come_back_in_order_with_their_frames(client: RpcClient) -> None:
    stream = client.open_stream("echo", window=4)
    got = []
    for number in range(100):
        stream.send(number, [bytes([number]) * (number * 1_000)])
        if number >= 10:
            got.append(stream.receive())
    stream.end()
    got.extend(stream)
    assert [item.body for item in got] == list(range(100))
    assert [bytes(item.frames[0]) for item in got] == [bytes([n]) * (n * 1_000) for n in range(100)]
    assert stream.receive() is None


def test_streams_and_calls_share_a_connection(client: RpcClient) -> None:
    streams = [client.open_stream("echo") for _ in range(5)]
    for number in range(20):
        for stream in streams:
            stream.send([stream._end.id, number])
    for stream in streams:
        stream.end()
        assert [item.body for item in stream] == [[stream._end.id, number] for number in range(20)]


def test_two_threads_use_the_two_directions(client: RpcClient) -> None:
    stream = client.open_stream("echo", window=2)

    def write() -> None:
        for number in range(200):
            stream.send(number)
        stream.end()

    writer = threading.Thread(target=write)
    writer.start()
    assert [item.body for item in stream] == list(range(200))
    writer.join()


def test_slow_reader_bounds_the_sender(client: RpcClient) -> None:
    Flood.sent = 0
    stream = client.open_stream("flood", window=3)
    assert [stream.receive().body for _ in range(4)] == [0, 1, 2, 3]  # type: ignore[union-attr]
    with pytest.raises(RemoteCallError):
        client.call("a call, to be sure that the server has dealt with everything before it")
    assert Flood.sent <= 4 + 3
    stream.abort("enough")
    assert Flood.over.wait(20)
    assert isinstance(Flood.error, RemoteCallError)


def test_slow_server_bounds_the_writer(
    address: str, start_server: StartServer, open_client: OpenClient
) -> None:
    streams: list[IncomingStream] = []

    class Slow(StreamHandler):
        def __init__(self, stream: IncomingStream) -> None:
            self.stream = stream
            streams.append(stream)

        def received(self, body: Any, frames: list[memoryview]) -> None:
            self.stream.hold()

        def ended(self) -> None:
            self.stream.end()

    server = start_server(address, lambda server: server.register_stream("slow", Slow), window=2)
    client = open_client(server.address)
    stream = client.open_stream("slow")
    stream.send(0)
    stream.send(1)
    with pytest.raises(DeadlineError, match="no room"):
        stream.send(2, timeout_s=0.05)
    server.post(streams[0].release)
    stream.send(2)
    stream.send(3)
    stream.end()
    assert stream.receive() is None


def test_stream_that_is_refused_says_why(client: RpcClient) -> None:
    with pytest.raises(RemoteCallError, match="not today") as caught:
        client.open_stream("echo", "refuse").receive()
    assert caught.value.kind is ErrorKind.INTERNAL
    with pytest.raises(RemoteCallError, match="no stream method 'absent'"):
        client.open_stream("absent").send(1)


@pytest.mark.parametrize(
    ("method", "item", "kind"),
    [("echo", "break", ErrorKind.INTERNAL), ("numbers", "not a number", ErrorKind.MALFORMED)],
)
def test_item_that_breaks_its_stream_breaks_no_other(
    client: RpcClient, method: str, item: Any, kind: ErrorKind
) -> None:
    other = client.open_stream("echo")
    stream = client.open_stream(method)
    stream.send(1)
    stream.send(item)
    assert stream.receive().body == 1  # type: ignore[union-attr]
    with pytest.raises(RemoteCallError) as caught:
        stream.receive()
    assert caught.value.kind is kind
    with pytest.raises(RemoteCallError):
        stream.send(2)
    other.send("fine")
    assert other.receive().body == "fine"  # type: ignore[union-attr]


def test_item_of_another_type_breaks_the_stream_of_its_reader(client: RpcClient) -> None:
    stream = client.open_stream("echo", item_type=int)
    stream.send("text")
    with pytest.raises(DPFlowError, match="Expected `int`"):
        stream.receive()


def test_waiting_for_an_item_ends_at_its_timeout(client: RpcClient) -> None:
    stream = client.open_stream("echo")
    with pytest.raises(DeadlineError, match="no item came"):
        stream.receive(0.05)
    stream.send("late")
    assert stream.receive().body == "late"  # type: ignore[union-attr]


def test_nothing_is_sent_after_the_end(client: RpcClient) -> None:
    stream = client.open_stream("echo")
    stream.send(1)
    stream.end()
    stream.end()
    with pytest.raises(StateError, match="it has ended"):
        stream.send(2)
    assert [item.body for item in stream] == [1]


def test_reader_that_leaves_stops_the_sender(client: RpcClient) -> None:
    with client.open_stream("flood") as stream:
        assert stream.receive() is not None
    assert Flood.over.wait(20)


def test_client_that_is_closed_loses_its_streams_on_both_sides(client: RpcClient) -> None:
    stream = client.open_stream("flood")
    assert stream.receive() is not None
    client.close()
    assert Flood.over.wait(20)
    with pytest.raises(PeerLostError, match="closed"):
        stream.receive()


def test_too_many_streams_are_refused(
    address: str, start_server: StartServer, open_client: OpenClient
) -> None:
    client = open_client(start_server(address, prepare, max_streams=2).address)
    streams = [client.open_stream("echo") for _ in range(3)]
    for stream in streams[:2]:
        stream.send(1)
        assert stream.receive() is not None
    with pytest.raises(RemoteCallError, match="of at most 2"):
        streams[2].receive()
