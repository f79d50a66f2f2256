"""TCP listener of a pool server: accepts clients that prove that they belong to its cluster.

One thread handles all clients that are not authenticated yet, and blocks on none of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import select
import socket
import threading
import time
from collections.abc import Callable

from torch_dpflow._core.descriptors import soft_limit
from torch_dpflow.errors import OptionError
from torch_dpflow.log import SERVICE
from torch_dpflow.pool.server.data_sender import DataSender
from torch_dpflow.pool.server.holdings import Holdings
from torch_dpflow.pool.transport.address import PoolAddress
from torch_dpflow.pool.transport.authentication import Handshake, accept_stream, authenticator_for
from torch_dpflow.pool.transport.data_frames import DATA_CONNECTION

#: Unauthenticated connections: maximum number; time limit of each, seconds; and the age, seconds, from which the oldest
#: is closed for a new one if the maximum is reached. Until then new connections wait in the kernel.
MAX_UNAUTHENTICATED, HANDSHAKE_TIMEOUT_S, MIN_HANDSHAKE_S = 1024, 2.0, 0.25
#: Share of the process's descriptors that these may take: one in this many.
_DESCRIPTOR_SHARE = 4
#: Maximum number of authenticated connections of each kind.
MAX_CONNECTIONS = 4096
#: Minimum interval between log lines about rejected clients, seconds.
_LOG_S = 10.0
#: Poll timeout, seconds.
_LOOK_S = 1.0


@dataclasses.dataclass(frozen=True)
class _UnauthenticatedPeer:
    """Connection that has not been authenticated yet."""

    connection: socket.socket
    handshake: Handshake[tuple[socket.socket, int]]
    name: str
    #: When it was accepted, seconds.
    since: float


class PoolListener:
    """TCP listener that authenticates clients, and hands over their control and data connections.

    Args:
        address: address to listen at; port 0 for any free port.
        talk: called with each control connection; serves it in another thread.
        holdings: the datasets that data connections read.

    Raises OptionError if the address cannot be bound, or there are no keys.
    """

    def __init__(self, address: PoolAddress, talk: Callable[[socket.socket], None], holdings: Holdings) -> None:
        if address.directory is not None:
            raise OptionError(f"cannot listen at {address}: other hosts reach a server at tcp://HOST:PORT; give that")
        self._authenticator = authenticator_for(address, serves=True)
        self._talk = talk
        #: By descriptor, the oldest first.
        self._unauthenticated: dict[int, _UnauthenticatedPeer] = {}
        self._max_unauthenticated = min(MAX_UNAUTHENTICATED, soft_limit() // _DESCRIPTOR_SHARE)
        self._lock = threading.Lock()
        self._is_running = self._is_closed = False
        self._logged_at, self._rejected = -_LOG_S, 0
        try:
            family, _, _, _, place = socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            _check_host(address, str(place[0]))
            self._listener = socket.create_server(place, family=family, backlog=1024)
        except OSError as error:
            raise OptionError(f"cannot listen at {address}: {error.strerror or error}; give another address") from None
        self._listener.setblocking(False)
        self._holdings = holdings
        #: Exists while `run` does.
        self._data_sender: DataSender
        #: Address at which clients reach this listener.
        self.address = str(dataclasses.replace(address, port=self._listener.getsockname()[1]))

    def run(self) -> None:
        """Accept clients until `close`."""
        with self._lock:
            self._is_running = not self._is_closed
        if not self._is_running:
            return
        self._data_sender = DataSender(self._holdings)
        with select.epoll() as poll, self._listener, contextlib.closing(self._data_sender):
            listener = self._listener.fileno()
            poll.register(listener, select.EPOLLIN)
            while not self._is_closed:
                now = time.monotonic()
                is_full = self._is_full(now)
                poll.modify(listener, 0 if is_full else select.EPOLLIN)
                came = [
                    fd for fd, _ in poll.poll(self._wait_s(now, MIN_HANDSHAKE_S if is_full else HANDSHAKE_TIMEOUT_S))
                ]
                for fd in came:
                    if fd != listener:
                        self._go_on(fd, poll)
                if listener in came:
                    self._accept(poll)
                now = time.monotonic()
                for fd in [fd for fd, one in self._unauthenticated.items() if now >= one.since + HANDSHAKE_TIMEOUT_S]:
                    self._reject(fd, f"it did not authenticate within {HANDSHAKE_TIMEOUT_S:g} s")
            for fd in [*self._unauthenticated]:
                self._end(fd)

    def close(self) -> None:
        """End `run`, and close all data connections."""
        with self._lock:
            self._is_closed = True
            if not self._is_running:
                self._listener.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    # -- unauthenticated peers ---------------------------------------------------------------------------------

    def _is_full(self, now: float) -> bool:
        """Return whether no further peer may be accepted until the oldest peer has had its minimum time."""
        oldest = next(iter(self._unauthenticated.values()), None)
        return (
            oldest is not None
            and len(self._unauthenticated) >= self._max_unauthenticated
            and now < oldest.since + MIN_HANDSHAKE_S
        )

    def _wait_s(self, now: float, age_s: float) -> float:
        """Return the time until the oldest peer reaches this age, at most `_LOOK_S`, seconds."""
        oldest = next(iter(self._unauthenticated.values()), None)
        return _LOOK_S if oldest is None else min(_LOOK_S, max(0.0, oldest.since + age_s - now))

    def _accept(self, poll: select.epoll) -> None:
        """Accept waiting peers as far as there is capacity; the oldest peer may be closed for a new one."""
        while not self._is_full(now := time.monotonic()):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # no descriptor is free
                if not self._is_closed:
                    SERVICE.warning("a client of the pool was refused: %s", error)
                    time.sleep(0.1)
                return
            if len(self._unauthenticated) >= self._max_unauthenticated:
                self._reject(next(iter(self._unauthenticated)), "it did not authenticate, and others wait")
            fd = connection.fileno()
            handshake = accept_stream(connection, self._authenticator)
            self._unauthenticated[fd] = _UnauthenticatedPeer(connection, handshake, _name_of(connection), now)
            poll.register(fd, select.EPOLLIN)
            self._go_on(fd, poll)

    def _go_on(self, fd: int, poll: select.epoll) -> None:
        """Continue a peer's handshake."""
        peer = self._unauthenticated[fd]
        try:
            next(peer.handshake)
        except StopIteration as done:
            del self._unauthenticated[fd]
            poll.unregister(fd)
            self._admit(*done.value)
        except Exception as error:  # any error: other peers must be served
            self._reject(fd, error)

    def _admit(self, admitted: socket.socket, purpose: int) -> None:
        if purpose != DATA_CONNECTION:
            self._talk(admitted)
        elif self._is_closed or len(self._data_sender) >= MAX_CONNECTIONS:
            admitted.close()
        else:
            self._data_sender.adopt(admitted)

    def _end(self, fd: int) -> str:
        """Close a peer's connection; return its name."""
        peer = self._unauthenticated.pop(fd)
        peer.handshake.close()  # with TLS it owns the connection by now
        peer.connection.close()
        return peer.name

    def _reject(self, fd: int, why: object) -> None:
        """Close a peer's connection; log at most one rejection per `_LOG_S`."""
        name = self._end(fd)
        self._rejected += 1
        if time.monotonic() - self._logged_at >= _LOG_S:
            self._logged_at = time.monotonic()
            SERVICE.warning("rejected %s (%d so far): %s", name, self._rejected, why)


def _check_host(address: PoolAddress, host: str) -> None:
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        raise OptionError(
            f"--listen {address}: other hosts connect to this address; give one of this host that they can reach"
        )


def _name_of(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return "a client that is gone"
