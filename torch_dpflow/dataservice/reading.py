"""What a process sees of one set in the pool: mapped regions, and which samples are there."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_dpflow.dataservice.ahead_reader import AheadReader
from torch_dpflow.dataservice.lane_reader import LaneReader
from torch_dpflow.dataservice.pool_address import PoolAddress
from torch_dpflow.dataservice.pool_connection import PoolConnection
from torch_dpflow.dataservice.protocol import (
    HERE,
    IN_STORAGE,
    MOST_RECORDS,
    PENDING,
    AnySource,
    CountReads,
    OpenSet,
    PreloadSet,
    RecordStates,
    SetInfo,
    SetOpened,
    WantRecords,
)
from torch_dpflow.dataservice.regions import UNKNOWN, UNLOADED, PoolRegion, map_region
from torch_dpflow.errors import DPFlowError
from torch_dpflow.log import DATASETS

#: Between attempts to reach a server, seconds: doubles from the first to the second with each that fails.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
#: How long a set's places are waited for before samples are read from storage again, seconds.
_PLANNING_S = 0.2
#: How often the server is told how many samples were read, seconds.
_TELL_S = 1.0
#: How long an epoch begins later for that, seconds: its order can be announced at its beginning only.
_ANNOUNCING_S = 2.0
Keys = npt.NDArray[np.integer[Any]]


class SetReading:
    """Reads samples of one set from memory, for one process. Thread-safe; never waits for a server that is gone.

    What has been mapped stays readable when the server dies, so its samples still come from memory.

    silence_s: after how long without an answer, or a sample that it waits for, it goes on without the server, seconds.
    """

    def __init__(self, address: PoolAddress, source: AnySource, identity: bytes, silence_s: float) -> None:
        self._silence_s = silence_s
        #: Where the server is on another host.
        self._lanes = LaneReader(address, silence_s) if address.directory is None else None
        self._address, self._source, self._identity = address, source, identity
        self._lock = threading.Lock()
        self._connection: PoolConnection | None = None
        self._per_stripe = 1
        self._regions: dict[int, PoolRegion] = {}
        #: All that are in use, those of an earlier server too.
        self._mapped: list[PoolRegion] = []
        #: Stripes that are in memory as a whole, and where.
        self._ready: dict[int, PoolRegion] = {}
        #: What the server has said of records in other stripes, where that is final.
        self._states: dict[int, int] = {}
        self._retry_at = 0.0
        self._pause_s = _FIRST_PAUSE_S
        #: Samples that came from memory, and that did not.
        self.hits = self.misses = 0
        #: What of these the server knows, and since when.
        self._told, self._told_at = (0, 0), 0.0
        #: Whether some have no place in memory; those may be read ahead.
        self._is_part = False
        self._ahead = AheadReader(identity, silence_s)

    def announce(self, order: str, keys: Callable[[], Keys], spread: int) -> None:
        """Tell the server in which order, of this name, records are read from now on, if that is of use.

        keys: called at most once.
        spread: records that are asked for between an earlier one and its turn, at most.
        """
        with self._lock, self._from_storage():
            deadline = time.monotonic() + _ANNOUNCING_S
            while self._connection is None and (wait_s := self._retry_at - time.monotonic()) < _PLANNING_S:
                time.sleep(max(0.0, wait_s))
                self._connect()
                if time.monotonic() > deadline:
                    break
            if self._connection is not None and self._is_part:
                self._ahead.announce(self._connection, order, keys(), spread)

    def read(
        self,
        records: Sequence[int],
        lengths: Sequence[int | None] | None = None,
        order: str | None = None,
    ) -> list[bytes | None]:
        """A copy of each record that is in memory; None for those that have to be read from storage.

        lengths: of each; None: unknown. What has another one is not taken.
        order: the name of what was announced, in this process or its parent.
        """
        with self._lock:
            self._look(records)
            if self._lanes is None:
                found = [self._read(record) for record in records]
            else:
                found = self._read_afar(self._lanes, records, lengths or [None] * len(records))
            if order is not None and None in found:
                found = self._read_ahead(order, records, found)
            self.misses += found.count(None)
            self.hits += len(found) - found.count(None)
            self._tell()
        return found

    def places(self, records: npt.NDArray[np.int64]) -> list[tuple[PoolRegion, npt.NDArray[np.int64]]]:
        """Regions in which some of these records are mapped, and where each begins there; -1: not in this one."""
        found: list[tuple[PoolRegion, npt.NDArray[np.int64]]] = []
        with self._lock:
            self._look(records.tolist())
            stripes, numbers = np.divmod(records, self._per_stripe)
            for stripe in np.unique(stripes).tolist():
                own, region = stripes == stripe, self._ready.get(stripe)
                if region is None and stripe in self._regions:
                    region = self._regions[stripe]
                    own &= [self._states.get(one) == HERE for one in records.tolist()]
                if region is not None:
                    begins = np.full(len(records), -1, np.int64)
                    begins[own] = region.offsets(stripe, numbers[own])
                    found.append((region, begins))
        return found

    def count(self, hits: int, misses: int) -> None:
        """So many more samples were found in memory by `places`, and were not."""
        with self._lock:
            self.hits += hits
            self.misses += misses
            self._tell()

    def close(self) -> None:
        """End reading; memory is freed."""
        with self._lock:
            self._tell(0.0)
            self._forget()

    # -- inside ----------------------------------------------------------------------------------------------

    def _read_afar(
        self, lanes: LaneReader, records: Sequence[int], lengths: Sequence[int | None]
    ) -> list[bytes | None]:
        if self._connection is None:
            return [None] * len(records)
        found = lanes.read(self._identity, [str(self._address)] * len(records), records, lengths)
        if self._identity in lanes.gone:
            lanes.gone.clear()
            try:
                self._connection.contents()
                # This reader has kept it from being idle, so somebody has unloaded it.
                self._retry_at = math.inf
            except DPFlowError:  # it is another server, which begins anew
                self._retry_at = 0.0
            self._forget()
        return found

    def _read_ahead(
        self, order: str, records: Sequence[int], found: Sequence[bytes | None]
    ) -> list[bytes | None]:
        """What was found, and what the server reads ahead of the rest."""
        if self._connection is not None and self._is_part:
            missing = [record for record, content in zip(records, found) if content is None]
            with self._from_storage():
                ahead = self._ahead.read(self._connection, order, missing)
                return [
                    ahead.get(record) if content is None else content
                    for record, content in zip(records, found)
                ]
        return [*found]

    def _read(self, record: int) -> bytes | None:
        stripe, number = divmod(record, self._per_stripe)
        region = self._ready.get(stripe)
        if region is None:
            if self._states.get(record) != HERE:
                return None
            region = self._regions[stripe]
        return None if region.place(stripe, number)[1] == UNKNOWN else region.read(stripe, number)

    def _look(self, records: Sequence[int]) -> None:
        """Ask the server for what is not known to be in memory or in storage, and wait for it."""
        retired = {region.retired for region in self._mapped} - {None}
        if retired:
            self._forget()
            # Where somebody has unloaded it, this process loads it no more.
            self._retry_at = math.inf if UNLOADED in retired else 0.0
        if self._ready and all(record // self._per_stripe in self._ready for record in records):
            return
        with self._from_storage():
            if self._connection is None and time.monotonic() >= self._retry_at:
                self._connect()
            if self._connection is not None and self._lanes is None:
                self._ask(self._connection, records)

    @contextmanager
    def _from_storage(self) -> Iterator[None]:
        """Go on without the server where it is not there, or does not answer."""
        try:
            yield
        except DPFlowError as error:
            self._disconnect()
            self._retry_at = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            DATASETS.info("%s is read from storage for now: %s", self._source.ref, error)

    def _connect(self) -> None:
        connection = PoolConnection(self._address, silence_s=self._silence_s)
        try:
            request = PreloadSet(source=self._source, identity=self._identity, is_explicit=False, whole=False)
            info, _ = connection.ask(request)
            assert isinstance(info, SetInfo)
            if not info.is_placed:
                self._retry_at = time.monotonic() + _PLANNING_S
                connection.close()
                return
            opened, fds = connection.ask(OpenSet(self._identity))
            assert isinstance(opened, SetOpened)
            regions = [map_region(fd, self._identity) for fd in fds]
        except BaseException:
            connection.close()
            raise
        self._connection, self._pause_s = connection, _FIRST_PAUSE_S
        self._per_stripe, self._is_part = opened.per_stripe, opened.is_part and self._lanes is None
        # What an earlier server said of single records holds for its regions alone; whole stripes stay mapped.
        self._states = {}
        self._mapped = [*{id(one): one for one in self._ready.values()}.values(), *regions]
        self._regions = {stripe: region for region in regions for stripe in region.stripes}

    def _ask(self, connection: PoolConnection, records: Sequence[int]) -> None:
        deadline = time.monotonic() + self._silence_s
        while unknown := self._unknown(records)[:MOST_RECORDS]:
            answer, _ = connection.ask(WantRecords(self._identity, unknown))
            assert isinstance(answer, RecordStates)
            came = {one: state for one, state in zip(unknown, answer.states) if state != PENDING}
            self._states |= came
            self._ready |= {
                stripe: self._regions[stripe] for stripe in answer.stripes if stripe in self._regions
            }
            if came:
                deadline = time.monotonic() + self._silence_s
            elif time.monotonic() > deadline:
                return  # its storage does not answer; ours may, and says so if it does not

    def _unknown(self, records: Sequence[int]) -> list[int]:
        unknown: list[int] = []
        for record in records:
            stripe = record // self._per_stripe
            if stripe in self._ready or self._states.get(record, PENDING) != PENDING:
                continue
            if stripe in self._regions:
                unknown.append(record)
            else:
                self._states[record] = IN_STORAGE
        return unknown

    def _tell(self, pause_s: float = _TELL_S) -> None:
        """Tell the server what was read, for people."""
        now = time.monotonic()
        if self._connection is None or now < self._told_at + pause_s:
            return
        hits, misses = self._told
        if self._connection.tell(CountReads(self._identity, self.hits - hits, self.misses - misses)):
            self._told, self._told_at = (self.hits, self.misses), now

    def _forget(self) -> None:
        self._disconnect()
        self._regions, self._ready, self._states, self._mapped = {}, {}, {}, []

    def _disconnect(self) -> None:
        if self._lanes is not None:
            self._lanes.close()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
