"""Datasets that one server holds, as its leader has decided."""

from __future__ import annotations

import itertools
import os
import secrets
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch_dpflow._core.backoff import Backoff
from torch_dpflow.datasets.storage.failures import is_transient
from torch_dpflow.errors import StorageError, UsageError
from torch_dpflow.log import SERVICE
from torch_dpflow.pool.messages import (
    ALL_FAILED,
    ELSEWHERE,
    MAX_RECORDS,
    MAX_SEGMENTS,
    AnnounceAccessPlan,
    DatasetOpened,
    DatasetPart,
    DatasetState,
    DropDataset,
    RecordStates,
)
from torch_dpflow.pool.server import start_thread
from torch_dpflow.pool.server.ahead import AheadReading
from torch_dpflow.pool.server.held_dataset import FIRST_PAUSE_S, MAX_PAUSE_S, HeldDataset
from torch_dpflow.pool.sources import open_source
from torch_dpflow.pool.transport.data_frames import memory_name


class AheadMemory:
    """Memory for reading ahead, shared by the datasets whose access plans are announced. Thread-safe.

    memory_bytes: total for all datasets. A dataset gets half of the free memory when its first plan is announced.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._left = memory_bytes
        self._numbers = itertools.count(secrets.randbits(62))  # never equal to the identity of a dataset
        self._lock = threading.RLock()
        self._readings: dict[bytes, AheadReading] = {}

    def announce(self, held: HeldDataset, connection: str, part: AnnounceAccessPlan) -> None:
        """Accept a part of a reader's plan for a dataset. connection: name of the reader's connection.

        Raises PoolFullError if there is no memory for the dataset, UsageError for an invalid part or too many plans.
        """
        with self._lock:
            reading = self._readings.get(part.identity)
            if reading is None:
                reading = held.read_ahead(self._left // 2, next(self._numbers))
                self._readings[part.identity] = reading
                self._left -= reading.memory_bytes
            reading.announce(connection, part)

    def of(self, identity: bytes, records: Sequence[int] = ()) -> AheadReading:
        """Return the `AheadReading` of a dataset. records: requested records, of which only the number is checked.

        Raises UsageError if the dataset has no `AheadReading`, or there are more than `MAX_RECORDS` records.
        """
        if len(records) > MAX_RECORDS:
            raise UsageError(f"{len(records)} records: at most {MAX_RECORDS} are allowed")
        with self._lock:
            try:
                return self._readings[identity]
            except KeyError:
                raise UsageError(f"no access plan of dataset {identity.hex()} is announced; announce one") from None

    def named(self, name: bytes) -> AheadReading | None:
        """Return the `AheadReading` whose memory has this `memory_name`; None if there is none. Takes no lock."""
        return next((one for one in [*self._readings.values()] if memory_name(one.number) == name), None)

    def leave(self, connection: str) -> None:
        """Drop a connection's plans; free the memory of datasets without plans."""
        with self._lock:
            for reading in self._readings.values():
                reading.leave(connection)
            self.drop([identity for identity, reading in self._readings.items() if reading.is_idle])

    def drop(self, identities: Iterable[bytes]) -> None:
        """Drop the plans of datasets, and free their memory for reading ahead."""
        with self._lock:
            for identity in identities:
                if (reading := self._readings.pop(identity, None)) is not None:
                    reading.close()
                    self._left += reading.memory_bytes

    def close(self) -> None:
        """Drop all plans, and free all memory."""
        with self._lock:
            self.drop([*self._readings])


#: Longest wait of an answer for records that are being read, seconds.
ANSWER_S = 1.0
#: Maximum datasets of a pool.
MAX_DATASETS = 4096
#: Maximum characters of an error in a list.
_MAX_ERROR_CHARS = 2000


@dataclass(eq=False)
class _Holding:
    is_explicit: bool
    #: None while its metadata is read.
    held: HeldDataset | None = None
    #: Stripes to read once its metadata was read.
    waiting: list[list[int]] = field(default_factory=list)
    #: Why its metadata could not be read.
    error: str = ""


class Holdings:
    """Datasets that a server holds, by identity, and their readers. Thread-safe.

    ahead_bytes: memory for reading ahead records that are not cached, of all datasets together.
    """

    def __init__(self, ahead_bytes: int) -> None:
        self.ahead = AheadMemory(ahead_bytes)
        self._lock = threading.Lock()
        #: Notified when datasets are dropped.
        self._changed = threading.Condition(self._lock)
        self._datasets: dict[bytes, _Holding] = {}
        self._readers: dict[bytes, set[str]] = {}
        self._is_closed = False

    # -- for the leader or follower --------------------------------------------------------------------------

    def add(self, identity: bytes, held: HeldDataset, is_explicit: bool) -> None:
        """Add a dataset without stripes; `apply` adds its stripes."""
        with self._lock:
            self._datasets[identity] = _Holding(is_explicit, held)

    def apply(self, instruction: DatasetPart | DropDataset) -> None:
        """Apply the leader's instruction for a dataset. Raises PoolFullError if no thread can start."""
        if isinstance(instruction, DropDataset):
            self.drop(instruction.identity, instruction.why)
            return
        with self._lock:
            if self._is_closed:
                return
            holding = self._datasets.get(instruction.identity)
            if holding is None:
                holding = _Holding(instruction.is_explicit)
                start_thread(partial(self._open, instruction, holding), "dpflow-plan")
                self._datasets[instruction.identity] = holding
            holding.is_explicit = instruction.is_explicit
            if holding.held is None:
                holding.waiting.append(instruction.stripes)
            else:
                holding.held.fill(instruction.stripes)

    def drop(self, identity: bytes, why: int) -> None:
        """Drop a dataset, and report the reason to its readers."""
        with self._lock:
            holding = self._datasets.pop(identity, None)
            self._changed.notify_all()
        self.ahead.drop([identity])
        if holding is not None and holding.held is not None:
            holding.held.close(why)

    def close(self) -> None:
        """Drop everything; readers keep the segments that they have mapped."""
        self.ahead.close()
        with self._lock:
            self._is_closed = True
            datasets, self._datasets = self._datasets, {}
            self._changed.notify_all()
        for holding in datasets.values():
            if holding.held is not None:
                holding.held.close()

    # -- for readers -----------------------------------------------------------------------------------------

    def get(self, identity: bytes) -> HeldDataset:
        """Return a dataset. Raises UsageError if this server does not hold it, or still reads its metadata."""
        if (held := self._held(identity)) is None:
            raise UsageError(f"dataset {identity.hex()} is not in the pool (any more); preload it")
        return held

    def on_data_connection(self, name: bytes) -> HeldDataset | AheadReading | None:
        """Return the dataset, or the `AheadReading`, that a request on a data connection names; None if not held here.

        name: identity of the dataset, or the `memory_name` of the memory for reading ahead.
        """
        return self._held(name) if name in self._datasets else self.ahead.named(name)

    def all(self) -> list[HeldDataset]:
        """Return every dataset whose metadata was read."""
        with self._lock:
            return [one.held for one in self._datasets.values() if one.held is not None]

    def read(self, identity: bytes, reader: str) -> None:
        """Record that a reader has begun to read a dataset. Raises UsageError if `MAX_DATASETS` others are read."""
        with self._lock:
            if identity not in self._readers and len(self._readers) >= MAX_DATASETS:
                raise UsageError(f"{MAX_DATASETS} datasets are read here; close one")
            self._readers.setdefault(identity, set()).add(reader)

    def open(self, identity: bytes, first: int) -> tuple[DatasetOpened, list[int]]:
        """Return the answer to OpenDataset, and descriptors of at most `MAX_SEGMENTS` segments; the caller closes them.

        Raises OSError if no descriptor is free.
        """
        if (held := self._held(identity)) is None:
            return DatasetOpened(0, 0), []
        fds: list[int] = []
        try:
            fds.extend(os.dup(segment.fd) for segment in held.segments[first : first + MAX_SEGMENTS])
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        return DatasetOpened(len(fds), len(held.segments), held.shares, held.number), fds

    def want(self, identity: bytes, records: Sequence[int], wait_s: float) -> RecordStates:
        """Read records before others; return their states. Raises UsageError for too many or unknown records."""
        if (held := self._held(identity)) is None:
            return RecordStates(bytes([ELSEWHERE]) * len(records), [])
        if len(records) > MAX_RECORDS or not all(0 <= one < held.records.records for one in records):
            raise UsageError(f"{len(records)} records: at most {MAX_RECORDS} that exist are allowed")
        return held.want(records, min(wait_s, ANSWER_S))

    def leave(self, reader: str) -> None:
        """Record that a reader's connection has ended; drop its access plans."""
        self.ahead.leave(reader)
        with self._lock:
            for identity, readers in list(self._readers.items()):
                readers.discard(reader)
                if not readers:
                    del self._readers[identity]

    def readers(self, identity: bytes) -> int:
        """Return how many connected processes read a dataset from this server."""
        return len(self._readers.get(identity, ()))

    # -- reports to the leader -------------------------------------------------------------------------------

    def reports(self) -> list[DatasetPart]:
        with self._lock:
            held = [(one.is_explicit, one.held) for one in self._datasets.values() if one.held is not None]
        return [
            DatasetPart(
                source=one.source,
                identity=one.records.identity,
                is_explicit=is_explicit,
                cut=one.cut,
                stripes=one.stripes,
            )
            for is_explicit, one in held
        ]

    def states(self) -> list[DatasetState]:
        """Return the progress of each dataset that is held or read here."""
        with self._lock:
            return [self.state(identity) for identity in self._datasets.keys() | self._readers.keys()]

    def state(self, identity: bytes) -> DatasetState:
        holding = self._datasets.get(identity)
        held = None if holding is None else holding.held
        loaded, failed = (0, 0) if held is None else held.counts
        error = held.error if held is not None else "" if holding is None else holding.error
        if held is None and error:
            failed = ALL_FAILED
        return DatasetState(
            identity=identity,
            is_placed=holding is None or bool(holding.error) or (held is not None and held.is_placed),
            loaded=loaded,
            failed=failed,
            readers=self.readers(identity),
            error=error[:_MAX_ERROR_CHARS],
        )

    def _held(self, identity: bytes) -> HeldDataset | None:
        holding = self._datasets.get(identity)
        return None if holding is None else holding.held

    def _open(self, instruction: DatasetPart, holding: _Holding) -> None:
        """Read a dataset's metadata, with retries if its storage does not answer; then hold the dataset."""
        backoff, source, identity = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S), instruction.source, instruction.identity
        while True:
            try:
                held = HeldDataset(source, open_source(source, identity), instruction.cut)
                break
            except Exception as error:  # any error: its readers must continue
                if not holding.error:
                    SERVICE.warning("%s cannot be held: %s", source.ref, error)
                holding.error = f"{type(error).__name__}: {error}"
                if not (isinstance(error, StorageError) and is_transient(error)):
                    return
            with self._changed:
                if self._changed.wait_for(lambda: self._datasets.get(identity) is not holding, backoff.pause_s()):
                    return
        with self._lock:
            holding.error = ""
            if self._datasets.get(identity) is holding:
                holding.held = held
                for stripes in holding.waiting:
                    held.fill(stripes)
                return
        held.close()  # dropped meanwhile
