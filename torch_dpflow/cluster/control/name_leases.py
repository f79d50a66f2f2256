"""Leases of the names under which processes read, and the choice between two processes that request one name.

A pure state machine around `leases`; there is no socket, thread or clock inside.

A name belongs to the process that joined under it until its lease expires or it leaves. Another process that requests
it has to repeat the request, because the holder may have ended. If the holder renews its lease after the first request,
the other process is refused for good; otherwise the lease expires, and the next process that requests the name gets it.
A holder that is known to have ended is replaced at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch_dpflow.errors import UsageError
from torch_dpflow.ipc.messages.errors import NameBusyError, StaleJobError
from torch_dpflow.ipc.rpc.leases import ExpireLeases, Leases, Leave, Lost, RenewLease, Stale


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

    def admit(
        self, name: str, generation: int, holder: int, now: float, *, process: str = "", replaces: int = 0
    ) -> bool:
        """Grant the name to a process that begins to read under it, or that returns.

        holder: the process's random number.
        process: its identity, as of `own_process`.
        replaces: the random number of a process that is known to have ended.

        Returns whether this replaces an earlier generation, whose state is void.

        Raises:
            NameBusyError: another process has the name, and may have ended; try again.
            UsageError: another process has it and renews its lease.
            StaleJobError: a later generation has joined.
        """
        current = self._holders.get(name)
        if current is not None and current.holder not in (holder, replaces):
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
