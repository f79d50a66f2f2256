"""Use distance: the thesis's baseline for ALSD, which uses certain orders only."""

from __future__ import annotations

from torch_dpflow.caches.job_progress import JobProgress
from torch_dpflow.caches.lookahead_policy import LookaheadPolicy
from torch_dpflow.caches.next_use import WeightedMean


class _CertainMean(WeightedMean):
    def values(self, progress: JobProgress) -> list[float]:
        far, certain, _, _ = super().values(progress)
        return [far, certain, far, far]


class UseDistance(LookaheadPolicy):
    """Evicts the key of the greatest mean distance; a key that is not certain counts N (thesis, 5.2.1).

    If orders are known in full it equals ALSD's weighted mean; the difference shows the value of ALSD's estimates.
    """

    name = "use-distance"

    def __init__(
        self, *, max_items: int | None = None, max_bytes: int | None = None, keys: int | None = None
    ) -> None:
        super().__init__(_CertainMean(), max_items=max_items, max_bytes=max_bytes, keys=keys)
