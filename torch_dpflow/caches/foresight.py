"""Common ground of the policies that work with the jobs' lookaheads in full."""

from __future__ import annotations

import numpy as np

from torch_dpflow.caches.outlook import Outlook
from torch_dpflow.caches.policy import Job, check_weight
from torch_dpflow.caches.ranked import RankedPolicy
from torch_dpflow.caches.reader import Reader
from torch_dpflow.lookahead import Keys, Lookahead

#: Keys that are refreshed at once, which bounds the memory that it takes.
_CHUNK = 1 << 16

#: A change of speed by less than this factor waits for the job's next epoch.
_SPEED_CHANGE = 1.25


class ForesightPolicy(RankedPolicy):
    """Follows each job through its epochs and evicts by an `Outlook`.

    A job without a lookahead is taken to read all `keys` keys once in an epoch, in an order that is not
    known.
    """

    def __init__(
        self, outlook: Outlook, *, max_items: int | None, max_bytes: int | None, keys: int | None
    ) -> None:
        self._outlook = outlook
        self._table = outlook.table
        super().__init__(outlook, max_items=max_items, max_bytes=max_bytes, keys=keys)

    # -- jobs ------------------------------------------------------------------------------------------------

    @property
    def jobs(self) -> tuple[Job, ...]:
        return tuple(self._table.readers)

    def join(self, job: Job, *, weight: float = 1.0) -> None:
        weight = check_weight(job, weight)
        reader = self._table.readers.get(job)
        if reader is None:
            self._begin(self._table.add(job, weight), None)
        elif reader.weight != weight:
            reader.weight = weight
            self._rework()

    def forget(self, job: Job) -> None:
        if self._table.remove(job) is not None:
            self._rework()

    def foresee(self, job: Job, lookahead: Lookahead) -> None:
        for keys in (lookahead.certain, lookahead.likely, lookahead.members, lookahead.following):
            if keys is not None:
                self._reach_many(keys)
        reader = self._table.readers.get(job) or self._table.add(job, 1.0)
        goes_on = (reader.epoch, reader.length) == (lookahead.epoch, lookahead.length)
        # A sampler has handed out at least what was read; one that has not is reading the epoch again.
        if goes_on and lookahead.position >= reader.position:
            self._revise(reader, lookahead)
        else:
            self._begin(reader, lookahead)

    # -- reading ---------------------------------------------------------------------------------------------

    def _read(self, key: int, job: Job) -> None:
        reader = self._table.readers.get(job)
        if reader is None or (reader.position >= reader.length and reader.turns):
            reader = self._ready(job)
        self._table.read(reader, key)
        self._outlook.advance(reader)

    def _read_many(self, keys: Keys, job: Job) -> None:
        while len(keys):
            reader = self._table.readers.get(job)
            if reader is None or (reader.position >= reader.length and reader.turns):
                reader = self._ready(job)
            keys = keys[self._table.read_many(reader, keys) :]
            self._outlook.advance(reader)

    def _grow(self, span: int) -> None:
        self._outlook.grow(span)
        guessing = [reader for reader in self._table if not reader.turns]
        for reader in guessing:
            reader.length = span
        if guessing:
            self._rework()

    # -- epochs ----------------------------------------------------------------------------------------------

    def _ready(self, job: Job) -> Reader:
        """A job reads that is new, or has read all of its epoch and not told of the next."""
        reader = self._table.readers.get(job)
        if reader is None:
            reader = self._table.add(job, 1.0)
            self._begin(reader, None)
        else:
            stranger = reader.epoch is None
            self._begin(reader, self._table.next_epoch(reader))
            if stranger:
                reader.epoch = None
        return reader

    def _begin(self, reader: Reader, lookahead: Lookahead | None) -> None:
        """A job starts an epoch; None: it has not told anything."""
        speed = None if lookahead is None else lookahead.speed
        reader.pace = self._pace(reader) if speed is None else 1 / speed
        told = lookahead or Lookahead.unknown(self._known_keys or self._span, epoch=0)
        self._table.begin(reader, told)
        if lookahead is None:
            reader.epoch = None
            reader.turns = self._known_keys is not None
        reader.began = self._outlook.now
        reader.base = reader.began - reader.position * reader.pace
        self._rework()

    def _pace(self, reader: Reader) -> float:
        """Time for a sample, measured without a clock: by what the others read meanwhile."""
        elapsed = self._outlook.now - reader.began
        if reader.reads and elapsed > 0:
            return elapsed / reader.reads
        others = [other.pace for other in self._table if other is not reader]
        return sum(others) / len(others) if others else 1.0

    def _revise(self, reader: Reader, lookahead: Lookahead) -> None:
        """A job tells more of its epoch. O(what is told, and what had been told)."""
        before = self._outlook.values(reader)
        touched = self._table.revise(reader, lookahead)
        self._outlook.update(reader)
        growth = [
            after - value for after, value in zip(self._outlook.values(reader), before) if after > value
        ]
        if growth:
            self._residents.raise_bounds(max(growth))
        speed, order = lookahead.speed, lookahead.following
        new_pace = speed is not None and not 1 / _SPEED_CHANGE < speed * reader.pace < _SPEED_CHANGE
        new_order = order is not None and reader.following is None
        if speed is not None and new_pace:
            reader.pace = 1 / speed
            reader.base = self._outlook.now - reader.position * reader.pace
        if order is not None and new_order:
            self._table.follow(reader, order)
        if new_pace or new_order:
            self._rework()
            return
        moved = np.unique(touched[self._residents.loads.take(touched) > 0])
        if len(moved):
            self._residents.move_many(moved, self._outlook.renew_many(moved))

    def _rework(self) -> None:
        """Whatever was known of distances is void."""
        self._outlook.settle()
        if self._residents.count:
            keys = self._residents.keys()
            for start in range(0, len(keys), _CHUNK):
                self._outlook.renew_many(keys[start : start + _CHUNK])
            self._residents.rebuild()
