"""Remote workers of one shard: their start, connections and content, and the log of missing workers.

`lifecycle.Fleet` decides which workers start and end; the shard's thread carries that out here.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from random import SystemRandom
from typing import Any, Protocol

from torch_dpflow._core.threads import SuspendAwareClock
from torch_dpflow.errors import MessageError, WorkerStartError
from torch_dpflow.ipc.messages.fields import MAX_TEXT
from torch_dpflow.ipc.messages.headers import Stop, WorkerHandshake, WorkerRefused, decode, encode, version_of
from torch_dpflow.ipc.messages.remote_worker import (
    FetchPiece,
    Piece,
    RemoteHandshake,
    RemoteWelcome,
    RemoteWorkerView,
    WorkerGoodbye,
    WorkerHeartbeat,
)
from torch_dpflow.ipc.transport import Frame
from torch_dpflow.log import TRANSPORT
from torch_dpflow.metrics import WorkerTime
from torch_dpflow.remote.fleet.content import BATCH_WORKERS, RemoteContent, Shortage, WorkerKind
from torch_dpflow.remote.fleet.lifecycle import SUSPECT_S, Fleet
from torch_dpflow.remote.fleet.worker_listener import WorkerListener
from torch_dpflow.remote.fleet.worker_states import (
    LINE,
    WORK,
    AdmitWorker,
    CheckWorker,
    DrainWorker,
    Fail,
    FleetInstruction,
    FleetWorker,
    RejectWorker,
    Report,
    StartWorker,
    StopWorker,
    WorkerState,
    split_identity,
)
from torch_dpflow.remote.launchers.contract import Ended, PlatformSource, RemotePlatform, prefix_of
from torch_dpflow.workers.platform import Handle
from torch_dpflow.workers.shard import Shard, other_release

#: Minimum interval between queries of the platform about all workers, which ended connections cause, in seconds.
ASK_S = 2.0
#: Maximum interval between checks of leases and time limits, in seconds.
LOOK_S = 0.25
#: How long `close` waits for workers to end before it kills them, in seconds.
TERMINATE_S = 2.0


class Shell(Protocol):
    """Owner of the shard to which the workers belong; its methods are called in the shard's thread."""

    def lose(self, worker: int, how: str, *, had_tasks: bool, may_blame: bool) -> None:
        """Handle a worker that has ended or does not answer.

        worker: its number. how: how it ended; empty if its end was requested. had_tasks: whether it was admitted; if
            not, another worker may have its number. may_blame: whether its task may be the reason.
        """

    def fail(self, error: Exception) -> None:
        """Handle the error that no worker can be started any more, or that too few have connected in time."""


class RemoteWorkers:
    """Remote workers of one shard, which a platform runs.

    Args:
        platform: settings of the platform, which is opened here and closed by `close`.
        content: the code and the dataset that are sent to each worker.
        workers: target number of workers.
        listen_at: address to which workers connect, `tcp://HOST:PORT`, or `tcp://HOST:FIRST-LAST` for the first free
            port; empty: the platform chooses the address.
        least: number of workers that must be ready to load before the first one gets tasks; 0: do not wait.
        kind: whether a task is a batch or a sample.
        cluster: 8 hexadecimal digits for the workers' names, as in `prefix_of`; empty: random digits.

    Raises:
        OptionError: `listen_at` or a setting of the platform is invalid.
        TransportError: `listen_at` is in use, or is not an address of this host.
        PlatformError, MissingExtraError: see `PlatformSpec.open`.
    """

    def __init__(
        self,
        platform: PlatformSource,
        content: RemoteContent,
        workers: int,
        *,
        listen_at: str = "",
        least: int = 1,
        kind: WorkerKind = BATCH_WORKERS,
        cluster: str = "",
    ) -> None:
        self._spec = platform
        self._content = content
        self._count, self._least = workers, least
        self._kind = kind
        self._clock = SuspendAwareClock()
        if listen_at:
            platform.check_listen(listen_at)
        self._platform: RemotePlatform = platform.open()
        try:
            self._worker_listener = WorkerListener(listen_at or platform.listen_at())
        except BaseException:
            self._platform.close()
            raise
        self.listener = self._worker_listener.listener
        self.listener.watch(self._platform.wakeup_fd)
        start_s = self._platform.limits.start_timeout_s[1]
        self._shortage = Shortage(platform.name, workers, least, start_s, self._worker_listener.addresses[0], kind.log)
        prefix = prefix_of(cluster or secrets.token_hex(4), secrets.token_hex(5))
        # Not `random`'s own generator, which is the user's.
        draw = SystemRandom().random
        self._fleet = Fleet(prefix, self._platform.limits, draw=draw)
        #: None: in contrast to `WorkerProcesses`, no worker is treated as a process of this host.
        self.local = None
        #: The shard, which gets the workers' messages, and its owner. To be set before `start_all`.
        self.shard: Shard
        self.shell: Shell
        self._look_at = self._ask_at = 0.0
        self._has_events, self._losses = True, 0
        self._leaving = False
        self.time = WorkerTime()  # at the latest look

    def __len__(self) -> int:
        return self._count

    # -- for the shard -----------------------------------------------------------------------------------

    def start_all(self) -> None:
        self._fleet.target(self._count)
        self._shortage.begin(self._clock())
        self.look()

    @property
    def importing(self) -> str:
        """Text to append to a log message: what a starting worker imports; empty if none does."""
        return next((f"; {one.name} starts: {one.importing}" for one in self._fleet.workers if one.importing), "")

    def resize(self, workers: int) -> None:
        self._count = self._shortage.workers = workers
        self._fleet.target(workers)
        self._has_events = True

    def rest(self) -> None:
        """Stop all workers, after their present tasks, until `resume`."""
        self._fleet.target(0)
        self._shortage.end()
        self._has_events = True

    def resume(self) -> None:
        """Start workers again, after `rest` or when no worker could be started."""
        self._fleet.retry()
        self.start_all()

    @property
    def limited_by(self) -> str:
        """What limits the number of workers, such as "quota" or "unfit workers"; empty if no limit is known."""
        return self._fleet.limited_by

    @property
    def shortage(self) -> str:
        """What limits the number of workers, with details, for display; empty if no limit is known."""
        return self._shortage.reason

    def views(self) -> list[RemoteWorkerView]:
        """Return the states of all workers of the fleet, including requested ones that do not run yet."""
        now, workers = self._clock(), self._fleet.workers
        return [RemoteWorkerView(one.name, one.number, one.state.value, now - one.begun, one.where) for one in workers]

    def ended(self) -> Sequence[tuple[int, Handle]]:
        """Return an empty sequence: the ends of remote workers are reported by `Shell.lose`."""
        return ()

    def refusal(self, number: int, incarnation: int) -> str:
        """Return why messages of this incarnation of a worker are rejected; empty if it was admitted and works."""
        worker = self._fleet.by_user(f"{number}/{incarnation}")
        return "" if worker is not None and worker.is_working else "it was not admitted"

    @property
    def sender(self) -> RemoteWorkers:
        """This object, whose `send` the shard calls for all messages to workers."""
        return self

    def send(self, peer: bytes, frames: Sequence[Frame]) -> bool:
        """Send a message as `Listener.send` does, but return True for every admitted worker.

        If the message could not be sent, the worker has ended, or the fleet ends it `SUSPECT_S` seconds later.
        """
        worker, is_sent = self._fleet.by_user(split_identity(peer)[0]), self.listener.send(peer, frames)
        if worker is None or not worker.is_working:
            return is_sent
        worker.sent += 1
        if not is_sent and worker.refused_at is None:
            worker.refused_at = self._clock()
            self._platform.suspect(worker.name)
        return True

    def kill(self, number: int, why: str) -> None:
        """End the worker with this number, for the reason `why`; another worker is started in its place."""
        for worker in self._fleet.workers:
            if worker.is_working and worker.number == number:
                worker.condemn(why)
        self._has_events = True
        self.listener.wake()

    @property
    def working(self) -> int:
        return sum(worker.is_working for worker in self._fleet.workers)

    def dismiss(self, *, all_: bool = False) -> None:
        """Start no more workers; make connected workers leave: those that were not admitted, or all if `all_`."""
        self._leaving = True
        for worker in self._fleet.connected:
            if all_ or not worker.is_working:
                self._refuse(worker, "")

    def close(self) -> None:
        self._platform.close(grace_s=TERMINATE_S)
        for outcome in self._platform.take():
            self._fleet.handle(outcome, self._clock())
        self._fleet.end(self._clock())
        self.time.seconds, self.time.is_over = self._fleet.worker_s(self._clock()), True
        text = "its workers on platform %r have ended, after %.1f worker-seconds"
        self._kind.log.info(text, self._spec.name, self.time.seconds)

    def on_message(self, peer: bytes, frames: list[memoryview]) -> None:
        try:
            user, nonce, kind = split_identity(peer)
            worker = self._fleet.by_user(user)
            if worker is None:
                self._send(peer, WorkerRefused("it is not expected any more"))
            elif kind == LINE:
                self._on_line(worker, nonce, peer, frames)
            elif nonce == worker.nonce and worker.is_working:
                worker.note_work(self._clock())
                self.shard.on_message(peer, frames)
            elif nonce == worker.nonce and isinstance(decode(frames[0]), WorkerHandshake):
                worker.handshake, worker.received = frames, worker.received + 1
                self._fleet.ready(worker.name)
                self._has_events = True
        except MessageError as error:
            TRANSPORT.warning("message of a worker dropped: %s", error)
            self._send(peer, WorkerRefused((other_release(version_of(frames[0])) or str(error))[:MAX_TEXT]))

    def _on_line(self, worker: FleetWorker, nonce: bytes, peer: bytes, frames: list[memoryview]) -> None:
        header: Any = decode(frames[0])
        if worker.nonce and nonce != worker.nonce:
            self._send(peer, WorkerRefused(f"another process is {worker.name} already"))
            return
        worker.last_seen = self._clock()
        match header:
            case RemoteHandshake():
                self._on_handshake(worker, nonce, header)
            case FetchPiece(digest=digest, offset=offset):
                self._fleet.progressed(worker.name, worker.last_seen)
                self._send(peer, Piece(digest, offset), self._content.piece(digest, offset))
            case WorkerHeartbeat():
                self.time.away_s += worker.note_away(header.away_s)
                worker.importing = header.importing
                if worker.has_lost_message(header, self.listener.losses, worker.last_seen):
                    worker.condemn("a message to or from it was lost with a connection", may_blame=False)
                    self._has_events = True
                self._fit_window(worker, header.round_trip_s)
                self._send(peer, WorkerHeartbeat(0))
            case WorkerGoodbye(missing=[_, *_]) if not worker.is_working:
                self._fleet.unfit(worker.name, self._content.missing(header.missing), worker.last_seen)
                self._has_events = True
            case WorkerGoodbye():
                # Its results come by the other connection, and may arrive later.
                worker.goodbye, self._has_events = header, True
                self._platform.suspect(worker.name)
                if self._leaving:
                    self._forget(worker)
            case _:
                raise MessageError(f"a worker may not send a {type(header).__name__} here")

    def _on_handshake(self, worker: FleetWorker, nonce: bytes, handshake: RemoteHandshake) -> None:
        worker.nonce, worker.where = nonce, handshake.where
        self._worker_listener.keep(worker)
        if not worker.arrived:
            self._has_events = True
            unfit = other_release(handshake.version) or self._content.unfit(handshake.versions)
            self._fleet.arrived(worker.name, unfit, self._clock())
            if unfit:
                return
        content = self._content
        self._send(
            worker.peer(LINE),
            RemoteWelcome(content.digest, content.nbytes, content.code_digest, content.code_nbytes),
        )

    def _fit_window(self, worker: FleetWorker, round_trip_s: float) -> None:
        window = worker.fitting_window(round_trip_s, self._kind.min_window, self._kind.max_window)
        if worker.is_working and window != worker.window:
            worker.window = window
            self.shard.set_window(worker.number, window)

    def _part(self, worker: FleetWorker, end: str, now: float) -> None:
        """Handle a worker that has left or ended, after all its messages have arrived."""
        report = "" if worker.goodbye is None else worker.goodbye.report
        if report and not worker.is_working:
            self._fleet.unfit(worker.name, report, now)
        else:
            self._fleet.goodbye(worker.name, now)
        if worker.is_sent_away and not report and (worker.goodbye is not None or not worker.is_working):
            self._lose(worker, "", may_blame=False)
        else:
            how = f"has left{f': {report}' if report else ''}" if worker.goodbye is not None else end
            self._lose(worker, f"{worker.name} {how}", may_blame=worker.goodbye is None or bool(report))

    def look(self) -> None:
        """Handle the platform's outcomes, check leases, and apply the fleet's instructions. Call this often."""
        outcomes = self._platform.take()
        now = self._clock()
        if self.listener.losses != self._losses and now >= self._ask_at:
            # A killed worker has lost its connections at once. An unauthenticated peer can connect and leave at will.
            self._losses, self._ask_at = self.listener.losses, now + ASK_S
            for worker in self._fleet.workers:
                self._platform.suspect(worker.name)
        if not (outcomes or self._has_events or now >= self._look_at) or self._leaving:
            return
        self._has_events, self._look_at = False, now + LOOK_S
        if any(isinstance(outcome, Ended) for outcome in outcomes):
            self._drain()
        for outcome in outcomes:
            ended = self._fleet.get(outcome.name)
            if isinstance(outcome, Ended) and ended is not None:
                self._part(ended, str(outcome.end), now)
            self._fleet.handle(outcome, now)
        for worker in self._fleet.connected:
            goodbye = worker.goodbye
            if goodbye is not None and (worker.received >= goodbye.sent or now - worker.last_seen >= SUSPECT_S):
                self._part(worker, "", now)
        self.time.seconds = self._fleet.worker_s(now)
        for instruction in self._fleet.tick(now):
            self._obey(instruction)
        if too_few := self._shortage.check(self.working, len(self._fleet.connected), self.importing, now):
            self.shell.fail(WorkerStartError(too_few))

    def _drain(self) -> None:
        """Handle the messages that have arrived: results that a worker sent before its end count."""
        while (message := self.listener.receive(0)) is not None:
            self.on_message(*message)

    def _obey(self, instruction: FleetInstruction) -> None:
        worker = self._fleet.get(getattr(instruction, "name", ""))
        match instruction:
            case StartWorker() if worker is not None:
                self._start(instruction, worker)
            case CheckWorker(name):
                self._platform.suspect(name)
            case StopWorker(name, why):
                self._platform.stop(name, why)
                if worker is not None:
                    self._refuse(worker, why)
                    imports = f"; {worker.importing}" if worker.importing else ""
                    self._lose(worker, f"{name} was ended: {why}{imports}", may_blame=worker.may_blame)
            case RejectWorker(name, why) if worker is not None:
                self._refuse(worker, why)
                self._forget(worker)
            case AdmitWorker():
                self._begin()
            case DrainWorker() if worker is not None:
                if worker.is_working:
                    self.send(worker.peer(WORK), [encode(Stop())])
                else:
                    self._refuse(worker, "it is not needed any more")
            case Report(limited_by, text):
                self._shortage.limit(limited_by, text, self.working)
            case Fail(text):
                why = f"no worker can be had of platform {self._spec.name!r}: {text}"
                self.shell.fail(WorkerStartError(why))

    def _begin(self) -> None:
        """Admit the connected workers, once at least the required number is connected."""
        admitted = [one for one in self._fleet.connected if one.state is WorkerState.WORKING]
        if self._least > len(admitted):
            return
        self._least = 0
        for worker in admitted:
            if worker.handshake is not None:
                handshake, worker.handshake, worker.is_working = worker.handshake, None, True
                self.shard.on_message(worker.peer(WORK), handshake)

    def _start(self, start: StartWorker, worker: FleetWorker) -> None:
        worker.window = self._kind.min_window
        within_s = self._platform.limits.start_timeout_s[1]
        launch_spec = self._worker_listener.launch_spec(
            worker, kind=self._kind, within_s=within_s, lifetime_s=start.lifetime_s
        )
        self._platform.start(worker.name, launch_spec)

    def _lose(self, worker: FleetWorker, how: str, *, may_blame: bool = True) -> None:
        had_tasks = worker.is_working
        self._forget(worker)
        if worker.nonce:
            self.shell.lose(worker.number, how, had_tasks=had_tasks, may_blame=may_blame)

    def _forget(self, worker: FleetWorker) -> None:
        worker.is_lost, worker.is_working, worker.handshake = True, False, None
        self._worker_listener.drop(worker)

    def _refuse(self, worker: FleetWorker, why: str) -> None:
        if worker.nonce:
            self._send(worker.peer(LINE), WorkerRefused(why[:MAX_TEXT]))

    def _send(self, peer: bytes, header: Any, *frames: Frame) -> None:
        """Send a message on a control connection. If it is lost, the worker's repetition makes the shard send it again.

        A worker repeats its handshake, requests for pieces and heartbeats. Each message of a worker that is no longer
        expected is answered by `WorkerRefused`.
        """
        self.listener.send(peer, [encode(header), *frames])
