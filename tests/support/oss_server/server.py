"""The server: sockets, keep-alive, latency and faults around the operations."""

from __future__ import annotations

import http.client
import itertools
import os
import socket
import struct
import threading
from collections.abc import Mapping
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.oss_server.buckets import Buckets
from tests.support.oss_server.faults import Fault, FaultPlan
from tests.support.oss_server.messages import OSSError, Reply, Request
from tests.support.oss_server.operations import perform
from tests.support.oss_server.signatures import check_signature

#: Seconds between two bytes of a trickling answer.
TRICKLE_S = 0.1
#: More than that in one request is refused: an object here lives in memory.
LONGEST_BODY = 1 << 30


class OSSServer:
    """A test double of Alibaba Cloud OSS that speaks its real protocol on 127.0.0.1.

    It checks signatures (V1 and V4 headers), serves byte ranges, answers errors in XML, and lives in memory.
    It shows neither the real service's throughput nor its load balancing, TLS, access policies, versioning or
    server-side checksums, and buckets are addressed by path only.

    Use it as a context manager. Every attribute may be changed and every method called from any thread while
    it serves.

    Args:
        key_id, secret: what requests must be signed with.
        token: the security token that requests must carry as well; None: none is looked at.
        latency_s: seconds that every answer is held back.
        connection_bytes_per_s: an answer is held back for as long as it would take at this rate too, since clouds bound
            what one connection carries; None: no longer.
    """

    def __init__(
        self,
        *,
        key_id: str = "test-key-id",
        secret: str = "test-secret",
        token: str | None = None,
        latency_s: float = 0.0,
        connection_bytes_per_s: float | None = None,
        port: int = 0,
    ) -> None:
        self.key_id, self.secret, self.token = key_id, secret, token
        #: Seconds that every answer is held back.
        self.latency_s = latency_s
        self.connection_bytes_per_s = connection_bytes_per_s
        self.buckets = Buckets()
        self.faults = FaultPlan()
        #: Every request so far, in the order of their arrival.
        self.requests: list[Request] = []
        #: Connections accepted so far.
        self.connections = 0
        self._http = _HTTPServer(("127.0.0.1", port), self)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), name="oss-server")

    @property
    def endpoint(self) -> str:
        """Its URL, with the port that it listens on."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def storage_options(self) -> dict[str, Any]:
        """What fsspec and `torch_dpflow.datasets` take to reach it under `oss://`."""
        options = {"endpoint": self.endpoint, "key": self.key_id, "secret": self.secret}
        return options if self.token is None else options | {"token": self.token}

    def start(self) -> OSSServer:
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop, cut every connection, and wait for its threads to end."""
        self._http.closing.set()
        self._http.shutdown()
        self._http.cut_connections()
        self._http.server_close()
        self._thread.join()

    def __enter__(self) -> OSSServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def answer(self, request: Request, request_id: str) -> Reply:
        """What OSS would answer."""
        try:
            check_signature(request, {self.key_id: self.secret}, token=self.token)
            return perform(request, self.buckets)
        except OSSError as error:
            return error.reply(request_id)


class _HTTPServer(ThreadingHTTPServer):
    daemon_threads = False  # close() waits for them
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], owner: OSSServer) -> None:
        super().__init__(address, _Handler)
        self.owner = owner
        self.closing = threading.Event()
        self.request_ids = itertools.count(1)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.add(request)
        self.owner.connections += 1
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def cut_connections(self) -> None:
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # the client was faster

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a client that goes away in the middle is what this server is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _HTTPServer

    def _serve(self) -> None:
        body = self._read_body()
        if body is None:
            self.close_connection = True
            return
        request = Request.parse(self.command, self.path, dict(self.headers.items()), body)
        owner = self.server.owner
        owner.requests.append(request)
        if owner.latency_s:
            self.server.closing.wait(owner.latency_s)
        request_id = f"{next(self.server.request_ids):024X}"
        fault = owner.faults.take(request)
        error = fault.error() if fault is not None else None
        reply = owner.answer(request, request_id) if error is None else error.reply(request_id)
        whole = self._encode(reply, request_id)
        if owner.connection_bytes_per_s:
            self.server.closing.wait(len(whole) / owner.connection_bytes_per_s)
        if fault is None or error is not None:
            self.wfile.write(whole)
        else:
            self._misbehave(fault, whole, len(whole) - len(reply.body))

    def _read_body(self) -> bytes | None:
        """The request's body; None: it is longer than any that we take."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            length = int(self.headers.get("Content-Length") or 0)
            return self.rfile.read(length) if length <= LONGEST_BODY else None
        body = bytearray()
        while size := int(self.rfile.readline(64).partition(b";")[0], 16):
            if len(body) + size > LONGEST_BODY:
                return None
            body += self.rfile.read(size)
            self.rfile.readline(64)
        self.rfile.readline(64)
        return bytes(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what was asked is in `OSSServer.requests`."""

    def _encode(self, reply: Reply, request_id: str) -> bytes:
        head = [f"HTTP/1.1 {reply.status} {http.client.responses[reply.status]}"]
        fields: Mapping[str, str] = {
            "Server": "AliyunOSS",
            "Date": formatdate(usegmt=True),
            "x-oss-request-id": request_id,
            "Connection": "keep-alive",
            **reply.headers,
        }
        head += [f"{name}: {value}" for name, value in fields.items()]
        body = b"" if self.command == "HEAD" else reply.body
        if reply.status != 204:
            head.append(f"Content-Length: {len(reply.body) if reply.length is None else reply.length}")
        return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body

    def _misbehave(self, fault: Fault, whole: bytes, head: int) -> None:
        self.close_connection = True
        half = head + (len(whole) - head) // 2
        if fault is Fault.RESET:
            self._reset()
        elif fault is Fault.RESET_IN_BODY:
            self.wfile.write(whole[:half])
            self._reset()
        elif fault is Fault.HANG:
            self.server.closing.wait()
        elif fault is Fault.TRICKLE:
            for byte in whole:
                self.wfile.write(bytes((byte,)))
                if self.server.closing.wait(TRICKLE_S):
                    break
        elif fault is Fault.TRUNCATE:
            self.wfile.write(whole[:half])
        elif fault is Fault.CORRUPT:
            self.wfile.write(whole[:half] + bytes((whole[half] ^ 1,)) + whole[half + 1 :])
        elif fault is Fault.GARBAGE:
            self.wfile.write(b"220 mail.example ESMTP\r\n\r\n")

    def _reset(self) -> None:
        # Lingering for zero seconds makes close() send RST instead of FIN.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # Past the socket object, which stays open until its files are closed, after a FIN.
        os.close(self.connection.detach())
