"""Who has no keys, or speaks nonsense: gets nothing, costs nothing that grows, and disturbs no other connection."""

from __future__ import annotations

import random
import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.datasets.samples_source import numbers
from tests.pool.pool_servers import inner_server, server
from tests.shared_cluster import PATIENCE_S
from torch_dpflow import PooledDataset
from torch_dpflow.cluster.security.connection_file import generate_keys, write_connection_file
from torch_dpflow.datasets import StoredDataset
from torch_dpflow.errors import MessageError
from torch_dpflow.pool import DataClient
from torch_dpflow.pool.messages import MAX_RECORDS
from torch_dpflow.pool.server import listener
from torch_dpflow.pool.server.data_sender import DataSender
from torch_dpflow.pool.server.holdings import Holdings
from torch_dpflow.pool.sources import identity_of
from torch_dpflow.pool.transport.address import PoolAddress, find_address
from torch_dpflow.pool.transport.authentication import (
    authenticator_for,
    connect_stream,
    receive_exactly,
)
from torch_dpflow.pool.transport.data_frames import (
    ANSWER_BYTES,
    CONTROL,
    DATA_CONNECTION,
    ENTRY_BYTES,
    GONE,
    HELLO_BYTES,
    WHOLE,
    RecordRequest,
    hello,
    purpose_of,
    read_header,
    read_table,
    take_request,
)

COUNT = 40
#: A million frames take 70 s of a processor without other work, and several times that beside other tests.
LONG = [pytest.mark.slow, pytest.mark.timeout(1200)]
#: What a server's memory may vary by while unauthenticated peers come and go, bytes.
SLACK_BYTES = 16 << 20


@contextmanager
def tcp_server(folder: Path, *, trust_network: bool) -> Iterator[tuple[PoolAddress, psutil.Process]]:
    """A server of its own process, which listens to other hosts, and whose memory nobody can map."""
    write_connection_file(folder / "keys", generate_keys("", certificates=True))
    more = ["--listen", "tcp://127.0.0.1:0", "--connection", str(folder / "keys")]
    with server(folder / "p", more=more + ["--trust-network"] * trust_network) as process:
        (folder / "p").rename(folder / "q")  # as in another container
        address = process.said.rpartition(" and at ")[2].partition(",")[0]
        found = find_address(address, folder / "keys", trust_network=trust_network)
        yield found, psutil.Process(process.pid)


def malformed(chance: random.Random) -> bytes:
    """A request that something is wrong with, or bytes of any kind."""
    count = chance.choice([0, 1, 2, 40, MAX_RECORDS, MAX_RECORDS + 1, 1 << 31])
    numbers = [-1, 0, 1, COUNT, 1 << 62]
    parts = [(chance.choice(numbers), chance.choice(numbers), chance.choice(numbers)) for _ in range(min(count, 40))]
    frame = bytearray(RecordRequest(chance.randbytes(16), parts).pack())
    frame[4:8] = struct.pack("<I", count)
    for _ in range(chance.randrange(4)):
        frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
    return bytes(frame) if chance.random() < 0.8 else chance.randbytes(chance.randrange(1, 100))


@pytest.mark.parametrize("frames", [5_000, pytest.param(1_000_000, marks=LONG)])
def test_frames_of_any_bytes_are_taken_or_refused(frames: int) -> None:
    chance = random.Random(1)
    refused, buffer = 0, bytearray()
    for _ in range(frames):
        buffer += malformed(chance)
        try:
            while (request := take_request(buffer)) is not None:
                assert 1 <= len(request.parts) <= MAX_RECORDS
        except MessageError:
            refused += 1
            buffer.clear()
        assert len(buffer) <= 24 * MAX_RECORDS + 200
        content = chance.randbytes(ANSWER_BYTES)
        with suppress(MessageError):
            read_header(content)
        with suppress(MessageError):
            read_table(chance.randbytes(ENTRY_BYTES * chance.randrange(1, 4)))
        with suppress(MessageError):
            purpose_of(chance.randbytes(HELLO_BYTES))
    assert refused > frames // 100  # a frame of many records swallows those behind it


def answer_to(address: PoolAddress, sent: bytes) -> bytes:
    """All that an unauthenticated peer receives."""
    told = b""
    with (
        socket.create_connection((address.host, address.port), PATIENCE_S) as peer,
        suppress(OSError),
    ):
        peer.sendall(sent)
        peer.shutdown(socket.SHUT_WR)
        while more := peer.recv(1 << 16):
            told += more
    return told


@pytest.mark.parametrize("trust_network", [False, True])
def test_who_proves_nothing_gets_nothing(stored: StoredDataset, tmp_path: Path, trust_network: bool) -> None:
    chance = random.Random(2)
    with tcp_server(tmp_path, trust_network=trust_network) as (address, _):
        DataClient(address, silence_s=PATIENCE_S).preload(stored)
        request = RecordRequest(identity_of(stored), [(0, 0, WHOLE), (1, 0, WHOLE)]).pack()
        with closing(PooledDataset(stored, address, silence_s=PATIENCE_S)) as dataset:
            assert dataset.read_each(range(COUNT)) == numbers(COUNT)
            for sent in (
                b"",
                hello(DATA_CONNECTION) + request,
                hello(CONTROL) + b"\x00" * 100 + request,
                hello(DATA_CONNECTION) + chance.randbytes(32) + chance.randbytes(32) + hello(DATA_CONNECTION) + request,
                b"\x16\x03\x01\x00\x05hello" + request,
                *(chance.randbytes(chance.randrange(1, 2_000)) for _ in range(20)),
            ):
                told = answer_to(address, sent)
                # A number that was drawn for a proof, or TLS' refusal; never a hello, a proof or a record.
                assert len(told) in (0, 7, 32)
            assert dataset.read_each(range(COUNT)) == numbers(COUNT)
            assert dataset.misses == 0


def test_a_certificate_is_needed_to_be_answered(stored: StoredDataset, tmp_path: Path) -> None:
    with tcp_server(tmp_path, trust_network=False) as (address, _):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        plain = socket.create_connection((address.host, address.port), PATIENCE_S)
        with context.wrap_socket(plain) as peer:
            told = b""
            with suppress(ssl.SSLError, ConnectionError):  # it is left at whatever it does next
                peer.sendall(hello(DATA_CONNECTION) + RecordRequest(identity_of(stored), [(0, 0, WHOLE)]).pack())
                told = peer.recv(100)
            assert told == b""


@contextmanager
def connected_peers(folder: Path, count: int, say: bytes) -> Iterator[tuple[PoolAddress, list[socket.socket]]]:
    """A server in a thread, and connections whose other sides never prove anything."""
    write_connection_file(folder / "keys", generate_keys("", certificates=True))
    place = find_address("tcp://127.0.0.1:0", folder / "keys")
    with inner_server(folder / "p", 1 << 20, listen=place) as serving, ExitStack() as opened:
        address = find_address(str(serving.address), folder / "keys")
        peers = []
        for _ in range(count):
            one = socket.create_connection((address.host, address.port), PATIENCE_S)
            peers.append(opened.enter_context(one))
            one.sendall(say)
        yield address, peers


def is_open(peer: socket.socket) -> bool:
    peer.setblocking(False)
    try:
        return peer.recv(10, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


@pytest.mark.parametrize("say", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01"])
def test_a_reader_waits_for_no_unauthenticated_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: bytes
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_TIMEOUT_S", 2 * PATIENCE_S)
    with connected_peers(tmp_path, 200, say) as (address, peers):
        connect_stream(address, authenticator_for(address, serves=False), DATA_CONNECTION, PATIENCE_S).close()
        assert all(map(is_open, peers))


def test_the_oldest_unauthenticated_peers_make_room_for_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_TIMEOUT_S", 2 * PATIENCE_S)
    monkeypatch.setattr(listener, "MAX_UNAUTHENTICATED", 8)
    with connected_peers(tmp_path, 20, b"") as (address, peers):
        connect_stream(address, authenticator_for(address, serves=False), DATA_CONNECTION, PATIENCE_S).close()
        assert [is_open(one) for one in peers] == [False] * 13 + [True] * 7


def test_unauthenticated_peers_are_turned_away_in_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_TIMEOUT_S", 0.1)
    with connected_peers(tmp_path, 20, b"") as (_, peers):
        for one in peers:
            assert one.recv(10) == b""


@pytest.mark.parametrize("connections", [30, pytest.param(3_000, marks=pytest.mark.slow)])
def test_data_connections_that_speak_nonsense_disturb_no_other(
    stored: StoredDataset, tmp_path: Path, connections: int
) -> None:
    chance = random.Random(3)
    with tcp_server(tmp_path, trust_network=True) as (address, process):
        DataClient(address, silence_s=PATIENCE_S).preload(stored)
        authenticator = authenticator_for(address, serves=False)
        with closing(PooledDataset(stored, address, silence_s=PATIENCE_S)) as dataset:
            assert dataset.read_each(range(COUNT)) == numbers(COUNT)
            before = process.memory_info().rss
            for number in range(connections):
                connection = connect_stream(address, authenticator, DATA_CONNECTION, PATIENCE_S)
                with suppress(ConnectionError):
                    connection.sendall(b"".join(malformed(chance) for _ in range(10)))
                connection.close()
                if number % 10 == 0:
                    assert dataset.read_each(range(COUNT)) == numbers(COUNT)
            assert dataset.misses == 0
            assert process.memory_info().rss < before + SLACK_BYTES


def test_a_data_connection_is_closed_with_the_sender_and_after_it() -> None:
    """Its thread ends, which the check after each test awaits."""
    connections, identity = DataSender(Holdings(0)), bytes(16)
    (early, its_end), (late, the_other) = socket.socketpair(), socket.socketpair()
    with early, late:
        connections.adopt(its_end)
        early.settimeout(PATIENCE_S)
        early.sendall(RecordRequest(identity, [(0, 0, WHOLE)]).pack())
        assert read_header(receive_exactly(early, ANSWER_BYTES))[1:] == (1, identity)
        assert read_table(receive_exactly(early, ENTRY_BYTES)) == ([0], [GONE])
        connections.close()
        connections.adopt(the_other)
        for one in (early, late):
            one.settimeout(PATIENCE_S)
            assert one.recv(1) == b""


def test_a_data_connection_that_asks_and_takes_nothing_is_not_read_from(stored: StoredDataset, tmp_path: Path) -> None:
    request = RecordRequest(
        identity_of(stored), [(one, 0, WHOLE) for one in range(COUNT)] * (MAX_RECORDS // COUNT)
    ).pack()
    with tcp_server(tmp_path, trust_network=True) as (address, process):
        DataClient(address, silence_s=PATIENCE_S).preload(stored)
        connection = connect_stream(address, authenticator_for(address, serves=False), DATA_CONNECTION, PATIENCE_S)
        assert isinstance(connection, socket.socket)
        before = process.memory_info().rss
        connection.setblocking(False)
        with suppress(BlockingIOError):  # until both sides' buffers are full
            while True:
                connection.send(request)
        with closing(PooledDataset(stored, address, silence_s=PATIENCE_S)) as dataset:
            assert dataset.read_each(range(COUNT)) == numbers(COUNT)
            assert dataset.misses == 0
        assert process.memory_info().rss < before + SLACK_BYTES
        connection.setblocking(True)
        _, count, identity = read_header(receive_exactly(connection, ANSWER_BYTES))
        assert (count > 0, identity) == (True, identity_of(stored))
        connection.close()
