"""Which process reads under which name: leases, and who has a name that two processes want.

A pure state machine around `leases`; there is no socket, thread or clock inside.

A name belongs to the process that joined under it until its lease lapses or it leaves. Another that wants it is
put off, because the holder may be dead already. A holder that is heard of after that is alive, and then the other
is refused for good; one that is silent loses the name when its lease lapses, to whoever asks next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch_dpflow.errors import UsageError
from torch_dpflow.remote.control.leases import ExpireLeases, Heard, Leases, Leave, Lost, Stale
from torch_dpflow.remote.wire.errors import NameBusyError, StaleJobError


@dataclass(slots=True)
class _Holder:
    #: Drawn by the process that has the name.
    holder: int
    #: When it was last heard of, seconds.
    heard: float
    #: When others first asked for the name, by what they drew.
    rivals: dict[int, float] = field(default_factory=dict)


class NameLeases:
    """Keeps the names of all readers of one flow. Not thread-safe; every call is amortised O(1).

    Args:
        lease_s: seconds of silence after which a reader is taken for dead.
    """

    def __init__(self, *, lease_s: float) -> None:
        self._leases = Leases(lease_s=lease_s)
        self._holders: dict[str, _Holder] = {}

    @property
    def members(self) -> Mapping[str, int]:
        """The generation of everyone who reads: a copy."""
        return self._leases.members

    def admit(self, name: str, generation: int, holder: int, now: float) -> bool:
        """A process, known by what it drew, begins to read under this name, or comes back under it.

        Returns whether the name was known under an earlier generation, of which nothing counts any more.

        Raises:
            NameBusyError: another process has the name, and may be dead; ask again.
            UsageError: another process has it and lives.
            StaleJobError: a later generation has joined.
        """
        current = self._holders.get(name)
        if current is not None and current.holder != holder:
            _refuse(name, current, holder, now)
        changes = self._leases.handle(Heard(name, generation, now))
        for change in changes:
            if isinstance(change, Stale):
                raise StaleJobError(f"job {name!r}: generation {change.newest} is newer")
        self._holders[name] = _Holder(holder, now)
        return any(isinstance(change, Lost) for change in changes)

    def heard(self, name: str, generation: int, now: float) -> None:
        """It lives. StaleJobError for one that has not joined, or was taken for dead."""
        if self._leases.generation_of(name) != generation:
            raise StaleJobError(f"job {name!r} is not known (any more); join anew")
        self._leases.handle(Heard(name, generation, now))
        self._holders[name].heard = now

    def leave(self, name: str, generation: int, now: float) -> bool:
        """It says goodbye; whether it was there."""
        lost = any(isinstance(one, Lost) for one in self._leases.handle(Leave(name, generation, now)))
        if lost:
            del self._holders[name]
        return lost

    def tick(self, now: float) -> list[str]:
        """Time has passed; the names of those who are taken for dead from now on."""
        expired = [
            change.peer for change in self._leases.handle(ExpireLeases(now)) if isinstance(change, Lost)
        ]
        for name in expired:
            del self._holders[name]
        return expired

    def validate(self) -> None:
        """Check every invariant; O(readers), for tests. Raises AssertionError."""
        self._leases.validate()
        assert self._holders.keys() == self._leases.members.keys()


def _refuse(name: str, current: _Holder, rival: int, now: float) -> None:
    asked = current.rivals.setdefault(rival, now)
    if current.heard > asked:
        del current.rivals[rival]
        raise UsageError(
            f"job {name!r} is being read by another process; give this one a name of its own, as in "
            "JobOptions(name=...), or none"
        )
    raise NameBusyError(
        f"job {name!r} was last heard of {now - current.heard:.1f} s ago in another process; its name is free once "
        "that is taken for dead"
    )
