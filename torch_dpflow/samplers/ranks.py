"""One epoch for several ranks (DDP): the length of each rank's part, and the samples in it."""

from dataclasses import dataclass

import numpy as np

from torch_dpflow.samplers.group import SamplingGroup
from torch_dpflow.samplers.indices import CompactArray, IndexArray

_NOTHING: IndexArray = np.empty(0, np.int64)


@dataclass(frozen=True)
class RankShares:
    """How an epoch of `length` samples is made even for `replicas` ranks: DistributedSampler's rule.

    With `drop_last` the tail is dropped; otherwise the order is repeated from its start until it is even.
    """

    length: int
    replicas: int
    drop_last: bool

    @property
    def per_rank(self) -> int:
        """Samples that each rank gets."""
        return self.length // self.replicas if self.drop_last else -(-self.length // self.replicas)

    @property
    def total(self) -> int:
        """Samples that all ranks get together."""
        return self.per_rank * self.replicas

    def of(self, order: CompactArray, rank: int) -> CompactArray:
        """One rank's part of an order: every `replicas`-th sample, as in DistributedSampler."""
        even = np.resize(order, self.total) if self.total > len(order) else order[: self.total]
        part: CompactArray = even[rank :: self.replicas]
        return part


class GlobalBatches:
    """The epoch that a job of a group is in, as batches for all its ranks together.

    Args:
        batch_size: samples for each rank.
        position: samples, of all ranks, that were drawn before; the group's epoch was started with them.
        head: the epoch's first samples, from `head` at that time; needed to fill up an uneven end.
    """

    def __init__(
        self,
        group: SamplingGroup,
        job: str,
        shares: RankShares,
        batch_size: int,
        *,
        position: int = 0,
        head: IndexArray = _NOTHING,
    ) -> None:
        self._group = group
        self._job = job
        self._shares = shares
        self._batch_size = batch_size
        #: Samples of the epoch that were drawn, including those that fill it up.
        self.position = position
        #: Its first samples, at most one for each rank.
        self.head = head

    def draw(self, now: float | None = None) -> IndexArray:
        """The next global batch, which divides evenly among the ranks; empty at the end of the epoch."""
        size = min(self._batch_size * self._shares.replicas, self._shares.total - self.position)
        if not size:
            return _NOTHING
        fresh = self._group.next(self._job, size, now) if self.position < self._shares.length else _NOTHING
        if len(self.head) < self._shares.replicas:
            self.head = np.concatenate([self.head, fresh])[: self._shares.replicas]
        self.position += size
        if len(fresh) == size:
            return fresh
        return np.concatenate([fresh, np.resize(self.head, size - len(fresh))])


def rank_slice(batch: IndexArray, rank: int, replicas: int) -> IndexArray:
    """A rank's part of a global batch: consecutive samples, so that rank 0 has the first ones."""
    part = len(batch) // replicas
    return batch[rank * part : (rank + 1) * part]
