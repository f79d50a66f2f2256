"""MinIO: keep what came first, for ever (CoorDL; "MinIO" in the thesis's comparison)."""

from __future__ import annotations

from torch_dpflow.caches.keyed import KeyedPolicy


class MinIO(KeyedPolicy):
    """Fills up and replaces nothing: where each epoch reads each sample once, every replacement is a loss.

    `evict`, when the owner insists, gives up what was loaded last.
    """

    name = "minio"

    def _entered(self, key: int) -> None: ...

    def _used(self, key: int) -> None: ...

    def _left(self, key: int) -> None: ...

    def _first_to_go(self) -> int:
        return next(reversed(self._sizes))

    def _make_room(self, size: int) -> list[int] | None:
        return [] if self._fits(size) else None
