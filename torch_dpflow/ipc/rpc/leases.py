"""Leases of peers, renewed by heartbeats, and their generations.

A pure state machine: `handle(event)` returns what has changed; there is no socket, thread or clock inside.

A peer is a member while it renews its lease in time. Each time it starts, or rejoins after a loss, it has a higher
generation. A generation is a member at most once: after its loss it stays lost even if the peer is alive, because its
work has been given to others. `Stale` reports that; the peer rejoins under a new generation.

::

    RenewLease, new generation ──> LeaseGranted ──> RenewLease, same generation: the lease lasts longer
                                   │
                                   └──> ExpireLeases after its end, Leave, RenewLease of a newer generation ──> Lost
    RenewLease of a generation that is lost or replaced ──> Stale

A name belongs to the process that joined under it until its lease expires or it leaves. Another process that requests
it has to repeat the request, because the holder may have ended. If the holder renews its lease after the first request,
the other process is refused for good; otherwise the lease expires, and the next process that requests the name gets it.
A holder that is known to have ended is replaced at once.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias

import msgspec

from torch_dpflow._core.checks import check_seconds
from torch_dpflow.errors import OptionError, OptionTypeError, UsageError
from torch_dpflow.ipc.messages.fields import NameBusyError, StaleJobError

#: Maximum lost peers whose generation is remembered.
MAX_REMEMBERED = 1 << 14
#: The name of a service, a job or a worker, the same over all its generations.
Peer: TypeAlias = str


class RenewLease(msgspec.Struct, frozen=True, gc=False):
    """A message from this peer has arrived; each renews its lease."""

    peer: Peer
    generation: int
    now: float


class Leave(msgspec.Struct, frozen=True, gc=False):
    """This generation of the peer leaves."""

    peer: Peer
    generation: int
    now: float


class ExpireLeases(msgspec.Struct, frozen=True, gc=False):
    """Time has passed. To be sent after all messages that had arrived by then."""

    now: float


LeaseEvent: TypeAlias = RenewLease | Leave | ExpireLeases


class LeaseGranted(msgspec.Struct, frozen=True, gc=False):
    """This generation of the peer has become a member."""

    peer: Peer
    generation: int


class Lost(msgspec.Struct, frozen=True, gc=False):
    """This generation is no longer a member: give its work to others."""

    peer: Peer
    generation: int
    reason: Literal["expired", "left", "replaced"]


class Stale(msgspec.Struct, frozen=True, gc=False):
    """A message from a generation that is lost or replaced. One above `newest` would be granted a lease."""

    peer: Peer
    generation: int
    newest: int


LeaseChange: TypeAlias = LeaseGranted | Lost | Stale


class _Lease(msgspec.Struct):
    generation: int
    #: When the entry expires, seconds.
    until: float


class Leases:
    """Leases of all peers of one service. Not thread-safe; every event is amortised O(1).

    Only ExpireLeases ends a lease: a service that was delayed itself first handles the messages that have arrived
    meanwhile, and so loses no living peer.

    Args:
        lease_s: seconds of silence after which a peer is lost, above 0.
        remember_s: seconds for which the generation of a lost peer is remembered, at least `lease_s`; for at most
            `MAX_REMEMBERED` peers, the latest ones. A forgotten peer may rejoin under its old generation.

    Raises OptionError or OptionTypeError.
    """

    def __init__(self, *, lease_s: float, remember_s: float = 3600.0) -> None:
        self._lease_s = check_seconds("lease_s", lease_s)
        self._remember_s = check_seconds("remember_s", remember_s)
        if remember_s < lease_s:
            raise OptionError(f"remember_s must be at least lease_s={lease_s!r}; got {remember_s!r}")
        #: The members, next to expire first: a renewal moves to the end, and all leases are equally long.
        self._members: OrderedDict[Peer, _Lease] = OrderedDict()
        #: The newest generation of lost peers, next to be forgotten first.
        self._gone: OrderedDict[Peer, _Lease] = OrderedDict()
        self._now = -math.inf

    @property
    def members(self) -> Mapping[Peer, int]:
        """The generation of every member: a copy."""
        return MappingProxyType({peer: lease.generation for peer, lease in self._members.items()})

    def generation_of(self, peer: Peer) -> int | None:
        """Return the generation of a member; None if the peer is not one."""
        lease = self._members.get(peer)
        return None if lease is None else lease.generation

    def handle(self, event: LeaseEvent) -> list[LeaseChange]:
        """Apply one event; return what has changed, in order. Time that runs backwards is ignored."""
        match event:
            case RenewLease(peer, generation, now):
                self._now = max(self._now, now)
                return self._renew(peer, generation)
            case Leave(peer, generation, now):
                self._now = max(self._now, now)
                return self._leave(peer, generation)
            case ExpireLeases(now):
                self._now = max(self._now, now)
                return self._expire()
            case _:
                raise OptionTypeError(f"Leases.handle takes RenewLease, Leave and ExpireLeases; got {event!r}")

    def _renew(self, peer: Peer, generation: int) -> list[LeaseChange]:
        newest = self._newest(peer)
        member = peer in self._members
        if newest is not None and (generation < newest or (generation == newest and not member)):
            return [Stale(peer, generation, newest)]
        changes: list[LeaseChange] = []
        if generation != newest:
            if newest is not None and member:
                changes.append(Lost(peer, newest, "replaced"))
            changes.append(LeaseGranted(peer, generation))
        self._gone.pop(peer, None)
        self._members[peer] = _Lease(generation, self._now + self._lease_s)
        self._members.move_to_end(peer)
        return changes

    def _leave(self, peer: Peer, generation: int) -> list[LeaseChange]:
        newest = self._newest(peer)
        if newest is not None and generation < newest:
            return []
        changes: list[LeaseChange] = []
        if newest is not None and peer in self._members:
            del self._members[peer]
            changes.append(Lost(peer, newest, "left" if generation == newest else "replaced"))
        self._remember(peer, generation)
        return changes

    def _expire(self) -> list[LeaseChange]:
        changes: list[LeaseChange] = []
        while self._members:
            peer, lease = next(iter(self._members.items()))
            if lease.until > self._now:
                break
            del self._members[peer]
            changes.append(Lost(peer, lease.generation, "expired"))
            self._remember(peer, lease.generation)
        while self._gone and next(iter(self._gone.values())).until <= self._now:
            self._gone.popitem(last=False)
        return changes

    def _newest(self, peer: Peer) -> int | None:
        lease = self._members.get(peer) or self._gone.get(peer)
        return None if lease is None else lease.generation

    def _remember(self, peer: Peer, generation: int) -> None:
        self._gone[peer] = _Lease(generation, self._now + self._remember_s)
        self._gone.move_to_end(peer)
        if len(self._gone) > MAX_REMEMBERED:
            self._gone.popitem(last=False)

    def validate(self) -> None:
        """Check every invariant; O(peers), for tests. Raises AssertionError."""
        assert self._members.keys().isdisjoint(self._gone)
        assert len(self._gone) <= MAX_REMEMBERED
        for leases, length in ((self._members, self._lease_s), (self._gone, self._remember_s)):
            ends = [lease.until for lease in leases.values()]
            assert ends == sorted(ends)
            assert all(end <= self._now + length for end in ends)


@dataclass(slots=True)
class _Holder:
    #: A random number by which the process identifies itself.
    holder: int
    #: When it last renewed its lease, seconds.
    renewed: float
    #: Its identity for other processes of its host, as of `own_process`.
    process: str = ""
    #: When other processes first requested the name, by their random numbers.
    rivals: dict[int, float] = field(default_factory=dict)


class NameLeases:
    """Names of all readers of one flow. Not thread-safe; every call is amortised O(1).

    Args:
        lease_s: how long a lease lasts without renewal, seconds.
    """

    def __init__(self, *, lease_s: float) -> None:
        self._leases = Leases(lease_s=lease_s)
        self._holders: dict[str, _Holder] = {}

    @property
    def members(self) -> Mapping[str, int]:
        """The generation of every reader: a copy."""
        return self._leases.members

    def holder(self, name: str) -> tuple[int, str]:
        """Return the random number and the identity of the process that has this name; 0 and "" if there is none."""
        current = self._holders.get(name)
        return (0, "") if current is None else (current.holder, current.process)

    def renewed_at(self, name: str) -> float:
        """Return when the holder of this name renewed its lease last."""
        return self._holders[name].renewed

    def admit(self, name: str, generation: int, holder: int, now: float, *, process: str = "") -> bool:
        """Grant the name to a process that begins to read under it, or that returns.

        holder: the process's random number.
        process: its identity, as of `own_process`.

        Returns whether this replaces an earlier generation, whose state is void.

        Raises:
            NameBusyError: another process has the name, and may have ended; try again.
            UsageError: another process has it and renews its lease.
            StaleJobError: a later generation has joined.
        """
        current = self._holders.get(name)
        if current is not None and current.holder != holder:
            _refuse(name, current, holder, now)
        changes = self._leases.handle(RenewLease(name, generation, now))
        for change in changes:
            if isinstance(change, Stale):
                raise StaleJobError(f"job {name!r}: generation {change.newest} is newer")
        self._holders[name] = _Holder(holder, now, process)
        return any(isinstance(change, Lost) for change in changes)

    def renew(self, name: str, generation: int, now: float) -> None:
        """Renew a lease. Raises StaleJobError if the reader has none, or it has expired."""
        if self._leases.generation_of(name) != generation:
            raise StaleJobError(f"job {name!r} has no lease (any more); join again")
        self._leases.handle(RenewLease(name, generation, now))
        self._holders[name].renewed = now

    def leave(self, name: str, generation: int, now: float) -> bool:
        """End a lease; returns whether there was one."""
        lost = any(isinstance(one, Lost) for one in self._leases.handle(Leave(name, generation, now)))
        if lost:
            del self._holders[name]
        return lost

    def tick(self, now: float) -> list[str]:
        """Expire leases; returns the names that are free now."""
        expired = [change.peer for change in self._leases.handle(ExpireLeases(now)) if isinstance(change, Lost)]
        for name in expired:
            del self._holders[name]
        return expired

    def validate(self) -> None:
        """Check every invariant; O(readers), for tests. Raises AssertionError."""
        self._leases.validate()
        assert self._holders.keys() == self._leases.members.keys()


def _refuse(name: str, current: _Holder, rival: int, now: float) -> None:
    asked = current.rivals.setdefault(rival, now)
    if current.renewed > asked:
        del current.rivals[rival]
        raise UsageError(
            f"job {name!r} is being read by another process; give this one a name of its own, as in "
            "JobOptions(name=...), or none. Jobs with names of their own have orders of their own; processes that are "
            "to read the same batches need a sampler with a seeded generator, or torch.distributed"
        )
    raise NameBusyError(
        f"job {name!r} is held by another process, which renewed its lease {now - current.renewed:.1f} s ago; its name "
        "is free once that lease has expired"
    )
