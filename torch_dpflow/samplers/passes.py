"""One rank's pass over an epoch that a sampling group draws, and the division of the epoch among ranks (DDP)."""

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
    """Number of samples for each of `replicas` ranks in an epoch of `length` samples, as in DistributedSampler.

    If the order does not divide evenly, `drop_last` drops its end; otherwise samples from its start are appended.
    """

    length: int
    replicas: int
    drop_last: bool

    @property
    def per_rank(self) -> int:
        return share(self.length, self.replicas, drop_last=self.drop_last)

    @property
    def total(self) -> int:
        """Number of samples for all ranks together."""
        return self.per_rank * self.replicas


class SharedPass:
    """One rank's iteration over an epoch that a sampling group draws in global batches, for all ranks together.

    Each rank has a copy of the group, draws each global batch as a whole, and yields its own slice.

    Args:
        batch_size: number of samples for each rank in a global batch.
        state: result of `shared_state` of the pass to resume; None for a whole epoch.
        position: number of the epoch's samples that this rank has read before this pass.
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
        self._rank, self._shares, self._batch_size = rank, shares, batch_size
        #: Number of samples of all ranks that were drawn, including those that fill up the epoch; the samples that
        #: earlier passes have drawn; and the epoch's first samples, at most one for each rank, which fill it up.
        self._count, self._done, self._first, pending = _checked(state, group.size, rank)
        group.start_epoch(job, epoch, done=self._done)
        #: The position at which this rank's record begins, and its slices since then, in order.
        self._recorded_from = position
        self._record: list[IndexArray] = [pending]
        #: The global batches since then.
        self._drawn: list[IndexArray] = []
        #: Why the pass was ended; None if it was not.
        self._ended: str | None = None

    def end(self, why: str) -> None:
        """End this pass: instead of drawing again, its iterators raise UsageError with the text `why`."""
        self._ended = why

    def __iter__(self) -> Iterator[int]:
        """Yield the samples starting at `position`. Raises UsageError after `end`."""
        part = self._record[0]
        while True:
            yield from part.tolist()
            if self._ended is not None:
                raise UsageError(self._ended)
            batch = self._draw()
            if not len(batch):
                return
            length = len(batch) // self._shares.replicas
            part = batch[self._rank * length : (self._rank + 1) * length]
            self._drawn.append(batch)
            self._record.append(part)

    def _draw(self) -> IndexArray:
        """Draw the next global batch, which divides evenly among the ranks; empty at the end of the epoch."""
        shares = self._shares
        size = min(self._batch_size * shares.replicas, shares.total - self._count)
        fresh = self._group.next(self._job, size) if size and self._count < shares.length else _NOTHING
        if len(self._first) < shares.replicas:
            self._first = np.concatenate([self._first, fresh])[: shares.replicas]
        self._count += size
        return fresh if len(fresh) == size else np.concatenate([fresh, np.resize(self._first, size - len(fresh))])

    def shared_state(self, consumed: int) -> dict[str, Any] | None:
        """Return the part of the sampler's state that resumes this pass; None if no samples were drawn.

        consumed: number of the epoch's samples that this rank has used. Raises StateError if it is lower than the
        position at which this pass was resumed.
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
            "drawn": self._count,
            "done": _encode(drawn, self._group.size),
            "head": self._first.tolist(),
            "pending": record[consumed - self._recorded_from :].tolist(),
        }

    def lookahead(self, position: int) -> Lookahead:
        """Return the job's lookahead at `position`: samples drawn but not yielded, then the group's lookahead.

        If there are several ranks, it has no samples: a rank's slice of a batch is not known before it is drawn.
        """
        if self._shares.replicas > 1:
            return Lookahead(epoch=self._epoch, length=self._shares.per_rank, position=position)
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
