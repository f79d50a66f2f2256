"""The workers of one shard that a platform runs elsewhere: started, greeted, given what they load, and missed.

Runs in the shard's thread. Decides nothing about lifetimes: that is the fleet's.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from random import SystemRandom
from typing import Any

from torch_dpflow._core.threads import SuspendAwareClock
from torch_dpflow.errors import MessageError, WorkerStartError
from torch_dpflow.ipc.messages.fields import MAX_TEXT
from torch_dpflow.ipc.messages.headers import (
    FetchPiece,
    MissingModules,
    Piece,
    RemoteHandshake,
    RemoteWelcome,
    Stop,
    WorkerGoodbye,
    WorkerHandshake,
    WorkerHeartbeat,
    WorkerRefused,
    decode,
    encode,
    version_of,
)
from torch_dpflow.ipc.messages.launch_spec import RemoteWorkerView
from torch_dpflow.log import TRANSPORT
from torch_dpflow.metrics import WorkerTime
from torch_dpflow.remote.fleet.lifecycle import Fleet
from torch_dpflow.remote.fleet.worker_listener import Door
from torch_dpflow.remote.fleet.worker_record import (
    BATCH_WORKERS,
    LINE,
    WORK,
    RemoteContent,
    RemoteWorker,
    Shell,
    Shortage,
    WorkerKind,
    other_release,
    parts_of,
)
from torch_dpflow.remote.fleet.worker_states import (
    AdmitWorker,
    CheckWorker,
    DrainWorker,
    Fail,
    FleetInstruction,
    RejectWorker,
    Report,
    StartWorker,
    StopWorker,
)
from torch_dpflow.remote.launchers.contract import Ended, PlatformSource, RemotePlatform, prefix_of
from torch_dpflow.workers.platform import Handle

#: After how long without a sign of life the platform is asked about a member, and after how long it is lost, seconds.
SUSPECT_S, LEASE_S = 2.5, 10.0
#: How often the platform is asked about all members because connections have ended, at most, seconds.
ASK_S = 2.0
#: How often to look at leases and time limits where nothing happens, seconds.
LOOK_S = 0.25
#: How long after the loader's end members may take to end, before they are killed, seconds.
TERMINATE_S = 2.0


class RemoteWorkers:
    """The members of one shard's fleet, as its workers.

    Args:
        platform: where they run; opened here, closed with this.
        content: what they load.
        workers: how many.
        first: the number of the first of them.
        listen_at: where they call, `tcp://HOST:PORT`, or `tcp://HOST:FIRST-LAST` for the first port that is free;
            empty: where the platform says.
        least: how many have to be there before any works; 0: none.
        kind: what they are to the shard.
        cluster: the first part of their names, 8 hexadecimal digits; empty: random ones.

    Raises:
        OptionError: members cannot reach that address, or a setting of the platform is not possible.
        TransportError: the address cannot be listened at.
        PlatformError, MissingExtraError: see `PlatformSpec.open`.
    """

    def __init__(
        self,
        platform: PlatformSource,
        content: RemoteContent,
        workers: int,
        *,
        first: int = 0,
        listen_at: str = "",
        least: int = 1,
        kind: WorkerKind = BATCH_WORKERS,
        cluster: str = "",
    ) -> None:
        self._spec = platform
        self._content = content
        self._workers, self._first, self._least = workers, first, least
        self._kind = kind
        self._clock = SuspendAwareClock()
        if listen_at:
            platform.check_listen(listen_at)
        self._platform: RemotePlatform = platform.open()
        try:
            self._door = Door(listen_at or platform.listen_at())
        except BaseException:
            self._platform.close()
            raise
        self.listener = self._door.listener
        self.listener.watch(self._platform.wakeup_fd)
        start_s = self._platform.limits.start_timeout_s[1]
        self._shortage = Shortage(platform.name, workers, least, start_s, self._door.addresses[0], kind.log)
        prefix = prefix_of(cluster or secrets.token_hex(4), secrets.token_hex(5))
        # Not `random`'s own generator, which is the user's.
        draw = SystemRandom().random
        self._fleet = Fleet(prefix, self._platform.limits, draw=draw, alone=first == 0)
        #: As of `private_shard.Workers`: there are none.
        self.local = None
        self.shell: Shell
        self._members: dict[str, RemoteWorker] = {}
        self._by_user: dict[str, RemoteWorker] = {}
        #: By the identity of their second connection, those that work.
        self._working: dict[bytes, RemoteWorker] = {}
        #: Names of members that may work, until enough are there.
        self._admitted: list[str] = []
        self._condemned: dict[int, str] = {}
        self._look_at = self._ask_at = 0.0
        self._has_news, self._losses = True, 0
        self._leaving = False
        self.time = WorkerTime()  # as of the latest look

    def __len__(self) -> int:
        return self._workers

    # -- for the shard -----------------------------------------------------------------------------------

    def start_all(self) -> None:
        """Have the platform start them."""
        self._fleet.target(self._workers)
        self._shortage.begin(self._clock())
        self.look()

    def resize(self, workers: int) -> None:
        """Have so many from now on."""
        self._workers = self._shortage.workers = workers
        self._fleet.target(workers)
        self._has_news = True

    def rest(self) -> None:
        """Have none until `resume`."""
        self._fleet.target(0)
        self._shortage.end()
        self._has_news = True

    def resume(self) -> None:
        """Start them anew, after `rest` or when no worker could be had."""
        self._fleet.retry()
        self.start_all()

    @property
    def descriptors(self) -> list[int]:
        """Are readable where there is something to do: see `ZeroMQListener.descriptors`."""
        return [*self.listener.descriptors, self._platform.wakeup_fd]

    @property
    def limited_by(self) -> str:
        """Why there are fewer than there should be: see `Fleet`."""
        return self._fleet.limited_by

    @property
    def shortage(self) -> str:
        """The same with the details, for people."""
        return self._shortage.reason

    def views(self) -> list[RemoteWorkerView]:
        """All that were asked for and are not gone, for people."""
        now, where = self._clock(), {name: member.where for name, member in self._members.items()}
        rows = ((one, where.get(one.name, "")) for one in self._fleet.members)
        return [
            RemoteWorkerView(one.name, one.number, one.state.value, now - one.begun, at) for one, at in rows
        ]

    def ended(self) -> Sequence[tuple[int, Handle]]:
        """Nobody: ends are told by `Shell.lose`."""
        return ()

    def refusal(self, worker: int, incarnation: int) -> str:
        """Why a process is not the latest one of its worker; empty if it is."""
        member = self._by_user.get(f"{worker}/{incarnation}")
        return "" if member is not None and member.is_working else "it was not admitted"

    def kill(self, worker: int, why: str) -> None:
        """Have a worker's process ended, and its place given to another, soon."""
        self._condemned[worker] = why
        self._has_news = True
        self.listener.wake()

    @property
    def awaits_more(self) -> bool:
        """Whether too few are there for any to work."""
        return self._least > 0

    @property
    def working(self) -> int:
        """How many work."""
        return len(self._working)

    def dismiss(self, *, all_: bool = False) -> None:
        """The shard ends: send away who does not work, or all of them, and begin nothing any more."""
        self._leaving = True
        for member in self._members.values():
            if all_ or not member.is_working:
                self._refuse(member, "")

    def close(self) -> None:
        """End all of them."""
        self._platform.close(grace_s=TERMINATE_S)
        for outcome in self._platform.take():
            self._fleet.handle(outcome, self._clock())
        self._fleet.end(self._clock())
        self.time.seconds, self.time.is_over = self._fleet.member_s(self._clock()), True
        text = "its workers on platform %r have ended, after %.1f worker-seconds"
        self._kind.log.info(text, self._spec.name, self.time.seconds)

    def on_message(self, peer: bytes, frames: list[memoryview]) -> None:
        """A message of a member."""
        member = self._working.get(peer)
        if member is not None:
            member.note_work(self._clock())
            self.shell.deliver(peer, frames)
            return
        try:
            user, nonce, kind = parts_of(peer)
            member = self._by_user.get(user)
            if member is None:
                self._send(peer, WorkerRefused("nobody waits for it any more"))
            elif kind == LINE:
                self._on_line(member, nonce, peer, frames)
            elif nonce == member.nonce and isinstance(decode(frames[0]), WorkerHandshake):
                member.hello, member.received = frames, member.received + 1
                self._fleet.ready(member.name)
                self._has_news = True
        except MessageError as error:
            TRANSPORT.warning("message of a member dropped: %s", error)
            self._send(peer, WorkerRefused((other_release(version_of(frames[0])) or str(error))[:MAX_TEXT]))

    def _on_line(self, member: RemoteWorker, nonce: bytes, peer: bytes, frames: list[memoryview]) -> None:
        header: Any = decode(frames[0])
        if member.nonce and nonce != member.nonce:
            self._send(peer, WorkerRefused(f"another process is {member.name} already"))
            return
        member.heard = self._clock()
        match header:
            case RemoteHandshake():
                self._on_hello(member, nonce, header)
            case FetchPiece(digest=digest, offset=offset):
                self.listener.send(peer, [encode(Piece(digest, offset)), self._content.piece(digest, offset)])
            case WorkerHeartbeat(sent=sent, round_trip_s=round_trip_s, away_s=away_s):
                self.time.away_s += member.note_away(away_s)
                if member.lacks(sent, self.listener.losses, member.heard):
                    self.kill(member.number, "messages of it were lost with a connection")
                self._fit_window(member, round_trip_s)
                self._send(peer, WorkerHeartbeat(member.sent))
            case MissingModules(modules=modules):
                self._fleet.unfit(member.name, self._content.missing(modules), self._clock())
                self._has_news = True
            case WorkerGoodbye():
                # Its results come by the other connection, and may come later.
                member.bye, self._has_news = header, True
                self._platform.suspect(member.name)
                if self._leaving:
                    self._forget(member)
            case _:
                raise MessageError(f"a member may not send a {type(header).__name__} here")

    def _on_hello(self, member: RemoteWorker, nonce: bytes, hello: RemoteHandshake) -> None:
        member.nonce, member.where = nonce, hello.where
        self._door.keep(member)
        if not member.has_called:
            member.has_called = self._has_news = True
            unfit = other_release(hello.version) or self._content.unfit(hello.versions)
            self._fleet.arrived(member.name, unfit, self._clock())
            if unfit:
                return
        content = self._content
        self._send(
            member.peer(LINE),
            RemoteWelcome(content.digest, content.nbytes, content.code_digest, content.code_nbytes),
        )

    def _fit_window(self, member: RemoteWorker, round_trip_s: float) -> None:
        window = member.fitting_window(round_trip_s)
        if member.is_working and window != member.window:
            member.window = window
            self.shell.set_window(member.number, window)

    def _part(self, member: RemoteWorker, end: str, now: float) -> None:
        """A member has left or ended, and all that it had to say is here."""
        words = "" if member.bye is None else member.bye.words
        if words and not member.is_working:
            self._fleet.unfit(member.name, words, now)
        else:
            self._fleet.bye(member.name, now)
        if member.is_sent_away and not words and (member.bye is not None or not member.is_working):
            self._lose(member, "", may_blame=False)
        else:
            how = f"has left{f': {words}' if words else ''}" if member.bye is not None else end
            self._lose(member, f"{member.name} {how}", may_blame=member.bye is None or bool(words))

    # -- what follows ------------------------------------------------------------------------------------

    def look(self) -> None:
        """Take the platform's news, check leases, and do what the fleet says. Cheap where nothing is due."""
        outcomes = self._platform.take()
        now = self._clock()
        if self.listener.losses != self._losses and now >= self._ask_at:
            # Who was killed has lost its connections at once. A stranger can connect and leave as often as it likes.
            self._losses, self._ask_at = self.listener.losses, now + ASK_S
            for name in self._members:
                self._platform.suspect(name)
        if not (outcomes or self._has_news or now >= self._look_at) or self._leaving:
            return
        self._has_news, self._look_at = False, now + LOOK_S
        if any(isinstance(outcome, Ended) for outcome in outcomes):
            self.shell.drain()
        for outcome in outcomes:
            member = self._members.get(outcome.name)
            if isinstance(outcome, Ended) and member is not None:
                self._part(member, str(outcome.end), now)
            self._fleet.handle(outcome, now)
        for member in list(self._members.values()):
            why = self._condemned.pop(member.number, "") if member.is_working else ""
            silent_s = now - member.heard if member.nonce else 0.0
            if member.bye is not None and (member.received >= member.bye.sent or silent_s >= SUSPECT_S):
                self._part(member, "", now)
                why = ""
            elif silent_s >= LEASE_S:
                why = why or f"nothing was heard of it for {LEASE_S:g} s"
            elif silent_s >= SUSPECT_S and member.suspected_at < member.heard:
                member.suspected_at = now
                self._platform.suspect(member.name)
            if why:
                self._fleet.silent(member.name, now, member.heard)
                self._platform.stop(member.name, why)
                self._refuse(member, why)
                self._lose(member, f"{member.name} was given up: {why}")
        heard = {name: one.heard for name, one in self._members.items() if one.nonce}
        self.time.seconds = self._fleet.member_s(now, heard)
        for instruction in self._fleet.tick(now):
            self._obey(instruction, now)
        called = sum(bool(member.nonce) for member in self._members.values())
        if too_few := self._shortage.check(len(self._working), called, now):
            self.shell.fail(WorkerStartError(too_few))

    def _obey(self, instruction: FleetInstruction, now: float) -> None:
        member = self._members.get(getattr(instruction, "name", ""))
        match instruction:
            case StartWorker():
                self._start(instruction, now)
            case CheckWorker(name):
                self._platform.suspect(name)
            case StopWorker(name, why):
                self._platform.stop(name, why)
                if member is not None:
                    self._lose(member, f"{name} was ended: {why}", may_blame=False)
            case RejectWorker(name, why) if member is not None:
                self._refuse(member, why)
                self._forget(member)
            case AdmitWorker() if member is not None:
                self._admitted.append(member.name)
                self._begin()
            case DrainWorker() if member is not None:
                member.is_sent_away = True
                if member.is_working:
                    self._send(member.peer(WORK), Stop())
                else:
                    self._refuse(member, "it is not needed any more")
            case Report(limited_by, text):
                self._shortage.limit(limited_by, text, len(self._working))
            case Fail(text):
                why = f"no worker can be had of platform {self._spec.name!r}: {text}"
                self.shell.fail(WorkerStartError(why))

    def _begin(self) -> None:
        """Let those work that may, once there are enough."""
        if self._least > len(self._members.keys() & set(self._admitted)):
            return
        self._least = 0
        admitted, self._admitted = [self._members.get(name) for name in self._admitted], []
        for member in admitted:
            if member is not None and member.hello is not None:
                hello, member.hello, member.is_working = member.hello, None, True
                self._working[member.peer(WORK)] = member
                self.shell.admit(member.peer(WORK), hello)

    def _start(self, start: StartWorker, now: float) -> None:
        number = self._first + start.number
        member = RemoteWorker(start.name, number, start.incarnation, now, self._kind)
        within_s = self._platform.limits.start_timeout_s[1]
        launch_spec = self._door.launch_spec(
            member, self._content, within_s=within_s, lifetime_s=start.lifetime_s
        )
        self._members[member.name] = self._by_user[member.user] = member
        self._platform.start(member.name, launch_spec)

    def _lose(self, member: RemoteWorker, how: str, *, may_blame: bool = True) -> None:
        self._forget(member)
        if member.nonce:
            self.shell.lose(member.number, how, had_tasks=member.is_working, may_blame=may_blame)

    def _forget(self, member: RemoteWorker) -> None:
        self._members.pop(member.name, None)
        self._by_user.pop(member.user, None)
        if self._working.pop(member.peer(WORK), None) is not None:
            self._condemned.pop(member.number, None)  # else its successor would be killed for it
        self._door.drop(member)

    def _refuse(self, member: RemoteWorker, why: str) -> None:
        if member.nonce:
            self._send(member.peer(LINE), WorkerRefused(why[:MAX_TEXT]))

    def _send(self, peer: bytes, header: Any) -> None:
        self.listener.send(peer, [encode(header)])
