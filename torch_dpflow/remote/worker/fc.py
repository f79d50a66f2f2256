"""Program of Function Compute's custom container: `python -m torch_dpflow.remote.worker.fc [MODULE]`.

It is an HTTP server that imports slow modules before it listens, and runs the launch spec of each invocation in a
fork. It answers an invocation once the worker and its connections have ended: the platform then freezes the instance,
and the shard could not distinguish a frozen connection from a live one.

A frozen worker that is thawed later continues. If its lease has ended meanwhile, its shard rejects it and it ends.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from importlib import import_module
from types import ModuleType
from typing import Any

import msgspec

from torch_dpflow.remote.launchers.function_settings import WorkerAnswer
from torch_dpflow.remote.launchers.processes import MODULE
from torch_dpflow.remote.worker.forking import Fork
from torch_dpflow.workers.platform import End

#: The variable with the port, and the platform's default.
PORT_VARIABLE, PORT = "FC_SERVER_PORT", 9000
#: Maximum bytes of a request: a launch spec is far smaller.
MAX_REQUEST_BYTES = 2**20
#: How long a request may take to arrive once it has begun, in seconds.
REQUEST_S = 10.0
#: How long a signal may wait, in seconds, if the kernel delivers it to a thread of a library, as it may after SIGCONT.
LOOK_S = 1.0
#: Headers with the credentials of the function's role for this invocation, and the variables where storages find them.
KEYS = {
    "x-fc-access-key-id": "ALIBABA_CLOUD_ACCESS_KEY_ID",
    "x-fc-access-key-secret": "ALIBABA_CLOUD_ACCESS_KEY_SECRET",
    "x-fc-security-token": "ALIBABA_CLOUD_SECURITY_TOKEN",
}


class RuntimeConnection(BaseHTTPRequestHandler):
    """Connection from the platform's runtime; the server calls `handle_one_request` when data has arrived."""

    protocol_version = "HTTP/1.1"
    timeout = REQUEST_S
    #: Buffer writes, so that each answer is sent as one packet.
    wbufsize = -1
    disable_nagle_algorithm = True
    server: Any

    def __init__(self, accepted: socket.socket, server: Instance) -> None:
        # Not the base's, which would serve the connection to its end.
        self.request, self.client_address, self.server = accepted, ("", 0), server
        self.close_connection = False
        self.setup()

    def fileno(self) -> int:
        return int(self.connection.fileno())

    def do_GET(self) -> None:
        """Handle a hook of the platform or a health check; http.server calls it."""
        self._serve(b"")

    def do_POST(self) -> None:
        """Handle a hook of the platform or an invocation; http.server calls it."""
        length = self.headers.get("content-length", "")
        if not length.isascii() or not length.isdecimal() or int(length) > MAX_REQUEST_BYTES:
            self.close_connection = True
            self.answer(413 if length.isdecimal() else 411, b"")
            return
        self._serve(self.rfile.read(int(length)))

    def _serve(self, body: bytes) -> None:
        match self.path.partition("?")[0]:
            case "/invoke" if self.command == "POST":
                self.server.invoke(self, self.headers, body)
            case "/initialize" | "/":
                self.answer(200, b"")
            case "/pre-stop":
                self.server.stop()
                self.answer(200, b"")
            case _:
                self.answer(404, b"")

    def answer(self, status: int, body: bytes) -> None:
        """Send the answer to the latest request."""
        with suppress(OSError):  # the caller has closed the connection
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: the platform logs its requests itself."""


class Instance:
    """HTTP server of one instance of the function, in the main thread. It runs one invocation at a time.

    Args:
        module: module whose `run(launch_spec)` workers run.
        port: port at which to listen, on all interfaces; 0: any.
    """

    def __init__(self, module: ModuleType, port: int) -> None:
        self._run = module.run
        self._listener = socket.create_server(("0.0.0.0", port), backlog=16)
        self.port = int(self._listener.getsockname()[1])
        self._connections: dict[int, RuntimeConnection] = {}
        self._fork: Fork | None = None
        self._caller: RuntimeConnection | None = None
        self._stopping = False

    def serve(self) -> None:
        signal.signal(signal.SIGTERM, self._on_signal)
        with self._listener:
            while not self._stopping or self._fork is not None:
                self._turn()

    def invoke(self, caller: RuntimeConnection, headers: Mapping[str, str], launch_spec: bytes) -> None:
        """Start a worker; `serve` answers when it has ended. If a worker runs already, or after `stop`, answer 503."""
        if self._fork is not None or self._stopping:
            caller.answer(503, b"")
            return
        env = {variable: headers[name] for name, variable in KEYS.items() if headers.get(name)}
        close = [self._listener.fileno(), *self._connections]
        self._caller, self._fork = caller, Fork(self._run, launch_spec, env=env, close=close)

    def stop(self) -> None:
        """Kill the running worker, and end `serve` after its answer is sent."""
        self._stopping = True
        if self._fork is not None:
            self._fork.kill()

    def _on_signal(self, *_: object) -> None:
        self.stop()
        if self._fork is None:
            raise SystemExit  # nothing else would end the waiting

    def _turn(self) -> None:
        fork = self._fork
        poller = select.poll()
        listened = {self._listener.fileno(), *self._connections, *([] if fork is None else fork.descriptors)}
        for descriptor in listened:
            poller.register(descriptor, select.POLLIN)
        timeout_s = LOOK_S if fork is None or fork.timeout_s is None else fork.timeout_s
        ready = {descriptor for descriptor, _ in poller.poll(timeout_s * 1000)}
        if fork is not None and (end := fork.poll()) is not None:
            self._answer(end)
        if self._listener.fileno() in ready:
            accepted, _ = self._listener.accept()
            connection = RuntimeConnection(accepted, self)
            self._connections[connection.fileno()] = connection
        for descriptor in ready & self._connections.keys():
            self._read(descriptor)

    def _read(self, descriptor: int) -> None:
        connection = self._connections[descriptor]
        connection.close_connection = True
        with suppress(OSError):
            connection.handle_one_request()
        if connection.close_connection:
            del self._connections[descriptor]
            if connection is self._caller and self._fork is not None:
                self._caller = None
                self._fork.kill()  # the invocation is over
            with suppress(OSError):
                connection.finish()
            connection.request.close()

    def _answer(self, end: End) -> None:
        caller, self._fork, self._caller = self._caller, None, None
        if caller is not None:
            body = msgspec.json.encode(WorkerAnswer.of(end))
            caller.answer(200 if end.code == 0 else 500, body)


def main(name: str = MODULE, port: int | None = None) -> None:
    """Import the module `name`, call its `warm` if it has one, and run an `Instance` with it until `Instance.stop`.

    port: the port to listen at; None: from the environment variable `PORT_VARIABLE`, or `PORT` if that is not set.
    """
    module = import_module(name)
    getattr(module, "warm", lambda: None)()
    Instance(module, int(os.environ.get(PORT_VARIABLE, PORT)) if port is None else port).serve()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else MODULE)
