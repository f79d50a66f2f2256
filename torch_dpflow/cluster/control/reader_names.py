"""Names of a flow's readers, each leased to one process. A pure state machine.

A name belongs to the process that joined under it until its lease expires or it leaves. Another process that requests
the name has to repeat its request, because the holder may have ended or be about to leave. If the holder renews its
lease `LEAVING_S` after the first request, the other process is refused for good. Otherwise the lease expires, and the
next process that requests the name gets it. `leave` frees the name of a holder that is known to have ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from torch_dpflow.errors import UsageError
from torch_dpflow.ipc.messages.fields import NameBusyError, StaleJobError
from torch_dpflow.ipc.rpc.leases import Leases, Renewal

#: How long a holder may renew its lease of a name that another process has requested (seconds): ranks of a changed
#: group leave their former job one after the other.
LEAVING_S = 3.0


class Rivals(dict[int, float]):
    """Times of the first refused request of each process (seconds), by the process's random number (`holder`)."""

    def refuse(self, rival: int, renewed: float, now: float, *, busy: str, final: str) -> NoReturn:
        """Refuse a request of the process `rival`, because it conflicts with another process, the holder.

        renewed: when the holder last renewed its lease. busy, final: texts of the two errors.

        Raises:
            NameBusyError: the holder may have ended. The caller repeats the request.
            UsageError: the holder has renewed its lease more than `LEAVING_S` after the first request.
        """
        if renewed > self.setdefault(rival, now) + LEAVING_S:
            del self[rival]
            raise UsageError(final)
        raise NameBusyError(busy)


@dataclass(slots=True)
class _Holder:
    #: A random number by which the process identifies itself.
    holder: int
    #: Its identity for other processes of its host, as in `own_process`.
    process: str = ""
    rivals: Rivals = field(default_factory=Rivals)


class ReaderNames(Leases):
    """Leases of all readers of one flow, each with the process that holds the name. Not thread-safe."""

    def __init__(self, *, lease_s: float) -> None:
        super().__init__(lease_s=lease_s)
        self._holders: dict[str, _Holder] = {}

    def holder(self, name: str) -> tuple[int, str]:
        """Return (random number, identity) of the process that has this name; (0, "") if no process has it."""
        current = self._holders.get(name)
        return (0, "") if current is None else (current.holder, current.process)

    def admit(self, name: str, generation: int, holder: int, now: float, *, process: str = "") -> bool:
        """Grant the name to a process that starts or resumes reading.

        holder: the process's random number.
        process: the process's identity, as in `own_process`.

        Returns whether this generation replaces an earlier one, whose state the caller must drop.

        Raises:
            NameBusyError: another process has the name, but may have ended; the caller repeats the request.
            UsageError: another process has the name and renews its lease.
            StaleJobError: a later generation of this name has joined.
        """
        current = self._holders.get(name)
        if current is not None and current.holder != holder:
            renewed = self.renewed_at(name)
            current.rivals.refuse(
                holder,
                renewed,
                now,
                busy=f"job {name!r} is held by another process, which renewed its lease {now - renewed:.1f} s ago; its "
                "name is free once that lease has expired",
                final=f"job {name!r} is being read by another process; give this one a different name by "
                "JobOptions(name=...), or none. Jobs with different names read different orders; processes that are "
                "to read the same batches need a sampler with a seeded generator, or torch.distributed",
            )
        renewal = self.renew(name, generation, now)
        if renewal is Renewal.STALE:
            raise StaleJobError(f"job {name!r}: generation {self.newest(name)} is newer")
        self._holders[name] = _Holder(holder, process)
        return renewal is Renewal.REPLACED

    def keep(self, name: str, generation: int, now: float) -> None:
        """Renew a reader's lease. Raises StaleJobError if this generation has no lease, or its lease has expired."""
        if self.generation_of(name) != generation:
            raise StaleJobError(f"job {name!r} has no lease (any more); join again")
        self.renew(name, generation, now)

    def leave(self, peer: str, generation: int, now: float) -> bool:
        return self._freed([peer] if super().leave(peer, generation, now) else []) != []

    def expire(self, now: float) -> list[str]:
        return self._freed(super().expire(now))

    def _freed(self, names: list[str]) -> list[str]:
        for name in names:
            del self._holders[name]
        return names
