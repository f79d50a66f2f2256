"""A node: the processes of one host, started, supervised and ended as its coordinator desires."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any, Protocol

from torch_dpflow._core.descriptors import exhausted, soft_limit
from torch_dpflow._core.processes import PrivateDirectory
from torch_dpflow._core.threads import SuspendAwareClock
from torch_dpflow.cluster.control.supervision import (
    START_S,
    CleanUp,
    Kill,
    Spawn,
    Supervisor,
    SupervisorInstruction,
)
from torch_dpflow.cluster.messages.node import (
    WAITING,
    Desire,
    Ending,
    Heartbeat,
    HeartbeatReply,
    Launch,
    ProcessView,
    Running,
)
from torch_dpflow.cluster.services.service import (
    COORDINATOR,
    PAGE,
    POOL,
    PRELOAD,
    PROVISIONER,
    ROLES,
    ClusterPlace,
    ServiceSpec,
    main,
    subjects_of,
)
from torch_dpflow.errors import DescriptorLimitError, LaunchError, OptionError, StateError, UsageError
from torch_dpflow.ipc.messages.fields import Count
from torch_dpflow.ipc.rpc import LATER, IncomingCall, Later, Result, RpcServer, ServerOptions
from torch_dpflow.ipc.transport import listen
from torch_dpflow.log import SERVICE
from torch_dpflow.remote.launchers.contract import PlatformSpec
from torch_dpflow.workers.local_platform import DESCRIPTORS, ForkServerPlatform
from torch_dpflow.workers.platform import Handle, Platform, ProcessSpec, require_same_host

#: A process without a heartbeat for so long is killed and restarted, seconds.
LEASE_S = 10.0
#: How often a node checks its processes when nothing happens, seconds.
CHECK_S = 0.5
#: How long a call of `changes` waits for a change, seconds; so figures of processes are no older.
HOLD_S = 0.5
#: How long processes may take to end their members, where these run on a platform, seconds.
GRACE_S = 8.0
#: The session of a client that sends nothing for so long is dropped, seconds: processes send a heartbeat each second.
IDLE_CLIENT_S = 30.0
#: Most messages that are handled before a node checks its processes.
BURST = 1024
#: Descriptors that a node keeps for itself, and the limit that it asks for: more than any cluster needs.
OWN_DESCRIPTORS, WISHED_DESCRIPTORS = 64, 65536


def most_processes() -> int:
    """How many processes this one may start, by its limit of open files."""
    return max(0, soft_limit() - OWN_DESCRIPTORS) // (DESCRIPTORS + 1)  # and its connection


def most_workers() -> int:
    """How many workers all flows may have together, by the same limit.

    A flow has a router and at least one shard; there are never more flows or shards than workers.

    Raises DescriptorLimitError if it allows none.
    """
    most = (most_processes() - 1) // 3  # beside the coordinator
    if most < 1:
        raise exhausted(
            f"a cluster needs a limit of {OWN_DESCRIPTORS + 4 * (DESCRIPTORS + 1)} for its first worker"
        )
    return most


class Stoppable(Protocol):
    """What signals may stop."""

    def stop(self) -> None:
        """End it. Any thread may call, and signal handlers."""


class Node:
    """Keeps its own processes running, and those that a coordinator desires. One thread drives it.

    It saves no state: its clients send what is desired. A process that ends, or sends no heartbeat for `lease_s`, is
    restarted at the same address.

    Args:
        place: the sockets, keys and token of its processes.
        own: the processes that it keeps running whatever is desired: the coordinator, a provisioner, the live page, a
            server of the pool. None of them on a host that has joined a cluster.
        platform: starts its processes; closed with the node.
        roles: those that may be desired.
        members: where workers run, for the provisioner; None: this platform runs them.

    Raises:
        OptionError: the platform cannot run services: nothing could connect to them, or they could not reach the node.
    """

    def __init__(
        self,
        place: ClusterPlace,
        own: Sequence[Launch],
        platform: Platform,
        *,
        roles: Collection[str] = ROLES,
        members: PlatformSpec | None = None,
        lease_s: float = LEASE_S,
    ) -> None:
        if not platform.limits.accepts_connections:
            raise OptionError(
                f"platform={platform!r}: services must be reached by others, which it does not allow"
            )
        require_same_host(platform, "a node")
        self._place = place
        self._platform = platform
        self._lease_s = lease_s
        self._supervisor = Supervisor(
            lease_s=lease_s, most=most_processes(), max_starting=max(2, len(os.sched_getaffinity(0)))
        )
        #: Processes that end by themselves once a heartbeat is answered, id and incarnation: they have members to end.
        self._leaving: set[tuple[str, int]] = set()
        #: How many processes could not be started when that was last logged.
        self._refused = 0
        self._clock = SuspendAwareClock()
        self._members = members
        self._own, self._roles = [*own], roles
        #: Where processes of another host listen, by their ids.
        self._elsewhere: dict[str, str] = {}
        #: Processes that have been launched and not been seen to end.
        self._processes: dict[str, Handle] = {}
        #: Calls of `changes`: when to answer at the latest, the revision that the caller has, the call.
        self._asking: list[tuple[float, int, IncomingCall]] = []
        #: When to check the processes next, seconds.
        self._check_at = 0.0
        self._stopped = False
        self._ready: Callable[[], None] | None = None
        #: Why the first coordinator cannot serve; empty: it can, or has not told.
        self._failure = ""
        # idle_s: a killed process does not sign off, and its successor is another client.
        options = ServerOptions(shared_bytes=0, idle_s=IDLE_CLIENT_S)
        listener = listen(place.node_address)
        listener.watch(platform.wakeup_fd)
        self._server = RpcServer(listener, options=options)
        self._server.register("heartbeat", self._on_heartbeat, body_type=Heartbeat, remembered=False)
        self._server.register("desire", self._on_desire, body_type=Desire)
        self._server.register("processes", self._on_processes, body_type=None, remembered=False)
        self._server.register("changes", self._on_changes, body_type=Count, remembered=False)
        self._server.register("end", self._on_end, body_type=Ending)
        self._server.register("stop", self._on_stop, body_type=None)

    def serve(self, ready: Callable[[], None] | None = None) -> None:
        """Keep everything running until `stop` is called, here or by a client.

        ready: called once, in this thread, when the coordinator serves.
        Raises StateError if the first coordinator cannot use the state store; a later one waits for it.
        """
        self._ready = ready or (lambda: None)
        try:
            self._apply(self._supervisor.desire(self._own, self._clock()))
            while not self._stopped:
                self._server.step(self._until_due())
                # Pending heartbeats first: after a delay of its own, a node must not kill their senders.
                handled = 0
                while handled < BURST and self._server.step(0.0):
                    handled += 1
                ended = self._platform.take_ended()
                if ended or time.monotonic() >= self._check_at or self._is_spawn_due():
                    self._check(ended)
                    self._check_at = time.monotonic() + CHECK_S
                self._answer_asking()
            if self._failure:
                raise StateError(self._failure)
        finally:
            self._platform.close(grace_s=GRACE_S if self._place.members is not None else 0.0)
            self._server.close()

    def address_of(self, id: str) -> str:
        """Where a process listens; empty until it has reported that. Any thread may call."""
        return self._supervisor.address_of(id)

    @property
    def is_vacant(self) -> bool:
        """Whether no process runs. Any thread may call."""
        return not self._processes

    def begin(self, token: str, incarnations: int) -> None:
        """Start the next processes with this token, and with incarnations above that number.

        To be called while nothing runs and nothing is desired; any thread may.
        """
        self._place = replace(self._place, token=token)
        self._supervisor.begin(incarnations)

    def stop(self) -> None:
        """Make `serve` end everything and return. Any thread may call, and signal handlers."""
        self._stopped = True
        self._server.stop()

    def _until_due(self) -> float:
        """The time until something is due, at most, seconds."""
        now = time.monotonic()
        waits = [self._check_at - now, *(until - now for until, _, _ in self._asking)]
        if (due := self._supervisor.next_due) is not None:
            waits.append(due - self._clock())
        return max(0.0, min(waits))

    def _is_spawn_due(self) -> bool:
        due = self._supervisor.next_due
        return due is not None and due <= self._clock()

    def _check(self, ended: Sequence[Handle]) -> None:
        now = self._clock()
        for process in ended:
            id, incarnation = process.name, process.incarnation
            self._leaving.discard((id, incarnation))
            if self._processes.get(id) is process:
                del self._processes[id]
            end = process.describe()
            supervisor = self._supervisor
            if supervisor.is_desired(id, incarnation) and not supervisor.is_stopped(id, incarnation):
                text = "process %s ended unexpectedly, restarting: %s"
                SERVICE.warning(text, id, end, extra=subjects_of(id))
            else:
                SERVICE.info("process %s ended", id, extra=subjects_of(id))
            how = str(end or "").partition("\n")[0]
            self._apply(self._supervisor.on_ended(id, incarnation, now, how))
        self._apply(self._supervisor.tick(now))
        self._log_refused()

    def _log_refused(self) -> None:
        refused = self._supervisor.refused
        if refused and refused != self._refused:
            what = f"{refused} desired processes cannot be started: at most {most_processes()} may run"
            SERVICE.error("%s", exhausted(what))
        self._refused = refused

    def _apply(self, instructions: list[SupervisorInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Spawn():
                    self._spawn(instruction)
                case Kill():
                    self._kill(instruction)
                case CleanUp(id):
                    self._place.remove_socket(id)

    def _spawn(self, spawn: Spawn) -> None:
        service = ServiceSpec(
            id=spawn.launch.id,
            role=spawn.launch.role,
            incarnation=spawn.incarnation,
            arguments=spawn.launch.arguments,
            settings=spawn.launch.settings,
            address=spawn.address,
            place=self._place,
            platform=self._members if spawn.launch.role == PROVISIONER else None,
        )
        spec = ProcessSpec(
            name=service.id,
            incarnation=service.incarnation,
            target=main,
            arguments=(service,),
            directory=self._place.directory,
        )
        try:
            process = self._platform.launch(spec)
        except (LaunchError, DescriptorLimitError) as error:
            SERVICE.warning("process %s not started: %s", service.id, error, extra=subjects_of(service.id))
            how = f"could not be started: {error}"
            self._apply(self._supervisor.on_ended(service.id, service.incarnation, self._clock(), how))
            return
        self._processes[service.id] = process
        SERVICE.info("process %s started (pid %d)", service.id, process.pid, extra=subjects_of(service.id))
        self._supervisor.on_started(service.id, service.incarnation, process.pid, self._clock())

    def _kill(self, kill: Kill) -> None:
        why = ""
        if self._supervisor.is_desired(kill.id, kill.incarnation):
            why = f"no heartbeat for {self._lease_s:g} s"
            SERVICE.warning("process %s killed: %s", kill.id, why, extra=subjects_of(kill.id))
        else:
            SERVICE.info("process %s stopped: no longer desired", kill.id, extra=subjects_of(kill.id))
            key = kill.id, kill.incarnation
            if self._place.members is not None and key not in self._leaving:
                self._leaving.add(key)  # it is killed where it does not end within its lease
                return
        process = self._processes.get(kill.id)
        if process is not None and process.incarnation == kill.incarnation:
            process.kill(why)

    def _on_heartbeat(self, call: IncomingCall) -> Result:
        sent: Heartbeat = call.body
        now = self._clock()
        if not self._supervisor.on_heartbeat(sent.id, sent.incarnation, sent.address, sent.status, now):
            return Result(HeartbeatReply(False))
        waits_for = sent.status.get(WAITING)
        if sent.id == COORDINATOR and self._ready is not None and waits_for != "":
            ready, self._ready = self._ready, None
            if waits_for is None:
                ready()
            else:
                self._failure, self._stopped = waits_for, True
        return Result(HeartbeatReply(True, self._supervisor.settings_of(sent.id)))

    def _on_desire(self, call: IncomingCall) -> None:
        desired: Desire = call.body
        for launch in desired.launches:
            if launch.role not in self._roles or launch.id in (COORDINATOR, PROVISIONER, PAGE, POOL):
                raise UsageError(f"{launch.id!r}: a node runs no process of role {launch.role!r} for clients")
        self._elsewhere = desired.elsewhere
        self._apply(self._supervisor.desire([*self._own, *desired.launches], self._clock()))

    def _on_processes(self, call: IncomingCall) -> Result:
        views: list[ProcessView] = self._supervisor.views()
        return Result(views)

    def _on_changes(self, call: IncomingCall) -> Later:
        # Held until there is a change, so that nobody polls: an idle cluster costs 6 ms of processor time a second
        # (15 with polling), and every wakeup beside a decoder costs that one its caches.
        self._asking.append((time.monotonic() + HOLD_S, call.body, call))
        return LATER

    def _answer_asking(self) -> None:
        revision, now = self._supervisor.revision, time.monotonic()
        asking, self._asking = self._asking, []
        for until, seen, call in asking:
            if seen != revision or now >= until:
                call.answer(Running(revision, self._supervisor.views(), self._elsewhere))
            else:
                self._asking.append((until, seen, call))

    def _on_end(self, call: IncomingCall) -> None:
        ending: Ending = call.body
        if subjects_of(ending.id).get("worker") is None:
            raise UsageError(f"{ending.id!r} is not a worker; nothing else can be ended by this call")
        process = self._processes.get(ending.id)
        if process is not None and process.incarnation == ending.incarnation:
            SERVICE.warning(
                "process %s killed: requested by its shard", ending.id, extra=subjects_of(ending.id)
            )
            process.kill("requested by its shard")

    def _on_stop(self, call: IncomingCall) -> None:
        self._stopped = True


@contextmanager
def stopped_by_signals(node: Stoppable) -> Iterator[None]:
    """SIGTERM and SIGINT stop the node. In the main thread."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    previous = [signal.signal(number, lambda *_: node.stop()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous):
            signal.signal(number, handler)


def fork_platform(preload: Sequence[str]) -> ForkServerPlatform:
    """The platform of a node. preload: modules to import once, beside this package's own."""
    # Processes are forked from a server that has imported torch: 2 s and 130 MB less for each worker. The node
    # waits for each fork and serves nothing meanwhile, so a fork server that hangs is killed after `timeouts_s`.
    # Only the operator chooses what it imports (`preload`), never a client.
    return ForkServerPlatform(preload=[*PRELOAD, *preload], timeouts_s=(LEASE_S, START_S), outlived=True)


def keep_fork_server_in(directory: str) -> None:
    """Have multiprocessing put the socket of its fork server into this directory.

    Its own directory would stay for good if this process is killed; the cluster's is removed by the last survivor.
    """
    process: Any = multiprocessing.current_process()
    process._config.setdefault("tempdir", directory)


def check_installed(module: str) -> None:
    """Raise OptionError unless a module of this name is installed. Imports nothing."""
    if module in sys.modules:
        return
    top, *rest = names = module.split(".")
    found = find_spec(top) if all(name.isidentifier() for name in names) else None
    for name in rest:  # not all at once by `find_spec`, which imports the packages on the way
        places = None if found is None else found.submodule_search_locations
        found = (
            None if found is None or places is None else PathFinder.find_spec(f"{found.name}.{name}", places)
        )
    if found is None:
        raise OptionError(f"--preload {module!r}: no such module is installed; install it, or leave it out")


def private_directory() -> PrivateDirectory:
    """A directory for sockets. Raises OptionError if none can be made."""
    try:
        return PrivateDirectory()
    except OSError as error:
        raise OptionError(
            f"no directory for sockets can be made in {tempfile.gettempdir()!r}: {error.strerror}; set TMPDIR"
        ) from error
