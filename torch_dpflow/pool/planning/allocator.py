"""Which sets the pool holds, which server holds which stripe, and who has room: a pure state machine.

A set is reserved before a byte of it is read, so no server fills up in the midst of one. A stripe has one owner, who
reads it from storage; one that nobody has room for stays there. An explicit set stays until it is unloaded. An
implicit one goes when nobody has read it for `idle_s`, or at once where another set needs its room, the longest idle
first. A server that is lost takes its stripes with it: others that have room get them and read them again, and what
they hold stays where it is. One that joins gets what nobody has room for, and nothing that another holds: memory that
readers have mapped cannot move, so to deal it anew would be to read it from storage once more. Storage is the second
copy, so a reader needs none of this to go on.

    preload -> Fill to each owner        unload, idle, lack of room -> Drop to each owner
    a server is lost -> Fill to the new owners of its stripes, under a new generation of the table
    a machine that begins anew -> recover, from what servers say they hold; they have a lease's time to come back
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
from torch_dpflow.ipc.rpc.leases import ExpireLeases, LeaseChange, Leases, Leave, Lost, RenewLease
from torch_dpflow.pool.planning.placement import UNPLACED, place


@dataclass(eq=False)
class AllocatedDataset:
    """A set of the keeper; it reserves the room."""

    sizes: npt.NDArray[np.int64]
    is_explicit: bool
    #: The name of each stripe's owner; None: nobody has room.
    owners: list[str | None]
    generation: int = 1
    #: Stripes that a server holds beside their owners.
    copies: dict[str, set[int]] = field(default_factory=dict)
    #: How many processes read it at each server.
    readers: dict[str, int] = field(default_factory=dict)
    #: Since when nobody reads it; seconds.
    idle_since: float = 0.0
    #: Until when servers may come back with what they hold of it, before that is given to others; None: it is over.
    returns_until: float | None = None
    #: The only server that may have it; None: any.
    only: str | None = None
    #: The set whose memory it shares; empty: none.
    base: bytes = b""

    def owned_by(self, server: str | None) -> list[int]:
        """The stripes of a server; None: those of nobody."""
        return [stripe for stripe, owner in enumerate(self.owners) if owner == server]

    def copied_bytes(self, server: str) -> int:
        """What a server holds beside its own."""
        return int(self.sizes[[*self.copies.get(server, ())]].sum())

    def own_copies(self) -> None:
        """Give stripes that nobody owns any more to servers that have copies."""
        for server, copied in self.copies.items():
            for stripe in [one for one in copied if self.owners[one] is None]:
                copied.remove(stripe)
                self.owners[stripe] = server
                self.generation += 1

    def without_owner(self) -> npt.NDArray[np.int64]:
        """The stripes of nobody."""
        return np.array(self.owned_by(None), dtype=np.int64)


class StripeTable(msgspec.Struct, frozen=True, kw_only=True):
    """Who owns each stripe: places in `servers`, or `UNPLACED`. A later table has a higher generation."""

    generation: int
    servers: list[str]
    owners: list[int]
    #: Stripes that servers hold beside their owners.
    copies: dict[str, list[int]]
    #: Bytes of the stripes that have an owner.
    placed_bytes: int
    #: Processes that read the set.
    readers: int
    #: Whether what has no owner waits for no server to come back with it.
    is_settled: bool

    def owned(self) -> dict[str, list[int]]:
        """The stripes of each server."""
        of_each = [list[int]() for _ in self.servers]
        for stripe, owner in enumerate(self.owners):
            if owner != UNPLACED:
                of_each[owner].append(stripe)
        return dict(zip(self.servers, of_each))


class Fill(msgspec.Struct, frozen=True):
    """Have this server read these stripes from storage."""

    server: str
    identity: bytes
    stripes: list[int]


class Drop(msgspec.Struct, frozen=True):
    """Have this server give up what it holds of this set."""

    server: str
    identity: bytes


AllocatorInstruction: TypeAlias = Fill | Drop


class StripeAllocator:
    """Decides what is held where. One thread owns it.

    Args:
        lease_s: silence after which a server is lost, seconds.
        idle_s: how long an implicit set stays that nobody reads, seconds.
    """

    def __init__(self, *, lease_s: float, idle_s: float) -> None:
        self._leases = Leases(lease_s=lease_s)
        self._lease_s = lease_s
        self._idle_s = check_seconds("idle_s", idle_s, zero=True)
        #: The bytes of each server, and those that are not reserved.
        self._capacity: dict[str, int] = {}
        self._room: dict[str, int] = {}
        self._sets: dict[bytes, AllocatedDataset] = {}

    # -- servers ---------------------------------------------------------------------------------------------

    def renew(
        self,
        server: str,
        generation: int,
        capacity_bytes: int,
        now: float,
        held: Mapping[bytes, Sequence[int]] | None = None,
    ) -> list[AllocatorInstruction]:
        """A server has begun, or lives on. A generation that was lost before is ignored.

        held: stripes of sets that are in its memory already; it keeps a set's, those that others own by now as copies
            that take room, unless these are most of it: a part of a region cannot be freed.
        """
        self._lose(self._leases.handle(RenewLease(server, generation, now)), now)
        if not self.lives(server, generation) or server in self._capacity:
            return []
        self._capacity[server] = self._room[server] = capacity_bytes
        adopted = [self._adopt(server, one, stripes) for one, stripes in (held or {}).items()]
        return [*itertools.chain(*adopted), *self._place_all()]

    def lives(self, server: str, generation: int) -> bool:
        """Whether this generation of a server is one of the pool's."""
        return self._leases.generation_of(server) == generation

    def servers(self) -> dict[str, tuple[int, int]]:
        """The bytes of each server, and those that are free."""
        return {name: (self._capacity[name], room) for name, room in sorted(self._room.items())}

    def leave(self, server: str, generation: int, now: float) -> list[AllocatorInstruction]:
        """A server ends, or its end was seen."""
        self._lose(self._leases.handle(Leave(server, generation, now)), now)
        return self._place_all()

    def expire(self, now: float) -> list[AllocatorInstruction]:
        """Time has passed: servers that were silent are lost, sets that nobody reads go."""
        out: list[AllocatorInstruction] = []
        for identity, one in list(self._sets.items()):
            if self._may_go(identity) and now - one.idle_since >= self._idle_s:
                out += self._drop(identity)
            if one.returns_until is not None and now >= one.returns_until:
                one.returns_until = None
        self._lose(self._leases.handle(ExpireLeases(now)), now)
        return out + self._place_all()

    # -- sets ------------------------------------------------------------------------------------------------

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
        """Reserve room for a set, and have it read. Of one that is there, `whole` asks for what has no room yet.

        only: the one server that may have it; None: any.
        base: the set whose memory it shares, which stays as long as this one; its stripes there take 0 bytes.
        whole: refuse a set that does not fit as a whole; else a part of it is held.
        Raises PoolFullError: there is not enough room; nothing has changed.
        """
        known = self._sets.get(identity)
        if known is None:
            sizes = np.asarray(stripe_bytes, dtype=np.int64)
            known = AllocatedDataset(
                sizes, explicit, [None] * len(sizes), idle_since=now, only=only, base=base
            )
        elif not whole or known.returns_until is not None:
            known.is_explicit |= explicit
            return []
        out = self._make_room(identity, known, whole=whole)
        known.is_explicit |= explicit
        self._sets[identity] = known
        return out + self._place(identity)

    def rooms(self, base: bytes = b"") -> list[int]:
        """Bytes that a further set may have of each server: free ones, and those of sets that may go, but `base`."""
        may_go = (one for one in self._sets if one != base and self._may_go(one))
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
        """Know a set that servers hold and this machine has not known; held: their stripes, as for `renew`."""
        sizes = np.asarray(stripe_bytes, dtype=np.int64)
        until = now + self._lease_s
        self._sets[identity] = AllocatedDataset(
            sizes, explicit, [None] * len(sizes), idle_since=now, returns_until=until
        )
        return [one for server, stripes in held.items() for one in self._adopt(server, identity, stripes)]

    def read_by(self, identity: bytes, server: str, readers: int, now: float) -> None:
        """So many processes read a set at this server. Of a set or a server that is gone: ignored."""
        known = self._sets.get(identity)
        if known is None or server not in self._capacity:
            return
        if readers:
            known.readers[server] = readers
        elif known.readers.pop(server, None) is not None:
            known.idle_since = now

    def unload(self, identity: bytes) -> list[AllocatorInstruction]:
        """Give up a set, whoever reads it. Raises UsageError: there is no such set."""
        self._set(identity)
        return [*self._drop(identity), *self._place_all()]

    def table(self, identity: bytes) -> StripeTable:
        """Who owns what of a set. Raises UsageError: there is no such set."""
        one = self._set(identity)
        names = sorted({owner for owner in one.owners if owner is not None})
        place_of: dict[str | None, int] = {name: number for number, name in enumerate(names)}
        owners = [place_of.get(owner, UNPLACED) for owner in one.owners]
        return StripeTable(
            generation=one.generation,
            servers=names,
            owners=owners,
            copies={name: sorted(own) for name, own in one.copies.items()},
            placed_bytes=sum(size for size, owner in zip(one.sizes.tolist(), owners) if owner != UNPLACED),
            readers=sum(one.readers.values()),
            is_settled=one.returns_until is None,
        )

    def holds(self, identity: bytes) -> bool:
        """Whether there is such a set."""
        return identity in self._sets

    # -- inside ----------------------------------------------------------------------------------------------

    def _set(self, identity: bytes) -> AllocatedDataset:
        if identity not in self._sets:
            raise UsageError(f"set {identity.hex()} is not in the pool (any more); preload it")
        return self._sets[identity]

    def _may_go(self, identity: bytes) -> bool:
        """Whether nobody misses a set, or has memory of it."""
        one = self._sets[identity]
        is_base = any(other.base == identity for other in self._sets.values())
        return not (one.is_explicit or one.readers or is_base)

    def _adopt(self, server: str, identity: bytes, stripes: Sequence[int]) -> list[AllocatorInstruction]:
        """What a server holds already is its own, or a copy; Drop where most of it is others' by now."""
        known = self._sets.get(identity)
        if known is not None and all(0 <= one < len(known.sizes) for one in stripes):
            own = [one for one in {*stripes} if known.owners[one] is None]
            size = int(known.sizes[[*{*stripes}]].sum())
            if size <= min(self._room[server], 2 * int(known.sizes[own].sum())):
                self._room[server] -= size
                known.generation += 1
                for one in own:
                    known.owners[one] = server
                if copied := set(stripes).difference(own):
                    known.copies[server] = copied
                return []
        return [Drop(server, identity)]

    def _make_room(
        self, identity: bytes, known: AllocatedDataset, *, whole: bool
    ) -> list[AllocatorInstruction]:
        """Drop idle sets, the oldest first, until what has no owner of this one fits, or none is left.

        whole: raise PoolFullError, with nothing dropped, where it does not fit even so.
        """
        stripes = known.without_owner()
        sizes = known.sizes[stripes]
        may_go = [one for one in self._sets if one not in (identity, known.base) and self._may_go(one)]
        idle = sorted(may_go, key=lambda one: self._sets[one].idle_since)
        capacity, room = self._open_to(known), self._room_without(idle)
        if whole and UNPLACED in place(identity, sizes, capacity, room, stripes):
            free = sum(room[name] for name in capacity)
            raise PoolFullError(
                f"the set takes {int(sizes.sum()):,} bytes, and the servers have room for {free:,}; give them more "
                "memory, unload another set, or have a part of this one held"
            )
        out: list[AllocatorInstruction] = []
        for oldest in idle:
            if UNPLACED not in place(identity, sizes, capacity, self._room, stripes):
                break
            out += self._drop(oldest)
        return out

    def _open_to(self, one: AllocatedDataset) -> dict[str, int]:
        """The capacities of the servers that may have it."""
        return {name: size for name, size in self._capacity.items() if one.only in (None, name)}

    def _room_without(self, idle: Iterable[bytes]) -> dict[str, int]:
        """The room that each server would have without these sets."""
        room = dict(self._room)
        for one in (self._sets[identity] for identity in idle):
            for size, owner in zip(one.sizes.tolist(), one.owners):
                if owner is not None:
                    room[owner] += size
            for server in one.copies:
                room[server] += one.copied_bytes(server)
        return room

    def _drop(self, identity: bytes) -> list[AllocatorInstruction]:
        self._room = self._room_without([identity])
        gone = self._sets.pop(identity)
        servers = {owner for owner in gone.owners if owner is not None} | gone.copies.keys()
        return [Drop(server, identity) for server in sorted(servers)]

    def _lose(self, changes: Sequence[LeaseChange], now: float) -> None:
        for lost in (change.peer for change in changes if isinstance(change, Lost)):
            self._capacity.pop(lost, None)
            self._room.pop(lost, None)
            for one in self._sets.values():
                one.copies.pop(lost, None)
                if one.readers.pop(lost, None) is not None:
                    one.idle_since = now
                for stripe in one.owned_by(lost):
                    one.owners[stripe] = None
                    one.generation += 1

    def _place_all(self) -> list[AllocatorInstruction]:
        return [one for identity in self._sets for one in self._place(identity)]

    def _place(self, identity: bytes) -> list[AllocatorInstruction]:
        """Give the stripes that nobody has to servers that have room."""
        one = self._sets[identity]
        one.own_copies()
        if one.returns_until is not None:
            return []
        unplaced = one.without_owner()
        capacity = self._open_to(one)
        owners = place(identity, one.sizes[unplaced], capacity, self._room, unplaced)
        names, fills = sorted(capacity), dict[str, list[int]]()
        for stripe, owner in zip(unplaced.tolist(), owners.tolist()):
            if owner != UNPLACED:
                one.owners[stripe] = names[owner]
                self._room[names[owner]] -= int(one.sizes[stripe])
                fills.setdefault(names[owner], []).append(stripe)
        one.generation += bool(fills)
        return [Fill(server, identity, stripes) for server, stripes in fills.items()]

    def validate(self) -> None:
        """Check every invariant; for tests. Raises AssertionError."""
        self._leases.validate()
        assert self._capacity.keys() == self._room.keys() == self._leases.members.keys()
        for server, capacity in self._capacity.items():
            held = sum(
                int(one.sizes[one.owned_by(server)].sum()) + one.copied_bytes(server)
                for one in self._sets.values()
            )
            assert held + self._room[server] == capacity
            assert self._room[server] >= 0
        for one in self._sets.values():
            assert all(owner is None or owner in self._capacity for owner in one.owners)
            assert one.readers.keys() | one.copies.keys() <= self._capacity.keys()
            assert all(one.copies[name].isdisjoint(one.owned_by(name)) for name in one.copies)
