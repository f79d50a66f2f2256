"""A TCP proxy that resets and stalls real connections, when a test says so."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

_RESET = struct.pack("ii", 1, 0)


class ProxiedConnection:
    """One connection through the proxy: a client's side and a server's side, with a thread for each direction."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self._sides = client, server
        self._flows = threading.Event()
        self._flows.set()
        #: Bytes that the server has sent.
        self.from_server = 0
        self.is_over = False
        self.threads = [
            threading.Thread(target=self._pump, args=ends, name="proxy")
            for ends in ((client, server), (server, client))
        ]
        for thread in self.threads:
            thread.start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._flows.wait()
                if self.is_over:
                    return
                target.sendall(data)
                self.from_server += len(data) if source is self._sides[1] else 0
        self.end()

    def stall(self) -> None:
        """Hold everything that comes from now on, without an error at either side."""
        self._flows.clear()

    def resume(self) -> None:
        self._flows.set()

    def reset(self) -> None:
        """Lose what is on its way; both sides get a reset."""
        for side in self._sides:
            with suppress(OSError):
                side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.end()

    def end(self) -> None:
        self.is_over = True
        self._flows.set()
        for side in self._sides:
            with suppress(OSError):
                side.shutdown(socket.SHUT_RD)  # wakes the thread that reads it
            side.close()


class TcpProxy:
    """Listens at a port of this host and passes connections on to a server there; thread-safe. Close it."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port = 0
        #: All connections since the start, in the order in which they came.
        self.connections: list[ProxiedConnection] = []
        #: Whether new connections are passed on; they wait otherwise.
        self.accepts = threading.Event()
        self.accepts.set()
        #: Called with each new connection, before the next one is accepted.
        self.on_connection: Callable[[ProxiedConnection], None] = lambda connection: None
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="proxy")
        self._thread.start()

    def tell(self, listen: str, bound: str) -> list[str]:
        """Return the proxy's address in place of the bound one: `worker_listener.to_tell`."""
        self._port = int(bound.rpartition(":")[2])
        return [f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"]

    def _accept(self) -> None:
        with suppress(OSError):
            while not self._closed:
                client, _ = self._listener.accept()
                self.accepts.wait()
                try:
                    server = socket.create_connection(("127.0.0.1", self._port))
                except OSError:
                    client.close()
                    continue
                self.connections.append(ProxiedConnection(client, server))
                self.on_connection(self.connections[-1])

    def close(self) -> None:
        self._closed = True
        self.accepts.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for connection in self.connections:
            connection.end()
            for thread in connection.threads:
                thread.join()
