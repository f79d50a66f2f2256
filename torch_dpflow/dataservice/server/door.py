"""The door of a server of the pool to other hosts: lets in whoever proves that they belong to its cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import socket
import threading
import time
from collections.abc import Callable

from torch_dpflow.dataservice.lanes.guards import admit_stream, guard_of
from torch_dpflow.dataservice.lanes.pool_address import PoolAddress
from torch_dpflow.dataservice.lanes.wire import LANE
from torch_dpflow.dataservice.server.holdings import Holdings
from torch_dpflow.dataservice.server.lane_server import LaneServer
from torch_dpflow.errors import DPFlowError, OptionError
from torch_dpflow.log import SERVICE

#: Connections that have not proved anything yet, and how long each may take, seconds; others wait in the kernel.
MOST_STRANGERS, STRANGER_S = 64, 2.0
#: Most that have.
MOST_CONNECTIONS = 4096
#: At most one line of the log for those who are turned away, seconds.
_LOG_S = 10.0


class StreamDoor:
    """Listens at a port.

    Args:
        address: where; port 0 for any that is free.
        talk: serves one control connection until it ends.
        holdings: what lanes are answered from.

    Raises OptionError: nobody can listen there, or there are no keys.
    """

    def __init__(
        self, address: PoolAddress, talk: Callable[[socket.socket], None], holdings: Holdings
    ) -> None:
        if address.directory is not None:
            raise OptionError(
                f"nobody can listen at {address}: other hosts reach a server at tcp://HOST:PORT; give that"
            )
        self._guard = guard_of(address, serves=True)
        self._talk = talk
        self._strangers = threading.BoundedSemaphore(MOST_STRANGERS)
        self._talking: set[socket.socket] = set()
        self._is_closed = False
        self._logged_at, self._turned_away = -_LOG_S, 0
        try:
            family, _, _, _, place = socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            _check_host(address, str(place[0]))
            self._listener = socket.create_server(place, family=family, backlog=1024)
        except OSError as error:
            raise OptionError(
                f"nobody can listen at {address}: {error.strerror or error}; give another address"
            ) from None
        self._lanes = LaneServer(holdings)
        #: Where clients find it.
        self.address = str(dataclasses.replace(address, port=self._listener.getsockname()[1]))

    def run(self) -> None:
        """Let clients in until `close`."""
        threading.Thread(target=self._lanes.run, name="dpflow-lanes", daemon=True).start()
        while not self._is_closed:
            self._strangers.acquire()
            try:
                connection, _ = self._listener.accept()
                threading.Thread(
                    target=self._receive, args=(connection,), name="dpflow-door", daemon=True
                ).start()
            except (OSError, RuntimeError) as error:  # no descriptor, or no thread, is free
                self._strangers.release()
                if not self._is_closed:
                    SERVICE.warning("a client of the pool is refused: %s", error)
                    time.sleep(0.1)

    def close(self) -> None:
        """End `run`, and all connections."""
        self._is_closed = True
        self._lanes.close()
        for connection in (self._listener, *self._talking):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _receive(self, connection: socket.socket) -> None:
        name = _name_of(connection)
        try:
            admitted, purpose = admit_stream(connection, self._guard, STRANGER_S)
        except (OSError, DPFlowError) as error:
            connection.close()
            self._turn_away(name, error)
            return
        finally:
            self._strangers.release()
        if self._is_closed or len(self._talking) + len(self._lanes) >= MOST_CONNECTIONS:
            admitted.close()
        elif purpose == LANE:
            self._lanes.adopt(admitted)
        else:
            self._talking.add(admitted)
            try:
                self._talk(admitted)
            finally:
                self._talking.discard(admitted)

    def _turn_away(self, name: str, error: Exception) -> None:
        """Log it, unless strangers would fill the log so."""
        self._turned_away += 1
        if time.monotonic() - self._logged_at >= _LOG_S:
            self._logged_at = time.monotonic()
            SERVICE.warning("%s is turned away (%d so far): %s", name, self._turned_away, error)


def _check_host(address: PoolAddress, host: str) -> None:
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        raise OptionError(
            f"--listen {address}: others are told this address; give that of this host by which they reach it"
        )


def _name_of(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return "a client that has gone"
