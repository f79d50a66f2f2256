"""What `benchmarks.read_batch` compares data connections with.

Each side serves the same records from four processes of this host.

python -m benchmarks.pool_sides raw|curve|rpc|mooncake COUNT      serve records, and print where
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import psutil
import zmq

from torch_dpflow.cluster.security.connection_file import generate_keys, write_connection_file
from torch_dpflow.datasets import StoredDataset
from torch_dpflow.ipc.messages.headers import PayloadTable
from torch_dpflow.ipc.rpc import Result, RpcClient, RpcServer
from torch_dpflow.ipc.serialization.codec import decode, encode
from torch_dpflow.ipc.transport import listen
from torch_dpflow.pool.sources import identity_of, source_of
from torch_dpflow.pool.transport.address import find_address
from torch_dpflow.pool.transport.control_connection import PoolConnection
from torch_dpflow.pool.transport.data_connection import WantedRecord
from torch_dpflow.pool.transport.data_reader import DataReader

RECORD_BYTES, SERVERS = 110_000, 4
#: What a server that prints other lines too says before its address.
_READY = "READY "
Read = Callable[[Sequence[int]], object]
ServerT = TypeVar("ServerT")


class PoolSide(NamedTuple):
    """A way to read a batch, and the processes that serve it."""

    read: Read
    servers: list[psutil.Process]


def content_of(index: int) -> bytes:
    """The bytes of a record."""
    return np.random.default_rng(index).bytes(RECORD_BYTES)


def by_server(servers: Sequence[ServerT], indices: Sequence[int]) -> list[tuple[ServerT, list[int]]]:
    """Servers that hold some of these records, and the places of these in the batch."""
    places: dict[int, list[int]] = {}
    for place, index in enumerate(indices):
        places.setdefault(index % SERVERS, []).append(place)
    return [(servers[number], own) for number, own in places.items()]


@contextmanager
def process(command: Sequence[str]) -> Iterator[tuple[str, psutil.Process]]:
    """A server, and the first line that it prints."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as running:
        try:
            assert running.stdout is not None
            yield running.stdout.readline(), psutil.Process(running.pid)
        finally:
            running.terminate()


def data_connections(
    stack: ExitStack, stored: StoredDataset, folder: Path, *, trust_network: bool
) -> tuple[PoolSide, PoolSide]:
    """Ours: four servers of the pool, each with all records, over tcp; and without a copy, in memory used again."""
    folder.mkdir()
    keys = folder / "keys"
    write_connection_file(keys, generate_keys("", certificates=True))
    more = ["--listen", "tcp://127.0.0.1:0", "--connection", str(keys)] + ["--trust-network"] * trust_network
    owners, servers = list[str](), list[psutil.Process]()
    memory = f"{2 * RECORD_BYTES * len(stored)}B"
    for number in range(SERVERS):
        command = [sys.executable, "-m", "torch_dpflow.cli", "pool", "serve", "--memory", memory]
        said, server = stack.enter_context(process([*command, "--address", str(folder / f"{number}"), *more]))
        owners.append(said.rpartition(" and at ")[2].partition(",")[0])
        servers.append(server)
        address = find_address(owners[-1], keys, trust_network=trust_network)
        with PoolConnection(address) as connection:
            connection.preload(source_of(stored, None), identity_of(stored), whole=True)
    reader = stack.enter_context(closing(DataReader(address, silence_s=60.0)))
    identity = identity_of(stored)

    def read(copy: bool, indices: Sequence[int]) -> object:
        told = [owners[one % SERVERS] for one in indices]
        return reader.read(identity, told, [WantedRecord(one, RECORD_BYTES) for one in indices], copy=copy)

    return PoolSide(partial(read, True), servers), PoolSide(partial(read, False), servers)


def raw_sockets(stack: ExitStack, count: int) -> tuple[PoolSide, PoolSide]:
    """The least that tcp can cost: all requests at once, `sendmsg` from memory, one call for each record received.

    The second side receives into the same memory each time, which overwrites what it has given before.
    """
    connections, servers = list[socket.socket](), list[psutil.Process]()
    for _ in range(SERVERS):
        port, server = stack.enter_context(process(_own("raw", count)))
        connection = socket.create_connection(("127.0.0.1", int(port)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connections.append(stack.enter_context(closing(connection)))
        servers.append(server)

    kept = [memoryview(bytearray(RECORD_BYTES)) for _ in range(count)]

    def ask(indices: Sequence[int]) -> list[tuple[socket.socket, list[int]]]:
        places = by_server(connections, indices)
        for connection, own in places:
            connection.sendall(struct.pack(f"<I{len(own)}q", len(own), *[indices[place] for place in own]))
        return places

    def read(indices: Sequence[int]) -> list[bytes]:
        found = [b""] * len(indices)
        for connection, own in ask(indices):
            for place in own:
                found[place] = connection.recv(RECORD_BYTES, socket.MSG_WAITALL)
        return found

    def read_into(indices: Sequence[int]) -> list[memoryview]:
        for connection, own in ask(indices):
            for place in own:
                assert connection.recv_into(kept[place], 0, socket.MSG_WAITALL) == RECORD_BYTES
        return kept[: len(indices)]

    return PoolSide(read, servers), PoolSide(read_into, servers)


def curve(stack: ExitStack, count: int) -> PoolSide:
    """ZeroMQ with CURVE: a frame for each record."""
    context = stack.enter_context(zmq.Context())
    sockets, servers = list[Any](), list[psutil.Process]()
    for _ in range(SERVERS):
        said, server = stack.enter_context(process(_own("curve", count)))
        address, key = json.loads(said)
        one = stack.enter_context(context.socket(zmq.DEALER))
        one.curve_publickey, one.curve_secretkey = zmq.curve_keypair()
        one.curve_serverkey = key.encode()
        one.connect(address)
        sockets.append(one)
        servers.append(server)

    def read(indices: Sequence[int]) -> list[bytes]:
        found, places = [b""] * len(indices), by_server(sockets, indices)
        for one, own in places:
            one.send(struct.pack(f"<{len(own)}q", *[indices[place] for place in own]))
        for one, own in places:
            for place, content in zip(own, one.recv_multipart()):
                found[place] = content
        return found

    return PoolSide(read, servers)


def rpc(stack: ExitStack, count: int) -> PoolSide:
    """Our own calls with payloads, as a flow's shards answer jobs: one call to each server."""
    clients, servers = list[RpcClient](), list[psutil.Process]()
    for _ in range(SERVERS):
        said, server = stack.enter_context(process(_own("rpc", count)))
        clients.append(stack.enter_context(closing(RpcClient(said.strip()))))
        servers.append(server)

    def read(indices: Sequence[int]) -> list[bytes]:
        found, places = [b""] * len(indices), by_server(clients, indices)
        calls = [
            (client.begin("read", [indices[place] for place in own], reply_type=PayloadTable), own)
            for client, own in places
        ]
        for call, own in calls:
            answer = call.result()
            for place, content in zip(own, decode(answer.body, answer.frames)):
                found[place] = content
        return found

    return PoolSide(read, servers)


def mooncake(stack: ExitStack, count: int) -> PoolSide:
    """Mooncake's transfer engine by tcp, in C++: records are read into memory that is registered once, and copied."""
    engine: Any = _mooncake_engine()
    buffer = np.zeros(count * RECORD_BYTES, dtype=np.uint8)
    assert engine.register_memory(buffer.ctypes.data, buffer.nbytes) == 0
    peers, servers = list[tuple[str, int]](), list[psutil.Process]()
    for _ in range(SERVERS):
        running = stack.enter_context(
            subprocess.Popen(_own("mooncake", count), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        )
        stack.callback(running.terminate)
        assert running.stdout is not None
        said = next(line for line in running.stdout if line.startswith(_READY))  # the engine prints there too
        port, start = json.loads(said.removeprefix(_READY))
        peers.append((f"127.0.0.1:{port}", start))
        servers.append(psutil.Process(running.pid))

    def read(indices: Sequence[int]) -> list[bytes]:
        found = [b""] * len(indices)
        for (peer, start), own in by_server(peers, indices):
            into = [buffer.ctypes.data + place * RECORD_BYTES for place in own]
            at = [start + indices[place] * RECORD_BYTES for place in own]
            assert engine.batch_transfer_sync_read(peer, into, at, [RECORD_BYTES] * len(own)) == 0
        for place in range(len(indices)):
            found[place] = buffer[place * RECORD_BYTES : (place + 1) * RECORD_BYTES].tobytes()
        return found

    return PoolSide(read, servers)


def redis_servers(stack: ExitStack, count: int) -> PoolSide:
    """redis-server, redis-py with hiredis: a MGET to each server before the first answer is read."""
    import redis

    clients, servers = list[Any](), list[psutil.Process]()
    for _ in range(SERVERS):
        port = _free_port()
        command = ["redis-server", "--port", f"{port}", "--save", "", "--appendonly", "no"]
        _, server = stack.enter_context(process(command))
        client = stack.enter_context(closing(redis.Redis(port=port, protocol=2)))
        _await(client.ping)
        clients.append(client)
        servers.append(server)
    for index in range(count):
        clients[index % SERVERS].set(str(index), content_of(index))
    connections = [client.connection_pool.get_connection() for client in clients]
    for connection in connections:
        stack.callback(connection.disconnect)

    def read(indices: Sequence[int]) -> list[bytes]:
        found, places = [b""] * len(indices), by_server(connections, indices)
        for connection, own in places:
            connection.send_command("MGET", *[str(indices[place]) for place in own])
        for connection, own in places:
            for place, content in zip(own, connection.read_response()):
                found[place] = content
        return found

    return PoolSide(read, servers)


def memcached_servers(stack: ExitStack, count: int) -> PoolSide:
    """memcached, pylibmc: get_multi."""
    import pylibmc

    addresses, servers = list[str](), list[psutil.Process]()
    for _ in range(SERVERS):
        port = _free_port()
        command = ["memcached", "-p", f"{port}", "-l", "127.0.0.1", "-m", "512", "-I", "2m", "-u", "root"]
        running = subprocess.Popen(command)
        stack.callback(running.wait)
        stack.callback(running.terminate)
        addresses.append(f"127.0.0.1:{port}")
        servers.append(psutil.Process(running.pid))
        _await(lambda port=port: not socket.create_connection(("127.0.0.1", port)).close())  # type: ignore[misc]
    client = pylibmc.Client(addresses, binary=True, behaviors={"tcp_nodelay": True})
    for index in range(count):
        client.set(str(index), content_of(index))

    def read(indices: Sequence[int]) -> list[bytes]:
        found = client.get_multi([str(index) for index in indices])
        return [found[str(index)] for index in indices]

    return PoolSide(read, servers)


def ray_objects(stack: ExitStack, count: int) -> tuple[PoolSide, PoolSide]:
    """Ray's object store on this host: an object for each record, `ray.get` of a batch of them.

    `bytes` come as copies; arrays, the second side, as views of the store.
    """
    import ray

    before = {one.pid for one in psutil.process_iter()}
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
    stack.callback(ray.shutdown)
    copied = [ray.put(content_of(index)) for index in range(count)]
    viewed = [ray.put(np.frombuffer(content_of(index), np.uint8)) for index in range(count)]
    servers = [one for one in psutil.Process().children(recursive=True) if one.pid not in before]

    def view(indices: Sequence[int]) -> list[memoryview]:
        return [memoryview(one) for one in ray.get([viewed[index] for index in indices])]

    return PoolSide(lambda indices: ray.get([copied[index] for index in indices]), servers), PoolSide(view, servers)


def missing(side: str) -> str:
    """What a side takes that is not here; empty: nothing."""
    for command in {"Redis": ["redis-server"], "memcached": ["memcached"]}.get(side, []):
        if shutil.which(command) is None:
            return f"the command {command}"
    modules = {
        "Redis": ["redis", "hiredis"],
        "memcached": ["pylibmc"],
        "Ray": ["ray"],
        "Mooncake": ["mooncake.engine"],
    }
    for module in modules.get(side, []):
        try:
            __import__(module)
        except ImportError:
            return f"the package {module}"
    return ""


# -- servers ---------------------------------------------------------------------------------------------------


def _own(kind: str, count: int) -> list[str]:
    return [sys.executable, "-m", "benchmarks.pool_sides", kind, str(count)]


def _serve_raw(contents: Sequence[bytes]) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_send_raw, args=(connection, contents), daemon=True).start()


def _send_raw(connection: socket.socket, contents: Sequence[bytes]) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while head := connection.recv(4, socket.MSG_WAITALL):
        (count,) = struct.unpack("<I", head)
        indices = struct.unpack(f"<{count}q", connection.recv(8 * count, socket.MSG_WAITALL))
        views = [memoryview(contents[index]) for index in indices]
        while views:
            sent = connection.sendmsg(views)
            while sent and len(views[0]) <= sent:
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]


def _serve_curve(contents: Sequence[bytes]) -> None:
    server = zmq.Context().socket(zmq.ROUTER)
    public, secret = zmq.curve_keypair()
    server.curve_server, server.curve_publickey, server.curve_secretkey = True, public, secret
    server.sndhwm = 0
    port = server.bind_to_random_port("tcp://127.0.0.1")
    print(json.dumps([f"tcp://127.0.0.1:{port}", public.decode()]), flush=True)
    while True:
        peer, request = server.recv_multipart()
        indices = struct.unpack(f"<{len(request) // 8}q", request)
        server.send_multipart([peer, *[contents[index] for index in indices]], copy=False)


def _serve_rpc(contents: Sequence[bytes]) -> None:
    server = RpcServer(listen("tcp://127.0.0.1:0"))
    server.register("read", lambda call: Result(*encode([contents[index] for index in call.body])), body_type=list[int])
    print(server.address, flush=True)
    server.serve()


def _serve_mooncake(contents: Sequence[bytes]) -> None:
    engine = _mooncake_engine()
    memory = np.frombuffer(bytearray().join(contents), dtype=np.uint8)
    assert engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
    print(_READY + json.dumps([engine.get_rpc_port(), memory.ctypes.data]), flush=True)
    signal.pause()


def _mooncake_engine() -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return engine


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _await(answers: Callable[[], object]) -> None:
    for _ in range(200):
        with suppress(Exception):
            if answers():
                return
        time.sleep(0.05)
    raise TimeoutError("a server does not answer")


if __name__ == "__main__":
    kind, count = sys.argv[1], int(sys.argv[2])
    serve = {"raw": _serve_raw, "curve": _serve_curve, "rpc": _serve_rpc, "mooncake": _serve_mooncake}[kind]
    serve([content_of(index) for index in range(count)])
