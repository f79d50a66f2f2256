"""Ownership of a cluster's remote workers by its shards, for the provisioner. A pure state machine.

A shard's fleet names each worker before it requests the start, and the provisioner receives the name before it calls
the platform. If shard or provisioner dies, the other process still has all names. A worker that neither of them knows,
as after the death of both, is a stray.

A shard that attaches under a higher incarnation has lost the workers of its earlier incarnation, which alone had
their keys. A shard also loses its workers if it is silent for longer than its workers wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch_dpflow._core.clocks import START_S
from torch_dpflow.cluster.messages.provisioner import MAX_EVENTS, MAX_OWNED
from torch_dpflow.errors import RejectedError, ThrottledError, UnavailableError, UsageError
from torch_dpflow.ipc.messages.fields import StaleShardError
from torch_dpflow.ipc.rpc.leases import Expiry
from torch_dpflow.remote.launchers.contract import Ended, Outcome, Refused, cluster_of

#: Silence after which a shard has lost its workers (seconds): workers end if their shard does not answer them.
SILENT_S = START_S / 2
#: Pause before a start that exceeds the limit is repeated (seconds).
AGAIN_S = 1.0


@dataclass(slots=True)
class _Owner:
    incarnation: int
    #: Outcomes that it has not received, and how many it has received before.
    news: list[Outcome] = field(default_factory=list)
    seen: int = 0


class WorkerOwners:
    """Record of which shard owns each remote worker, within the limit of workers. Not thread-safe. Times are seconds.

    Args:
        prefix: prefix of the names of all remote workers of the cluster.
        workers: maximum number of workers of the cluster. A tenth more, at least one, are allowed for replacements.
    """

    def __init__(self, prefix: str, workers: int) -> None:
        self._prefix = prefix
        self._workers = workers
        self.most = workers + max(1, workers // 10)
        self._owners: dict[str, _Owner] = {}
        self._leases: Expiry[str] = Expiry(SILENT_S)
        #: The shard of each worker that has not ended. For a worker without a shard: when it should be ended; infinite
        #: while it is being ended.
        self._members: dict[str, str | float] = {}

    def __len__(self) -> int:
        return len(self._members)

    def limit(self, most: int | None) -> None:
        """Lower the maximum number of workers to `most`, the platform's limit; None: the platform has no limit."""
        self.most = self.most if most is None else min(self.most, most)

    def attach(self, shard: str, incarnation: int, names: Iterable[str], now: float) -> int:
        """Attach a shard that owns the workers `names`; return how many outcomes this incarnation has received.

        Raises StaleShardError if the shard has been replaced, UsageError if a name is not allowed or another shard's.
        """
        owner = self._owners.get(shard)
        if owner is not None and owner.incarnation > incarnation:
            raise StaleShardError(f"incarnation {owner.incarnation} has replaced {shard!r}")
        names = list(names)
        for name in names:
            self._check(name, shard)
        if owner is None or owner.incarnation < incarnation:
            self._doom(shard, now)
            owner = self._owners[shard] = _Owner(incarnation)
        self._leases.renew(shard, now)
        self._members |= dict.fromkeys(names, shard)
        return owner.seen

    def hears(self, shard: str, incarnation: int, now: float) -> bool:
        """Renew the lease of a shard that has called; return False if this incarnation is not attached."""
        owner = self._owners.get(shard)
        if owner is None or owner.incarnation != incarnation:
            return False
        self._leases.renew(shard, now)
        return True

    def start(self, shard: str, name: str) -> bool:
        """Record a shard's request for a worker; return whether the caller must start the worker.

        Returns False if the worker was started before, or if the request is refused. For a refusal, `news` then returns
        a `Refused` outcome with the reason.
        """
        if name in self._members:
            if isinstance(self._members[name], float):
                self._owners[shard].news.append(Refused(name, UnavailableError(f"{name} is being ended")))
            return False
        try:
            self._check(name, shard)
        except UsageError as error:
            self._owners[shard].news.append(Refused(name, RejectedError(str(error))))
            return False
        if len(self._members) >= self.most:
            text = (
                f"{name} waits: the cluster has {len(self._members)} workers; {self._workers} are allowed, and some "
                "more while workers are replaced"
            )
            self._owners[shard].news.append(Refused(name, ThrottledError(text, AGAIN_S)))
            return False
        self._members[name] = shard
        return True

    def has(self, shard: str, name: str) -> bool:
        """Return whether a shard owns the worker of this name."""
        return self._members.get(name) == shard

    def note(self, outcome: Outcome) -> None:
        """Record a platform's outcome for the shard that owns the worker. `Refused` and `Ended` remove the worker."""
        shard = self._members.get(outcome.name)
        if isinstance(outcome, Refused | Ended):
            self._members.pop(outcome.name, None)
        if isinstance(shard, str):
            self._owners[shard].news.append(outcome)

    def news(self, shard: str, seen: int) -> tuple[int, list[Outcome]]:
        """Return (count, up to `MAX_EVENTS` outcomes that a shard has not received), and drop the received outcomes.

        seen: number of outcomes that the shard has received. The count is `seen` plus the number of returned outcomes.
        """
        owner = self._owners[shard]
        had = min(max(0, seen - owner.seen), len(owner.news))
        del owner.news[:had]
        owner.seen += had
        told = owner.news[:MAX_EVENTS]
        return owner.seen + len(told), told

    def release(self, shard: str, incarnation: int, end_at: float) -> list[str]:
        """Detach a shard and return its workers; [] if it is not attached. At `end_at`, `to_end` returns them."""
        owner = self._owners.get(shard)
        if owner is None or owner.incarnation != incarnation:
            return []
        del self._owners[shard]
        self._leases.drop(shard)
        return self._doom(shard, end_at)

    def to_end(self, now: float) -> list[str]:
        """Return the workers that should be ended now, also those of silent shards. Returns each worker once."""
        for shard in self._leases.expire(now):
            del self._owners[shard]
            self._doom(shard, now)
        due = [name for name, end_at in self._members.items() if isinstance(end_at, float) and now >= end_at]
        self._members |= dict.fromkeys(due, math.inf)
        return due

    def strays(self, found: Iterable[str]) -> list[str]:
        """Return the names in `found` that are workers of the cluster and not in this record."""
        return [name for name in found if name.startswith(self._prefix) and name not in self._members]

    def _doom(self, shard: str, end_at: float) -> list[str]:
        """Take all workers from a shard, to be ended at `end_at`; return their names."""
        mine = [name for name, owner in self._members.items() if owner == shard]
        self._members |= dict.fromkeys(mine, float(end_at))
        return mine

    def _check(self, name: str, shard: str) -> None:
        if not name.startswith(self._prefix) or cluster_of(name) is None:
            raise UsageError(f"{name!r:.80} is no member of this cluster, whose names begin with {self._prefix!r}")
        if isinstance(owner := self._members.get(name, shard), str) and owner != shard:
            raise UsageError(f"{name} is a member of {owner!r}, and not of {shard!r}")
        if len(self._members) >= MAX_OWNED and name not in self._members:
            raise UsageError(f"{name}: {MAX_OWNED} members are there, the most that a provisioner has")
