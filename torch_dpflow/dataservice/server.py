"""DataServer: holds sets in memory for the processes of its host. It has one thread for each of them."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import msgspec

from torch_dpflow.checks import check_int, check_seconds
from torch_dpflow.dataservice.filling import HeldSet, start_thread
from torch_dpflow.dataservice.keeper_machine import Fill, KeeperInstruction, KeeperMachine
from torch_dpflow.dataservice.protocol import (
    MOST_BYTES,
    MOST_RECORDS,
    MOST_REGIONS,
    REQUESTS,
    ListSets,
    OpenSet,
    PoolAnswer,
    PoolRefusal,
    PoolRequest,
    PreloadSet,
    SetInfo,
    SetList,
    SetOpened,
    UnloadSet,
    WantRecords,
    check_private,
    find_directory,
    peer_uid,
    receive,
    send,
    socket_path,
)
from torch_dpflow.dataservice.regions import IDLE, UNLOADED
from torch_dpflow.dataservice.sources import open_source, record_set
from torch_dpflow.datasets.sample_reader import SampleReader
from torch_dpflow.errors import (
    DPFlowError,
    MessageError,
    OptionError,
    PeerLostError,
    PoolFullError,
    UsageError,
)
from torch_dpflow.log import SERVICE

#: How long an answer to `WantRecords` waits for what is on its way, seconds: well below a client's patience.
ANSWER_S = 1.0
#: Most connections, and sets.
MOST_CONNECTIONS, MOST_SETS = 4096, 4096
_TICK_S = 1.0
#: How long a refusal is kept for whoever has asked, seconds.
_REFUSAL_S = 30.0
#: A server beats itself, so its lease ends only with it.
_LEASE_S = 10.0
_NAME = "server"
#: Most characters of an error in a list.
_LONGEST_ERROR = 2000


@dataclass(eq=False)
class _KnownSet:
    """A set from when it is first asked for."""

    request: PreloadSet
    url: str
    is_explicit: bool
    #: Whether somebody wants all of it or nothing.
    whole: bool
    #: None while its metadata is read.
    held: HeldSet | None = None
    #: Why it is not held, for whoever asks next; and since when.
    refusal: PoolRefusal | None = None
    refused_at: float = 0.0


class DataServer:
    """Holds sets for the processes of this user on this host.

    Args:
        memory_bytes: most bytes of samples.
        address: the directory of its socket; "auto" as for clients.
        idle_s: how long a set that no command has loaded stays when nobody reads it, seconds.

    Raises:
        OptionError: a value is not allowed, another server has this address, or others may enter the directory.
    """

    def __init__(
        self, memory_bytes: int, address: str | os.PathLike[str] = "auto", *, idle_s: float = 600.0
    ) -> None:
        self._memory = check_int("memory_bytes", memory_bytes, minimum=1)
        self._keeper = KeeperMachine(lease_s=_LEASE_S, idle_s=check_seconds("idle_s", idle_s, zero=True))
        self._lock = threading.Lock()
        self._sets: dict[bytes, _KnownSet] = {}
        self._readers = itertools.count(1)
        self._connections: set[socket.socket] = set()
        self._stop = threading.Event()
        self._keeper.renew(_NAME, 1, self._memory, time.monotonic())
        self.directory = find_directory(address)
        self._listener, self._held_lock = _listen(self.directory)

    def serve(self) -> None:
        """Serve until `stop`."""
        threading.Thread(target=self._beat, name="dpflow-beat", daemon=True).start()
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
            lane = threading.Thread(target=self._talk, args=(connection,), name="dpflow-lane", daemon=True)
            try:
                lane.start()
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
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with self._lock:
            for known in self._sets.values():
                if known.held is not None:
                    known.held.close()
            self._sets.clear()
        os.close(self._held_lock)

    # -- one client ------------------------------------------------------------------------------------------

    def _talk(self, connection: socket.socket) -> None:
        reader = f"reader {next(self._readers)}"
        try:
            while True:
                request, _ = receive(connection, REQUESTS)
                answer, fds = self._answer_safely(request, reader)
                try:
                    send(connection, answer, fds)
                finally:
                    for fd in fds:
                        os.close(fd)
        except (OSError, MessageError, OptionError, PeerLostError) as error:
            if isinstance(error, MessageError | OptionError):
                SERVICE.warning("a client of the pool is left: %s", error)
        finally:
            with self._lock:
                self._keeper.close(reader, time.monotonic())
            self._connections.discard(connection)
            connection.close()

    def _answer_safely(self, request: PoolRequest, reader: str) -> tuple[PoolAnswer, list[int]]:
        try:
            return self._answer(request, reader)
        except DPFlowError as error:
            return PoolRefusal.of(error), []

    def _answer(self, request: PoolRequest, reader: str) -> tuple[PoolAnswer, list[int]]:
        match request:
            case PreloadSet():
                return self._preload(request), []
            case OpenSet(identity):
                return self._open(identity, reader)
            case WantRecords(identity, records):
                held = self._held(identity)
                if len(records) > MOST_RECORDS or not all(0 <= one < held.records.records for one in records):
                    raise UsageError(f"{len(records)} records: at most {MOST_RECORDS} that exist are allowed")
                return held.want(records, ANSWER_S), []
            case UnloadSet(identity):
                with self._lock:
                    self._unload(identity)
                    return self._list(), []
            case ListSets(first):
                with self._lock:
                    return self._list(max(0, first)), []

    def _held(self, identity: bytes) -> HeldSet:
        known = self._sets.get(identity)
        if known is None or known.held is None:
            raise UsageError(f"set {identity.hex()} is not in the pool (any more); preload it")
        return known.held

    def _open(self, identity: bytes, reader: str) -> tuple[PoolAnswer, list[int]]:
        with self._lock:
            held = self._held(identity)
            self._keeper.open(identity, reader)
            fds: list[int] = []
            try:
                fds.extend(os.dup(region.fd) for region in held.regions[:MOST_REGIONS])
            except OSError:  # no descriptor is free
                for fd in fds:
                    os.close(fd)
                raise
            return SetOpened(held.records.per_stripe, len(fds)), fds

    # -- sets ------------------------------------------------------------------------------------------------

    def _preload(self, request: PreloadSet) -> SetInfo:
        with self._lock:
            known = self._sets.get(request.identity)
            if known is None:
                if len(self._sets) >= MOST_SETS:
                    raise PoolFullError(f"the pool has {MOST_SETS} sets; unload one")
                known = _KnownSet(request, "", request.is_explicit, request.whole)
                start_thread(partial(self._plan, known), "dpflow-plan")
                self._sets[request.identity] = known
            elif known.refusal is not None:
                del self._sets[request.identity]
                raise known.refusal.error()
            elif request.is_explicit:
                if known.held is not None:
                    now = time.monotonic()
                    self._obey(
                        self._keeper.preload(request.identity, [], now, explicit=True, whole=request.whole)
                    )
                known.is_explicit = True
                known.whole |= request.whole
            return self._info(known)

    def _plan(self, known: _KnownSet) -> None:
        request, held = known.request, None
        try:
            stored = open_source(request.source, request.identity)
            known.url = stored.url
            records, is_known = record_set(stored)
            reader = SampleReader(stored, storage_options=request.source.data_options)
            held = HeldSet(request.source, reader, records, is_known)
            sizes = [
                records.stripe_bytes(stripe) + 16 * (1 + len(records.records_of(stripe)))
                for stripe in range(records.stripes)
            ]
            with self._lock:
                if self._sets.get(request.identity) is not known:  # it was given up meanwhile
                    held.close()
                    return
                instructions = self._keeper.preload(
                    request.identity,
                    sizes,
                    time.monotonic(),
                    explicit=known.is_explicit,
                    whole=known.whole,
                )
                known.held = held
                self._obey(instructions)
        except Exception as error:  # whoever asked has to be told, whatever it is
            SERVICE.warning("%s cannot be held: %s", request.source.ref, error)
            known.refused_at = time.monotonic()
            known.refusal = PoolRefusal.of(error)
            if held is not None and known.held is None:
                held.close()

    def _obey(self, instructions: Iterable[KeeperInstruction], why: int = IDLE) -> None:
        for one in instructions:
            if isinstance(one, Fill):
                held = self._sets[one.identity].held
                assert held is not None
                held.fill(one.stripes)
        # This is the only server, so what is dropped here is dropped everywhere.
        present = {one.identity for one in self._keeper.summaries()}
        for identity, known in list(self._sets.items()):
            if known.held is not None and identity not in present:
                known.held.close(why)
                del self._sets[identity]

    def _unload(self, identity: bytes) -> None:
        known = self._sets.get(identity)
        if known is None:
            raise UsageError(f"set {identity.hex()} is not in the pool; `dpflow pool list` has what is")
        if known.held is None:
            del self._sets[identity]
        else:
            self._obey(self._keeper.unload(identity), UNLOADED)

    def _list(self, first: int = 0) -> SetList:
        sets = [self._info(known) for known in self._sets.values() if known.refusal is None]
        ends = itertools.accumulate(len(msgspec.msgpack.encode(one)) for one in sets[first:])
        count = max(1, sum(end <= MOST_BYTES // 2 for end in ends))
        free = self._memory - sum(one.reserved_bytes for one in sets)
        return SetList(sets[first : first + count], free, self._memory, len(sets))

    def _info(self, known: _KnownSet) -> SetInfo:
        request, held = known.request, known.held
        info = SetInfo(
            identity=request.identity,
            ref=request.source.ref,
            url=known.url or request.source.store,
            records=0,
            placed=0,
            loaded=0,
            failed=0,
            reserved_bytes=0,
            is_explicit=known.is_explicit,
            readers=0,
            is_placed=False,
        )
        if held is None:
            return info
        summary = next(one for one in self._keeper.summaries() if one.identity == request.identity)
        owners = self._keeper.table(request.identity).owners
        loaded, failed = held.counts
        return msgspec.structs.replace(
            info,
            records=held.records.records,
            placed=sum(len(held.records.records_of(stripe)) for stripe, one in enumerate(owners) if one >= 0),
            loaded=loaded,
            failed=failed,
            reserved_bytes=summary.placed_bytes,
            readers=summary.readers,
            is_placed=held.is_placed,
            error=held.error[:_LONGEST_ERROR],
        )

    def _beat(self) -> None:
        while not self._stop.wait(_TICK_S):
            with self._lock:
                now = time.monotonic()
                self._obey(self._keeper.renew(_NAME, 1, self._memory, now))
                self._obey(self._keeper.expire(now))
                for identity, known in list(self._sets.items()):
                    if known.refusal is not None and now - known.refused_at > _REFUSAL_S:
                        del self._sets[identity]


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
