"""Node of a cluster, which starts, supervises and ends the cluster's processes on one host."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from torch_dpflow._core.clocks import HEARTBEAT_S, START_S
from torch_dpflow._core.descriptors import exhausted
from torch_dpflow._core.threads import SuspendAwareClock
from torch_dpflow.cluster.control.supervision import LEASE_S, CleanUp, Kill, Spawn, Supervisor, SupervisorInstruction
from torch_dpflow.cluster.messages.node import WAITING, Desire, Ending, Heartbeat, HeartbeatReply, Launch, Running
from torch_dpflow.cluster.services.node_host import max_processes
from torch_dpflow.cluster.services.service import (
    COORDINATOR,
    PAGE,
    POOL,
    PROVISIONER,
    ROLES,
    ClusterPlace,
    ServiceSpec,
    main,
    subjects_of,
)
from torch_dpflow.errors import DPFlowError, StateError, UsageError
from torch_dpflow.ipc.messages.fields import Count
from torch_dpflow.ipc.rpc import LATER, IncomingCall, Later, Result, RpcServer, ServerOptions
from torch_dpflow.ipc.transport import listen
from torch_dpflow.log import SERVICE
from torch_dpflow.remote.launchers.contract import PlatformSpec
from torch_dpflow.workers.fork_server import ModuleEndedError, progress_of
from torch_dpflow.workers.import_server import StillImportingError
from torch_dpflow.workers.platform import Handle, Imports, Platform, ProcessSpec

#: Interval at which a node checks its processes when nothing happens (seconds).
CHECK_S = HEARTBEAT_S / 2
#: How long a call of `changes` waits for a change before it is answered without one (seconds).
HOLD_S = HEARTBEAT_S / 2
#: How long processes may take to end their workers on a platform (seconds).
GRACE_S = 8.0
#: The session of a silent client is dropped after this long (seconds); processes send a heartbeat each second.
IDLE_CLIENT_S = START_S / 2
#: Maximum number of messages that a node handles before it checks its processes.
BURST = 1024


class Node:
    """Node that keeps processes running: its own, and all that the coordinator desires. One thread drives it.

    A node saves no state: the coordinator sends the desired processes. A process that sends no heartbeat for the length
    of its lease is killed. A desired process that ends is restarted, except as `Launch.needed` says.

    Args:
        place: sockets, keys and token of the node's processes.
        own: processes that always run: the coordinator, and optionally the provisioner, the live page and a pool
            server. Empty on a host that has joined a cluster.
        platform: starts the node's processes; the node closes it at its end.
        roles: roles of processes that the coordinator may desire.
        worker_platform: platform on which the provisioner in `own` starts workers or nodes; None without a provisioner.
    """

    def __init__(
        self,
        place: ClusterPlace,
        own: Sequence[Launch],
        platform: Platform,
        *,
        roles: Collection[str] = ROLES,
        worker_platform: PlatformSpec | None = None,
    ) -> None:
        self._place = place
        self._platform = platform
        self._supervisor = Supervisor(
            lease_s=LEASE_S, most=max_processes(), max_starting=max(2, len(os.sched_getaffinity(0)))
        )
        #: Id and incarnation of processes that end once a heartbeat is answered, after they have ended their workers.
        self._leaving: set[tuple[str, int]] = set()
        #: Number of processes that could not be started, as last logged.
        self._refused = 0
        self._clock = SuspendAwareClock()
        self._worker_platform = worker_platform
        self._own, self._roles = [*own], roles
        #: Addresses of processes of another host, by id.
        self._elsewhere: dict[str, str] = {}
        #: Processes that were launched and have not ended yet, by id.
        self._processes: dict[str, Handle] = {}
        #: Id and incarnation of processes that are being launched; handles of launching processes that have ended.
        self._launching: set[tuple[str, int]] = set()
        self._ended_early: list[Handle] = []
        #: Calls of `changes`: deadline, revision that the caller has, call.
        self._watching: list[tuple[float, int, IncomingCall]] = []
        #: Time of the next check of processes (seconds).
        self._check_at = 0.0
        self._stopped = False
        self._ready: Callable[[], None] | None = None
        #: Why the cluster cannot begin.
        self._failure: DPFlowError | None = None
        # idle_s: a killed process does not close its session, and its successor is another client.
        options = ServerOptions(shared_bytes=0, idle_s=IDLE_CLIENT_S)
        listener = listen(place.node_address)
        listener.watch(platform.wakeup_fd)
        self._server = RpcServer(listener, options=options)
        self._server.register("heartbeat", self._on_heartbeat, body_type=Heartbeat)
        self._server.register("desire", self._on_desire, body_type=Desire)
        self._server.register("changes", self._on_changes, body_type=Count)
        self._server.register("end", self._on_end, body_type=Ending)
        self._server.register("stop", self._on_stop, body_type=None)
        self._launches = LaunchThread(
            platform, lambda spec, outcome: self._server.post(partial(self._on_launched, spec, outcome))
        )

    def serve(self, ready: Callable[[], None] | None = None) -> None:
        """Keep the node's processes running until `stop` is called on this object or by a client; then end them.

        ready: called once, in this thread, when the coordinator serves.

        Raises:
            StateError: the first coordinator cannot use the state store; a restarted one waits for it.
            LaunchError: a preloaded module ends the fork server before the first coordinator serves.
            DPFlowError: an error that `ready` raised.
        """
        self._ready = ready or (lambda: None)
        try:
            self._apply(self._supervisor.desire(self._own, self._clock()))
            while not self._stopped:
                self._server.step(self._until_due())
                # Pending heartbeats first: after a delay, a node must not kill their senders.
                handled = 0
                while handled < BURST and self._server.step(0.0):
                    handled += 1
                ended = self._platform.take_ended()
                if ended or time.monotonic() >= self._check_at or self._must_spawn():
                    self._check(ended)
                    self._check_at = time.monotonic() + CHECK_S
                self._answer_watching()
            if self._failure is not None:
                raise self._failure
        finally:
            self._launches.close()
            self._platform.close(grace_s=GRACE_S if self._place.worker_platform is not None else 0.0)
            self._server.close()

    def address_of(self, id: str) -> str:
        """Return the address of a process; empty until it has reported one. Any thread may call."""
        return self._supervisor.address_of(id)

    @property
    def is_vacant(self) -> bool:
        """Whether no process runs or is being started. Any thread may call."""
        return not (self._processes or self._launching)

    def begin(self, token: str, incarnations: int) -> None:
        """Set the token of the processes that will be started, and the number above which their incarnations begin.

        Call this while nothing runs and nothing is desired. Any thread may call.
        """
        self._place = replace(self._place, token=token)
        self._supervisor.begin(incarnations)

    def stop(self) -> None:
        """Make `serve` end all processes and return. Any thread and any signal handler may call."""
        self._stopped = True
        self._server.stop()

    def _until_due(self) -> float:
        """Return the longest time to wait for messages (seconds)."""
        now = time.monotonic()
        waits = [self._check_at - now, *(until - now for until, _, _ in self._watching)]
        if (due := self._supervisor.next_due) is not None:
            waits.append(due - self._clock())
        return max(0.0, min(waits))

    def _must_spawn(self) -> bool:
        due = self._supervisor.next_due
        return due is not None and due <= self._clock()

    def _check(self, ended: Sequence[Handle]) -> None:
        now = self._clock()
        ended, self._ended_early = [*self._ended_early, *ended], []
        for process in ended:
            id, incarnation = process.name, process.incarnation
            if (id, incarnation) in self._launching:  # the report of its launch is on the way
                self._ended_early.append(process)
                continue
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
            self._apply(self._supervisor.on_ended(id, incarnation, now, str(end or "")))
        self._supervisor.note_progress(progress_of, now)
        self._apply(self._supervisor.tick(now))
        self._log_refused()

    def _log_refused(self) -> None:
        refused = self._supervisor.refused
        if refused and refused != self._refused:
            what = f"{refused} desired processes cannot be started: at most {max_processes()} may run"
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
            platform=self._worker_platform if spawn.launch.id == PROVISIONER else None,
        )
        given, group = spawn.launch.imports, service.id.rpartition("/shard-")[0]
        spec = ProcessSpec(
            imports=None if given is None else Imports(group=group, **msgspec.structs.asdict(given)),
            name=service.id,
            incarnation=service.incarnation,
            target=main,
            arguments=(service,),
            report_file=service.report_file,
            directory=self._place.directory,
        )
        self._launching.add((service.id, service.incarnation))
        self._launches.launch(spec)

    def _on_launched(self, spec: ProcessSpec, outcome: Handle | Exception) -> None:
        id, incarnation = spec.name, spec.incarnation
        self._launching.discard((id, incarnation))
        if isinstance(outcome, Exception):
            trace = None if isinstance(outcome, DPFlowError) else outcome
            SERVICE.warning("process %s not started: %s", id, outcome, exc_info=trace, extra=subjects_of(id))
            if id == COORDINATOR and self._ready is not None and isinstance(outcome.__cause__, ModuleEndedError):
                self._failure, self._stopped = outcome, True  # type: ignore[assignment]
                return
            how = f"could not be started: {outcome}"
            self._apply(self._supervisor.on_ended(id, incarnation, self._clock(), how))
            return
        self._processes[id] = outcome
        SERVICE.info("process %s started (pid %d)", id, outcome.pid, extra=subjects_of(id))
        self._apply(self._supervisor.on_started(id, incarnation, outcome.pid, self._clock()))

    def _kill(self, kill: Kill) -> None:
        why = ""
        if self._supervisor.is_desired(kill.id, kill.incarnation):
            why = f"no heartbeat for {LEASE_S:g} s"
            SERVICE.warning("process %s killed: %s", kill.id, why, extra=subjects_of(kill.id))
        else:
            SERVICE.info("process %s stopped: no longer desired", kill.id, extra=subjects_of(kill.id))
            key = kill.id, kill.incarnation
            if self._place.worker_platform is not None and key not in self._leaving:
                self._leaving.add(key)  # it is killed if it does not end within its lease
                return
        process = self._processes.get(kill.id)
        if process is not None and process.incarnation == kill.incarnation:
            process.kill(why)

    def _on_heartbeat(self, call: IncomingCall) -> Result:
        sent: Heartbeat = call.body
        now = self._clock()
        if not self._supervisor.on_heartbeat(sent.id, sent.incarnation, sent.address, sent.status, now):
            return Result(HeartbeatReply(False))
        if sent.id == COORDINATOR:
            try:
                self._on_coordinator(sent)
            except DPFlowError as error:
                self._failure, self._stopped = error, True
        return Result(HeartbeatReply(True, self._supervisor.settings_of(sent.id)))

    def _on_coordinator(self, sent: Heartbeat) -> None:
        """Call `ready` once the first coordinator serves. Raises StateError if that cannot use its state store."""
        waits_for = sent.status.get(WAITING)
        if self._ready is None or waits_for == "":
            return
        ready, self._ready = self._ready, None
        if waits_for is not None:
            raise StateError(waits_for)
        ready()

    def _on_desire(self, call: IncomingCall) -> None:
        desired: Desire = call.body
        for launch in desired.launches:
            if launch.role not in self._roles or launch.id in (COORDINATOR, PROVISIONER, PAGE, POOL):
                raise UsageError(f"{launch.id!r}: a node runs no process of role {launch.role!r} for clients")
        self._elsewhere = desired.elsewhere
        self._apply(self._supervisor.desire([*self._own, *desired.launches], self._clock()))

    def _on_changes(self, call: IncomingCall) -> Later:
        # Held until there is a change, so that clients need not poll: an idle cluster takes 6 ms of processor time a
        # second (15 with polling), and every wakeup evicts the processor caches of decoders.
        self._watching.append((time.monotonic() + HOLD_S, call.body, call))
        return LATER

    def _answer_watching(self) -> None:
        revision, now = self._supervisor.revision, time.monotonic()
        watching, self._watching = self._watching, []
        for until, seen, call in watching:
            if seen != revision or now >= until:
                call.answer(Running(revision, self._supervisor.views(), self._elsewhere))
            else:
                self._watching.append((until, seen, call))

    def _on_end(self, call: IncomingCall) -> None:
        ending: Ending = call.body
        if subjects_of(ending.id).get("worker") is None:
            raise UsageError(f"{ending.id!r} is not a worker; nothing else can be ended by this call")
        process = self._processes.get(ending.id)
        if process is not None and process.incarnation == ending.incarnation:
            SERVICE.warning("process %s killed: requested by its shard", ending.id, extra=subjects_of(ending.id))
            process.kill("requested by its shard")

    def _on_stop(self, call: IncomingCall) -> None:
        self._stopped = True


#: How long `close` waits for the thread to end, before and after it interrupts the start of a process (seconds).
THREAD_GRACE_S, THREAD_END_S = 0.5, 2.0
#: Interval at which the start of a process is tried again while modules for it are being imported (seconds).
IMPORT_POLL_S = 0.05


class LaunchThread:
    """Thread that starts processes one after the other.

    Args:
        platform: starts the processes. The caller closes it after this thread.
        report: called in this thread after a start, with the specification, and the process's handle or an error.
    """

    def __init__(self, platform: Platform, report: Callable[[ProcessSpec, Handle | Exception], None]) -> None:
        self._platform, self._report = platform, report
        self._specs: queue.SimpleQueue[ProcessSpec | None] = queue.SimpleQueue()
        self._closes = False
        self._thread = threading.Thread(target=self._run, name="dpflow-launch", daemon=True)
        self._thread.start()

    def launch(self, spec: ProcessSpec) -> None:
        self._specs.put(spec)

    def close(self) -> None:
        """Start no more processes, interrupt a start in progress, and wait briefly for the thread's end. Idempotent."""
        self._closes = True
        self._specs.put(None)
        self._thread.join(THREAD_GRACE_S)
        self._platform.interrupt()
        self._thread.join(THREAD_END_S)

    def _run(self) -> None:
        waiting: deque[ProcessSpec] = deque()  # for imports
        pause_s = 0.0
        while not self._closes:
            try:
                spec = self._specs.get(timeout=pause_s if waiting else None)
            except queue.Empty:
                spec = waiting.popleft()
            if spec is None:
                return
            try:
                outcome: Handle | Exception = self._platform.launch(spec)
            except StillImportingError:
                waiting.append(spec)
                pause_s = IMPORT_POLL_S
                continue
            except Exception as error:
                outcome = error
            pause_s = 0.0  # the others of its group can start, too
            self._report(spec, outcome)
