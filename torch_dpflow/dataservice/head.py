"""The head of a pool: decides what is held where, and says what there is."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import msgspec

from torch_dpflow.dataservice.filling import HeldSet, start_thread
from torch_dpflow.dataservice.holdings import Holdings
from torch_dpflow.dataservice.keeper_machine import Fill, KeeperInstruction, KeeperMachine
from torch_dpflow.dataservice.protocol import (
    MOST_BYTES,
    CountReads,
    PoolRefusal,
    PreloadSet,
    SetInfo,
    SetList,
)
from torch_dpflow.dataservice.regions import IDLE, UNLOADED
from torch_dpflow.dataservice.residents import ALL, cut_that_fits, resident_set
from torch_dpflow.dataservice.sets import FileSet
from torch_dpflow.dataservice.sources import open_source, samples_in
from torch_dpflow.errors import PoolFullError, UsageError
from torch_dpflow.log import SERVICE

#: Most sets of a pool.
MOST_SETS = 4096
#: How long a refusal is kept for whoever has asked, seconds.
_REFUSAL_S = 30.0
#: A server beats itself, so its lease ends only with it.
_LEASE_S = 10.0
_NAME = "server"
#: What the index of a region has for each stripe and each record.
_INDEX_BYTES = 16
#: Most characters of an error in a list.
_LONGEST_ERROR = 2000


@dataclass(eq=False)
class KnownSet:
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
    #: Samples that readers have got from memory, and from storage.
    hits: int = 0
    misses: int = 0


class PoolHead:
    """Decides what the pool holds. Thread-safe.

    Args:
        memory_bytes: most bytes of samples.
        idle_s: how long a set that no command has loaded stays when nobody reads it, seconds.
        holdings: what this server holds.
    """

    def __init__(self, memory_bytes: int, idle_s: float, holdings: Holdings) -> None:
        self._memory = memory_bytes
        self._keeper = KeeperMachine(lease_s=_LEASE_S, idle_s=idle_s)
        self._holdings = holdings
        self._lock = threading.Lock()
        self._sets: dict[bytes, KnownSet] = {}
        self._keeper.renew(_NAME, 1, self._memory, time.monotonic())

    def preload(self, request: PreloadSet) -> SetInfo:
        """Hold a set, and tell how far that is. Raises PoolFullError, and what kept it from being held."""
        with self._lock:
            known = self._sets.get(request.identity)
            if known is None:
                if len(self._sets) >= MOST_SETS:
                    raise PoolFullError(f"the pool has {MOST_SETS} sets; unload one")
                known = KnownSet(request, "", request.is_explicit, request.whole)
                start_thread(partial(self._plan, known), "dpflow-plan")
                self._sets[request.identity] = known
            elif known.refusal is not None:
                del self._sets[request.identity]
                raise known.refusal.error()
            elif request.is_explicit:
                if known.held is not None:
                    if request.whole and known.held.is_part:
                        raise PoolFullError(
                            f"{request.source.ref} is held in part, as there was no room for more: unload it to load "
                            "all of it, or have a part of this one held"
                        )
                    now = time.monotonic()
                    self._obey(
                        self._keeper.preload(request.identity, [], now, explicit=True, whole=request.whole)
                    )
                known.is_explicit = True
                known.whole |= request.whole
            return self._info(known)

    def open(self, identity: bytes, reader: str) -> None:
        """A reader begins to read a set. Raises UsageError: there is no such set."""
        with self._lock:
            self._keeper.open(identity, reader)

    def count(self, reads: CountReads) -> None:
        """A reader has read so many more samples."""
        with self._lock:
            known = self._sets.get(reads.identity)
            if known is not None:
                known.hits += reads.hits
                known.misses += reads.misses

    def leave(self, reader: str) -> None:
        """A reader has ended."""
        with self._lock:
            self._keeper.close(reader, time.monotonic())

    def unload(self, identity: bytes) -> SetList:
        """Give a set up. Raises UsageError: it is not there."""
        with self._lock:
            known = self._sets.get(identity)
            if known is None:
                raise UsageError(f"set {identity.hex()} is not in the pool; `dpflow pool list` has what is")
            if known.held is None:
                del self._sets[identity]
            else:
                self._obey(self._keeper.unload(identity), UNLOADED)
            return self._list()

    def contents(self, first: int) -> SetList:
        """The sets from this number on, as many as one message has room for."""
        with self._lock:
            return self._list(first)

    def tick(self) -> None:
        """Time has passed; to be called about once a second."""
        with self._lock:
            now = time.monotonic()
            self._obey(self._keeper.renew(_NAME, 1, self._memory, now))
            self._obey(self._keeper.expire(now))
            for identity, known in list(self._sets.items()):
                if known.refusal is not None and now - known.refused_at > _REFUSAL_S:
                    del self._sets[identity]

    def close(self) -> None:
        """Decide nothing any more."""
        with self._lock:
            self._sets.clear()

    # -- inside ----------------------------------------------------------------------------------------------

    def _plan(self, known: KnownSet) -> None:
        request, held = known.request, None
        try:
            known.url, records, is_known, reader = open_source(request.source, request.identity)
            with self._lock:
                if self._sets.get(request.identity) is not known:  # it was given up meanwhile
                    reader.close()
                    return
                cut = (
                    ALL
                    if known.whole
                    else cut_that_fits(records, self._keeper.room() - _index_bytes(records))
                )
                held = HeldSet(request.source, reader, records, is_known, cut)
                instructions = self._keeper.preload(
                    request.identity,
                    _stripe_bytes(resident_set(records, cut)),
                    time.monotonic(),
                    explicit=known.is_explicit,
                    whole=known.whole,
                )
                known.held = held
                self._holdings.add(request.identity, held)
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
                self._holdings.get(one.identity).fill(one.stripes)
        # This is the only server, so what is dropped here is dropped everywhere.
        present = {one.identity for one in self._keeper.summaries()}
        for identity, known in list(self._sets.items()):
            if known.held is not None and identity not in present:
                self._holdings.drop(identity, why)
                del self._sets[identity]

    def _list(self, first: int = 0) -> SetList:
        sets = [self._info(known) for known in self._sets.values() if known.refusal is None]
        ends = itertools.accumulate(len(msgspec.msgpack.encode(one)) for one in sets[first:])
        count = max(1, sum(end <= MOST_BYTES // 2 for end in ends))
        free = self._memory - sum(one.reserved_bytes for one in sets)
        return SetList(sets[first : first + count], free, self._memory, len(sets))

    def _info(self, known: KnownSet) -> SetInfo:
        request, held = known.request, known.held
        info = SetInfo(
            identity=request.identity,
            ref=request.source.ref,
            url=known.url or "not opened yet",
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
        placed = held.placed_in(stripe for stripe, one in enumerate(owners) if one >= 0)
        samples = partial(samples_in, request.source)
        return msgspec.structs.replace(
            info,
            records=samples(held.records.records),
            placed=samples(placed),
            loaded=samples(loaded),
            failed=samples(failed),
            reserved_bytes=summary.placed_bytes,
            readers=summary.readers,
            is_placed=held.is_placed,
            hits=known.hits,
            misses=known.misses,
            error=held.error[:_LONGEST_ERROR],
        )


def _stripe_bytes(records: FileSet) -> list[int]:
    return [
        records.stripe_bytes(stripe) + _INDEX_BYTES * (1 + len(records.records_of(stripe)))
        for stripe in range(records.stripes)
    ]


def _index_bytes(records: FileSet) -> int:
    return _INDEX_BYTES * (records.stripes + records.records)
