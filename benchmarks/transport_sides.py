"""The sides of the transport benchmark: each has a server in one process and a client in another.

All three do the same work: the client sends a list of objects, the server gets the list and sends it back,
and the client checks that what it got equals what it sent. The objects are bytes, of which each end makes
copies of its own, or arrays, which may lie where they arrived. "raw" is the floor: the objects' bytes over a
socket, and lengths agreed on beforehand.
"""

from __future__ import annotations

import itertools
import pickle
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from torch_dpflow.ipc.messages.headers import PayloadTable
from torch_dpflow.ipc.rpc import IncomingCall, Result, RpcClient, RpcServer
from torch_dpflow.ipc.serialization.codec import decode, encode
from torch_dpflow.ipc.transport import listen

Array = np.ndarray[Any, np.dtype[np.uint8]]


class Client(Protocol):
    """One side's client. All calls block."""

    def echo(self, objects: list[bytes]) -> list[bytes]:
        """Send a list of bytes objects and get it back."""

    def echo_arrays(self, arrays: list[Array]) -> list[Array]:
        """Send a list of arrays and get it back."""

    def ping(self, payload: bytes) -> bytes:
        """Send a few bytes and get them back."""


class Side(Protocol):
    """One way to get objects to another process and back."""

    def serve(self, address: str, ready: Callable[[str], None], shape: Sequence[int]) -> None:
        """Serve for ever; call `ready` with the real address. `shape`: the sizes of the objects, in bytes."""

    def connect(self, address: str, shape: Sequence[int]) -> Client:
        """A client of the server at `address`."""


# --- ours ---


class Dpflow:
    """Our calls, with a payload as their payload."""

    def serve(self, address: str, ready: Callable[[str], None], shape: Sequence[int]) -> None:
        server = RpcServer(listen(address))
        server.register("echo", _echo, body_type=PayloadTable)
        server.register("ping", lambda call: Result(call.body))
        ready(server.address)
        server.serve()

    def connect(self, address: str, shape: Sequence[int]) -> Client:
        return _DpflowClient(RpcClient(address))


class _DpflowClient:
    def __init__(self, client: RpcClient) -> None:
        self._client = client

    def echo(self, objects: list[Any]) -> list[Any]:
        answer = self._client.call("echo", *encode(objects), reply_type=PayloadTable)
        received: list[Any] = decode(answer.body, answer.frames)
        return received

    echo_arrays = echo

    def ping(self, payload: bytes) -> bytes:
        answer: bytes = self._client.call("ping", payload).body
        return answer


def _echo(call: IncomingCall) -> Result:
    return Result(*encode(decode(call.body, call.frames)))


# --- gRPC ---


class Grpc:
    """Python gRPC with generic handlers and pickle, for objects that no .proto file describes."""

    _options = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))

    def serve(self, address: str, ready: Callable[[str], None], shape: Sequence[int]) -> None:
        import grpc

        handlers = {
            "echo": grpc.unary_unary_rpc_method_handler(
                lambda objects, _: objects, request_deserializer=pickle.loads, response_serializer=_dumps
            ),
            "ping": grpc.unary_unary_rpc_method_handler(lambda payload, _: payload),
        }
        server = grpc.server(ThreadPoolExecutor(2), options=self._options)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
        port = server.add_insecure_port(_grpc_address(address))
        server.start()
        ready(f"tcp://127.0.0.1:{port}" if address.startswith("tcp") else address)
        server.wait_for_termination()

    def connect(self, address: str, shape: Sequence[int]) -> Client:
        import grpc

        channel = grpc.insecure_channel(_grpc_address(address), options=self._options)
        grpc.channel_ready_future(channel).result(timeout=30)
        return _GrpcClient(channel)


class _GrpcClient:
    def __init__(self, channel: Any) -> None:
        self._echo = channel.unary_unary("/bench/echo", request_serializer=_dumps, response_deserializer=pickle.loads)
        self._ping = channel.unary_unary("/bench/ping")

    def echo(self, objects: list[bytes]) -> list[bytes]:
        received: list[bytes] = self._echo(objects)
        return received

    def echo_arrays(self, arrays: list[Array]) -> list[Array]:
        received: list[Array] = self._echo(arrays)
        return received

    def ping(self, payload: bytes) -> bytes:
        answer: bytes = self._ping(payload)
        return answer


def _dumps(obj: Any) -> bytes:
    return pickle.dumps(obj, protocol=5)


def _grpc_address(address: str) -> str:
    scheme, _, rest = address.partition("://")
    return rest if scheme == "tcp" else f"unix:{rest}"


# --- a socket and nothing else ---


class Raw:
    """The objects' bytes over a plain socket; both ends know the sizes and cut the list anew."""

    def serve(self, address: str, ready: Callable[[str], None], shape: Sequence[int]) -> None:
        listener = _bind(address)
        name = listener.getsockname()
        ready(f"tcp://127.0.0.1:{name[1]}" if address.startswith("tcp") else address)
        while True:
            connection, _ = listener.accept()
            _set_up(connection)
            stream = _RawStream(connection, shape)
            try:
                while True:
                    kind = stream.receive_exactly(1)
                    if kind == b"p":
                        stream.send(stream.receive_exactly(50))
                    elif kind == b"e":
                        stream.send_all(stream.receive_objects())
                    else:
                        stream.send_all(stream.receive_arrays())
            except EOFError:
                connection.close()

    def connect(self, address: str, shape: Sequence[int]) -> Client:
        scheme, _, rest = address.partition("://")
        connection = socket.socket(socket.AF_INET if scheme == "tcp" else socket.AF_UNIX)
        host, _, port = rest.rpartition(":")
        connection.connect((host, int(port)) if scheme == "tcp" else rest)
        _set_up(connection)
        return _RawClient(_RawStream(connection, shape))


class _RawStream:
    def __init__(self, connection: socket.socket, shape: Sequence[int]) -> None:
        self._connection = connection
        self._shape = shape
        self._buffer = bytearray(sum(shape))

    def send_all(self, objects: Sequence[Any]) -> None:
        for content in objects:
            self._connection.sendall(content)

    def receive_objects(self) -> list[bytes]:
        return [bytes(piece) for piece in self._receive()]

    def receive_arrays(self) -> list[Array]:
        return [np.frombuffer(piece, np.uint8) for piece in self._receive()]

    def _receive(self) -> list[memoryview]:
        view = memoryview(self._buffer)
        self._fill(view)
        ends = list(itertools.accumulate(self._shape))
        return [view[end - size : end] for end, size in zip(ends, self._shape)]

    def receive_exactly(self, size: int) -> bytes:
        buffer = bytearray(size)
        self._fill(memoryview(buffer))
        return bytes(buffer)

    def send(self, content: bytes) -> None:
        self._connection.sendall(content)

    def _fill(self, view: memoryview) -> None:
        filled = 0
        while filled < view.nbytes:
            count = self._connection.recv_into(view[filled:])
            if not count:
                raise EOFError
            filled += count


class _RawClient:
    def __init__(self, stream: _RawStream) -> None:
        self._stream = stream

    def echo(self, objects: list[bytes]) -> list[bytes]:
        self._stream.send(b"e")
        self._stream.send_all(objects)
        return self._stream.receive_objects()

    def echo_arrays(self, arrays: list[Array]) -> list[Array]:
        self._stream.send(b"a")
        self._stream.send_all(arrays)
        return self._stream.receive_arrays()

    def ping(self, payload: bytes) -> bytes:
        self._stream.send(b"p" + payload)
        return self._stream.receive_exactly(len(payload))


def _bind(address: str) -> socket.socket:
    scheme, _, rest = address.partition("://")
    listener = socket.socket(socket.AF_INET if scheme == "tcp" else socket.AF_UNIX)
    listener.bind(("127.0.0.1", 0) if scheme == "tcp" else rest)
    listener.listen(1)
    return listener


def _set_up(connection: socket.socket) -> None:
    if connection.family == socket.AF_INET:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


SIDES: dict[str, Side] = {"raw": Raw(), "grpc": Grpc(), "dpflow": Dpflow()}
