"""MinIO: never replace anything (CoorDL; "MinIO" in the thesis's comparison)."""

from __future__ import annotations

from torch_dpflow.caches.keyed import KeyedPolicy


class MinIO(KeyedPolicy):
    """Keeps the first samples that fit: if each epoch reads each sample once, replacing gains nothing.

    `evict` drops the sample that was loaded last.
    """

    name = "minio"

    def _entered(self, key: int) -> None: ...

    def _used(self, key: int) -> None: ...

    def _left(self, key: int) -> None: ...

    def _next_victim(self) -> int:
        return next(reversed(self._sizes))

    def _make_room(self, size: int) -> list[int] | None:
        return [] if self._fits(size) else None
