"""DataServer: a server of the pool, and its door on this host. It has one thread for each control connection."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import socket
import threading
import time

from torch_dpflow.checks import check_int, check_seconds
from torch_dpflow.dataservice.ahead_messages import (
    AnnounceOrder,
    OpenAhead,
    TookAhead,
    WantAhead,
)
from torch_dpflow.dataservice.door import MOST_CONNECTIONS, StreamDoor
from torch_dpflow.dataservice.framing import Channel, PacketChannel, StreamChannel
from torch_dpflow.dataservice.head import PoolHead
from torch_dpflow.dataservice.holdings import ANSWER_S, Holdings
from torch_dpflow.dataservice.pool_address import PoolAddress
from torch_dpflow.dataservice.protocol import (
    REQUESTS,
    CountReads,
    ListSets,
    OpenSet,
    PoolAnswer,
    PoolRefusal,
    PoolRequest,
    PreloadSet,
    UnloadSet,
    WantRecords,
    check_private,
    find_directory,
    peer_uid,
    socket_path,
)
from torch_dpflow.errors import DPFlowError, MessageError, OptionError, PeerLostError
from torch_dpflow.log import SERVICE

#: Most memory for reading ahead where none is given.
MOST_AHEAD = 1 << 30
_TICK_S = 1.0


class DataServer:
    """Holds sets for the processes of this user on this host, and of its cluster on others.

    Args:
        memory_bytes: most bytes of samples.
        address: the directory of its socket; "auto" as for clients.
        idle_s: how long a set that no command has loaded stays when nobody reads it, seconds.
        ahead_bytes: memory beside that, for reading ahead what has no room; None: an eighth of `memory_bytes`, and at
            most `MOST_AHEAD`.
        listen: where other hosts reach it; None: nowhere.

    Raises:
        OptionError: a value is not allowed, another server has this address, others may enter the directory, or there
            are no keys for other hosts.
    """

    def __init__(
        self,
        memory_bytes: int,
        address: str | os.PathLike[str] = "auto",
        *,
        idle_s: float = 600.0,
        ahead_bytes: int | None = None,
        listen: PoolAddress | None = None,
    ) -> None:
        check_int("memory_bytes", memory_bytes, minimum=1)
        if ahead_bytes is None:
            ahead_bytes = min(memory_bytes // 8, MOST_AHEAD)
        self._holdings = Holdings(check_int("ahead_bytes", ahead_bytes, minimum=0))
        self._head = PoolHead(
            memory_bytes,
            check_seconds("idle_s", idle_s, zero=True),
            self._holdings,
        )
        self._readers = itertools.count(1)
        self._connections: set[socket.socket] = set()
        self._stop = threading.Event()
        self.directory = find_directory(address)
        self._door = None if listen is None else StreamDoor(listen, self._talk_afar, self._holdings)
        #: Where other hosts reach it.
        self.address = None if self._door is None else self._door.address
        self._listener, self._held_lock = _listen(self.directory)

    def serve(self) -> None:
        """Serve until `stop`."""
        threading.Thread(target=self._beat, name="dpflow-beat", daemon=True).start()
        if self._door is not None:
            threading.Thread(target=self._door.run, name="dpflow-door", daemon=True).start()
        while not self._stop.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._stop.is_set():
                    break
                time.sleep(0.1)  # no descriptor is free
                continue
            if peer_uid(connection) != os.getuid() or len(self._connections) >= MOST_CONNECTIONS:
                connection.close()
                continue
            self._connections.add(connection)
            thread = threading.Thread(
                target=self._talk_here, args=(connection,), name="dpflow-talk", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # the machine has no thread left; those who are connected go on
                SERVICE.warning("a client of the pool is refused: %s", error)
                self._connections.discard(connection)
                connection.close()

    def stop(self) -> None:
        """End `serve`, and give up everything. Any thread may call."""
        if self._stop.is_set():
            return
        self._stop.set()
        with contextlib.suppress(OSError):
            os.unlink(socket_path(self.directory))
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._door is not None:
            self._door.close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._head.close()
        self._holdings.close()
        os.close(self._held_lock)

    # -- one client ------------------------------------------------------------------------------------------

    def _talk_here(self, connection: socket.socket) -> None:
        try:
            self._talk(PacketChannel(connection))
        finally:
            self._connections.discard(connection)

    def _talk_afar(self, connection: socket.socket) -> None:
        self._talk(StreamChannel(connection))

    def _talk(self, channel: Channel) -> None:
        reader = f"reader {next(self._readers)}"
        try:
            while True:
                request, _ = channel.receive(REQUESTS)
                if isinstance(request, CountReads):
                    self._head.count(request)
                    continue
                answer, fds = self._answer_safely(request, reader, channel.carries_regions)
                try:
                    channel.send(answer, fds)
                finally:
                    for fd in fds:
                        os.close(fd)
        except (OSError, MessageError, OptionError, PeerLostError) as error:
            if isinstance(error, MessageError | OptionError):
                SERVICE.warning("a client of the pool is left: %s", error)
        finally:
            self._head.leave(reader)
            self._holdings.ahead.leave(reader)
            channel.close()

    def _answer_safely(
        self, request: PoolRequest, reader: str, with_regions: bool
    ) -> tuple[PoolAnswer, list[int]]:
        try:
            return self._answer(request, reader, with_regions)
        except DPFlowError as error:
            return PoolRefusal.of(error), []

    def _answer(self, request: PoolRequest, reader: str, with_regions: bool) -> tuple[PoolAnswer, list[int]]:
        match request:
            case PreloadSet():
                return self._head.preload(request), []
            case OpenSet(identity):
                self._head.open(identity, reader)
                return self._holdings.open(identity, with_regions=with_regions)
            case WantRecords(identity, records):
                return self._holdings.want(identity, records), []
            case AnnounceOrder(identity=identity):
                return self._holdings.ahead.announce(self._holdings.get(identity), reader, request), []
            case OpenAhead():
                return self._holdings.ahead.open(request)
            case WantAhead():
                return self._holdings.ahead.want(request, reader, ANSWER_S), []
            case TookAhead():
                return self._holdings.ahead.took(request, reader), []
            case UnloadSet(identity):
                return self._head.unload(identity), []
            case ListSets(first):
                return self._head.contents(max(0, first)), []

    def _beat(self) -> None:
        while not self._stop.wait(_TICK_S):
            self._head.tick()


def _listen(directory: os.PathLike[str]) -> tuple[socket.socket, int]:
    """The socket, and the lock that says that the address is taken."""
    path = find_directory(directory)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(path)
    lock = os.open(path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise OptionError(
            f"a server of the pool runs at {path} already; give another address, or end it"
        ) from None
    with contextlib.suppress(FileNotFoundError):
        os.unlink(socket_path(path))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(socket_path(path))
    listener.listen(128)
    return listener, lock
