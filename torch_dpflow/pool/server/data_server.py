"""DataServer: a server of the pool, with one thread for each control connection."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch_dpflow._core.checks import check_int, check_seconds, check_type, is_loopback
from torch_dpflow._core.decoding import msgpack_decoder
from torch_dpflow._version import __version__
from torch_dpflow.cluster.services.service import HeartbeatSender, ServiceSpec
from torch_dpflow.errors import DPFlowError, MessageError, OptionError, PeerLostError, PoolFullError, UsageError
from torch_dpflow.ipc.memory.headroom import check_memory
from torch_dpflow.log import SERVICE
from torch_dpflow.pool.messages import (
    LOCK_FILE,
    MAX_ANSWER_BYTES,
    Acknowledged,
    AnnounceAccessPlan,
    CountReads,
    DatasetOpened,
    DatasetPart,
    FollowerHeartbeat,
    GetAheadPlaces,
    GetRecordStates,
    GetStripeTable,
    JoinPool,
    ListDatasets,
    ListServers,
    OpenDataset,
    PoolAnswer,
    PoolRefusal,
    PoolRequest,
    PreloadDataset,
    PushStripe,
    ServerInfo,
    StartReading,
    UnloadDataset,
    boot_id,
)
from torch_dpflow.pool.server import start_thread
from torch_dpflow.pool.server.follower import PoolFollower
from torch_dpflow.pool.server.holdings import ANSWER_S, MAX_DATASETS, Holdings
from torch_dpflow.pool.server.leader import PoolLeader
from torch_dpflow.pool.server.listener import MAX_CONNECTIONS, PoolListener
from torch_dpflow.pool.transport.address import (
    AddressLike,
    PoolAddress,
    check_private,
    find_address,
    find_directory,
    peer_uid,
    socket_path,
)
from torch_dpflow.pool.transport.authentication import check_keys
from torch_dpflow.pool.transport.control_connection import REQUESTS, Channel

#: Upper limit of the default memory for reading ahead, bytes.
MAX_AHEAD_BYTES = 1 << 30
#: How often `serve` looks for a signal, seconds.
_LOOK_S = 1.0


class DataServer:
    """Pool server: caches datasets for processes of this user on this host and, with `listen`, on other hosts.

    Creating it reserves the address; `serve` answers clients.

    Args:
        memory_bytes: maximum memory for samples, bytes.
        address: directory of the server's socket; "auto": the directory in `DPFLOW_POOL`, or this user's default.
        idle_s: seconds after which a leader drops a dataset that was not preloaded and that no process reads.
        ahead_bytes: additional memory for reading ahead; None: an eighth of `memory_bytes`, at most `MAX_AHEAD_BYTES`.
        listen: address for other hosts, from `find_address("tcp://HOST:PORT", FILE)`; None: this host only.
        join: address of the leader of a pool to join; None to lead a new pool.

    Raises:
        OptionTypeError: a value is of the wrong type.
        OptionError: a value is not allowed; another server has this address; the directory is open to other users; or
            there are no keys for other hosts.
    """

    def __init__(
        self,
        memory_bytes: int,
        address: str | os.PathLike[str] = "auto",
        *,
        idle_s: float = 600.0,
        ahead_bytes: int | None = None,
        listen: PoolAddress | None = None,
        join: AddressLike | None = None,
    ) -> None:
        check_int("memory_bytes", memory_bytes, minimum=1)
        check_seconds("idle_s", idle_s, zero=True)
        if ahead_bytes is None:
            ahead_bytes = min(memory_bytes // 8, MAX_AHEAD_BYTES)
        check_int("ahead_bytes", ahead_bytes, minimum=0)
        check_memory("memory_bytes and ahead_bytes", memory_bytes + ahead_bytes)
        self._holdings = Holdings(ahead_bytes)
        self._readers = itertools.count(1)
        self._connections: set[socket.socket] = set()
        self._stop = threading.Event()
        self.directory = find_directory(address)
        leader = None if join is None else find_address(join)
        if leader is not None and leader.directory == self.directory:
            raise OptionError(f"join={str(leader)!r} is this server itself; give the address of the pool's leader")
        if listen is not None:
            check_type("listen", listen, PoolAddress, "a PoolAddress, as find_address makes it")
        if leader is not None and leader.directory is None:
            _check_reach(listen, leader)
            check_keys(leader)
        self._tcp_listener = None if listen is None else PoolListener(listen, self._admit, self._holdings)
        #: Address at which other hosts reach this server; None for this host only.
        self.address = None if self._tcp_listener is None else self._tcp_listener.address
        incarnation = secrets.token_hex(8)
        self._listener, self._held_lock = _listen(self.directory, incarnation)
        server = ServerInfo(
            directory=str(self.directory),
            host=socket.gethostname(),
            boot=boot_id(),
            memory=memory_bytes,
            listen=self.address,
            incarnation=incarnation,
        )
        self._pool: PoolLeader | PoolFollower
        if leader is None:
            self._pool = PoolLeader(server, idle_s, self._holdings)
        else:
            self._pool = PoolFollower(server, leader, self._holdings)

    def serve(self) -> None:
        """Answer clients until `stop`."""
        threading.Thread(target=self._pool.run, name="dpflow-membership", daemon=True).start()
        if self._tcp_listener is not None:
            threading.Thread(target=self._tcp_listener.run, name="dpflow-listener", daemon=True).start()
        while not self._stop.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                if self._stop.is_set():
                    break
                time.sleep(0.1)  # no descriptor is free
                continue
            if peer_uid(connection) == os.getuid():
                self._admit(connection)
            else:
                connection.close()

    def stop(self) -> None:
        """End `serve`, and drop all cached datasets. Any thread may call this."""
        if self._stop.is_set():
            return
        self._stop.set()
        with contextlib.suppress(OSError):
            os.unlink(socket_path(self.directory))
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._tcp_listener is not None:
            self._tcp_listener.close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._pool.close()
        self._holdings.close()
        os.close(self._held_lock)

    def _admit(self, connection: socket.socket) -> None:
        """Serve a control connection in a thread, unless the maximum number of connections is open."""
        if self._stop.is_set() or len(self._connections) >= MAX_CONNECTIONS:
            connection.close()
            return
        self._connections.add(connection)
        try:
            start_thread(partial(self._talk, connection), "dpflow-control")
        except PoolFullError as error:  # connected clients continue
            SERVICE.warning("a client of the pool was refused: %s", error)
            self._connections.discard(connection)
            connection.close()

    def _talk(self, connection: socket.socket) -> None:
        channel = Channel(connection)
        client = _PoolClient(f"reader {next(self._readers)}", maps=channel.passes_memory)
        try:
            while True:
                request, given = channel.receive(REQUESTS, 1)
                fds = given
                try:
                    try:
                        answer, taken = self._answer(request, client, given)
                    except DPFlowError as error:
                        answer, taken = PoolRefusal.of(error), []
                    fds = [*given, *taken]
                    if answer is not None:
                        channel.send(answer, taken, MAX_ANSWER_BYTES)
                finally:
                    for fd in fds:
                        os.close(fd)
        except (OSError, MessageError, OptionError, PeerLostError) as error:
            if isinstance(error, MessageError | OptionError):
                SERVICE.warning("a client of the pool was disconnected: %s", error)
            if isinstance(error, MessageError):
                refusal = UsageError(f"{error}; clients need this server's release, {__version__}")
                with contextlib.suppress(OSError):
                    channel.send(PoolRefusal.of(refusal))
        finally:
            self._leave(client)
            self._connections.discard(connection)
            channel.close()

    def _leave(self, client: _PoolClient) -> None:
        if client.follower is not None and isinstance(self._pool, PoolLeader):
            self._pool.gone(*client.follower)
        self._holdings.leave(client.name)
        if client.reads:
            self._pool.count_readers()

    def _answer(
        self, request: PoolRequest | CountReads, client: _PoolClient, given: list[int]
    ) -> tuple[PoolAnswer | None, list[int]]:
        """Return the answer, None if the request has none, and descriptors to send with it."""
        match request:
            case CountReads():
                self._pool.count(request)
                return None, []
            case PreloadDataset():
                return self._pool.preload(request), []
            case GetStripeTable(identity):
                return self._pool.table(identity), []
            case StartReading(identity):
                client.reads = True
                self._holdings.read(identity, client.name)
                self._pool.count_readers()
                return Acknowledged(), []
            case OpenDataset(identity, first):
                return self._holdings.open(identity, max(0, first)) if client.maps else (DatasetOpened(0, 0), [])
            case GetRecordStates(identity, records, wait_s):
                return self._holdings.want(identity, records, wait_s), []
            case PushStripe(identity, stripe):
                return self._holdings.get(identity).push(stripe, given), []
            case AnnounceAccessPlan(identity=identity):
                try:
                    self._holdings.ahead.announce(self._holdings.get(identity), client.name, request)
                except (UsageError, PoolFullError) as error:
                    if not request.extends:
                        raise
                    SERVICE.info("a part of an access plan is not read ahead: %s", error)
                return None if request.extends else Acknowledged(), []
            case GetAheadPlaces(identity, plan, records, copied, memory):
                reading = self._holdings.ahead.of(identity, max(records, copied, key=len))
                reading.confirm(client.name, copied)
                places = reading.want(client.name, plan, records, ANSWER_S)
                return places, reading.descriptors(memory) if client.maps else []
            case UnloadDataset() | ListDatasets() | ListServers():
                return self._pool.command(request), []
            case DatasetPart() | JoinPool() | FollowerHeartbeat():
                return self._answer_follower(request, client), []

    def _answer_follower(self, request: DatasetPart | JoinPool | FollowerHeartbeat, client: _PoolClient) -> PoolAnswer:
        if not isinstance(self._pool, PoolLeader):
            raise UsageError(f"this server is a follower itself; join its leader, at {self._pool.leader}")
        match request:
            case DatasetPart():
                if len(client.reports) >= MAX_DATASETS:
                    raise UsageError(f"{MAX_DATASETS} parts of datasets were reported; more are not allowed")
                client.reports.append(request)
                return Acknowledged()
            case JoinPool(server):
                generation = self._pool.join(server, client.reports)
                client.follower, client.reports = (server.name, generation), []
                return Acknowledged()
            case FollowerHeartbeat():
                if client.follower is None:
                    raise UsageError("a server has to join before it sends a heartbeat")
                return self._pool.heartbeat(*client.follower, request)


@dataclass(eq=False)
class _PoolClient:
    """One control connection."""

    name: str
    #: Whether it is on this host, and gets segments.
    maps: bool
    reads: bool = False
    #: What a follower reports to hold, before it joins.
    reports: list[DatasetPart] = field(default_factory=list)
    #: Name and generation of the follower on this connection.
    follower: tuple[str, int] | None = None


def _check_reach(listen: PoolAddress | None, leader: PoolAddress) -> None:
    """Raise OptionError if readers on the leader's host could not reach this server."""
    if listen is None:
        raise OptionError(
            f"join={str(leader)!r}: a server that joins over a network must listen on it too; give it an address, "
            "--listen or listen="
        )
    if is_loopback(str(listen)) and not is_loopback(str(leader)):
        raise OptionError(
            f"--listen {listen}: the pool at {leader} and its readers cannot reach it; give an address of this host"
        )


def _listen(directory: os.PathLike[str], incarnation: str) -> tuple[socket.socket, int]:
    """Return the listening socket, and the descriptor of a lock that reserves the address for this process."""
    path = find_directory(directory)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(path)
        lock = os.open(path / LOCK_FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unusable(path, error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise OptionError(f"a server of the pool runs at {path} already; give another address, or stop it") from None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.ftruncate(lock, 0)
        os.write(lock, incarnation.encode())
        with contextlib.suppress(FileNotFoundError):
            os.unlink(socket_path(path))
        listener.bind(socket_path(path))
    except OSError as error:  # such as a full disk
        listener.close()
        os.close(lock)
        raise _unusable(path, error) from None
    listener.listen(MAX_CONNECTIONS)  # further readers are refused, and read from storage
    # A signal delivered to another thread, as may happen after SIGCONT, does not interrupt `accept`.
    listener.settimeout(_LOOK_S)
    return listener, lock


def _unusable(directory: Path, error: OSError) -> OptionError:
    reason = error.strerror or error
    return OptionError(f"{directory} cannot be a server's directory: {reason}; give another address")


#: How often the server is checked, and pause between attempts to get its address, seconds.
_POLL_S, _RETRY_S = 0.5, 2.0


def run_service(service: ServiceSpec) -> None:
    """Run a pool server in a process that a node has started. `service.arguments`: its memory in bytes, MessagePack."""
    memory_bytes = msgpack_decoder(int).decode(service.arguments)
    heartbeats = HeartbeatSender(service, str(find_directory()))
    serving = threading.Thread(target=_opened(memory_bytes, heartbeats).serve, name="dpflow-pool", daemon=True)
    serving.start()
    while serving.is_alive():
        heartbeats.on_iteration()
        time.sleep(_POLL_S)
    os._exit(1)  # the node starts another one


def _opened(memory_bytes: int, heartbeats: HeartbeatSender) -> DataServer:
    is_logged = False
    while True:
        try:
            return DataServer(memory_bytes)
        except OptionError as error:
            if not is_logged:
                SERVICE.error("the pool cannot be served: %s", error)
        is_logged = True
        heartbeats.on_iteration()
        time.sleep(_RETRY_S)
