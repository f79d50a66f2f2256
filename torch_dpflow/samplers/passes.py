"""Passes of a sampler over one epoch, alone or in a group, and their division among ranks (DDP)."""

from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torch_dpflow._core.dealing import share
from torch_dpflow.errors import StateError, UsageError
from torch_dpflow.lookahead import Lookahead
from torch_dpflow.samplers.group import SamplingGroup
from torch_dpflow.samplers.indices import IndexArray

_NOTHING: IndexArray = np.empty(0, np.int64)


@dataclass(frozen=True)
class RankShares:
    """Shares of an epoch of `length` samples for `replicas` ranks, by DistributedSampler's rule.

    If the order does not divide evenly, `drop_last` drops its tail; otherwise samples from its start are appended.
    """

    length: int
    replicas: int
    drop_last: bool

    @property
    def per_rank(self) -> int:
        return share(self.length, self.replicas, drop_last=self.drop_last)

    @property
    def total(self) -> int:
        """Number of samples of all ranks together."""
        return self.per_rank * self.replicas


class GlobalBatches:
    """The running epoch of a job of a group, as batches for all ranks of the job together.

    Args:
        batch_size: samples for each rank.
        position: number of samples, of all ranks, that were drawn before; the group's epoch was started with them.
        first: the attribute `first` of the pass that drew these samples; it fills up an uneven end.
    """

    def __init__(
        self,
        group: SamplingGroup,
        job: str,
        shares: RankShares,
        batch_size: int,
        *,
        position: int = 0,
        first: IndexArray = _NOTHING,
    ) -> None:
        self._group = group
        self._job = job
        self._shares = shares
        self._batch_size = batch_size
        #: Samples of the epoch that were drawn, including those that fill it up.
        self.position = position
        #: Its first samples, at most one for each rank.
        self.first = first

    def draw(self, now: float | None = None) -> IndexArray:
        """Draw the next global batch, which divides evenly among the ranks; empty at the end of the epoch."""
        size = min(self._batch_size * self._shares.replicas, self._shares.total - self.position)
        if not size:
            return _NOTHING
        fresh = self._group.next(self._job, size, now) if self.position < self._shares.length else _NOTHING
        if len(self.first) < self._shares.replicas:
            self.first = np.concatenate([self.first, fresh])[: self._shares.replicas]
        self.position += size
        if len(fresh) == size:
            return fresh
        return np.concatenate([fresh, np.resize(self.first, size - len(fresh))])


def rank_slice(batch: IndexArray, rank: int, replicas: int) -> IndexArray:
    """Return a rank's part of a global batch: consecutive samples, rank 0's first."""
    part = len(batch) // replicas
    return batch[rank * part : (rank + 1) * part]


class SharedPass:
    """One rank's iteration over the global batches that a group draws for an epoch.

    Every rank has a copy of the group and draws each global batch as a whole; it yields its own slice.
    """

    def __init__(
        self,
        epoch: int,
        *,
        group: SamplingGroup,
        job: str,
        shares: RankShares,
        rank: int,
        batch_size: int,
        state: dict[str, Any] | None = None,
        position: int = 0,
    ) -> None:
        self._epoch, self._group, self._job = epoch, group, job
        self._rank, self._replicas, self._length = rank, shares.replicas, shares.per_rank
        drawn, self._done, first, pending = _checked(state, group.size, rank)
        group.start_epoch(job, epoch, done=self._done)
        self._batches = GlobalBatches(group, job, shares, batch_size, position=drawn, first=first)
        #: The position at which this rank's record begins, and its slices since then, in order.
        self._recorded_from = position
        self._record: list[IndexArray] = [pending]
        #: The global batches since then.
        self._drawn: list[IndexArray] = []
        #: Why the pass was ended; None if it was not.
        self._ended: str | None = None

    def end(self, why: str) -> None:
        """End this pass: further iteration raises UsageError with the text `why`."""
        self._ended = why

    def __iter__(self) -> Iterator[int]:
        """Yield the samples starting at `position`. Raises UsageError after `end`."""
        part = self._record[0]
        while True:
            yield from part.tolist()
            if self._ended is not None:
                raise UsageError(self._ended)
            batch = self._batches.draw()
            if not len(batch):
                return
            part = rank_slice(batch, self._rank, self._replicas)
            self._drawn.append(batch)
            self._record.append(part)

    def shared_state(self, consumed: int) -> dict[str, Any] | None:
        """Return the samples that the job has drawn, and the drawn samples that this rank has not consumed.

        Return None if no samples were drawn. Raises StateError if `consumed` is before the position at which the pass
        was resumed.
        """
        if consumed < self._recorded_from:
            raise StateError(
                f"consumed={consumed} is before sample {self._recorded_from}, at which this pass was resumed"
            )
        record = np.concatenate(self._record)
        drawn = np.concatenate([self._done, *self._drawn])
        if not len(drawn):
            return None
        return {
            "rank": self._rank,
            "drawn": self._batches.position,
            "done": _encode(drawn, self._group.size),
            "head": self._batches.first.tolist(),
            "pending": record[consumed - self._recorded_from :].tolist(),
        }

    def lookahead(self, position: int) -> Lookahead:
        """Return samples drawn but not yielded, then the group's lookahead; for one of several ranks only the position.

        A rank's slice of a global batch is not known before the batch is drawn.
        """
        if self._replicas > 1:
            return Lookahead(epoch=self._epoch, length=self._length, position=position)
        ahead = self._group.lookahead(self._job)
        pending = np.concatenate(self._record)[position - self._recorded_from :]
        return replace(ahead, position=ahead.position - len(pending), certain=np.concatenate([pending, ahead.certain]))


def _checked(state: dict[str, Any] | None, size: int, rank: int) -> tuple[int, IndexArray, IndexArray, IndexArray]:
    """Check a shared pass's state, and return its values.

    Returns the number of samples drawn, these samples, the first ones of the epoch, and the ones left to yield.
    """
    if state is None:
        return 0, _NOTHING, _NOTHING, _NOTHING
    try:
        if state["rank"] != rank:
            raise StateError(
                f"the state is that of rank {state['rank']} in the middle of an epoch, this is rank "
                f"{rank}; save and load the sampler's state on every rank"
            )
        first, pending = (np.array(state[key], np.int64) for key in ("head", "pending"))
        return int(state["drawn"]), _decode(state["done"], size), first, pending
    except StateError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"the sampler's state is damaged: {error!r}") from error


def _encode(samples: IndexArray, size: int) -> str:
    """Return a set of samples as text: one bit for each of the `size` samples."""
    mask = np.zeros(size, np.bool_)
    mask[samples] = True
    return b64encode(np.packbits(mask).tobytes()).decode("ascii")


def _decode(text: str, size: int) -> IndexArray:
    bits = np.frombuffer(b64decode(text, validate=True), np.uint8)
    if len(bits) != -(-size // 8):
        raise StateError(f"the state is of a group of about {8 * len(bits)} samples, this one has {size}")
    return np.flatnonzero(np.unpackbits(bits, count=size))
