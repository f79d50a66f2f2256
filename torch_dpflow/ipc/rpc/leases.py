"""Leases of peers, renewed by heartbeats, and their generations. Pure: no socket, thread or clock inside.

A peer is a member while it renews its lease in time. Each time the peer starts, or rejoins after a loss, it has a
higher generation. A generation is a member at most once: after its loss it stays lost even if the peer is alive,
because its work has been given to other peers. Its messages are then `STALE`, and the peer rejoins under a new
generation.

A name belongs to the process that joined under it until its lease expires or it leaves. Another process that requests
the name has to repeat its request, because the holder may have ended or be about to leave. If the holder renews its
lease `LEAVING_S` after the first request, the other process is refused for good. Otherwise the lease expires, and the
next process that requests the name gets it. A holder that is known to have ended is replaced at once.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch_dpflow._core.checks import check_seconds
from torch_dpflow.errors import UsageError
from torch_dpflow.ipc.messages.fields import NameBusyError, StaleJobError

K = TypeVar("K", bound=Hashable)
#: Maximum lost peers whose generation is remembered, and for how long, seconds. A forgotten peer may rejoin under its
#: old generation.
MAX_REMEMBERED, REMEMBER_S = 1 << 14, 3600.0
#: How long a holder may renew its lease of a name that another process has requested, seconds: ranks of a changed group
#: leave their former job one after the other.
LEAVING_S = 3.0


class Expiry(Generic[K]):
    """Set of names that expire unless they are renewed. Not thread-safe; every call is amortised O(1).

    Only `expire` ends a lease. A service that was delayed first handles the messages that arrived meanwhile, and so
    loses no living peer. If the clock runs backwards, time stands still.

    lease_s: seconds of silence after which a name expires.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = check_seconds("lease_s", lease_s)
        #: When each was renewed last, the longest ago first: all leases are equally long.
        self._renewed: OrderedDict[K, float] = OrderedDict()
        self._now = -math.inf

    def __len__(self) -> int:
        return len(self._renewed)

    def __iter__(self) -> Iterator[K]:
        return iter(self._renewed)

    def __contains__(self, name: K) -> bool:
        return name in self._renewed

    def renewed_at(self, name: K) -> float:
        """Return when this name was renewed last."""
        return self._renewed[name]

    def renew(self, name: K, now: float) -> None:
        self._now = self._renewed[name] = max(self._now, now)
        self._renewed.move_to_end(name)

    def drop(self, name: K) -> bool:
        """End a lease; return whether there was one."""
        return self._renewed.pop(name, None) is not None

    def expire(self, now: float) -> list[K]:
        """End all expired leases; return their names."""
        self._now = max(self._now, now)
        expired: list[K] = []
        for name, renewed in self._renewed.items():
            if renewed + self._lease_s > self._now:
                break
            expired.append(name)
        for name in expired:
            del self._renewed[name]
        return expired


class Renewal(enum.Enum):
    """Effect of a message from a peer's generation."""

    RENEWED = enum.auto()
    #: The generation is a member now; `REPLACED`: instead of an earlier generation, whose work goes to others.
    GRANTED = enum.auto()
    REPLACED = enum.auto()
    #: No effect: the generation is lost, or replaced.
    STALE = enum.auto()


class Leases:
    """Leases of all peers of one service. Not thread-safe; every call is amortised O(1).

    lease_s: as in `Expiry`.
    """

    def __init__(self, *, lease_s: float) -> None:
        self._members: Expiry[str] = Expiry(lease_s)
        self._gone: Expiry[str] = Expiry(REMEMBER_S)
        #: The newest generation of the members, and of those that are gone.
        self._newest: dict[str, int] = {}

    @property
    def members(self) -> Mapping[str, int]:
        """Generation of every member, as a copy."""
        return {peer: self._newest[peer] for peer in self._members}

    def generation_of(self, peer: str) -> int | None:
        return self._newest[peer] if peer in self._members else None

    def renewed_at(self, peer: str) -> float:
        """Return when a member renewed its lease last."""
        return self._members.renewed_at(peer)

    def newest(self, peer: str) -> int:
        """Return the newest known generation of a peer; 0 if none is known."""
        return self._newest.get(peer, 0)

    def renew(self, peer: str, generation: int, now: float) -> Renewal:
        """Record a message from this generation of a peer, which renews or begins its lease."""
        is_member, newest = peer in self._members, self._newest.get(peer)
        if newest is not None and (generation < newest or (generation == newest and not is_member)):
            return Renewal.STALE
        self._gone.drop(peer)
        self._members.renew(peer, now)
        self._newest[peer] = generation
        if not is_member:
            return Renewal.GRANTED
        return Renewal.RENEWED if generation == newest else Renewal.REPLACED

    def leave(self, peer: str, generation: int, now: float) -> bool:
        """End this and earlier generations of a peer; return whether one of them was a member."""
        if generation < self._newest.get(peer, generation):
            return False
        was_member = self._members.drop(peer)
        self._newest[peer] = generation
        self._remember(peer, now)
        return was_member

    def expire(self, now: float) -> list[str]:
        """End all expired leases; return the lost peers."""
        lost = self._members.expire(now)
        for peer in lost:
            self._remember(peer, now)
        for peer in self._gone.expire(now):
            del self._newest[peer]
        return lost

    def _remember(self, peer: str, now: float) -> None:
        self._gone.renew(peer, now)
        if len(self._gone) > MAX_REMEMBERED:
            oldest = next(iter(self._gone))
            self._gone.drop(oldest)
            del self._newest[oldest]


@dataclass(slots=True)
class _Holder:
    #: A random number by which the process identifies itself.
    holder: int
    #: Its identity for other processes of its host, as in `own_process`.
    process: str = ""
    #: When other processes first requested the name, by their random numbers.
    rivals: dict[int, float] = field(default_factory=dict)


class NameLeases:
    """Names of all readers of one flow, each leased to a process. Not thread-safe; every call is amortised O(1).

    Args:
        lease_s: how long a lease lasts without renewal, seconds.
    """

    def __init__(self, *, lease_s: float) -> None:
        self._leases = Leases(lease_s=lease_s)
        self._holders: dict[str, _Holder] = {}

    @property
    def members(self) -> Mapping[str, int]:
        """Generation of every reader, as a copy."""
        return self._leases.members

    def holder(self, name: str) -> tuple[int, str]:
        """Return (random number, identity) of the process that has this name; (0, "") if no process has it."""
        current = self._holders.get(name)
        return (0, "") if current is None else (current.holder, current.process)

    def renewed_at(self, name: str) -> float:
        """Return when the holder of this name renewed its lease last."""
        return self._leases.renewed_at(name)

    def generation_of(self, name: str) -> int:
        """Return the generation of a reader; 0 if there is none."""
        return self._leases.generation_of(name) or 0

    def admit(self, name: str, generation: int, holder: int, now: float, *, process: str = "") -> bool:
        """Grant the name to a process that starts or resumes reading.

        holder: the process's random number.
        process: the process's identity, as in `own_process`.

        Returns whether it replaces an earlier generation, whose state must be dropped.

        Raises:
            NameBusyError: another process has the name, but may have ended; the caller repeats the request.
            UsageError: another process has the name and renews its lease.
            StaleJobError: a later generation of this name has joined.
        """
        current = self._holders.get(name)
        if current is not None and current.holder != holder:
            _refuse(name, current, self.renewed_at(name), holder, now)
        renewal = self._leases.renew(name, generation, now)
        if renewal is Renewal.STALE:
            raise StaleJobError(f"job {name!r}: generation {self._leases.newest(name)} is newer")
        self._holders[name] = _Holder(holder, process)
        return renewal is Renewal.REPLACED

    def renew(self, name: str, generation: int, now: float) -> None:
        """Renew a reader's lease. Raises StaleJobError if this generation has no lease, or its lease has expired."""
        if self._leases.generation_of(name) != generation:
            raise StaleJobError(f"job {name!r} has no lease (any more); join again")
        self._leases.renew(name, generation, now)

    def leave(self, name: str, generation: int, now: float) -> bool:
        """End a reader's lease; return whether there was one."""
        lost = self._leases.leave(name, generation, now)
        if lost:
            del self._holders[name]
        return lost

    def tick(self, now: float) -> list[str]:
        """Expire leases; return the names that are free now."""
        expired = self._leases.expire(now)
        for name in expired:
            del self._holders[name]
        return expired


def _refuse(name: str, current: _Holder, renewed: float, rival: int, now: float) -> None:
    asked = current.rivals.setdefault(rival, now)
    if renewed > asked + LEAVING_S:
        del current.rivals[rival]
        raise UsageError(
            f"job {name!r} is being read by another process; give this one a different name by "
            "JobOptions(name=...), or none. Jobs with different names read different orders; processes that are "
            "to read the same batches need a sampler with a seeded generator, or torch.distributed"
        )
    raise NameBusyError(
        f"job {name!r} is held by another process, which renewed its lease {now - renewed:.1f} s ago; its name "
        "is free once that lease has expired"
    )
