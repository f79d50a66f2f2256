"""Leader of a pool: decides what each server holds.

If the leader dies, followers still serve reads. They report their stripes to a new leader at the same address, which
gives them `LEASE_S` to do so before it assigns these stripes to other servers.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable
from functools import partial

import numpy as np

from torch_dpflow._core.threads import SuspendAwareClock
from torch_dpflow.errors import PoolFullError, UsageError
from torch_dpflow.log import SERVICE
from torch_dpflow.pool.messages import (
    CachedDataset,
    CachedDatasetList,
    CountReads,
    DatasetPart,
    DropDataset,
    FollowerHeartbeat,
    Instructions,
    ListDatasets,
    ListServers,
    PoolAnswer,
    PoolRefusal,
    PreloadDataset,
    ServerInfo,
    ServerList,
    StripeTable,
    UnloadDataset,
)
from torch_dpflow.pool.planning.allocator import AllocatorInstruction, Fill, StripeAllocator
from torch_dpflow.pool.planning.layout import resident_layout
from torch_dpflow.pool.server import start_thread
from torch_dpflow.pool.server.held_dataset import HeldDataset
from torch_dpflow.pool.server.holdings import MAX_DATASETS, Holdings
from torch_dpflow.pool.server.leader_state import (
    Followers,
    KnownDataset,
    check_pushed_dataset,
    cut_in,
    droppable,
    find_base,
    stripe_bytes,
)
from torch_dpflow.pool.sources import open_source
from torch_dpflow.pool.transport.segments import IDLE, UNLOADED

#: Silence after which a server is lost; longest wait of a heartbeat's answer; interval of checks. Seconds.
LEASE_S = 5.0
_HEARTBEAT_S, _TICK_S = 1.0, 0.5


class PoolLeader:
    """Leader of a pool: decides which datasets the pool holds, and which server holds which stripes. Thread-safe.

    Args:
        server: description of this server.
        idle_s: how long a dataset that was not preloaded stays when no process reads it, seconds.
        holdings: the datasets that this server holds.
    """

    def __init__(self, server: ServerInfo, idle_s: float, holdings: Holdings) -> None:
        self._server = server
        self._allocator = StripeAllocator(lease_s=LEASE_S, idle_s=idle_s)
        self._holdings = holdings
        self._changed = threading.Condition()
        self._datasets: dict[bytes, KnownDataset] = {}
        self._followers = Followers(server.directory)
        self._generations = itertools.count(1)
        self._is_closed = False
        self._clock = SuspendAwareClock()  # a leader that was suspended loses no follower
        #: Until when followers of an earlier leader may return.
        self._returns_until = self._clock() + LEASE_S if self._followers.had_some else 0.0
        self._allocator.renew(server.name, 0, server.memory, self._clock())

    # -- for clients -----------------------------------------------------------------------------------------

    def preload(self, request: PreloadDataset) -> CachedDataset:
        """Begin to cache a dataset, and return its state at once; repeat the request to get the progress.

        Raises PoolFullError or UsageError if it is refused, or the error because of which it could not be cached.
        """
        with self._changed:
            known = self._datasets.get(request.identity)
            if known is None:
                known = self._begin(request)
            elif known.refusal is not None:
                del self._datasets[request.identity]
                if not known.is_forgotten(self._clock()):
                    raise known.refusal.error()
                known = self._begin(request)
            elif request.is_explicit:
                if known.held is not None:
                    if request.whole and known.held.is_part:
                        raise PoolFullError(
                            f"{request.source.ref} is cached in part, as it did not fit: unload it to load "
                            "all of it, or load a part"
                        )
                    self._apply(
                        self._allocator.preload(request.identity, [], self._clock(), explicit=True, whole=request.whole)
                    )
                known.is_unloaded = False
                if not known.is_explicit:
                    known.is_explicit = True
                    if known.held is not None:
                        for server in self._allocator.dataset(request.identity).owned():
                            self._send(server, known.instruction([]))
                known.whole |= request.whole
            return self._info(known)

    def table(self, identity: bytes) -> StripeTable:
        """Return the servers of a dataset's stripes. Raises UsageError if the dataset is not placed."""
        with self._changed:
            allocated, held = self._allocator.dataset(identity), self._holdings.get(identity)
            infos, names = self._infos(), [*allocated.owned()]
            numbers: dict[str | None, int] = {name: number for number, name in enumerate(names)}
            owners = [numbers.get(one, -1) for one in allocated.owners]
            return StripeTable(
                per_stripe=held.records.per_stripe,
                servers=[infos[name] for name in names],
                answered_by=self._server.name,
                is_part=held.is_part,
                owners=np.array(owners, dtype="<i2").tobytes(),
            )

    def count_readers(self) -> None:
        """Record that a local client started or stopped reading a dataset."""
        with self._changed:
            for identity in self._datasets:
                readers = self._holdings.readers(identity)
                self._allocator.read_by(identity, self._server.name, readers, self._clock())

    def count(self, reads: CountReads) -> None:
        """Add a reader's numbers of samples read from memory and from storage to the dataset's counts."""
        with self._changed:
            known = self._datasets.get(reads.identity)
            if known is not None:
                known.hits += reads.hits
                known.misses += reads.misses

    def command(self, request: UnloadDataset | ListDatasets | ListServers) -> PoolAnswer:
        """Unload a dataset, or list datasets or servers. Raises UsageError if the dataset is not cached."""
        with self._changed:
            match request:
                case UnloadDataset(identity):
                    self._unload(identity)
                    return self._list()
                case ListDatasets():
                    return self._list()
                case ListServers():
                    return ServerList([*self._infos().values()])

    # -- for followers ---------------------------------------------------------------------------------------

    def join(self, server: ServerInfo, reports: Iterable[DatasetPart]) -> int:
        """Add a follower and the dataset parts that it reports; return the generation of its membership.

        Raises UsageError for too many servers or a rejected pushed array, PoolFullError for too many datasets.
        """
        with self._changed:
            generation, held = next(self._generations), dict[bytes, list[int]]()
            self._followers.add(server, generation)
            for report in reports:
                known = self._datasets.get(report.identity)
                if known is None:
                    source, is_explicit = report.source, report.is_explicit
                    request = PreloadDataset(
                        source=source, identity=report.identity, is_explicit=is_explicit, whole=False
                    )
                    known = self._begin(request)
                known.is_explicit |= report.is_explicit
                if not known.take_back(server.name, report):
                    self._followers[server.name].instruct(DropDataset(report.identity, IDLE))
                elif known.held is not None:
                    held.setdefault(report.identity, []).extend(report.stripes)
            self._apply(self._allocator.renew(server.name, generation, server.memory, self._clock(), held))
            return generation

    def heartbeat(self, name: str, generation: int, heartbeat: FollowerHeartbeat) -> Instructions:
        """Renew a follower's lease; return its instructions once there are any, or none after `wait_s`, at most 1 s.

        Raises PeerLostError if the follower was removed, and must join again.
        """
        until = time.monotonic() + min(heartbeat.wait_s, _HEARTBEAT_S)
        with self._changed:
            follower = self._followers.living(name, generation)
            self._apply(self._allocator.renew(name, generation, follower.info.memory, self._clock()))
            for state in follower.take(heartbeat):
                self._allocator.read_by(state.identity, name, state.readers, self._clock())
            while not follower.instructions and not self._is_closed:
                if not self._changed.wait(until - time.monotonic()):
                    break
            self._followers.living(name, generation)
            return follower.next_instructions()

    def gone(self, name: str, generation: int) -> None:
        """Remove a follower whose connection has ended; other servers with free memory get its stripes."""
        with self._changed:
            self._apply(self._allocator.leave(name, generation, self._clock()))
            self._forget_lost()

    def run(self) -> None:
        """Remove lost servers and idle datasets until `close`. Blocks its thread."""
        with self._changed:
            while not self._is_closed:
                self._tick()
                self._changed.wait_for(lambda: self._is_closed, _TICK_S)

    def close(self) -> None:
        """End `run`, and give no more instructions."""
        with self._changed:
            self._is_closed = True
            self._datasets.clear()
            self._changed.notify_all()

    def _tick(self) -> None:
        now = self._clock()
        self._apply(self._allocator.renew(self._server.name, 0, self._server.memory, now))
        self._apply(self._allocator.expire(now))
        self._forget_lost()
        self._drop_unloaded()
        for identity in [one for one, known in self._datasets.items() if known.is_forgotten(now)]:
            del self._datasets[identity]

    def _begin(self, request: PreloadDataset) -> KnownDataset:
        if len(self._datasets) >= MAX_DATASETS:
            raise PoolFullError(f"the pool has {MAX_DATASETS} datasets; unload one")
        check_pushed_dataset(request, self._datasets.values())
        known = KnownDataset(request, request.is_explicit, request.whole)
        start_thread(partial(self._plan, known), "dpflow-plan")
        self._datasets[request.identity] = known
        return known

    def _plan(self, known: KnownDataset) -> None:
        request, held = known.request, None
        identity = request.identity
        try:
            opened = open_source(request.source, identity)
            with self._changed:
                self._await_followers(known)
                if self._datasets.get(identity) is not known:  # dropped meanwhile
                    if opened.reader is not None:
                        opened.reader.close()
                    return
                base = find_base(known, opened, self._holdings, self._allocator)
                cut = known.cut
                if base is None and not (known.whole or known.returned):
                    cut = cut_in(opened.records, self._allocator.rooms())
                held = HeldDataset(request.source, opened, cut)
                sizes = stripe_bytes(resident_layout(opened.records, cut))
                if base is not None:
                    held.share(*base)
                    known.base, sizes[: base.stripes] = base.base, [0] * base.stripes
                instructions = self._place(known, sizes)
                known.held = held
                self._holdings.add(identity, held, known.is_explicit)
                self._apply(instructions)
        except Exception as error:  # any error: the client must get it
            SERVICE.warning("%s cannot be held: %s", request.source.ref, str(error))  # without its frames
            with self._changed:
                known.refused_at, known.refusal = self._clock(), PoolRefusal.of(error)
                for name in filter(self._followers.__contains__, known.returned):
                    self._send(name, DropDataset(identity, IDLE))
            if held is not None and known.held is None:
                held.close()

    def _await_followers(self, known: KnownDataset) -> None:
        """Wait for followers of an earlier leader: their stripes decide which part of a dataset is kept."""
        identity = known.request.identity
        while known.pushed is None and not known.returned and self._datasets.get(identity) is known:
            left_s = self._returns_until - self._clock()
            if left_s <= 0:
                return
            self._changed.wait(left_s)

    def _place(self, known: KnownDataset, sizes: list[int]) -> list[AllocatorInstruction]:
        identity, now = known.request.identity, self._clock()
        only = None if known.pushed is None else self._server.name
        if only is None and known.returned:
            living = {name: stripes for name, stripes in known.returned.items() if name in self._followers}
            return self._allocator.recover(identity, sizes, living, now, explicit=known.is_explicit)
        how = {"explicit": known.is_explicit, "whole": known.whole}
        return self._allocator.preload(identity, sizes, now, only=only, base=known.base, **how)

    def _apply(self, instructions: Iterable[AllocatorInstruction], why: int = IDLE) -> None:
        if self._is_closed:
            return
        for one in instructions:
            if isinstance(one, Fill):
                self._send(one.server, self._datasets[one.identity].instruction(one.stripes))
            else:
                self._send(one.server, DropDataset(one.identity, why))
        for identity, known in list(self._datasets.items()):
            if known.held is not None and not self._allocator.holds(identity):
                self._holdings.drop(identity, why)
                del self._datasets[identity]

    def _send(self, server: str, instruction: DatasetPart | DropDataset) -> None:
        if server != self._server.name:
            self._followers[server].instruct(instruction)
            self._changed.notify_all()
        elif isinstance(instruction, DatasetPart):
            self._holdings.apply(instruction)

    def _unload(self, identity: bytes) -> None:
        known = self._datasets.get(identity)
        if known is None:
            raise UsageError(f"dataset {identity.hex()} is not in the pool; `dpflow pool list` shows what is")
        if known.held is None:
            del self._datasets[identity]
        else:
            known.is_unloaded = True
            self._drop_unloaded()

    def _drop_unloaded(self) -> None:
        while (free := droppable(self._datasets)) is not None:
            self._apply(self._allocator.unload(free), UNLOADED)

    def _forget_lost(self) -> None:
        self._followers.forget(self._allocator.lives)
        self._changed.notify_all()

    def _infos(self) -> dict[str, ServerInfo]:
        return self._followers.infos(self._server, self._allocator.servers())

    def _list(self) -> CachedDatasetList:
        known = [one for one in self._datasets.values() if one.refusal is None and not one.is_unloaded]
        capacity, free = (sum(of) for of in zip(*self._allocator.servers().values()))
        return CachedDatasetList([self._info(one) for one in known], free, capacity)

    def _info(self, known: KnownDataset) -> CachedDataset:
        held = known.held
        if held is None:
            return known.info()
        identity = known.request.identity
        states = {name: one.states[identity] for name, one in self._followers.items() if identity in one.states}
        states[self._server.name] = self._holdings.state(identity)
        return known.progress(held, self._allocator.dataset(identity), states)
