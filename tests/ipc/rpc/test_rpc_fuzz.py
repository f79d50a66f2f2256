"""A live server, and a live client, that are told nonsense: they go on, and their memory does not grow."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torch_dpflow.errors import ErrorKind
from torch_dpflow.ipc.messages.headers import (
    EMPTY_BODY,
    PROTOCOL_VERSION,
    Handshake,
    Packing,
    PayloadOffer,
    Request,
    encode,
    encode_body,
)
from torch_dpflow.ipc.rpc import IncomingCall, Result, RpcClient, RpcServer
from torch_dpflow.ipc.transport import Connection, connect, listen

FILES = sorted((Path(__file__).parents[1] / "messages" / "corpus").glob("*.bin"))
CORPUS = [path.read_bytes() for path in FILES]
BAD = [path for path in FILES if path.name.startswith("bad-")]
StartServer = Callable[..., RpcServer]
OpenClient = Callable[..., RpcClient]


def prepare(server: RpcServer) -> None:
    server.register("echo", lambda call: Result(call.body, call.frames))
    server.register("whole", whole, body_type=int)


def whole(call: IncomingCall) -> Result:
    return Result(call.body)


@pytest.fixture
def server(address: str, start_server: StartServer) -> RpcServer:
    return start_server(address, prepare)


@pytest.fixture
def stranger(server: RpcServer) -> Iterator[Connection]:
    """A peer that has said nothing yet."""
    connection = connect(server.address)
    yield connection
    connection.close()


@pytest.fixture
def fiend(server: RpcServer) -> Iterator[Connection]:
    """A peer that has said Handshake, and may say anything now."""
    connection = connect(server.address)
    connection.send([encode(Handshake(PROTOCOL_VERSION, PayloadOffer(os.getpid())))])
    assert connection.receive(150) is not None
    yield connection
    connection.close()


def still_serves(server: RpcServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    assert client.call("echo", "alive", [b"frame"], timeout_s=150.0).body == "alive"
    client.close()


@pytest.mark.parametrize("greeted", [False, True])
def test_server_survives_the_corpus(
    server: RpcServer,
    stranger: Connection,
    fiend: Connection,
    open_client: OpenClient,
    eventually: Callable[..., None],
    greeted: bool,
) -> None:
    peer = fiend if greeted else stranger
    for content in CORPUS:
        peer.send([content])
        peer.send([content, b"payload", b""])
        while peer.receive(0) is not None:
            pass
    eventually(lambda: server.stats().messages >= 2 * len(CORPUS), what="the corpus to be read")
    still_serves(server, open_client)
    stats = server.stats()
    assert stats.malformed >= 2 * len(BAD)
    assert greeted or stats.without_session > 0


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    messages=st.lists(st.lists(st.binary(max_size=100) | st.sampled_from(CORPUS), min_size=1, max_size=4), max_size=8)
)
def test_server_survives_anything(
    server: RpcServer, fiend: Connection, open_client: OpenClient, messages: list[list[bytes]]
) -> None:
    for frames in messages:
        fiend.send(frames)
    while fiend.receive(0) is not None:
        pass
    still_serves(server, open_client)


@pytest.mark.parametrize(
    ("packing", "frames"),
    [
        (Packing([0, 0]), [b"one"]),
        (Packing([0]), [b"one", b"two"]),
        (Packing([5]), [b"\x05"]),
        (Packing([5]), [b""]),
        (Packing([2**62]), [b"\xff\xff\xff\xff\x0f" + bytes(50)]),
        (Packing([4_000_000_000]), [b"\x80\xd0\xac\xf3\x0e" + bytes(50)]),
        (Packing([2_000_000_000]), [b"\x80\xa8\xd6\xb9\x07" + bytes(50)]),
        (Packing([-1]), []),
        (Packing([-(2**63)]), []),
        (Packing([-100], encode_body([1, 0, 4096, 4096, 1])), []),
        (Packing([-100], encode_body([1, 2**40, 4096, 4096, 1])), []),
        (Packing([-100], encode_body("nonsense")), []),
        (Packing([-1, -1, -1] * 1000, EMPTY_BODY), []),
    ],
)
def test_payload_that_does_not_fit_its_packing_is_answered_as_an_error(
    server: RpcServer, fiend: Connection, packing: Packing, frames: list[bytes], open_client: OpenClient
) -> None:
    fiend.send([encode(Request(1, "echo", 10.0, EMPTY_BODY, packing)), *frames])
    answer = fiend.receive(150)
    assert answer is not None
    assert msgspec.msgpack.decode(answer[0])[:3] == [12, 1, ErrorKind.MALFORMED]
    still_serves(server, open_client)


def test_memory_stays_flat_under_nonsense(ipc_address: str, start_server: StartServer, open_client: OpenClient) -> None:
    server = start_server(ipc_address, prepare, max_clients=50)
    client = open_client(server.address)
    process = psutil.Process()

    def nonsense(rounds: int) -> None:
        for number in range(rounds):
            peer = connect(server.address)
            peer.send([encode(Handshake(PROTOCOL_VERSION, PayloadOffer(os.getpid())))])
            for content in CORPUS[number % 3 :: 3]:
                peer.send([content, bytes(20_000)])
            for call in range(20):
                peer.send([encode(Request(call, "echo", 1.0)), bytes(10_000)])
            peer.receive(150)
            client.call("echo", number)
            peer.close()

    nonsense(150)
    before = process.memory_info().rss
    nonsense(150)
    assert process.memory_info().rss - before < 24 << 20
    assert server.stats().clients <= 50
    still_serves(server, open_client)


def test_client_survives_a_server_that_talks_nonsense(address: str, open_client: OpenClient) -> None:
    listener = listen(address)
    stop = threading.Event()

    def babble() -> None:
        server = RpcServer(listener)
        server.register("echo", lambda call: Result(call.body))
        outbursts = 5  # each makes the client say more: Handshake to a NoSession
        while not stop.is_set():
            message = listener.receive(0.05)
            if message is None:
                continue
            for content in CORPUS if outbursts else ():
                if content[1:2] not in (b"\x01", b"\x02"):  # no Handshake or Welcome, which may be of another release
                    listener.send(message[0], [content, b"payload"])
            outbursts = max(0, outbursts - 1)
            server._on_message(*message)
        server.close()

    thread = threading.Thread(target=babble)
    thread.start()
    client = open_client(listener.address)
    try:
        assert [client.call("echo", number, timeout_s=150.0).body for number in range(5)] == list(range(5))
    finally:
        stop.set()
        thread.join()
    assert client.stats().malformed > 0
