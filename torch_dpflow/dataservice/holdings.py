"""What one server holds: its sets, whoever has decided that it holds them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch_dpflow.dataservice.ahead_memory import AheadMemory
from torch_dpflow.dataservice.filling import HeldSet
from torch_dpflow.dataservice.protocol import MOST_RECORDS, MOST_REGIONS, RecordStates, SetOpened
from torch_dpflow.errors import UsageError

#: How long an answer to `WantRecords` waits for what is on its way, seconds: well below a client's patience.
ANSWER_S = 1.0


class Holdings:
    """The sets that a server holds, by identity. Thread-safe.

    ahead_bytes: memory for reading ahead what has no place.
    """

    def __init__(self, ahead_bytes: int) -> None:
        self._sets: dict[bytes, HeldSet] = {}
        self.ahead = AheadMemory(ahead_bytes)

    def add(self, identity: bytes, held: HeldSet) -> None:
        """Hold a set from now on."""
        self._sets[identity] = held

    def get(self, identity: bytes) -> HeldSet:
        """A set. Raises UsageError: it is not here."""
        held = self._sets.get(identity)
        if held is None:
            raise UsageError(f"set {identity.hex()} is not in the pool (any more); preload it")
        return held

    def open(self, identity: bytes, *, with_regions: bool) -> tuple[SetOpened, list[int]]:
        """How to read a set, and descriptors of its regions, which the caller closes. Raises UsageError, OSError.

        with_regions: the reader is on this host.
        """
        held = self.get(identity)
        fds: list[int] = []
        try:
            fds.extend(os.dup(region.fd) for region in held.regions[: MOST_REGIONS * with_regions])
        except OSError:  # no descriptor is free
            for fd in fds:
                os.close(fd)
            raise
        return SetOpened(held.records.per_stripe, len(fds), held.is_part), fds

    def want(self, identity: bytes, records: Sequence[int]) -> RecordStates:
        """The states of these records, which are read first. Raises UsageError: one does not exist."""
        held = self.get(identity)
        if len(records) > MOST_RECORDS or not all(0 <= one < held.records.records for one in records):
            raise UsageError(f"{len(records)} records: at most {MOST_RECORDS} that exist are allowed")
        return held.want(records, ANSWER_S)

    def drop(self, identity: bytes, why: int) -> None:
        """Give a set up, and tell its readers why."""
        held = self._sets.pop(identity, None)
        self.ahead.drop(identity)
        if held is not None:
            held.close(why)

    def close(self) -> None:
        """Give everything up; readers go on with what they have mapped."""
        self.ahead.close()
        for held in self._sets.values():
            held.close()
        self._sets = {}
