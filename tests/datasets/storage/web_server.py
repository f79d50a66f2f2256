"""A web server on a real socket whose answers a test writes itself."""

from __future__ import annotations

import http.server
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

#: Answers one request; whatever it writes is what the client gets.
Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


class WebServer:
    """Serves `answer` on 127.0.0.1, in a `with` statement. `answer` may be replaced while it serves."""

    def __init__(self, answer: Answer, tls: ssl.SSLContext | None = None) -> None:
        self.answer = answer
        #: Headers of every request so far, with its path as "path", names in lower case.
        self.requests: list[dict[str, str]] = []
        self._http = _Server(("127.0.0.1", 0), _Handler)
        self._http.owner = self
        self._scheme = "http" if tls is None else "https"
        if tls is not None:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), name="web-server")

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> WebServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.cut_connections()
        self._http.server_close()
        self._thread.join()


class _Server(http.server.ThreadingHTTPServer):
    owner: WebServer
    daemon_threads = False  # closing waits for them
    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._open: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def cut_connections(self) -> None:
        for connection in list(self._open):
            with suppress(OSError):  # the client was faster
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: clients that go away in the middle are what is tested."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    timeout = 10.0

    def do_HEAD(self) -> None:
        self.send_error(405)

    def do_GET(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.owner.requests.append({"path": self.path, **headers})
        self.server.owner.answer(self)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def reply(handler: http.server.BaseHTTPRequestHandler, status: int, body: bytes = b"", **headers: str | int) -> None:
    """A whole answer; `content_length` and other headers may be given otherwise than they are."""
    handler.send_response(status)
    for name, value in {"content_length": len(body), **headers}.items():
        handler.send_header(name.replace("_", "-"), str(value))
    handler.end_headers()
    handler.wfile.write(body)


def serve_ranges(data: bytes, **headers: str) -> Answer:
    """What a server of files with ranges does for one file, with `headers` in its answers. It checks no conditions."""

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        wanted = handler.headers.get("Range")
        if wanted is None:
            return reply(handler, 200, data, **headers)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(len(data), int(last) + 1 if last else len(data))
        if start >= len(data):
            return reply(handler, 416, content_range=f"bytes */{len(data)}")
        range_ = f"bytes {start}-{stop - 1}/{len(data)}"
        return reply(handler, 206, data[start:stop], content_range=range_, **headers)

    return answer


def raw(response: bytes) -> Answer:
    """Writes bytes as they are, and ends the connection."""

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        handler.wfile.write(response)

    return answer


def then(last: Answer, *first: Answer) -> Answer:
    """Answers with each of `first` once, and then always with `last`."""
    left = [*first]

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        (left.pop(0) if left else last)(handler)

    return answer
