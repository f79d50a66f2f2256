"""What every service process of a cluster consists of: its specification, roles, heartbeats and main loop."""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import os
import re
import secrets
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from torch_dpflow._core.backoff import Backoff
from torch_dpflow._core.threads import PeriodicCall
from torch_dpflow.cluster.messages.node import Heartbeat, HeartbeatReply, Running
from torch_dpflow.cluster.security.connection_file import NODE_SOCKET, ConnectionFile
from torch_dpflow.errors import DeadlineError, DPFlowError, TransportError
from torch_dpflow.ipc.rpc import ClientOptions, RpcClient, RpcServer
from torch_dpflow.ipc.transport import Listener, TransportOptions, listen
from torch_dpflow.log import SERVICE, LogOptions, write_lines
from torch_dpflow.remote.launchers.contract import PlatformSpec

#: The name of the provisioner's socket.
PROVISIONER_SOCKET = "provisioner"
#: FLOW:vN/router, FLOW:vN/shard-000 or FLOW:vN/shard-000/worker-0: the id of a flow's process. Of a node
#: that has joined, shards are FLOW:vN/shard-NODE-000.
_ID = re.compile(r"(?P<flow>[^:]+:v\d+)/(router|(?P<shard>shard-[\w.-]+)(/worker-(?P<worker>\d+))?)")


@dataclass(frozen=True, kw_only=True)
class MemberPlace:
    """Where the workers of a cluster's flows run, if its node does not start them."""

    #: Of the platform. Its settings, which may hold keys, are the provisioner's alone.
    name: str
    #: Where they call their shards: see `RemoteWorkers`.
    listen_at: str = ""
    #: How many all flows may have together.
    most_workers: int


@dataclass(frozen=True, kw_only=True)
class ClusterPlace:
    """Where the processes of one node meet.

    Args:
        directory: private to the node's user; sockets lie in it.
        host: the address of this host on which services listen over tcp; None: ipc only.
        keys: for tcp; None where all is ipc, which needs none. Held here and not read from the connection file, which
            may vanish while processes start.
        log: how its processes log.
        token: proves to services that the node has started a shard or worker.
        members: where workers run; None: the node starts them.
    """

    directory: str
    host: str | None = None
    keys: ConnectionFile | None = field(default=None, repr=False)
    log: LogOptions = field(default_factory=LogOptions)
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    members: MemberPlace | None = None

    @property
    def node_address(self) -> str:
        """Where the node listens; always on this host."""
        return f"ipc://{self.directory}/{NODE_SOCKET}"

    @property
    def provisioner_address(self) -> str:
        """Where the provisioner listens; always on this host, so that only this user can reach it."""
        return f"ipc://{self.directory}/{PROVISIONER_SOCKET}"

    @property
    def cluster(self) -> str:
        """The first part of its members' names, 8 hexadecimal digits."""
        return hashlib.sha256(self.token.encode()).hexdigest()[:8]

    def address_for(self, id: str) -> str:
        """Where a process of this id is to listen."""
        if self.host is not None:
            return f"tcp://{self.host}:0"
        return f"ipc://{self.directory}/{hashlib.sha256(id.encode()).hexdigest()[:16]}"

    def remove_socket(self, id: str) -> None:
        """Remove what a process of this id, which has ended, has listened on."""
        scheme, _, path = self.address_for(id).partition("://")
        if scheme == "ipc":
            Path(path).unlink(missing_ok=True)

    def client_transport(self) -> TransportOptions:
        """Options for connecting."""
        return TransportOptions(keys=None if self.keys is None else self.keys.client_keys())

    def server_transport(self) -> TransportOptions:
        """Options for listening."""
        return TransportOptions(keys=None if self.keys is None else self.keys.server_keys())

    def connect(self, address: str, *, timeout_s: float = 30.0) -> RpcClient:
        """A client of the service at `address`, for calls whose payload is small."""
        options = ClientOptions(timeout_s=timeout_s, shared_bytes=0)
        return RpcClient(address, options=options, transport=self.client_transport())


@dataclass(frozen=True, kw_only=True)
class ServiceSpec:
    """Which process of a node this is."""

    id: str
    role: str
    incarnation: int
    #: For the role, msgpack; the settings as they are when it starts.
    arguments: bytes
    settings: bytes
    #: Where the process before it listened; empty for the first.
    address: str
    place: ClusterPlace
    #: Where workers run; only a provisioner has it.
    platform: PlatformSpec | None = None

    def listen(self, address: str = "") -> Listener:
        """Listen where the process before this one did, if there was one; else at `address`, if given.

        If another process has the port by now, it takes another one, which its heartbeats report.
        """
        options = self.place.server_transport()
        for chosen in filter(None, (self.address, address)):
            try:
                return listen(chosen, options=options)
            except TransportError as error:
                SERVICE.warning("%s listens elsewhere: %s", self.id, error, extra=subjects_of(self.id))
        return listen(self.place.address_for(self.id), options=options)


def subjects_of(id: str) -> dict[str, str | None]:
    """The fields of log lines about the process with this id: see `torch_dpflow.log`."""
    parts = _ID.fullmatch(id)
    return {} if parts is None else parts.groupdict()


#: The interval between heartbeats, seconds.
HEARTBEAT_S = 1.0
#: A process sends no heartbeats once an iteration of its main loop takes longer, seconds.
STUCK_S = 30.0


class HeartbeatSender:
    """A thread that sends heartbeats to the node, and ends this process once the node does not desire it.

    Args:
        address: where the process listens; empty where it does not.
        apply_settings: called with settings that have changed, in this thread.
        status: figures for people, until there are others.
        leave: called before this process ends because the node does not desire it, in this thread.
        stuck_s: no heartbeat is sent once an iteration of the main loop takes longer, seconds.
    """

    def __init__(
        self,
        service: ServiceSpec,
        address: str,
        *,
        apply_settings: Callable[[bytes], None] = lambda _: None,
        status: dict[str, Any] | None = None,
        leave: Callable[[], None] = lambda: None,
        stuck_s: float = STUCK_S,
    ) -> None:
        self._leave = leave
        self._service = service
        self._address = address
        self._apply_settings = apply_settings
        self._settings = service.settings
        #: Figures for people. Replaced by the main thread, which alone may read what they are gathered from.
        self.status = status or {}
        self._stuck_s = stuck_s
        self._iterated_at = time.monotonic()
        self._node = service.place.connect(service.place.node_address)
        self._thread = PeriodicCall(
            self._send, HEARTBEAT_S, "dpflow-heartbeat", what="the heartbeat to the node"
        )
        self._thread.wake()
        self._thread.start()

    def report(self, status: dict[str, Any]) -> None:
        """Send this status at once. Any thread may call."""
        self.status = status
        self._thread.wake()

    def on_iteration(self) -> None:
        """The main loop has completed an iteration."""
        self._iterated_at = time.monotonic()

    def _send(self) -> None:
        if time.monotonic() - self._iterated_at >= self._stuck_s:
            return
        heartbeat = Heartbeat(self._service.id, self._service.incarnation, self._address, self.status)
        try:
            reply: HeartbeatReply = self._node.call(
                "heartbeat", heartbeat, reply_type=HeartbeatReply, timeout_s=HEARTBEAT_S
            ).body
        except DPFlowError:
            return  # the node is busy; if it has ended, this process ends without its help
        if not reply.desired:
            self._leave()
            os._exit(0)
        if reply.settings != self._settings:
            self._settings = reply.settings
            self._apply_settings(reply.settings)


T = TypeVar("T")
#: How long a server waits for a message before it polls, seconds.
POLL_S = 0.1
#: How often its status is gathered, seconds: that costs more than polling.
STATUS_S = 0.5


def serve(
    service: ServiceSpec,
    server: RpcServer,
    *,
    status: Callable[[], dict[str, Any]] = dict,
    poll: Callable[[], None] = lambda: None,
    apply_settings: Callable[[bytes], None] = lambda _: None,
    poll_s: float = POLL_S,
    leave: Callable[[], None] = lambda: None,
    heartbeats: HeartbeatSender | None = None,
) -> None:
    """Serve until the process ends. All functions but `leave` are called in this thread.

    status: returns figures for people.
    poll: called between messages, at least every `poll_s` seconds.
    apply_settings: called with settings that have changed.
    leave: as of `HeartbeatSender`.
    heartbeats: of a process that sends some already.
    """
    heartbeats = heartbeats or HeartbeatSender(
        service,
        server.address,
        apply_settings=lambda settings: server.post(partial(apply_settings, settings)),
        leave=leave,
    )
    due = status_due = 0.0
    while True:
        server.step(poll_s)
        now = time.monotonic()
        if now >= due:
            due = now + poll_s
            heartbeats.on_iteration()
            poll()
        if now >= status_due:
            status_due = now + STATUS_S
            stats = server.stats()
            heartbeats.status = {**status(), "malformed": stats.malformed, "strangers": stats.strangers}


def ask_in(server: RpcServer, question: Callable[[], T]) -> T:
    """What `question` returns, called in the server's thread, while this one waits. Raises what it raises."""
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except Exception as error:
            answer.set_exception(error)

    server.post(ask)
    return answer.result()


def locate(place: ClusterPlace, id: str, *, timeout_s: float = 60.0) -> str:
    """The address of the process `id`, as soon as it listens. Raises DeadlineError if it does not in time."""
    deadline = time.monotonic() + timeout_s
    seen, backoff = 0, Backoff()
    with place.connect(place.node_address) as node:
        while time.monotonic() < deadline:
            try:
                running: Running = node.call("changes", seen, reply_type=Running, timeout_s=5.0).body
            except DPFlowError:
                time.sleep(backoff.pause_s())
                continue
            backoff.reset()
            seen = running.revision
            own = next((view.address for view in running.processes if view.id == id), "")
            address = own or running.elsewhere.get(id, "")
            if address:
                return address
    raise DeadlineError(f"{id!r} does not listen after {timeout_s} s; is it desired?")


#: The ids of the processes that a node runs by itself: the second only where a platform runs the workers, the third
#: where the live page is wanted, the fourth where datasets are held in memory.
COORDINATOR, PROVISIONER, PAGE, POOL = "coordinator", "provisioner", "page", "pool"
#: The function of each role.
ROLES = {
    "coordinator": "torch_dpflow.cluster.services.coordinator_process:run",
    "provisioner": "torch_dpflow.cluster.services.provisioner:run",
    "page": "torch_dpflow.cluster.services.page:run",
    "pool": "torch_dpflow.pool.server.data_server:run_service",
    "router": "torch_dpflow.cluster.services.router:run",
    "shard": "torch_dpflow.cluster.shard.run:run",
    "worker": "torch_dpflow.cluster.shard.sample_worker:run",
}
#: Imported once, for all processes of a node; a server of the pool, which few clusters have, imports what it needs.
PRELOAD = [target.partition(":")[0] for role, target in ROLES.items() if role != POOL]


def main(service: ServiceSpec) -> None:
    """Run the role that the specification names, until the process ends."""
    # Control-C reaches every process of the terminal. The node stops on it, and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    write_lines(service.place.log, {**subjects_of(service.id), "process": service.id, "pid": os.getpid()})
    # For a process that seems to hang: kill -USR1 writes the stacks of its threads to stderr.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    module, _, name = ROLES[service.role].partition(":")
    run: Callable[[ServiceSpec], None] = getattr(import_module(module), name)
    # Modules are never collected: skipping them saves time, and keeps the pages shared with the fork server.
    gc.freeze()
    run(service)
