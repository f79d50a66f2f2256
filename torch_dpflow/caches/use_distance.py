"""Use distance: the thesis's yardstick for ALSD, which trusts certain orders only."""

from __future__ import annotations

from torch_dpflow.caches.foresight import ForesightPolicy
from torch_dpflow.caches.outlook import WeightedMean
from torch_dpflow.caches.reader import Reader


class _CertainMean(WeightedMean):
    def values(self, reader: Reader) -> list[float]:
        far, certain, _, _ = super().values(reader)
        return [far, certain, far, far]


class UseDistance(ForesightPolicy):
    """Evicts the key of the greatest mean distance, where whatever is not certain counts N (thesis, 5.2.1).

    With orders known in full it is ALSD's weighted mean; the difference is what ALSD's estimates are worth.
    """

    name = "use-distance"

    def __init__(
        self, *, max_items: int | None = None, max_bytes: int | None = None, keys: int | None = None
    ) -> None:
        super().__init__(_CertainMean(), max_items=max_items, max_bytes=max_bytes, keys=keys)
