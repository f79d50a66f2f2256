"""Common parts of a cluster's service processes: specification, role, heartbeats and main loop."""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from torch_dpflow._core.backoff import Backoff
from torch_dpflow._core.clocks import HEARTBEAT_S, START_S
from torch_dpflow._core.threads import PeriodicCall
from torch_dpflow.cluster.messages.node import Desire, Heartbeat, HeartbeatReply, Running
from torch_dpflow.cluster.security.connection_file import NODE_SOCKET, ConnectionFile
from torch_dpflow.errors import DeadlineError, DPFlowError, TransportError
from torch_dpflow.ipc.rpc import Answer, ClientOptions, RpcClient, RpcServer
from torch_dpflow.ipc.transport import Listener, TransportOptions, listen
from torch_dpflow.log import SERVICE, LogOptions, write_lines
from torch_dpflow.remote.launchers.contract import PlatformSpec
from torch_dpflow.workers.exit_report import exit_report

T = TypeVar("T")
#: Ids of the processes that a node runs without a request by the coordinator. The provisioner (if a platform runs
#: workers or nodes), the live page and the server of the pool are optional.
COORDINATOR, PROVISIONER, PAGE, POOL = "coordinator", "provisioner", "page", "pool"
#: Main function of the processes of each role.
ROLES = {
    "coordinator": "torch_dpflow.cluster.services.coordinator_process:run",
    "provisioner": "torch_dpflow.cluster.services.provisioner:run",
    "node-fleet": "torch_dpflow.cluster.services.node_fleet:run",
    "page": "torch_dpflow.cluster.services.page:run",
    "pool": "torch_dpflow.pool.server.data_server:run_service",
    "router": "torch_dpflow.cluster.services.router:run",
    "shard": "torch_dpflow.cluster.shard.run:run",
    "worker": "torch_dpflow.cluster.shard.sample_worker:run",
}
#: Modules imported once for all processes of a node. Few clusters have a pool, whose server imports what it needs.
PRELOAD = [target.partition(":")[0] for role, target in ROLES.items() if role != POOL]
#: By default, a process sends no heartbeat once an iteration of its main loop takes this long (seconds).
STUCK_S = START_S / 2
#: Longest time that a server waits for a message before it polls (seconds).
POLL_S = 0.1
#: Interval at which a server computes its status, which costs more than polling (seconds).
STATUS_S = HEARTBEAT_S / 2
#: FLOW:vN/router, FLOW:vN/shard-000 or FLOW:vN/shard-000/worker-0: the id of a process of a flow. Shards of a joined
#: node are FLOW:vN/shard-NODE-000.
_ID = re.compile(r"(?P<flow>[^:]+:v\d+)/(router|(?P<shard>shard-[\w.-]+)(/worker-(?P<worker>\d+))?)")


@dataclass(frozen=True, kw_only=True)
class WorkerPlatform:
    """Settings of the platform that runs a cluster's workers, as far as shards need them.

    Only the provisioner has the other settings and the credentials.
    """

    name: str
    #: Address at which shards listen for workers, as in `RemoteWorkers`; empty: the platform's default.
    listen_at: str = ""
    #: Maximum number of workers of all flows together.
    max_workers: int


@dataclass(frozen=True, kw_only=True)
class ClusterPlace:
    """Settings that all processes of one node share.

    Args:
        directory: directory of the sockets, which only the node's user can read.
        host: address of this host at which services listen over TCP; None: services listen at Unix sockets.
        keys: keys for TCP; None without TCP. They are stored here because the connection file may vanish while
            processes start.
        token: secret that proves to services that the node has started a shard or worker.
        log: log settings of the processes.
        worker_platform: platform that runs workers; None: the node runs them.
    """

    directory: str
    host: str | None = None
    keys: ConnectionFile | None = field(default=None, repr=False)
    log: LogOptions = field(default_factory=LogOptions)
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    worker_platform: WorkerPlatform | None = None

    @property
    def node_address(self) -> str:
        """Address of the node, a socket of this host."""
        return f"ipc://{self.directory}/{NODE_SOCKET}"

    @property
    def provisioner_address(self) -> str:
        """Address of the provisioner, a socket of this host that only this user can reach."""
        return f"ipc://{self.directory}/{PROVISIONER}"

    @property
    def cluster(self) -> str:
        """Id of the cluster, 8 hexadecimal digits; the names of its remote workers contain it."""
        return hashlib.sha256(self.token.encode()).hexdigest()[:8]

    def address_for(self, id: str) -> str:
        if self.host is not None:
            return f"tcp://{self.host}:0"
        return f"ipc://{self.directory}/{hashlib.sha256(id.encode()).hexdigest()[:16]}"

    def report_file(self, incarnation: int) -> str:
        """Return the path of the file in which a worker of this incarnation reports its end."""
        return f"{self.directory}/exit-report-{incarnation}"

    def remove_socket(self, id: str) -> None:
        scheme, _, path = self.address_for(id).partition("://")
        if scheme == "ipc":
            Path(path).unlink(missing_ok=True)

    def connect(self, address: str, *, timeout_s: float = 30.0) -> RpcClient:
        """Return a client of the service at `address`, for calls with small payloads."""
        options = ClientOptions(timeout_s=timeout_s, shared_bytes=0)
        return RpcClient(address, options=options, transport=self.client_transport())

    def client_transport(self) -> TransportOptions:
        return TransportOptions(keys=None if self.keys is None else self.keys.client_keys())

    def listen(self, address: str) -> Listener:
        """Return a listener at `address`.

        Raises TransportError if it cannot be bound, OptionError if it is not allowed or `keys` has no server key.
        """
        return listen(address, options=TransportOptions(keys=None if self.keys is None else self.keys.server_keys()))


@dataclass(frozen=True, kw_only=True)
class ServiceSpec:
    """Everything that a process of a node receives at its start."""

    id: str
    role: str
    incarnation: int
    #: Arguments of the role, and its settings at the time of the start, as msgpack.
    arguments: bytes
    settings: bytes
    #: Address of the previous process of this id; empty for the first process.
    address: str
    place: ClusterPlace
    #: The platform that runs workers or nodes, for the provisioner; None for all other processes.
    platform: PlatformSpec | None = None

    @property
    def report_file(self) -> str:
        """Path of the exit report of a worker; empty for services, which log their errors."""
        return self.place.report_file(self.incarnation) if self.role == "worker" else ""

    def listen(self, address: str = "") -> Listener:
        """Return a listener at the first usable address: the previous process's, else `address`, else the default.

        The default over TCP is any free port. Heartbeats report the address to the node.
        """
        for chosen in filter(None, (self.address, address)):
            try:
                return self.place.listen(chosen)
            except TransportError as error:
                SERVICE.warning("%s listens elsewhere: %s", self.id, error, extra=subjects_of(self.id))
        return self.place.listen(self.place.address_for(self.id))


def subjects_of(id: str) -> dict[str, str | None]:
    """Return the fields (flow, shard, worker) of log lines about a flow's process `id`; empty for other processes."""
    parts = _ID.fullmatch(id)
    return {} if parts is None else parts.groupdict()


class HeartbeatSender:
    """Thread that sends heartbeats to the node, and ends this process once the node no longer desires it.

    Args:
        address: address at which the process listens; empty if it does not listen.
        apply_settings: called in the sender's thread with changed settings, encoded.
        status: values by name, for the coordinator and for display; sent until the attribute `status` is replaced.
        figures: returns further values for each heartbeat; called in the sender's thread.
        leave: called in the sender's thread before the process ends because the node does not desire it.
        stuck_s: duration of an iteration of the main loop, in seconds, after which no more heartbeats are sent.
    """

    def __init__(
        self,
        service: ServiceSpec,
        address: str,
        *,
        apply_settings: Callable[[bytes], None] = lambda _: None,
        status: dict[str, Any] | None = None,
        figures: Callable[[], dict[str, Any]] = dict,
        leave: Callable[[], None] = lambda: None,
        stuck_s: float = STUCK_S,
    ) -> None:
        self._leave, self._figures = leave, figures
        self._service = service
        self._address = address
        self._apply_settings = apply_settings
        self._settings = service.settings
        #: Values to send, by name. Replace this dictionary to change them.
        self.status = status or {}
        self._stuck_s = stuck_s
        self._iterated_at = time.monotonic()
        self._node = service.place.connect(service.place.node_address)
        self._thread = PeriodicCall(self._send, HEARTBEAT_S, "dpflow-heartbeat", what="the heartbeat to the node")
        self._thread.wake()
        self._thread.start()

    def report(self, status: dict[str, Any]) -> None:
        """Replace the status, and make the thread send it to the node now. Any thread may call."""
        self.status = status
        self._thread.wake()

    def on_iteration(self) -> None:
        """Record that the main loop has completed an iteration, so that heartbeats continue."""
        self._iterated_at = time.monotonic()

    def _send(self) -> None:
        if time.monotonic() - self._iterated_at >= self._stuck_s:
            return
        status = self.status | self._figures()
        heartbeat = Heartbeat(self._service.id, self._service.incarnation, self._address, status)
        try:
            reply: HeartbeatReply = self._node.call(
                "heartbeat", heartbeat, reply_type=HeartbeatReply, timeout_s=HEARTBEAT_S
            ).body
        except DPFlowError:
            return  # the node is busy; if it has ended, its fork server ends this process
        if not reply.desired:
            self._leave()
            os._exit(0)
        if reply.settings != self._settings:
            self._settings = reply.settings
            self._apply_settings(reply.settings)


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
    """Run the server, with heartbeats, until the process ends. All given functions except `leave` run in this thread.

    status: returns values by name, for the coordinator and for display.
    poll: called between messages, about every `poll_s` seconds.
    apply_settings: called with changed settings, encoded.
    leave: called before the process ends; see `HeartbeatSender`.
    heartbeats: sender that was started before; `apply_settings` and `leave` are then ignored. None: start a sender.
    """
    heartbeats = heartbeats or HeartbeatSender(
        service,
        server.address,
        apply_settings=lambda settings: server.post(partial(apply_settings, settings)),
        leave=leave,
    )
    poll_at = status_at = 0.0
    while True:
        server.step(poll_s)
        now = time.monotonic()
        if now >= poll_at:
            poll_at = now + poll_s
            heartbeats.on_iteration()
            poll()
        if now >= status_at:
            status_at = now + STATUS_S
            stats = server.stats()
            heartbeats.status = {**status(), "malformed": stats.malformed, "without_session": stats.without_session}


class DesiredProcesses:
    """Sender of the list of processes that a node should run. A list that the node has is not sent again."""

    def __init__(self, node: RpcClient) -> None:
        self._node = node
        #: What the node has; None: not known.
        self._applied: Desire | None = None

    def send(self, desire: Desire) -> bool:
        """Send this list, if the node is not known to have it already; return whether it was sent.

        Raises DPFlowError if the node does not answer, or refuses the list.
        """
        if desire == self._applied:
            return False
        self._applied = None  # it may have them, although it does not answer
        self._node.call("desire", desire)
        self._applied = desire
        return True


def ask_in(server: RpcServer, question: Callable[[], T]) -> T:
    """Call `question` in the server's thread; wait for its result and return it, or raise its error."""
    answer: Future[T] = Future()
    server.post(partial(_carry_out, question, answer))
    return answer.result()


def run_apart(
    post: Callable[[Callable[[], None]], None], name: str, work: Callable[[], T], done: Callable[[Future[T]], None]
) -> None:
    """Call `work`, which may block, in a new thread; then pass its result or error, in a Future, to `done`.

    post: `post` of the server in whose thread `done` is called. name: name of the new thread.
    """

    def run() -> None:
        outcome: Future[T] = Future()
        _carry_out(work, outcome)
        post(partial(done, outcome))

    threading.Thread(target=run, name=name, daemon=True).start()


def _carry_out(work: Callable[[], T], outcome: Future[T]) -> None:
    try:
        outcome.set_result(work())
    except Exception as error:
        outcome.set_exception(error)


def locate(place: ClusterPlace, id: str, *, timeout_s: float = 60.0) -> str:
    """Wait until the process `id` listens; return its address. Raises DeadlineError after `timeout_s` seconds."""
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
            if address := own or running.elsewhere.get(id, ""):
                return address
    raise DeadlineError(f"{id!r} does not listen after {timeout_s} s; is it desired?")


class ServiceClient:
    """Client of the process `id`. It looks the address up again after each failure. Only one thread may call.

    timeout_s, locate_s: timeouts of a call, and of the request for the address (seconds).
    """

    def __init__(self, place: ClusterPlace, id: str, *, timeout_s: float, locate_s: float = START_S) -> None:
        self._place, self._id, self._timeout_s, self._locate_s = place, id, timeout_s, locate_s
        self._client: RpcClient | None = None
        #: Last known address of the process; empty before the first call.
        self.address = ""

    def call(self, method: str, body: Any, reply_type: Any) -> Answer:
        """Call a method. Raises DPFlowError if the process does not answer, or refuses the call."""
        try:
            if self._client is None:
                self.address = locate(self._place, self._id, timeout_s=self._locate_s)
                self._client = self._place.connect(self.address, timeout_s=self._timeout_s)
            return self._client.call(method, body, reply_type=reply_type)
        except DPFlowError:
            if self._client is not None:
                self._client.close()
                self._client = None
            raise


def main(service: ServiceSpec) -> None:
    """Run the role that `service` names, until the process ends: the main function of all processes of a node."""
    # Control-C reaches every process of the terminal. The node handles it and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    write_lines(service.place.log, {**subjects_of(service.id), "process": service.id, "pid": os.getpid()})
    # For a process that seems to hang: kill -USR1 writes the stacks of its threads to stderr.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    module, _, name = ROLES[service.role].partition(":")
    run: Callable[[ServiceSpec], None] = getattr(import_module(module), name)
    # Modules are never collected: skipping them saves time, and keeps the pages shared with the fork server.
    gc.freeze()
    with exit_report(service.report_file) if service.report_file else nullcontext():
        run(service)
