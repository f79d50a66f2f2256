"""Reading ahead of a known order, several samples a request: a pure state machine.

What is held, who wants it and what has room is decided by `cluster.cache.SampleCache`, whose jobs are the readers and
whose tickets are positions of their epochs: a sample that several readers want soon is fetched once, is gone when all
have had it, and one that a reader waits for can always be fetched. Here is decided when the next samples are wanted.

With `lead=0` this is the patent's way ([0009]): a sample that is not there when it is read is fetched with the next
k-1 of its list (the patent has a list for each storage node; see `order_of`). So every k-th read waits for storage.
Otherwise the same is done `lead` reads earlier: as soon as one of the next `lead` positions was not asked for, it is,
with the next k-1 of its list; but what lies beyond those positions may only take the room that they leave.

Theorem. R samples of one size fit, and a reader consumes each position before it reads the next. If 0 < lead < R,
then whatever the order and the lists, each position was asked for before the one `lead` places before it was waited
for; so every read hits if a request takes no longer than `lead` reads. Proof: let W be the positions that were asked
for and not consumed, and G those not asked for among the next `lead` and the present one. At first W = 0 and
G = lead + 1 <= R. A position among them moves from G to W, one beyond them is asked for only while W + G < R, and
with the next read one position leaves W and at most one enters G. So W + G <= R always; as long as G > 0 there is
room for one, and it is asked for at once.

So a small room costs requests and no hits. They are of k samples while R is above `lead` and what the patent's way
holds, which is N(k-1)/2 in the mean and N(k-1) at most, over N lists.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from torch_dpflow._core.checks import check_int
from torch_dpflow.cluster.cache.objects import Arrival, CacheInstruction, Cancel, Load, RequestId, Serve
from torch_dpflow.cluster.cache.sample_cache import SampleCache
from torch_dpflow.errors import OptionError, UsageError

_MAX_KEY = (1 << 31) - 1


class KnownOrder:
    """One epoch's order; each position is taken once, and several behind it with it.

    `following` and `left_before` look at each position up to their last one that was not taken; in reading ahead those
    are few. It takes 4 bytes a position.

    order: the keys in the order in which they are read, below 2^31; kept as it is if it is an array of int32.
    Raises OptionError: the order has more dimensions than one, or a key is too large.
    """

    def __init__(self, order: npt.ArrayLike) -> None:
        given = np.asarray(order)
        given = given if given.dtype == np.int32 else given.astype(np.int64)
        if given.ndim != 1:
            raise OptionError(f"order has {given.ndim} dimensions; give keys in a single list")
        if len(given) and int(given.max()) > _MAX_KEY:
            raise OptionError(f"key {int(given.max())} is above {_MAX_KEY}; give smaller ones")
        self._order = given.astype(np.int32, copy=False)
        #: Every position before it was taken, and these behind it.
        self._nearest = 0
        #: The position of the first key that is kept.
        self._first = 0
        self._taken: set[int] = set()

    def __len__(self) -> int:
        return self._first + len(self._order)

    def extend(self, keys: npt.NDArray[np.int32]) -> None:
        """These come behind the others, and keys that were taken are forgotten."""
        self._order = np.concatenate([self._order[self._nearest - self._first :], keys])
        self._first = self._nearest

    def key(self, position: int) -> int:
        """What is read there, where that is not taken."""
        return int(self._order[position - self._first])

    def is_taken(self, position: int) -> bool:
        """Whether it was taken."""
        return position < self._nearest or position in self._taken

    def nearest(self) -> int | None:
        """The first position of all that was not taken; None where every one was."""
        return self._nearest if self._nearest < len(self) else None

    def left_before(self, end: int) -> int:
        """How many positions before `end` were not taken."""
        return max(0, end - self._nearest) - sum(position < end for position in self._taken)

    def following(self, position: int, count: int) -> list[int]:
        """This position and those that one request takes with it, which were not taken, at most `count`."""
        found: list[int] = []
        for one in self.behind(position):
            if len(found) >= count:
                break
            if not self.is_taken(one):
                found.append(one)
        return found

    def behind(self, position: int) -> Iterable[int]:
        """This position and those that one request may take with it, rising."""
        return range(position, len(self))

    def take(self, positions: Sequence[int]) -> None:
        """Take these. Raises UsageError: one of them was taken before."""
        taken = next((one for one in positions if self.is_taken(one)), None)
        if taken is not None:
            raise UsageError(f"position {taken} was taken already; each one is read once an epoch")
        self._taken.update(positions)
        while self._nearest in self._taken:
            self._taken.discard(self._nearest)
            self._nearest += 1


#: More fetches than any room has samples: the room bounds them.
_UNBOUNDED = 1 << 30


class StorageRequest(msgspec.Struct, frozen=True):
    """Ask storage for these samples in one request, then call `arrived` with the number of each load."""

    loads: list[Load]


ReadAheadInstruction: TypeAlias = StorageRequest | Serve | Cancel


@dataclass(slots=True)
class _AheadReader:
    order: KnownOrder
    #: No position from here on has been read; reading ahead, the first one counts as being read from the beginning.
    next: int
    #: Positions that it has asked for and not consumed.
    out: int = 0
    #: A heap of positions that it has asked for, consumed ones too.
    asked: list[int] = field(default_factory=list)


class ReadAhead:
    """Decides what is fetched ahead, for readers that announce what they read. One thread owns it.

    Args:
        capacity_bytes: most bytes of samples that are held or on their way, in equal parts for all readers; one that
            waits may exceed it by one sample.
        k: samples that one request asks for, at most.
        lead: how many positions behind the one that is read have to be asked for: as many as are read while a
            request takes. 0: nothing is, before it is read. May be changed at any time.
        sample_bytes: the mean size of a sample, where it is known; else it is learned.
        order_of: splits an order into lists, of which one request asks for one; else it is one list.

    Raises:
        OptionError: a number is too small.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int,
        k: int,
        lead: int,
        sample_bytes: int = 0,
        order_of: Callable[[npt.ArrayLike], KnownOrder] = KnownOrder,
    ) -> None:
        self._k = check_int("k", k, minimum=1)
        self.lead = check_int("lead", lead, minimum=0)
        self._order_of = order_of
        self._cache = SampleCache(capacity_bytes=capacity_bytes, concurrency=_UNBOUNDED, repeatable=True)
        self._readers: dict[str, _AheadReader] = {}
        self._requests = itertools.count()
        #: The mean size of samples that have arrived, and how many have.
        self._mean, self._arrived = float(sample_bytes), int(sample_bytes > 0)
        #: Reads that found their sample held, and those that did not.
        self.hits = self.misses = 0

    @property
    def used(self) -> int:
        """Bytes that are held or on their way."""
        return self._cache.used

    @property
    def room(self) -> int:
        """Samples that fit for each reader; until the size of one is known, as many as a request has."""
        if not self._arrived:
            return self._k
        return int(self._cache.capacity / max(1.0, self._mean)) // max(1, len(self._readers))

    @staticmethod
    def asked_by(request: RequestId) -> tuple[str, int]:
        """The reader and the position of what is served."""
        assert isinstance(request, tuple)
        return request[0], request[1]

    def is_open(self, reader: str, position: int) -> bool:
        """Whether `reader` may read this position: it has not consumed it. Raises UsageError."""
        return not self._reader(reader).order.is_taken(position) or self._cache.is_wanted(reader, position)

    def announce(self, reader: str, order: npt.ArrayLike) -> list[ReadAheadInstruction]:
        """`reader` begins to read these keys in this order; what is left of an earlier order is dropped."""
        known = self._order_of(order)
        out = self.leave(reader)
        self._cache.join(reader)
        self._readers[reader] = _AheadReader(known, next=min(1, self.lead))
        return [*out, *self._fill(reader)]

    def extend(self, reader: str, keys: npt.NDArray[np.int32]) -> list[ReadAheadInstruction]:
        """`reader` reads these after what it has announced. Raises UsageError."""
        self._reader(reader).order.extend(keys)
        return self._fill(reader)

    def read(self, reader: str, position: int) -> list[ReadAheadInstruction]:
        """`reader` waits for this position; one `Serve` has its sample, under the name and the position.

        It may have to wait until what readers have not consumed leaves room for it. What was served and is not
        consumed may be read again, and positions in any order.

        Raises UsageError: the reader has announced nothing, or has consumed this position, or it is none.
        """
        state = self._reader(reader)
        if not 0 <= position < len(state.order):
            raise UsageError(
                f"position {position} of an order of {len(state.order)}; read what was announced"
            )
        if not self.is_open(reader, position):
            raise UsageError(f"position {position} was consumed already; each one is read once an epoch")
        state.next = max(state.next, position + 1)
        out = self._fill(reader)
        if not state.order.is_taken(position):  # there is no room, which what is waited for need not have
            out += self._want(reader, [position])
        waiting = self._run(self._cache.fetch(reader, (reader, position, next(self._requests)), [position]))
        served = any(isinstance(one, Serve) and one.samples for one in waiting)
        self.hits += served
        self.misses += not served
        return [*out, *waiting]

    def consumed(self, reader: str, positions: Iterable[int]) -> list[ReadAheadInstruction]:
        """`reader` has these, or does not need them any more; unknown ones are ignored."""
        state = self._reader(reader)
        known = {one for one in positions if self._cache.is_wanted(reader, one)}
        state.out -= len(known)
        return [*self._run(self._cache.release(reader, known)), *self._fill(reader)]

    def pass_over(self, reader: str, before: int) -> list[ReadAheadInstruction]:
        """`reader` needs none of the positions before this one any more, whether it has read them or not."""
        state, passed = self._reader(reader), list[int]()
        known, asked, nearest = state.order, state.asked, state.order.nearest()
        if nearest is not None:
            known.take([one for one in range(nearest, min(before, len(known))) if not known.is_taken(one)])
        while asked and asked[0] < before:
            passed.append(heappop(asked))
        return self.consumed(reader, passed) if passed else []

    def arrived(self, arrivals: Sequence[Arrival]) -> list[ReadAheadInstruction]:
        """These loads have ended; a load that failed brings its error as value. Cancelled ones are ignored."""
        for one in arrivals:
            self._arrived += 1
            self._mean += (one.size - self._mean) / min(self._arrived, 100)
        out = self._run(self._cache.loaded(arrivals))
        return [*out, *itertools.chain.from_iterable(self._fill(reader) for reader in self._readers)]

    def leave(self, reader: str) -> list[ReadAheadInstruction]:
        """`reader` has ended: everything that only it wants goes. An unknown one is ignored."""
        self._readers.pop(reader, None)
        return self._run(self._cache.leave(reader))

    # -- inside ----------------------------------------------------------------------------------------------

    def _reader(self, name: str) -> _AheadReader:
        try:
            return self._readers[name]
        except KeyError:
            raise UsageError(f"reader {name!r} has announced no order; announce one first") from None

    def _want(self, reader: str, positions: Sequence[int]) -> list[ReadAheadInstruction]:
        state = self._readers[reader]
        state.order.take(positions)
        state.out += len(positions)
        for position in positions:
            heappush(state.asked, position)
        wanted = [(position, state.order.key(position)) for position in positions]
        return self._run(self._cache.want(reader, wanted, 0))

    def _fill(self, reader: str) -> list[ReadAheadInstruction]:
        """Ask for what the window lacks, each with what follows it in its list, as far as there is room."""
        state, out = self._readers[reader], list[ReadAheadInstruction]()
        end = min(state.next + self.lead, len(state.order))
        while (first := state.order.nearest()) is not None and first < end:
            room = self.room - state.out
            if room < 1:
                break
            positions = state.order.following(first, min(self._k, room))
            within = sum(position < end for position in positions)
            beyond = max(0, room - state.order.left_before(end))
            if self.lead and not self._arrived:
                beyond = 0  # it may take the room of what is read sooner: how many fit is not known yet
            out += self._want(reader, positions[: within + beyond])
        return out

    def _run(self, instructions: Iterable[CacheInstruction]) -> list[ReadAheadInstruction]:
        """The cache's instructions, loads joined."""
        given = [*instructions]
        loads = [one for one in given if isinstance(one, Load)]
        out: list[ReadAheadInstruction] = [one for one in given if not isinstance(one, Load)]
        return [*out, StorageRequest(loads)] if loads else out

    def validate(self) -> None:
        """Check every invariant; for tests. Raises AssertionError."""
        self._cache.validate()
        for name, state in self._readers.items():
            wanted = [one for one in range(len(state.order)) if self._cache.is_wanted(name, one)]
            assert all(state.order.is_taken(position) for position in wanted)
            assert len(wanted) == state.out
