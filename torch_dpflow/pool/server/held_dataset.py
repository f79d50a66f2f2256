"""One dataset in a server: its samples in memory, and the threads that read them from storage."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count, islice

import numpy as np
import numpy.typing as npt

from torch_dpflow._core.backoff import Backoff
from torch_dpflow.datasets.sample_reader import Sample
from torch_dpflow.datasets.storage.failures import is_transient
from torch_dpflow.errors import DamagedStoreError, DPFlowError, PoolFullError, StorageError, UsageError
from torch_dpflow.log import SERVICE
from torch_dpflow.pool.messages import ELSEWHERE, HERE, IN_STORAGE, PENDING, AnySource, RecordStates
from torch_dpflow.pool.planning.layout import ALL, resident, resident_layout
from torch_dpflow.pool.server import start_thread
from torch_dpflow.pool.server.ahead import AheadReading
from torch_dpflow.pool.sources import OpenedSource
from torch_dpflow.pool.transport.segments import PoolSegment, check_pushed, create_segment

#: Samples per read of the thread that reads everything.
_AT_ONCE = 64
#: Minimum memory for reading ahead, bytes: some samples.
_MIN_AHEAD_BYTES = 64 << 10
#: First and longest pause before reading again from storage that did not answer, seconds.
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
_NUMBERS = count(1)


class HeldDataset:
    """One dataset on a server: the memory segments of its stripes here, and the threads that fill them. Thread-safe.

    A record that a reader waits for is read before all others. If a record cannot be read, its readers read it from
    storage; this object reads it again later if the storage did not answer.

    Args:
        source: description of the dataset.
        opened: the opened source; `close` closes its reader.
        cut: limit of a record's hash, below which the record has a place in memory; see `layout.resident`.
    """

    def __init__(self, source: AnySource, opened: OpenedSource, cut: int = ALL) -> None:
        #: Number that is never used twice in this process, not even if the same dataset is dropped and held again.
        self.number = next(_NUMBERS)
        self.url, records, known, self._reader, self.parts = opened
        self.source, self.records = source, records
        self.cut, self.is_part = cut, cut != ALL
        stays = resident(records.identity, records.records, cut)
        #: Layout in which records without a place take no bytes.
        self._places = resident_layout(records, cut)
        self._has_place, self._may_read_ahead, self._stays = known & stays, known & ~stays, stays
        self.segments: list[PoolSegment] = []
        #: First error of a sample or of reserving memory; empty if none.
        self.error = ""
        self._changed = threading.Condition()
        #: State of each record.
        self._states = bytearray([ELSEWHERE]) * records.records
        self._state_array = np.frombuffer(self._states, np.uint8)
        self._segment_of: dict[int, PoolSegment] = {}
        #: Whether a thread reads, or has read, each record.
        self._taken = bytearray(records.records)
        #: Stripes that have memory, or are about to.
        self._stripes: set[int] = set()
        #: Records to read before others, in the order of requests.
        self._wanted: dict[int, None] = {}
        #: Callbacks for when a record is in memory, or has failed.
        self._watchers: dict[int, list[Callable[[bool], object]]] = {}
        #: Number of records of each stripe that are not in memory.
        self._left: Counter[int] = Counter()
        #: Number of fills whose memory is not reserved yet.
        self._making = 0
        self._loaded = self._failed = 0
        self._is_closed = False
        #: Number of first stripes that are shared with each older version, by its identity.
        self.shares: dict[bytes, int] = {}
        self._demand: threading.Thread | None = None

    @property
    def counts(self) -> tuple[int, int]:
        """Number of records in memory, and number of failed records."""
        return self._loaded, self._failed

    def placed_in(self, stripes: Iterable[int]) -> int:
        """Return the number of records of these stripes that `layout.resident` keeps in memory, also if they failed."""
        return sum(int(self._stays[own.start : own.stop].sum()) for own in map(self.records.records_of, stripes))

    def read_ahead(self, memory_bytes: int, number: int) -> AheadReading:
        """Return a new `AheadReading` of records without a place. Raises PoolFullError if the memory is too small."""
        if memory_bytes < _MIN_AHEAD_BYTES or self._reader is None:
            raise PoolFullError(
                f"{memory_bytes:,} bytes are left for reading ahead; give the server more (--ahead-memory)"
            )
        return AheadReading(self._may_read_ahead, self.records.lengths, self._reader, memory_bytes, number)

    @property
    def is_placed(self) -> bool:
        """Whether `fill` has reserved memory, or has failed to, for all stripes that it was called with."""
        return not self._making

    @property
    def stripes(self) -> list[int]:
        """Stripes whose memory is reserved here, or is being reserved."""
        with self._changed:
            return sorted(self._stripes)

    @property
    def leading(self) -> int:
        """Number of completely loaded stripes before the first incomplete stripe."""
        with self._changed:
            return next(one for one in count() if one not in self._segment_of or self._left[one])

    def share(self, older: HeldDataset, stripes: int) -> None:
        """Use the memory of an older version's first `stripes` stripes. It is freed once both versions are dropped.

        Raises UsageError if these stripes are not all in memory.
        """
        with older._changed, self._changed:
            if any(one not in older._segment_of or older._left[one] for one in range(stripes)):
                raise UsageError(f"{older.source.ref} is not completely in memory; complete its push first")
            shared = {id(one): one.share() for one in older.segments}
            self.segments += shared.values()
            self._segment_of |= {one: shared[id(older._segment_of[one])] for one in range(stripes)}
            self._stripes.update(range(stripes))
            end = self.records.records_of(stripes - 1).stop if stripes else 0
            self._states[:end] = older._states[:end]
            self._taken[:end] = bytes([True]) * end
            self._loaded = self._states.count(HERE)
            self._failed = end - self._loaded
            its = {name: min(of, stripes) for name, of in older.shares.items()}
            self.shares = its | {older.records.identity: stripes}

    def push(self, stripe: int, fds: Sequence[int]) -> RecordStates:
        """Copy a pushed stripe from the sealed memory of the one descriptor in `fds`; return the records' states.

        A stripe that is already loaded stays unchanged.

        Raises UsageError if the stripe cannot be pushed here, or `fds` is not one descriptor of its sealed memory.
        """
        if self._reader is not None or stripe not in self._segment_of or len(fds) != 1:
            raise UsageError(f"stripe {stripe} of {self.source.ref} cannot be pushed: it has no place here")
        own, segment = self.records.records_of(stripe), self._segment_of[stripe]
        check_pushed(fds[0], int(self.records.lengths[own.start : own.stop].sum()))
        with self._changed:
            is_new = not self._taken[own.start]
            self._taken[own.start : own.stop] = bytes([True]) * len(own)
        at = 0
        for number in range(len(own)) if is_new else ():
            at += segment.copy_from(fds[0], at, stripe, number)
        with self._changed:
            if is_new:
                self._states[own.start : own.stop] = bytes([HERE]) * len(own)
                self._left[stripe] = 0
                self._loaded += len(own)
                self._changed.notify_all()
                for one in own:
                    self._notify(one, is_here=True)
            ready = [] if self._left[stripe] else [stripe]
            return RecordStates(bytes(self._states[own.start : own.stop]), ready, self.number)

    def fill(self, stripes: Sequence[int]) -> None:
        """Reserve memory for the stripes that have none, in a thread that then reads them, unless clients push them."""
        with self._changed:
            # A second segment would replace the one that was filled, and be taken for filled.
            stripes = [one for one in stripes if one not in self._stripes]
            if not stripes:
                return
            self._making += 1
            self._stripes.update(stripes)
        try:
            start_thread(partial(self._fill, stripes), "dpflow-fill")
        except PoolFullError as error:
            self._leave(stripes, error)

    def want(self, records: Iterable[int], wait_s: float) -> RecordStates:
        """Read these records before others; return their states once none is pending, or after `wait_s` seconds."""
        asked = list(records)
        deadline = time.monotonic() + wait_s
        with self._changed:
            for one in asked:
                self._want(one)
            self._changed.notify_all()
            while any(self._states[one] == PENDING for one in asked) and not self._is_closed:
                if not self._changed.wait(deadline - time.monotonic()):
                    break
            stripes = {one // self.records.per_stripe for one in asked}
            ready = [one for one in sorted(stripes) if one in self._segment_of and not self._left[one]]
            return RecordStates(bytes(self._states[one] for one in asked), ready, self.number)

    def look(self, record: int, watch: Callable[[int], Callable[[bool], object] | None]) -> memoryview | int:
        """Return a view of a record in memory, or else its state: `PENDING` or `IN_STORAGE`.

        A pending record is then read before others.

        watch: called with a pending record; returns a callback, or None. The callback is called with True once the
            record is in memory, or with False once it has failed or the dataset is dropped.

        Raises UsageError if there is no such record.
        """
        if not 0 <= record < self.records.records:
            raise UsageError(f"record {record} of a dataset of {self.records.records}; give one that exists")
        if self._states[record] == PENDING:
            with self._changed:
                if self._states[record] == PENDING and not self._is_closed:
                    notify = watch(record)
                    if notify is not None:
                        self._watchers.setdefault(record, []).append(notify)
                    self._want(record)
                    self._changed.notify_all()
                    return PENDING
        if self._states[record] != HERE:
            return IN_STORAGE
        stripe, number = divmod(record, self.records.per_stripe)
        found = self._segment_of[stripe].read(stripe, number, copy=False)
        return found if isinstance(found, memoryview) else IN_STORAGE

    def close(self, why: int | None = None) -> None:
        """Drop the dataset. why: reason for readers, `UNLOADED` or `IDLE`; None: they keep using mapped segments."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            for record in [*self._watchers]:
                self._notify(record, is_here=False)
        for segment in self.segments:
            if why is not None:
                segment.retire(why)
            segment.close()
        if self._reader is not None:
            self._reader.close()

    def _want(self, record: int) -> None:
        """Queue a record to be read before others, unless a thread has taken it."""
        if self._reader is not None and self._states[record] == PENDING and not self._taken[record]:
            self._wanted.setdefault(record)

    def _notify(self, record: int, *, is_here: bool) -> None:
        for callback in self._watchers.pop(record, ()):
            callback(is_here)

    def _fill(self, stripes: Sequence[int]) -> None:
        own = self._records_of(stripes)
        has_place = self._has_place[own]
        placed, counts = np.unique(own[has_place] // self.records.per_stripe, return_counts=True)
        try:
            segment = create_segment(self._places, stripes, self._has_place)
        except (DPFlowError, OSError) as error:
            self._leave(stripes, error)
            return
        with self._changed:
            if self._is_closed:  # closed meanwhile: nothing else would free the segment
                self._making -= 1
                segment.close()
                return
            self.segments.append(segment)
            self._segment_of |= dict.fromkeys(stripes, segment)
            self._state_array[own] = np.where(has_place, PENDING, IN_STORAGE)
            self._left.update(dict(zip(placed.tolist(), counts.tolist())))
            self._failed += int((self._stays[own] & ~has_place).sum())  # of unknown length
            self._making -= 1
            if self._demand is None and self._reader is not None:
                self._demand = threading.Thread(target=self._serve_demand, name="dpflow-demand", daemon=True)
                self._demand.start()
        if self._reader is not None:
            self._read_all(own)
            self._read_again(own)

    def _leave(self, stripes: Sequence[int], error: Exception) -> None:
        self._note(error)
        with self._changed:
            self._making -= 1
            self._stripes.difference_update(stripes)
            self._failed += self.placed_in(stripes)
            self._state_array[self._records_of(stripes)] = IN_STORAGE

    def _records_of(self, stripes: Sequence[int]) -> npt.NDArray[np.int64]:
        return np.concatenate([np.arange(own.start, own.stop) for own in map(self.records.records_of, stripes)])

    def _read_all(self, records: npt.NDArray[np.int64]) -> None:
        for start in range(0, len(records), _AT_ONCE):
            if self._is_closed:
                return
            self._read(records[start : start + _AT_ONCE].tolist())

    def _read_again(self, records: npt.NDArray[np.int64]) -> None:
        """Retry records whose storage did not answer, until all are in memory."""
        backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        while len(records := records[np.isin(self._state_array[records], (PENDING, ELSEWHERE))]):
            before = self._loaded
            self._load(records[self._state_array[records] == ELSEWHERE][:_AT_ONCE].tolist())
            pause_s = 0.0 if self._loaded > before else backoff.pause_s()
            with self._changed:
                if self._changed.wait_for(lambda: self._is_closed, pause_s):
                    return

    def _serve_demand(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._is_closed)
                if self._is_closed:
                    return
                wanted = [*islice(self._wanted, _AT_ONCE)]
                for record in wanted:
                    del self._wanted[record]
            self._read(wanted)

    def _read(self, records: Iterable[int]) -> None:
        """Read the given records, except records that another thread reads or has read."""
        with self._changed:
            own = [one for one in dict.fromkeys(records) if self._states[one] == PENDING and not self._taken[one]]
            for one in own:
                self._taken[one] = True
        self._load(own)

    def _load(self, own: Sequence[int]) -> None:
        assert self._reader is not None
        try:
            samples: Sequence[Sample | DPFlowError] = self._reader.read_each(own)
        except Exception as error:  # any error: its readers must continue
            samples = [DPFlowError(f"{type(error).__name__}: {error}")] * len(own)
        states: list[tuple[int, int]] = []
        for one, sample in zip(own, samples):
            problem = sample if isinstance(sample, DPFlowError) else self._put(one, sample[0])
            if problem is not None:
                self._note(problem)
            # Readers request ELSEWHERE again, and take other states as final.
            missing = ELSEWHERE if isinstance(problem, StorageError) and is_transient(problem) else IN_STORAGE
            states.append((one, HERE if problem is None else missing))
        with self._changed:
            for one, state in states:
                self._failed += (state != HERE) - (self._states[one] != PENDING)
                self._states[one] = state
                self._left[one // self.records.per_stripe] -= state == HERE
                self._loaded += state == HERE
                self._notify(one, is_here=state == HERE)
            self.error = self.error if self._failed else ""
            self._changed.notify_all()

    def _put(self, record: int, content: bytes) -> DPFlowError | None:
        """Write a record to its place; return an error if its length is not the expected one."""
        stripe, number = divmod(record, self.records.per_stripe)
        segment = self._segment_of[stripe]
        length = segment.place(stripe, number)[1]
        if length != len(content):
            return DamagedStoreError(
                f"sample {record} has {len(content)} bytes, and {length} by the dataset's metadata"
            )
        segment.write(stripe, number, content)
        return None

    def _note(self, error: BaseException) -> None:
        if not self.error:
            self.error = f"{type(error).__name__}: {error}"
            SERVICE.warning("%s: left to its readers: %s", self.source.ref, self.error)
