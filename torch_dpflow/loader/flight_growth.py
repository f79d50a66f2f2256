"""How many batches may be in flight beyond torch's number."""

from __future__ import annotations

from torch_dpflow.ipc.memory.headroom import Headroom

#: So many bytes of batches beyond torch's number are always allowed; more while they are less than this part of the
#: available memory.
GROWTH_BYTES, GROWTH_FRACTION = 64 << 20, 4


class FlightGrowth:
    """Lets more batches be in flight than with torch while a worker is idle because the due one is late.

    Args:
        most: torch's number.
        limit: how many there may be; `most` where none may be added.
    """

    def __init__(self, most: int, limit: int) -> None:
        self._most = most
        self._limit = limit

    def allows(self, flights: int, largest: int) -> bool:
        """Whether so many may be in flight. largest: bytes of the largest batch so far; 0 while none has come."""
        more = (flights - self._most) * largest
        # Until a batch has come, nobody knows how large they are.
        if flights > self._limit or not largest:
            return False
        if more < GROWTH_BYTES:
            return True
        try:
            return more < Headroom().available() // GROWTH_FRACTION
        except OSError:  # no descriptor is left to read it by
            return False
