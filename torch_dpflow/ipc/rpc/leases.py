"""Leases, by which a service detects that peers are lost. Pure: no socket, thread or clock inside.

A peer is a member while it renews its lease in time, by heartbeats; otherwise it is lost. Each time a peer starts, or
rejoins after a loss, it has a higher generation. A lost generation stays lost while it is remembered, even if the peer
is alive, because other peers have its work. Its messages are `STALE`; the peer has to rejoin under a new generation.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, TypeVar

from torch_dpflow._core.checks import check_seconds

K = TypeVar("K", bound=Hashable)
#: Maximum number of former members whose generations are remembered, and for how long, seconds. After that, a peer can
#: rejoin under its old generation.
MAX_REMEMBERED, REMEMBER_S = 1 << 14, 3600.0


class Expiry(Generic[K]):
    """Set of names that expire if they are not renewed in time. Not thread-safe; every call is amortised O(1).

    Names are removed only by `expire` and `drop`. A service that was delayed can therefore first handle the messages
    that arrived meanwhile, and loses no living peer. If the clock runs backwards, time stands still.

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
        """Return the time at which this name was renewed last."""
        return self._renewed[name]

    def renew(self, name: K, now: float) -> None:
        self._now = self._renewed[name] = max(self._now, now)
        self._renewed.move_to_end(name)

    def drop(self, name: K) -> bool:
        """Remove a name; return whether it was in the set."""
        return self._renewed.pop(name, None) is not None

    def expire(self, now: float) -> list[K]:
        """Remove the names that were not renewed for `lease_s` seconds, and return them."""
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
    """Effect of a peer's message on the peer's lease."""

    RENEWED = enum.auto()
    #: The generation is now a member; the peer had no lease.
    GRANTED = enum.auto()
    #: The generation is now a member in place of an earlier one of this peer, whose work goes to other peers.
    REPLACED = enum.auto()
    #: No effect: the generation is lost or has left, or a newer one has replaced it.
    STALE = enum.auto()


class Leases:
    """Leases of all peers of one service. Not thread-safe. lease_s: as in `Expiry`."""

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
        """Renew or begin the lease of a peer that has sent a message under `generation`; return the effect."""
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
        """End the lease of a peer; return whether it had one. False, without effect, if a newer generation is known."""
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
