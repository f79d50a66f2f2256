"""Server side of data connections: one thread answers all of them, directly from the memory of segments."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from torch_dpflow.errors import DPFlowError, MessageError
from torch_dpflow.log import SERVICE
from torch_dpflow.pool.messages import IN_STORAGE, MAX_RECORDS, PENDING
from torch_dpflow.pool.server.holdings import Holdings
from torch_dpflow.pool.transport.data_frames import (
    ABSENT,
    DATA,
    GONE,
    LATER,
    READY,
    WHOLE,
    RecordRequest,
    pack_answer,
    take_request,
)

#: Bytes that a connection may send before the next connection's turn.
TURN_BYTES = 1 << 20
#: Unanswered records of a connection at which no further requests are read from it; and maximum number of its records
#: that were answered LATER and not yet READY.
MAX_REQUESTED = 4 * MAX_RECORDS
#: Bytes per receive call.
_READ_BYTES = 64 << 10
#: Maximum buffers per send call (IOV_MAX).
_MAX_VIEWS = 1024
#: Status codes of records that are not in memory.
_ANSWERS = {PENDING: LATER, IN_STORAGE: ABSENT}


class _Connection:
    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.is_tls = isinstance(sock, ssl.SSLSocket)
        self.incoming = bytearray()
        self.requests: deque[RecordRequest] = deque()
        #: Answered records of the first request, and unanswered ones of all requests.
        self.position = self.requested = 0
        #: Records that were answered LATER and are settled: dataset, record, 0 or `ABSENT`.
        self.ready: deque[tuple[bytes, int, int]] = deque()
        self.watched: set[tuple[bytes, int]] = set()
        self.outgoing: deque[memoryview] = deque()
        #: Bytes left in the turn.
        self.turn = 0
        self.events = select.EPOLLIN
        self.is_open = True

    @property
    def has_work(self) -> bool:
        return bool(self.outgoing or self.ready or self.requests)

    def send(self) -> bool:
        """Send the bytes that the turn allows; return whether the socket accepted all of them. Raises OSError."""
        try:
            while self.outgoing and self.turn > 0:
                if self.is_tls:
                    self._send_sealed(self.outgoing[0])
                else:
                    sent = self.socket.sendmsg(self._next_views())
                    self.turn -= sent
                    self._advance(sent)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return False
        return True

    def _send_sealed(self, view: memoryview) -> None:
        """Send over TLS if the turn allows: each call takes 16 KiB, the most that TLS encrypts at once."""
        at = 0
        try:
            while at < len(view) and at < self.turn:
                at += self.socket.send(view[at:])
        finally:
            self.turn -= at
            self._advance(at)

    def _next_views(self) -> list[memoryview]:
        """Return the memory to send next, within the turn's bytes."""
        views, room = list[memoryview](), self.turn
        for view in self.outgoing:
            views.append(view if len(view) <= room else view[:room])
            room -= len(view)
            if room <= 0 or len(views) == _MAX_VIEWS:
                break
        return views

    def _advance(self, sent: int) -> None:
        while sent:
            first = self.outgoing.popleft()
            if len(first) > sent:
                self.outgoing.appendleft(first[sent:])
                return
            sent -= len(first)

    def receive(self) -> None:
        """Receive requests. Raises OSError, or MessageError for invalid ones."""
        with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            while True:
                content = self.socket.recv(_READ_BYTES)
                if not content:
                    raise ConnectionResetError
                self.incoming += content
                while (request := take_request(self.incoming)) is not None:
                    self.requests.append(request)
                    self.requested += len(request.parts)
                # TLS may hold more received bytes, which polling the socket would never report.
                if not isinstance(self.socket, ssl.SSLSocket) or not self.socket.pending():
                    return


class DataSender:
    """Thread that answers the requests of all data connections, until `close`. Any thread may call the methods.

    holdings: the datasets that this server holds.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._connections: dict[int, _Connection] = {}
        #: Connections whose turn is next, in order; none of them waits for its socket.
        self._line: dict[_Connection, None] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._lock = threading.Lock()
        #: Whether no call follows.
        self._is_closed = False
        threading.Thread(target=self._run, name="dpflow-data", daemon=True).start()

    def __len__(self) -> int:
        return len(self._connections)

    def adopt(self, sock: socket.socket) -> None:
        """Answer a connection's requests from now on; close the connection once it fails or `close` is called."""
        if not self._call(partial(self._adopt, sock)):
            sock.close()

    def close(self) -> None:
        """Close all connections, and end the thread."""
        self._call(self._end)

    def _run(self) -> None:
        while not self._is_closed:
            self._handle(0 if self._line else None)
            line, self._line = self._line, {}
            for connection in line:
                if connection.is_open:
                    connection.turn = TURN_BYTES
                    self._guarded(connection, self._send)
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._epoll.close()
        os.close(self._wake)

    def _call(self, call: Callable[[], None]) -> bool:
        """Queue a call for the thread; return False if the thread has ended."""
        with self._lock:
            if not self._is_closed:
                self._calls.append(call)
                os.eventfd_write(self._wake, 1)
            return not self._is_closed

    def _end(self) -> None:
        with self._lock:
            self._is_closed = True

    def _adopt(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        connection = _Connection(sock)
        self._connections[sock.fileno()] = connection
        self._epoll.register(sock, connection.events)
        self._guarded(connection, self._receive)  # bytes that arrived with the handshake

    def _handle(self, timeout: float | None) -> None:
        for fd, events in self._epoll.poll(timeout):
            if fd == self._wake:
                os.eventfd_read(self._wake)
                while self._calls:
                    self._calls.popleft()()
            elif (connection := self._connections.get(fd)) is not None:
                if events & ~select.EPOLLOUT:
                    self._guarded(connection, self._receive)
                if events & select.EPOLLOUT and connection.is_open:
                    self._guarded(connection, self._send)

    def _guarded(self, connection: _Connection, act: Callable[[_Connection], None]) -> None:
        """Run `act`; close the connection if it fails."""
        try:
            act(connection)
        except OSError:
            self._drop(connection)
        except DPFlowError as error:
            SERVICE.warning("a data connection of the pool was closed: %s", error)
            self._drop(connection)

    def _receive(self, connection: _Connection) -> None:
        connection.receive()
        self._settle(connection)
        self._queue(connection)

    def _queue(self, connection: _Connection) -> None:
        """Queue a connection that has something to send, unless it waits for its socket in the midst of a turn."""
        if connection.has_work and not connection.events & select.EPOLLOUT:
            self._line.setdefault(connection)

    def _send(self, connection: _Connection) -> None:
        """Send until the turn ends or the socket accepts no more."""
        is_taken = True
        while is_taken and connection.turn > 0 and (connection.outgoing or self._prepare(connection)):
            is_taken = connection.send()
        self._settle(connection, blocked=not is_taken)
        self._queue(connection)

    def _settle(self, connection: _Connection, *, blocked: bool | None = None) -> None:
        """Update the events that epoll reports for a connection."""
        out = connection.events & select.EPOLLOUT if blocked is None else blocked * select.EPOLLOUT
        events = out | (select.EPOLLIN if connection.requested < MAX_REQUESTED else 0)
        if events != connection.events:
            connection.events = events
            self._epoll.modify(connection.socket, events)

    def _prepare(self, connection: _Connection) -> bool:
        """Queue the next answer, of as many records as fit in the turn; return whether there is one."""
        if connection.ready:
            identity = connection.ready[0][0]
            entries = list[tuple[int, int]]()
            while connection.ready and connection.ready[0][0] == identity and len(entries) < MAX_RECORDS:
                _, record, state = connection.ready.popleft()
                connection.watched.discard((identity, record))
                entries.append((record, state))
            connection.outgoing.append(memoryview(pack_answer(READY, identity, entries)))
            return True
        if not connection.requests:
            return False
        request = connection.requests[0]
        self._answer(connection, request)
        if connection.position == len(request.parts):
            connection.requests.popleft()
            connection.position = 0
        return True

    def _answer(self, connection: _Connection, request: RecordRequest) -> None:
        identity, entries, contents, room = request.identity, list[tuple[int, int]](), deque[memoryview](), 0
        held = self._holdings.on_data_connection(identity)
        watch = partial(self._watch, connection, identity)
        for record, begin, length in request.parts[connection.position :]:
            found = GONE if held is None else held.look(record, watch)
            if isinstance(found, memoryview):
                if length != WHOLE:  # a part beyond the end is shorter, which the reader rejects
                    found = found[begin : begin + length]
                entries.append((record, len(found)))
                if len(found):
                    contents.append(found)
                room += len(found)
            else:
                entries.append((record, _ANSWERS.get(found, found)))
            if room >= connection.turn:
                break
        connection.position += len(entries)
        connection.requested -= len(entries)
        connection.outgoing.append(memoryview(pack_answer(DATA, identity, entries)))
        connection.outgoing.extend(contents)

    def _watch(self, connection: _Connection, identity: bytes, record: int) -> Callable[[bool], object] | None:
        """Return a callback for when a record is settled; None if it is watched already."""
        if (identity, record) in connection.watched:
            return None
        if len(connection.watched) >= MAX_REQUESTED:
            raise MessageError(f"a reader waits for more than {MAX_REQUESTED} records")
        connection.watched.add((identity, record))
        return lambda is_here: self._call(partial(self._tell, connection, identity, record, is_here))

    def _tell(self, connection: _Connection, identity: bytes, record: int, is_here: bool) -> None:
        if connection.is_open:
            connection.ready.append((identity, record, 0 if is_here else ABSENT))
            self._queue(connection)

    def _drop(self, connection: _Connection) -> None:
        connection.is_open = False
        self._line.pop(connection, None)
        self._connections.pop(connection.socket.fileno(), None)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(connection.socket)
        connection.socket.close()
