"""Allocation of pool memory: which datasets are cached, and which server holds which stripe. Pure state machine.

Memory for a dataset is reserved before any of it is read, so a server does not run full during a load. Each stripe has
one owner, which reads it from storage. A stripe that fits nowhere stays in storage. An explicit dataset, which a user
preloaded, stays until it is unloaded. Any other dataset is implicit: while no process reads it, it is dropped after
`idle_s`, or when another dataset needs its memory, the longest idle first. The stripes of a lost server go to others
that have copies or free memory. All other stripes stay where they are. A server that joins gets only stripes without an
owner: memory that readers have mapped cannot move, so rebalancing would mean reading from storage again. If no server
holds a stripe, readers use storage.

    preload -> Fill to each owner        unload, idle, lack of memory -> Drop to each owner
    server lost -> Fill to the new owners of its stripes
    new leader -> recover the stripes that servers report; servers have the time of a lease to return
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from torch_dpflow._core.checks import check_seconds
from torch_dpflow.errors import PoolFullError, UsageError
from torch_dpflow.ipc.rpc.leases import Leases, Renewal
from torch_dpflow.pool.planning.layout import UNPLACED, place


@dataclass(eq=False)
class AllocatedDataset:
    """Cached dataset with reserved memory: the servers that own and hold its stripes, and the number of its readers."""

    #: Bytes of each stripe.
    sizes: npt.NDArray[np.int64]
    is_explicit: bool
    #: Name of each stripe's owner; None if it fits nowhere.
    owners: list[str | None]
    #: Stripes in each server's memory: those it owns, and copies of stripes that other servers own.
    held: dict[str, set[int]] = field(default_factory=dict)
    #: Number of reading processes at each server.
    readers: dict[str, int] = field(default_factory=dict)
    #: When a process last stopped reading the dataset, or the dataset was added, seconds.
    idle_since: float = 0.0
    #: Time until which stripes wait for servers that may still have them, before others get them; None afterwards.
    returns_until: float | None = None
    #: The only server that may hold it; None for any.
    only: str | None = None
    #: Identity of the dataset whose memory it shares; empty if none.
    base: bytes = b""

    def owned_by(self, server: str | None) -> list[int]:
        """Return the stripes that a server owns; for None, the stripes without an owner."""
        return [stripe for stripe, owner in enumerate(self.owners) if owner == server]

    def owned(self) -> dict[str, list[int]]:
        """Return the stripes of each owner, by name."""
        found: dict[str, list[int]] = {}
        for stripe, owner in enumerate(self.owners):
            if owner is not None:
                found.setdefault(owner, []).append(stripe)
        return dict(sorted(found.items()))

    def own(self, server: str, stripes: Sequence[int]) -> None:
        """Make a server the owner of stripes."""
        self.held.setdefault(server, set()).update(stripes)
        for stripe in stripes:
            self.owners[stripe] = server

    def bytes_of(self, stripes: Iterable[int]) -> int:
        return int(self.sizes[[*stripes]].sum())

    @property
    def placed_bytes(self) -> int:
        """Bytes of the stripes that have an owner."""
        return int(self.sizes.sum()) - self.bytes_of(self.owned_by(None))

    def without_owner(self) -> npt.NDArray[np.int64]:
        return np.array(self.owned_by(None), dtype=np.int64)


class Fill(msgspec.Struct, frozen=True):
    """Instruction to a server: hold these stripes of a dataset."""

    server: str
    identity: bytes
    stripes: list[int]


class Drop(msgspec.Struct, frozen=True):
    """Instruction to a server: drop a dataset."""

    server: str
    identity: bytes


AllocatorInstruction: TypeAlias = Fill | Drop


class StripeAllocator:
    """State machine that decides which server holds which stripes. Not thread-safe.

    Methods that change the allocation return the instructions to send to the servers. Times are in seconds.

    Args:
        lease_s: seconds without a call of `renew`, after which a server is lost.
        idle_s: how long an implicit dataset stays after the last process has stopped reading it, seconds.
    """

    def __init__(self, *, lease_s: float, idle_s: float) -> None:
        self._leases = Leases(lease_s=lease_s)
        self._lease_s = lease_s
        self._idle_s = check_seconds("idle_s", idle_s, zero=True)
        #: Total and unreserved bytes of each server.
        self._capacity: dict[str, int] = {}
        self._room: dict[str, int] = {}
        self._datasets: dict[bytes, AllocatedDataset] = {}

    # -- servers ---------------------------------------------------------------------------------------------

    def renew(
        self,
        server: str,
        generation: int,
        capacity_bytes: int,
        now: float,
        held: Mapping[bytes, Sequence[int]] | None = None,
    ) -> list[AllocatorInstruction]:
        """Add a server, or renew its lease. Ignored for a generation of the server that is older or was lost.

        generation: number of the server's connection. A higher number removes the server, and adds it again.
        held: stripes of each dataset in the memory of a server that is added. The server becomes the owner of stripes
            without an owner, and keeps the other stripes as copies. It must drop a dataset that is unknown, does not
            fit, or of which more than half of the held bytes would be copies.
        """
        if self._leases.renew(server, generation, now) is Renewal.REPLACED:
            self._lose([server], now)
        if not self.lives(server, generation) or server in self._capacity:
            return []
        self._capacity[server] = self._room[server] = capacity_bytes
        adopted = [self._adopt(server, one, stripes) for one, stripes in (held or {}).items()]
        return [*itertools.chain(*adopted), *self._place_all()]

    def lives(self, server: str, generation: int) -> bool:
        return self._leases.generation_of(server) == generation

    def servers(self) -> dict[str, tuple[int, int]]:
        """Return the total and free bytes of each server."""
        return {name: (self._capacity[name], room) for name, room in sorted(self._room.items())}

    def leave(self, server: str, generation: int, now: float) -> list[AllocatorInstruction]:
        """Remove a server that ends or has ended. Ignored for an older generation of it."""
        if self._leases.leave(server, generation, now):
            self._lose([server], now)
        return self._place_all()

    def expire(self, now: float) -> list[AllocatorInstruction]:
        """Remove servers whose leases have expired, and implicit datasets that were idle for `idle_s`."""
        out: list[AllocatorInstruction] = []
        for identity, one in list(self._datasets.items()):
            if self._may_go(identity) and now - one.idle_since >= self._idle_s:
                out += self._drop(identity)
            if one.returns_until is not None and now >= one.returns_until:
                one.returns_until = None
        self._lose(self._leases.expire(now), now)
        return out + self._place_all()

    # -- datasets --------------------------------------------------------------------------------------------

    def preload(
        self,
        identity: bytes,
        stripe_bytes: Sequence[int],
        now: float,
        *,
        explicit: bool,
        whole: bool,
        only: str | None = None,
        base: bytes = b"",
    ) -> list[AllocatorInstruction]:
        """Reserve memory for a dataset, and instruct servers to read it.

        If the dataset is already cached in part, `whole` reserves memory for its other stripes too.

        Args:
            explicit: whether the dataset stays until it is unloaded.
            whole: whether to refuse a dataset that does not fit completely; otherwise a part is held.
            only: the one server that may hold it; None for any.
            base: dataset whose memory this one shares, and which then only `unload` drops. Shared stripes take 0 bytes.

        Raises PoolFullError if `whole` is True and the dataset does not fit; nothing has changed then.
        """
        known = self._datasets.get(identity)
        if known is None:
            sizes = np.asarray(stripe_bytes, dtype=np.int64)
            known = AllocatedDataset(sizes, explicit, [None] * len(sizes), idle_since=now, only=only, base=base)
        elif not whole or known.returns_until is not None:
            known.is_explicit |= explicit
            return []
        out = self._make_room(identity, known, whole=whole)
        known.is_explicit |= explicit
        self._datasets[identity] = known
        return out + self._place(identity)

    def rooms(self, base: bytes = b"") -> list[int]:
        """Return the bytes of each server that would be free if all idle implicit datasets but `base` were dropped."""
        may_go = (one for one in self._datasets if one != base and self._may_go(one))
        return [*self._room_without(may_go).values()]

    def recover(
        self,
        identity: bytes,
        stripe_bytes: Sequence[int],
        held: Mapping[str, Sequence[int]],
        now: float,
        *,
        explicit: bool,
    ) -> list[AllocatorInstruction]:
        """Add a dataset that servers have reported to a new leader. held: the reported stripes of each server."""
        sizes = np.asarray(stripe_bytes, dtype=np.int64)
        until = now + self._lease_s
        self._datasets[identity] = AllocatedDataset(
            sizes, explicit, [None] * len(sizes), idle_since=now, returns_until=until
        )
        return [one for server, stripes in held.items() for one in self._adopt(server, identity, stripes)]

    def read_by(self, identity: bytes, server: str, readers: int, now: float) -> None:
        """Set the number of processes that read a dataset at a server. Unknown datasets and servers are ignored."""
        known = self._datasets.get(identity)
        if known is None or server not in self._capacity:
            return
        if readers:
            known.readers[server] = readers
        elif known.readers.pop(server, None) is not None:
            known.idle_since = now

    def unload(self, identity: bytes) -> list[AllocatorInstruction]:
        """Drop a dataset, even while processes read it. Raises UsageError if it is not cached."""
        self.dataset(identity)
        return [*self._drop(identity), *self._place_all()]

    def dataset(self, identity: bytes) -> AllocatedDataset:
        """Return a cached dataset. Raises UsageError if it is not cached."""
        if identity not in self._datasets:
            raise UsageError(f"dataset {identity.hex()} is not in the pool (any more); preload it")
        return self._datasets[identity]

    def holds(self, identity: bytes) -> bool:
        return identity in self._datasets

    def _may_go(self, identity: bytes) -> bool:
        """Return whether a dataset may be dropped: it is implicit, unread, and its memory is not shared."""
        one = self._datasets[identity]
        is_base = any(other.base == identity for other in self._datasets.values())
        return not (one.is_explicit or one.readers or is_base)

    def _adopt(self, server: str, identity: bytes, stripes: Sequence[int]) -> list[AllocatorInstruction]:
        """Make a server the owner of stripes that it holds; return Drop if most of them already have other owners."""
        known = self._datasets.get(identity)
        if known is not None and all(0 <= one < len(known.sizes) for one in stripes):
            own, size = [one for one in {*stripes} if known.owners[one] is None], known.bytes_of({*stripes})
            if size <= min(self._room[server], 2 * known.bytes_of(own)):
                self._room[server] -= size
                known.held[server] = {*stripes}
                known.own(server, own)
                return []
        return [Drop(server, identity)]

    def _make_room(self, identity: bytes, known: AllocatedDataset, *, whole: bool) -> list[AllocatorInstruction]:
        """Drop idle datasets, the oldest first, until stripes without an owner fit, or no idle dataset is left.

        whole: if they would not fit even then, drop nothing and raise PoolFullError.
        """
        stripes = known.without_owner()
        sizes = known.sizes[stripes]
        may_go = [one for one in self._datasets if one not in (identity, known.base) and self._may_go(one)]
        idle = sorted(may_go, key=lambda one: self._datasets[one].idle_since)
        capacity, room = self._open_to(known), self._room_without(idle)
        if whole and UNPLACED in place(identity, sizes, capacity, room, stripes):
            free = sum(room[name] for name in capacity)
            raise PoolFullError(
                f"the dataset takes {int(sizes.sum()):,} bytes, and the servers have room for {free:,}; give them more "
                "memory, unload another dataset, or have a part of this one held"
            )
        out: list[AllocatorInstruction] = []
        for oldest in idle:
            if UNPLACED not in place(identity, sizes, capacity, self._room, stripes):
                break
            out += self._drop(oldest)
        return out

    def _open_to(self, one: AllocatedDataset) -> dict[str, int]:
        """Return the capacities of the servers that may hold a dataset."""
        return {name: size for name, size in self._capacity.items() if one.only in (None, name)}

    def _room_without(self, idle: Iterable[bytes]) -> dict[str, int]:
        """Return each server's free bytes if these datasets were dropped."""
        room = dict(self._room)
        for one in (self._datasets[identity] for identity in idle):
            for server, stripes in one.held.items():
                room[server] += one.bytes_of(stripes)
        return room

    def _drop(self, identity: bytes) -> list[AllocatorInstruction]:
        self._room = self._room_without([identity])
        gone = self._datasets.pop(identity)
        return [Drop(server, identity) for server in sorted(gone.held)]

    def _lose(self, servers: Sequence[str], now: float) -> None:
        for lost in servers:
            self._capacity.pop(lost, None)
            self._room.pop(lost, None)
            for one in self._datasets.values():
                one.held.pop(lost, None)
                if one.readers.pop(lost, None) is not None:
                    one.idle_since = now
                for stripe in one.owned_by(lost):
                    one.owners[stripe] = None

    def _place_all(self) -> list[AllocatorInstruction]:
        return [one for identity in self._datasets for one in self._place(identity)]

    def _place(self, identity: bytes) -> list[AllocatorInstruction]:
        """Assign stripes without an owner to servers with free memory."""
        one = self._datasets[identity]
        for server, held in one.held.items():  # copies become its own
            if own := [stripe for stripe in held if one.owners[stripe] is None]:
                one.own(server, own)
        if one.returns_until is not None:
            return []
        unplaced = one.without_owner()
        capacity = self._open_to(one)
        owners = place(identity, one.sizes[unplaced], capacity, self._room, unplaced)
        names, fills = sorted(capacity), dict[str, list[int]]()
        for stripe, owner in zip(unplaced.tolist(), owners.tolist()):
            if owner != UNPLACED:
                fills.setdefault(names[owner], []).append(stripe)
        for server, stripes in fills.items():
            one.own(server, stripes)
            self._room[server] -= one.bytes_of(stripes)
        return [Fill(server, identity, stripes) for server, stripes in fills.items()]
