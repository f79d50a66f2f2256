"""Reading ahead in a known order, with several samples per storage request. Pure state machine.

`cluster.cache.SampleCache` decides what is held, which readers need it and what fits. Its jobs are the readers, and its
tickets are positions in their epochs. So a sample that several readers need soon is fetched once, and dropped when all
have received it. This module decides when the next samples are requested.

The window of a reader is the present position and the next ones, as many as fit. A position of the window that was not
requested is requested at once, together with the next k-1. Positions beyond the window may only use the capacity that
the window leaves.

Theorem. Let R > 1 samples of one size fit, and let a reader consume each position before it reads the next. Then for
any order each position is requested before the reader waits for the one R-1 places earlier; so every read hits if a
request takes no longer than R-1 reads. Proof: let W be the number of positions requested and not consumed, and G the
number of those in the window that were not requested. At first W = 0 and G <= R. A position of the window moves from G
to W; one beyond it is requested only while W + G < R; with the next read one position leaves W and at
most one enters G. So W + G <= R always, and while G > 0 there is capacity for one, which is requested at once.

So a small capacity does not lower the hit rate, but needs more requests: a request can have only as many samples as the
reader has just freed room for, at most k.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from torch_dpflow._core.checks import check_int
from torch_dpflow.cluster.cache.objects import Arrival, CacheInstruction, Cancel, Load, RequestId, Serve
from torch_dpflow.cluster.cache.sample_cache import SampleCache
from torch_dpflow.errors import UsageError

_SIDES: tuple[Any, Any] = ("left", "right")


class KnownOrder:
    """Announced order of one reader's epoch. A position is *taken* once it is requested from storage, or skipped.

    No position is taken twice. This object also holds the state that `ReadAhead` keeps for the reader. Takes 8 bytes
    per position.

    order: keys (record numbers) in reading order; not copied if it is an array of int32.
    """

    def __init__(self, order: npt.ArrayLike) -> None:
        self._order = np.asarray(order, np.int32)
        self._by_key = np.argsort(self._order, kind="stable").astype(np.int32)
        #: All positions before `_nearest` were taken, and those in `_taken`.
        self._nearest = 0
        #: Position of the first key that is kept, and of the first one that may be read.
        self._first = self.passed = 0
        self._taken: set[int] = set()
        #: Position after the highest one that was read. Position 0 counts as read from the beginning.
        self.next = 1
        #: Number of positions requested and not consumed.
        self.out = 0
        #: Heap of requested positions, including consumed ones.
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self._first + len(self._order)

    @property
    def kept(self) -> int:
        return len(self._order)

    def positions(self, key: int) -> list[int]:
        """Return the positions of a key, without those whose keys `extend` has forgotten."""
        first, end = (int(np.searchsorted(self._order, key, side, sorter=self._by_key)) for side in _SIDES)
        return [self._first + one for one in self._by_key[first:end].tolist()]

    def extend(self, keys: npt.NDArray[np.int32]) -> None:
        """Append keys, and forget the keys before `passed`."""
        self._order = np.concatenate([self._order[self.passed - self._first :], keys])
        self._by_key = np.argsort(self._order, kind="stable").astype(np.int32)
        self._first = self.passed

    def pass_over(self, before: int) -> None:
        """Mark all positions before `before` as taken, so that they are not requested."""
        self.passed = max(self.passed, min(before, len(self)))
        self.take([one for one in range(self._nearest, self.passed) if not self.is_taken(one)])

    def key(self, position: int) -> int:
        """Return the key at a position that `extend` has not forgotten."""
        return int(self._order[position - self._first])

    def is_taken(self, position: int) -> bool:
        return position < self._nearest or position in self._taken

    def untaken(self) -> Iterator[int]:
        """Yield the positions that were not taken, in order."""
        return (one for one in range(self._nearest, len(self)) if one not in self._taken)

    def left_before(self, end: int) -> int:
        """Return how many positions before `end` were not taken."""
        return max(0, end - self._nearest) - sum(position < end for position in self._taken)

    def take(self, positions: Sequence[int]) -> None:
        """Mark positions as taken. Raises UsageError if one of them was taken before."""
        taken = next((one for one in positions if self.is_taken(one)), None)
        if taken is not None:
            raise UsageError(f"position {taken} was taken already; each one is read once an epoch")
        self._taken.update(positions)
        while self._nearest in self._taken:
            self._taken.discard(self._nearest)
            self._nearest += 1


#: No limit on concurrent loads: the capacity bounds them.
_UNBOUNDED = 1 << 30


class StorageRequest(msgspec.Struct, frozen=True):
    """Instruction: read these samples in one request, then call `ReadAhead.arrived` with an Arrival for each load."""

    loads: list[Load]


ReadAheadInstruction: TypeAlias = StorageRequest | Serve | Cancel


class ReadAhead:
    """State machine that decides which samples to fetch ahead, for announced orders. Not thread-safe.

    Methods that change its state return instructions: requests to make, samples to serve, loads to cancel.

    Args:
        capacity_bytes: maximum bytes of samples held or in transit, shared equally by the readers. A reader that waits
            may exceed its share by one sample.
        k: maximum samples per request.
        sample_bytes: mean size of a sample.

    Raises OptionError if a number is below 1.
    """

    def __init__(self, *, capacity_bytes: int, k: int, sample_bytes: int) -> None:
        self._k = check_int("k", k, minimum=1)
        self._sample_bytes = check_int("sample_bytes", sample_bytes, minimum=1)
        self._cache = SampleCache(capacity_bytes=capacity_bytes, concurrency=_UNBOUNDED, repeatable=True)
        self._readers: dict[str, KnownOrder] = {}
        self._requests = itertools.count()

    @property
    def used(self) -> int:
        """Bytes of samples that are held or in transit."""
        return self._cache.used

    @property
    def room(self) -> int:
        """Number of samples of mean size that fit into each reader's share of the capacity."""
        return self._cache.capacity // self._sample_bytes // max(1, len(self._readers))

    @staticmethod
    def requester(request: RequestId) -> tuple[str, int]:
        """Return the reader and the position that a `Serve` instruction is for, from its field `request`."""
        assert isinstance(request, tuple)
        return request[0], request[1]

    def is_open(self, reader: str, position: int) -> bool:
        """Return whether a reader may still read this position. Raises UsageError if the reader has no order."""
        return not self._reader(reader).is_taken(position) or self._cache.is_wanted(reader, position)

    def announce(self, reader: str, order: KnownOrder) -> list[ReadAheadInstruction]:
        """Begin to read ahead in a reader's order, which replaces the reader's earlier order."""
        out = self.leave(reader)
        self._cache.join(reader)
        self._readers[reader] = order
        return [*out, *self._fill(reader)]

    def extend(self, reader: str, keys: npt.NDArray[np.int32]) -> list[ReadAheadInstruction]:
        """Append keys to a reader's order. Raises UsageError if the reader has announced nothing."""
        self._reader(reader).extend(keys)
        return self._fill(reader)

    def read(self, reader: str, position: int) -> list[ReadAheadInstruction]:
        """Record that a reader waits for a position. A `Serve` instruction for it follows later, if not now.

        It contains the sample, or none if there is no capacity until readers consume other samples. A position that
        was served and not consumed can be read again. Positions can be read in any order.

        Raises UsageError if the reader has announced nothing, or the position is consumed, skipped or out of range.
        """
        order = self._reader(reader)
        if not 0 <= position < len(order):
            raise UsageError(f"position {position} of an order of {len(order)}; read what was announced")
        if not self.is_open(reader, position):
            raise UsageError(f"position {position} was consumed already; each one is read once an epoch")
        order.next = max(order.next, position + 1)
        out = self._fill(reader)
        if not order.is_taken(position):  # it does not fit, but a reader waits for it
            out += self._want(reader, [position])
        return out + self._run(self._cache.fetch(reader, (reader, position, next(self._requests)), [position]))

    def consumed(self, reader: str, positions: Iterable[int]) -> list[ReadAheadInstruction]:
        """Record that `reader` has received these positions, or no longer needs them; unknown positions are ignored."""
        order = self._reader(reader)
        known = {one for one in positions if self._cache.is_wanted(reader, one)}
        order.out -= len(known)
        return [*self._run(self._cache.release(reader, known)), *self._fill(reader)]

    def pass_over(self, reader: str, before: int) -> list[ReadAheadInstruction]:
        """Record that `reader` no longer needs any position before `before`, whether it was read or not."""
        order, passed = self._reader(reader), list[int]()
        order.pass_over(before)
        while order.asked and order.asked[0] < before:
            passed.append(heappop(order.asked))
        return self.consumed(reader, passed) if passed else []

    def arrived(self, arrivals: Sequence[Arrival]) -> list[ReadAheadInstruction]:
        """Record loads that have ended; a failed load has its error as value. Cancelled loads are ignored."""
        out = self._run(self._cache.loaded(arrivals))
        return [*out, *itertools.chain.from_iterable(self._fill(reader) for reader in self._readers)]

    def leave(self, reader: str) -> list[ReadAheadInstruction]:
        """Remove a reader and all samples that only this reader needs. An unknown reader is ignored."""
        self._readers.pop(reader, None)
        return self._run(self._cache.leave(reader))

    def _reader(self, name: str) -> KnownOrder:
        try:
            return self._readers[name]
        except KeyError:
            raise UsageError(f"reader {name!r} has announced no order; announce one first") from None

    def _want(self, reader: str, positions: Sequence[int]) -> list[ReadAheadInstruction]:
        order = self._readers[reader]
        order.take(positions)
        order.out += len(positions)
        for position in positions:
            heappush(order.asked, position)
        wanted = [(position, order.key(position)) for position in positions]
        return self._run(self._cache.want(reader, wanted, 0))

    def _fill(self, reader: str) -> list[ReadAheadInstruction]:
        """Request missing samples of the window and samples that follow them, as far as capacity allows."""
        order, out = self._readers[reader], list[ReadAheadInstruction]()
        end = min(order.next + max(1, self.room - 1), len(order))
        while (room := self.room - order.out) > 0:
            positions = [*itertools.islice(order.untaken(), min(self._k, room))]
            if not positions or positions[0] >= end:
                break
            within = sum(position < end for position in positions)
            beyond = max(0, room - order.left_before(end))
            out += self._want(reader, positions[: within + beyond])
        return out

    def _run(self, instructions: Iterable[CacheInstruction]) -> list[ReadAheadInstruction]:
        """Return the cache's instructions, with several loads joined into one `StorageRequest`."""
        given = [*instructions]
        loads = [one for one in given if isinstance(one, Load)]
        out: list[ReadAheadInstruction] = [one for one in given if not isinstance(one, Load)]
        return out + [StorageRequest(loads[first : first + self._k]) for first in range(0, len(loads), self._k)]
