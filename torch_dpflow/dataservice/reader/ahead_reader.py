"""What a process gets of samples that its host's server reads ahead."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_dpflow.dataservice.lanes.pool_connection import PoolConnection
from torch_dpflow.dataservice.lanes.regions import map_sealed
from torch_dpflow.dataservice.messages.ahead_messages import (
    COMES,
    MOST_ANNOUNCED,
    AheadOpened,
    AheadPlaces,
    AnnounceOrder,
    OpenAhead,
    TookAhead,
    WantAhead,
)
from torch_dpflow.dataservice.messages.protocol import (
    MOST_RECORDS,
)
from torch_dpflow.errors import MessageError, PoolFullError, UsageError


class AheadReader:
    """Reads one set for one process, one call at a time.

    silence_s: after how long without any sample the rest is left, seconds.
    """

    def __init__(self, identity: bytes, silence_s: float) -> None:
        self._identity, self._silence_s = identity, silence_s
        #: What is mapped, and its number.
        self._memory: mmap.mmap | None = None
        self._number = 0

    def announce(
        self, connection: PoolConnection, order: str, keys: npt.NDArray[np.integer[Any]], spread: int
    ) -> None:
        """These records are read in this order from now on. Raises as `PoolConnection.ask`."""
        numbers = keys.astype("<i4")
        for first in range(0, len(numbers), MOST_ANNOUNCED):
            part = AnnounceOrder(
                identity=self._identity,
                order=order,
                first=first,
                total=len(numbers),
                spread=spread,
                records=numbers[first : first + MOST_ANNOUNCED].tobytes(),
            )
            connection.ask(part)

    def read(self, connection: PoolConnection, order: str, records: Sequence[int]) -> dict[int, bytes]:
        """Those of these records that the server has read, or reads now. Raises as `PoolConnection.ask`."""
        found: dict[int, bytes] = {}
        left = list(dict.fromkeys(records))
        deadline = time.monotonic() + self._silence_s
        try:
            while left and time.monotonic() < deadline:
                asked, rest = left[:MOST_RECORDS], left[MOST_RECORDS:]
                places, _ = connection.ask(WantAhead(self._identity, order, asked))
                assert isinstance(places, AheadPlaces)
                copied = self._copies(connection, asked, places)
                if copied:
                    connection.ask(TookAhead(self._identity, order, [*copied]))
                    found |= copied
                    deadline = time.monotonic() + self._silence_s
                left = [one for one, length in zip(asked, places.lengths) if length == COMES] + rest
        except (UsageError, PoolFullError):  # nothing is announced any more: by this process or its parent
            pass
        return found

    def _copies(
        self, connection: PoolConnection, records: Sequence[int], places: AheadPlaces
    ) -> dict[int, bytes]:
        there = [one for one in zip(records, places.offsets, places.lengths) if one[2] >= 0]
        if not there:
            return {}
        memory = self._mapped(connection, places.memory)
        if any(not 0 <= offset <= offset + length <= len(memory) for _, offset, length in there):
            raise MessageError("a place in the pool lies outside of its memory")
        return {record: memory[offset : offset + length] for record, offset, length in there}

    def _mapped(self, connection: PoolConnection, number: int) -> mmap.mmap:
        if self._memory is None or number != self._number:
            opened, fds = connection.ask(OpenAhead(self._identity))
            try:
                assert isinstance(opened, AheadOpened)
                self._memory, self._number = map_sealed(fds[0]), opened.memory
            except (OSError, ValueError, IndexError) as error:
                raise MessageError(f"memory of the pool cannot be mapped: {error}") from error
            finally:
                for fd in fds:
                    os.close(fd)
            if number != self._number:
                raise UsageError(f"memory {number} of the pool is gone")
        return self._memory
