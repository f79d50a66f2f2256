"""The order of one job's epochs, distributed to its ranks: each sample that a sampling group draws goes to one rank.

A pure state machine; there is no socket, thread or clock inside.

An epoch has a *slot* for each sample that its ranks read together. Slot `s` is place `s // replicas` of rank `s %
replicas`, as in torch's DistributedSampler. A slot is filled from the job's sampling group when a rank first draws that
far. A repeated draw of the same places returns the same samples.

Ranks can be at different places. When the first rank begins the next epoch, the remaining slots are filled for the
other ranks. Epochs are kept until every rank has passed them, at most `MAX_EPOCHS`.

Only a rank itself knows for certain what it has read. So every rank reports its epoch and its samples before the first
draw. All ranks report again if a rank's report contradicts the samples that it was given, such as after loading another
checkpoint. Then the open slots are filled again, without the samples that ranks have. A rank that begins its first
epoch has no samples, so it need not wait for ranks that have not reported: see `alone` of `draw`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from torch_dpflow._core.sparse_zeros import clear_before, sparse_zeros
from torch_dpflow.errors import UsageError
from torch_dpflow.ipc.messages.fields import AwaitedRanksError, OutOfStepError
from torch_dpflow.samplers.group import SamplingGroup
from torch_dpflow.samplers.indices import CompactArray, IndexArray, compact, mark
from torch_dpflow.samplers.passes import RankShares

#: A job of one rank can draw at least this number of its latest places again. Earlier places may have been cleared.
KEPT_PLACES = 1 << 21
#: Maximum number of epochs that are kept for ranks that are behind. An epoch takes memory for one number per sample.
MAX_EPOCHS = 16
_NOTHING: IndexArray = np.empty(0, np.int64)
_NO_MARKS: NDArray[np.uint8] = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Held:
    """Report of a rank: which samples of an epoch it has received."""

    epoch: int
    #: Number of places of which the rank has received the samples, starting with its first place.
    position: int = 0
    #: The samples in these places, ascending, each once. A rank that resumes from the state of another rank at the same
    #: position reports the samples of all ranks.
    samples: IndexArray = field(default_factory=lambda: _NOTHING)
    #: Samples that had been read when the unread samples were divided among the present ranks, ascending. They have no
    #: places.
    earlier: IndexArray = field(default_factory=lambda: _NOTHING)


class JointOrder:
    """State machine that distributes the samples of a job's epochs to its ranks. A sampling group draws the samples.

    A job without ranks counts as one rank. Not thread-safe.

    Args:
        group: draws the samples.
        job: the job's name in the group.
        shares: division of an epoch among the ranks, in equal numbers.
    """

    def __init__(self, group: SamplingGroup, job: str, shares: RankShares) -> None:
        self._group = group
        self._job = job
        self._shares = shares
        #: Reports of each rank: of its present epoch, then of the epoch before. Empty once every rank has reported.
        self._reported: dict[int, dict[int, Held]] = {}
        #: Ranks among them that have read nothing of any epoch.
        self._fresh: set[int] = set()
        #: The epochs in progress; empty until every rank has reported.
        self._epochs: dict[int, _JointEpoch] = {}
        #: The epoch of each reader, by its rank and name; without a name, of a rank that has no reader at present.
        self._at: dict[tuple[int, str], int] = {}

    @property
    def awaited(self) -> tuple[int, ...]:
        """Ranks that have to report their samples before any rank can draw; empty while ranks can draw."""
        if self._epochs:
            return ()
        return tuple(rank for rank in range(self._shares.replicas) if rank not in self._reported)

    def drawn(self, most: int | None = None) -> IndexArray:
        """Return the samples drawn in the newest epoch, in order, each once. Samples that ranks reported are left out.

        most: return only the last drawn samples, at most this number; None: all.
        """
        if not self._epochs:
            return _NOTHING
        return self._epochs[max(self._epochs)].drawn(most)

    @property
    def done(self) -> IndexArray:
        """Samples of the newest epoch that had been read before the epoch began at this router, ascending."""
        if not self._epochs:
            return _NOTHING
        return self._epochs[max(self._epochs)].done

    def start(self, rank: int, held: Sequence[Held], *, reader: str = "", fresh: bool = False) -> None:
        """Begin or resume an epoch for a rank.

        Args:
            held: the rank's reports of this epoch and, optionally, of earlier epochs, in this order.
            reader: name of the reader, if the rank has several readers.
            fresh: whether the rank has read nothing, in any epoch.

        Raises UsageError: the rank reports more samples than its part has, or the ranks' reports contradict each other.
        """
        now = held[0]
        if len(now.earlier) > self._shares.length:
            raise UsageError(
                f"rank {rank} of job {self._job!r} reports {len(now.earlier)} samples of earlier runs, and the job has "
                f"{self._shares.length}"
            )
        per_rank = self._shares_of_rest(now).per_rank
        if now.position > per_rank:
            raise UsageError(f"rank {rank} of job {self._job!r} has {now.position} samples of an epoch of {per_rank}")
        self._at.pop((rank, ""), None)
        self._at[rank, reader] = now.epoch
        if self._epochs:
            if self._begin_next(now) or self._agrees(rank, now):
                return
            self._epochs, self._reported, self._fresh = {}, {}, set()
        self._reported[rank] = {one.epoch: self._with_shared_arrays(one) for one in held}
        (self._fresh.add if fresh else self._fresh.discard)(rank)
        if not self.awaited:
            self._refill(rank)

    def leave(self, rank: int, reader: str = "") -> None:
        """Remove a reader. Its rank can begin again later."""
        epoch = self._at.pop((rank, reader), None)
        if epoch is not None and all(rank != other for other, _ in self._at):
            self._at[rank, ""] = epoch

    def draw(
        self, rank: int, epoch: int, position: int, count: int, now: float | None = None, *, alone: bool = False
    ) -> IndexArray:
        """Return the samples in `count` places of a rank, starting at place `position`; fewer at the end of its part.

        now: seconds on a steady clock, by which the group measures the job's speed; None: do not measure.
        alone: do not wait for the reports of other ranks, if all reports are of one epoch and from `fresh` ranks.

        Raises:
            AwaitedRanksError: other ranks have to call `start` first.
            OutOfStepError: the rank has to call `start` again and report its samples.
        """
        if not self._epochs and rank in self._reported and not (alone and self._begin_alone(rank)):
            raise AwaitedRanksError(
                f"job {self._job!r} waits for its ranks {list(self.awaited)}, which have not begun (again) to read"
            )
        joint = self._epochs.get(epoch)
        if joint is None or position < joint.first_of(rank):
            raise OutOfStepError(
                f"rank {rank} of job {self._job!r} has drawn {position} samples of epoch {epoch}, which its router "
                "does not know; start the epoch again with what you have"
            )
        return joint.part(rank, position, min(position + count, joint.per_rank), now)

    def read_by_all(self, epoch: int, position: int) -> NDArray[np.uint8] | None:
        """Return the samples that the job has read when each rank has read `position` samples of its part of the epoch.

        The result has one bit for each sample of the group, the most significant bit of a byte first. It is None if the
        order up to `position` is not known: a rank reported a later position, or early places have been cleared.

        Raises OutOfStepError: the epoch is not in progress, or ranks have to report first.
        """
        joint = self._epochs.get(epoch)
        if joint is None:
            raise OutOfStepError(f"epoch {epoch} of job {self._job!r} has not begun here")
        return joint.read_by_all(min(position, joint.per_rank), self._group.size)

    def _shares_of_rest(self, held: Held) -> RankShares:
        """Return the division among ranks of the samples that no earlier run had read."""
        return replace(self._shares, length=self._shares.length - len(held.earlier))

    def _with_shared_arrays(self, held: Held) -> Held:
        """Return a report whose arrays are shared with equal reports: each rank may report the samples of all ranks."""
        others = [reported[held.epoch] for reported in self._reported.values() if held.epoch in reported]
        samples = held.samples
        if len(samples) > held.position:
            samples = _first_equal(samples, [one.samples for one in others])
        return replace(held, samples=samples, earlier=_first_equal(held.earlier, [one.earlier for one in others]))

    def _agrees(self, rank: int, held: Held) -> bool:
        """Return whether a rank's report equals the samples that it was given."""
        joint = self._epochs.get(held.epoch)
        return joint is not None and joint.agrees(rank, held)

    def _begin_next(self, held: Held) -> bool:
        """Begin the next epoch if this rank is the first to reach it; return whether it is the first."""
        newest = max(self._epochs)
        if held.position or len(held.earlier) or held.epoch <= newest:
            return False
        before: dict[int, _JointEpoch] = {}
        if self._shares.replicas > 1:
            self._epochs[newest].finish()
            passed = min(self._at.values())
            kept = [epoch for epoch in sorted(self._epochs) if epoch >= passed][1 - MAX_EPOCHS :]
            before = {epoch: self._epochs[epoch] for epoch in kept}
        untouched = [Held(held.epoch)] * self._shares.replicas
        self._epochs = {**before, held.epoch: self._begin(held.epoch, untouched)}
        return True

    def _begin_alone(self, rank: int) -> bool:
        """Begin this rank's first epoch without missing reports, if that is allowed; return whether it is."""
        (epoch,) = self._reported[rank] if len(self._reported[rank]) == 1 else (-1,)
        if any(other not in self._fresh or [*held] != [epoch] for other, held in self._reported.items()):
            return False
        for other in self.awaited:
            self._reported[other] = {epoch: Held(epoch)}
            self._at[other, ""] = epoch
        self._refill(rank)
        return True

    def _refill(self, latest: int) -> None:
        """Fill the open slots again, after every rank has reported. latest: the rank that reported last."""
        current = [next(iter(self._reported[rank].values())).epoch for rank in range(self._shares.replicas)]
        epochs = sorted(set(current))
        try:
            if len(epochs) > 2:
                raise UsageError(f"the ranks of job {self._job!r} are in epochs {epochs}; resume all from one state")
            joint: dict[int, _JointEpoch] = {}
            for epoch in epochs:
                for before in joint.values():
                    before.finish()
                joint[epoch] = self._begin(epoch, self._held_in(epoch))
        except UsageError:
            # Forget its report, which may be the wrong one; the error goes to this rank.
            del self._reported[latest]
            raise
        self._epochs, self._reported, self._fresh = joint, {}, set()

    def _held_in(self, epoch: int) -> list[Held]:
        """Return each rank's report of an epoch; an empty report if the rank has not reached the epoch."""
        held: list[Held] = []
        earlier = self._earlier_in(epoch)
        for rank in range(self._shares.replicas):
            reported = self._reported[rank]
            now = next(iter(reported))
            if now > epoch and epoch not in reported:
                raise UsageError(
                    f"rank {rank} of job {self._job!r} is in epoch {now} and does not know what it read of epoch "
                    f"{epoch}, in which others are; resume all ranks from the state of one moment"
                )
            held.append(reported.get(epoch, Held(epoch, earlier=earlier)))
        return held

    def _earlier_in(self, epoch: int) -> IndexArray:
        """Return the samples of an epoch that earlier runs had read, as reported by the ranks that have reached it."""
        first: int | None = None
        earlier = _NOTHING
        for rank, reported in self._reported.items():
            if epoch not in reported:
                continue
            if first is None:
                first, earlier = rank, reported[epoch].earlier
            elif not np.array_equal(earlier, reported[epoch].earlier):
                raise UsageError(
                    f"ranks {first} and {rank} of job {self._job!r} resume epoch {epoch} after {len(earlier)} and "
                    f"{len(reported[epoch].earlier)} samples of earlier runs, or after other ones; resume all ranks "
                    "from the same states"
                )
        return earlier

    def _begin(self, epoch: int, held: list[Held]) -> _JointEpoch:
        joint = _JointEpoch(self._shares_of_rest(held[0]), held, partial(self._group.next, self._job))
        self._group.start_epoch(self._job, epoch, done=joint.done)
        return joint


class _JointEpoch:
    """Slots of one epoch, filled in order as ranks draw.

    Args:
        shares: division of the samples that no earlier run has read.
        held: report of each rank; the slots of reported samples stay empty, and no rank draws them.
        draw: returns the next n samples, fewer at the end; the missing samples are padded with samples from the epoch's
            beginning.
    """

    def __init__(self, shares: RankShares, held: list[Held], draw: Callable[[int, float | None], IndexArray]) -> None:
        self._replicas = shares.replicas
        self.per_rank = shares.per_rank
        self._held = held
        self._earlier = held[0].earlier
        done = _union([one.samples for one in held])
        #: The samples that had been read when the epoch was begun here, ascending.
        self.done = _union([self._earlier, done])
        self._draw = draw
        #: By slot, its sample plus 1; 0 while it is not filled.
        self._slots: CompactArray = sparse_zeros(shares.total, compact(shares.length + 1))
        #: The slots to fill, ascending.
        self._open = _OpenSlots(shares.total, [one.position for one in held])
        self._filled = 0
        #: The slots before it are cleared.
        self._kept_from = 0
        #: The padding of an uneven end, and how much of it has been used.
        self._head: IndexArray = done[: self._replicas]
        self._padded = 0
        #: The latest answer of `read_by_all`, which all ranks request at about the same position; 0: none.
        self._marked: int = 0
        self._marks: NDArray[np.uint8] = _NO_MARKS

    def drawn(self, most: int | None = None) -> CompactArray:
        """Return the samples in filled slots, without padding. most: only the last ones, at most this number."""
        end = self._filled - self._padded
        drawn = self._slots[self._open.part(0 if most is None else max(0, end - most), end)]
        return drawn[drawn > 0] - 1

    def first_of(self, rank: int) -> int:
        """Return the rank's first position that can be drawn: earlier samples were reported as read, or are cleared."""
        return max(self._held[rank].position, self._kept_from)

    def agrees(self, rank: int, held: Held) -> bool:
        """Return whether `held` equals the samples that the rank has received if it received its places in order."""
        mine = self._held[rank]
        if held.position < mine.position or not np.array_equal(held.earlier, self._earlier):
            return False
        given = self._slots[rank :: self._replicas][mine.position : held.position] - 1
        return bool((given >= 0).all()) and np.array_equal(_union([mine.samples, given]), held.samples)

    def part(self, rank: int, start: int, end: int, now: float | None) -> IndexArray:
        """Return the samples in a rank's places from `start` to before `end`."""
        if end > start:
            self._fill(rank + self._replicas * (end - 1), now)
        found = self._slots[rank :: self._replicas][start:end].astype(np.int64) - 1
        if self._replicas == 1 and start - self._kept_from >= 2 * KEPT_PLACES:
            self._kept_from = start - KEPT_PLACES
            clear_before(self._slots, self._kept_from)
        return found

    def read_by_all(self, position: int, size: int) -> NDArray[np.uint8] | None:
        """Return the samples read by all ranks; see `JointOrder.read_by_all`. size: number of samples in the group."""
        if self._kept_from or any(one.position > position for one in self._held):
            return None
        end = self._replicas * position
        self._fill(end - 1, None)
        if not len(self._marks) or position < self._marked:
            self._marked, self._marks = 0, np.zeros(-(-size // 8), np.uint8)
            mark(self._marks, self.done)
        if position > self._marked:  # a pass over what was read since, and a copy, as the one before may be in transit
            given = self._slots[self._replicas * self._marked : end] - 1
            given = given[given >= 0]
            self._marked, self._marks = position, self._marks.copy()
            mark(self._marks, given)
        return self._marks

    def finish(self) -> None:
        """Fill every slot, before the group begins another epoch."""
        self._fill(len(self._slots) - 1, None)

    def _fill(self, last: int, now: float | None) -> None:
        end = self._open.up_to(last)
        missing = end - self._filled
        if missing <= 0:
            return
        fresh = self._draw(missing, now)
        if len(self._head) < self._replicas:
            self._head = np.concatenate([self._head, fresh])[: self._replicas]
        if len(fresh) < missing:
            fresh = np.concatenate([fresh, self._padding(missing - len(fresh))])
        self._slots[self._open.part(self._filled, end)] = fresh + 1
        self._filled = end

    def _padding(self, count: int) -> IndexArray:
        start, self._padded = self._padded, self._padded + count
        return np.resize(self._head, self._padded)[start:]


class _OpenSlots:
    """Slots that no rank had when an epoch was begun, ascending: part of the slots up to the furthest rank, then all.

    Args:
        positions: for each rank, the number of its places that it has.
    """

    def __init__(self, total: int, positions: Sequence[int]) -> None:
        replicas, self._total = len(positions), total
        slots = np.arange(min(positions) * replicas, max(positions) * replicas, dtype=compact(total + 1))
        self._some: CompactArray = slots[slots // replicas >= np.array(positions)[slots % replicas]]
        #: From this slot on all are open.
        self._first = max(positions) * replicas

    def __len__(self) -> int:
        return len(self._some) + self._total - self._first

    def up_to(self, last: int) -> int:
        """Return the number of open slots among the slots 0 to `last`."""
        if last >= self._first:
            return len(self._some) + last + 1 - self._first
        return int(np.searchsorted(self._some, last, side="right"))

    def part(self, start: int, end: int) -> IndexArray | slice:
        """Return the open slots from the `start`-th to before the `end`-th, as an index."""
        some, shift = len(self._some), self._first - len(self._some)
        if start >= some:
            return slice(start + shift, end + shift)
        rest = np.arange(max(start, some), max(end, some)) + shift
        return np.concatenate([self._some[start:end].astype(np.int64), rest])


def _first_equal(array: IndexArray, others: Sequence[IndexArray]) -> IndexArray:
    """Return the first equal array in `others`, so that only one copy is kept; otherwise `array` itself."""
    return next((other for other in others if np.array_equal(array, other)), array)


def _union(arrays: Sequence[IndexArray]) -> IndexArray:
    """Return the samples of all arrays, ascending, each once. A repeated array object counts once."""
    distinct = [array for array in {id(array): array for array in arrays}.values() if len(array)]
    if len(distinct) == 1 and (distinct[0][1:] > distinct[0][:-1]).all():
        return distinct[0]
    return np.unique(np.concatenate(distinct or [_NOTHING]))
