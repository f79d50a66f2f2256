"""How many nodes a platform should run for a cluster. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_dpflow.cluster.messages.coordinator import NodeLimits


@dataclass(slots=True)
class NodeScaling:
    """Number of nodes by demand, within limits: as many as the workers of all flows take.

    It rises at once. It falls only to what was enough all through the latest `hold_s`, as a node that leaves loses what
    its shards have cached. Times are seconds on one monotonic clock.
    """

    limits: NodeLimits
    #: The present number; 0 before the first call.
    _count: int = field(default=0, init=False)
    #: Since when fewer are enough, and the greatest number that was needed since then; None: they are not.
    _less: tuple[float, int] | None = field(default=None, init=False)

    def wanted(self, workers: int, running: int, now: float) -> int:
        """Return the number of nodes for `workers` workers.

        running: how many run; where the first call begins, as an earlier coordinator may have started them.
        """
        limits = self.limits
        needed = limits.clamp(-(-workers // limits.workers_each))
        count = self._count or limits.clamp(running)
        if needed >= count:
            self._count, self._less = needed, None
            return needed
        since, most = self._less or (now, needed)
        self._less = since, max(most, needed)
        if now - since >= limits.hold_s:
            count, self._less = max(most, needed), None
        self._count = count
        return count
