"""The sets that a server reads ahead, and the memory that they share for it."""

from __future__ import annotations

import itertools
import os
import secrets
import threading
from collections.abc import Sequence

from torch_dpflow.errors import UsageError
from torch_dpflow.pool.messages.ahead_messages import AheadOpened, AnnounceOrder, memory_name
from torch_dpflow.pool.messages.protocol import MOST_RECORDS
from torch_dpflow.pool.server.ahead import AheadReading
from torch_dpflow.pool.server.filling import HeldSet


class AheadMemory:
    """Reads sets ahead while orders of them are announced. Thread-safe.

    memory_bytes: for all of them. Each gets half of what is left when its first order is announced.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._left = memory_bytes
        self._numbers = itertools.count(secrets.randbits(62))  # no name of a set
        self._lock = threading.RLock()
        self._readings: dict[bytes, AheadReading] = {}

    def announce(self, held: HeldSet, connection: str, part: AnnounceOrder) -> None:
        """Take a part of an order. Raises PoolFullError: there is no memory for it; UsageError: it is no such part."""
        with self._lock:
            reading = self._readings.get(part.identity)
            if reading is None:
                reading = held.read_ahead(self._left // 2, next(self._numbers))
                self._readings[part.identity] = reading
                self._left -= reading.memory_bytes
            reading.announce(connection, part)

    def open(self, identity: bytes) -> tuple[AheadOpened, list[int]]:
        """The memory that a set is read ahead into, whose descriptor the caller closes. Raises as `of`."""
        with self._lock:
            reading = self.of(identity)
            return AheadOpened(reading.number), [os.dup(reading.fd)]

    def of(self, identity: bytes, records: Sequence[int] = ()) -> AheadReading:
        """What reads a set ahead, for somebody who asks for these. Raises UsageError: nothing does; too many."""
        if len(records) > MOST_RECORDS:
            raise UsageError(f"{len(records)} records: at most {MOST_RECORDS} are allowed")
        with self._lock:
            try:
                return self._readings[identity]
            except KeyError:
                raise UsageError(f"no order of set {identity.hex()} is announced; announce one") from None

    def named(self, name: bytes) -> AheadReading | None:
        """What is read into the memory with this name, as of `memory_name`; None: it is gone. Waits for nobody."""
        return next((one for one in [*self._readings.values()] if memory_name(one.number) == name), None)

    def leave(self, connection: str) -> None:
        """A connection has ended; the memory of sets whose last order goes with it is free."""
        with self._lock:
            for identity, reading in list(self._readings.items()):
                reading.leave(connection)
                if reading.is_idle:
                    self._drop(identity)

    def drop(self, identity: bytes) -> None:
        """A set is given up."""
        with self._lock:
            self._drop(identity)

    def close(self) -> None:
        """Give everything up."""
        with self._lock:
            for identity in list(self._readings):
                self._drop(identity)

    def _drop(self, identity: bytes) -> None:
        reading = self._readings.pop(identity, None)
        if reading is not None:
            reading.close()
            self._left += reading.memory_bytes
