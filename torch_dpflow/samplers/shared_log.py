"""The strategy "shared-log": jobs read what other jobs have just loaded; every epoch stays uniformly random."""

from typing import ClassVar

import numpy as np

from torch_dpflow._core.need_counts import NEEDED, READ
from torch_dpflow._core.sparse_zeros import sparse_zeros
from torch_dpflow.lookahead import Lookahead
from torch_dpflow.samplers.directory import Directory
from torch_dpflow.samplers.group import Draw, Member, SamplingGroup
from torch_dpflow.samplers.indices import BoolArray, CompactArray, IndexArray
from torch_dpflow.samplers.shared_epoch import Partition, SharedEpoch, bitmap

#: Rounds of all jobs' batches for which a load is protected: by then every follower has drawn.
_PROTECTED_ROUNDS = 4


class SharedLogGroup(SamplingGroup):
    """Group of the default strategy. Like DynaGCS it adapts to jobs' starts and speeds, but its orders are uniform.

    Guarantee: if arrivals, sets and request times are independent of the samples' identities, each epoch of each job is
    uniform over all orders of its set. Reason: a pick depends only on the samples' classes (see `Partition`), and on
    which are resident, needed, and loaded before others. So renaming samples within a class changes nothing. The class
    of a position depends on the job's private permutation alone.

    Consequences of sharing:

    - A job's order depends on the times of other jobs' draws. Only the same calls, or ``independence=1``, repeat a run.
    - The jobs' orders are correlated, so an ensemble whose variance matters should not share a group. If jobs stay a
      fixed part of an epoch apart, one job's epochs are correlated too. A higher `independence` reduces this.

    A job that is alone in the group from the start of its epoch reads torch's order for its seed. Otherwise its private
    permutation depends on its seed and its identity (its name or, if that is random, its set), so jobs may have equal
    seeds.

    Cost: O(n) for a draw of n, plus the bookkeeping of ended epochs, which is spread over later draws; O(size) for a
    new set.
    Memory: 11 bytes per sample of the group, 1 more per job, and 4 per sample of a job's set.
    """

    strategy = "shared-log"
    keeps_directory: ClassVar[bool] = True

    def __init__(self, size: int, *, capacity: int | None = None, seed: int = 0) -> None:
        super().__init__(size, capacity=capacity, seed=seed)
        self._partition = Partition(self.size)
        self._directory = Directory(self.size, self.capacity)
        #: By job: its running epoch.
        self._epochs: dict[str, SharedEpoch] = {}
        #: By job: draws which picks ignore the directory.
        self._rngs: dict[str, np.random.Generator] = {}
        #: By job: the bitmap of its set, None for all samples.
        self._sets: dict[str, bytes | None] = {}

    def _joined(self, member: Member) -> None:
        members = self._sets[member.name] = None if member.indices is None else bitmap(member.indices, self.size)
        if self._partition.register(members):
            for epoch in self._epochs.values():
                epoch.relabel(self._partition)
        self._protect()

    def _left(self, member: Member) -> None:
        self._drop_epoch(member)
        self._partition.unregister(self._sets.pop(member.name))
        self._protect(without=member)

    def _started(self, member: Member, epoch: int, done: IndexArray) -> None:
        self._drop_epoch(member)
        begun = self._begin(member, epoch, done)
        self._epochs[member.name] = begun
        self._rngs[member.name] = member.own_rng(epoch, 0)
        self._directory.begin(begun.need, done, whole=member.indices is None)

    def _draw(self, member: Member, n: int) -> Draw:
        self._directory.needed.count_ended()
        epoch = self._epochs[member.name]
        quota = epoch.quota(n)
        followed = epoch.follow(quota - self._ignoring(member, quota), self._directory, self._partition)
        if len(followed) and member.ordered is None:
            member.ordered = member.position
        labels = self._partition.of(followed)
        missing = quota - (len(followed) if labels is None else np.bincount(labels, minlength=len(quota)))
        led = epoch.lead(missing)
        picks = np.concatenate([followed, led])
        loaded = self._directory.load(led)
        self._directory.on_read(picks)
        evicted = self._directory.shrink()
        for name, other in self._epochs.items() if len(led) else ():
            if name != member.name:
                other.offer(led)
        to_load = np.concatenate([np.zeros(len(followed), np.bool_), loaded])
        return self._arranged(epoch, picks, to_load, evicted)

    def _arranged(self, epoch: SharedEpoch, picks: CompactArray, to_load: BoolArray, evicted: CompactArray) -> Draw:
        slots = epoch.arrange(self._partition.of(picks), len(picks))
        if slots is None:
            return Draw(picks.astype(np.int64), to_load, evicted.astype(np.int64))
        indices, led = np.empty(len(picks), np.int64), np.empty(len(picks), np.bool_)
        indices[slots[0]], led[slots[0]] = picks[slots[1]], to_load[slots[1]]
        return Draw(indices, led, evicted.astype(np.int64))

    def _resized(self) -> IndexArray:
        self._directory.capacity = self.capacity
        self._protect()
        return self._directory.shrink().astype(np.int64)

    def _lookahead(self, member: Member, epoch: int) -> Lookahead:
        reading = self._epochs[member.name]
        likely = reading.followable(self._directory)
        alone = len(self._members) == 1 and not len(likely)
        return Lookahead(
            epoch=epoch,
            length=member.length,
            position=member.position,
            certain=reading.unread() if alone else likely[:0],
            likely=likely,
            members=member.indices,
        )

    def _near_lookahead(self, member: Member, epoch: int, horizon: int) -> Lookahead:
        reading = self._epochs[member.name]
        likely = reading.followable(self._directory, horizon)
        alone = len(self._members) == 1 and not len(likely)
        return Lookahead(
            epoch=epoch,
            length=member.length,
            position=member.position,
            certain=reading.next_unread(horizon) if alone else likely[:0],
            likely=likely,
        )

    def _ignoring(self, member: Member, quota: IndexArray) -> IndexArray:
        """Draw how many picks of each class ignore the samples that other jobs have loaded."""
        if member.independence == 0:
            return np.zeros_like(quota)
        return self._rngs[member.name].binomial(quota, member.independence)

    def _begin(self, member: Member, epoch: int, done: IndexArray) -> SharedEpoch:
        """Begin the remaining epoch after `done`, in the order of the job's private permutation.

        A resumed job that has read the first samples of its permutation continues it. Otherwise the others are shuffled
        again: in the order of the permutation, the samples that it skipped to follow others would come first.
        """
        # Another job may have the same seed, or the same sum of seed and epoch. Orders that agree place by place put
        # the same samples of partly overlapping sets side by side. Equal sets are harmless, and a job with a random
        # name must repeat its order even if an earlier job that read it is not closed yet.
        alone = all(
            other is member or (not member.named and member.reads_as(other)) for other in self._members.values()
        )
        order = member.order(epoch) if alone else member.own_order(epoch)
        need = sparse_zeros(self.size, np.uint8)
        if member.indices is not None:
            need[:] = READ
            need[member.indices] = NEEDED
        need[done] = READ
        start = 0
        if len(done):
            if (need[order[: len(done)]] == READ).all():
                start = len(done)
            else:
                order, alone = member.own_order(epoch, len(done)), False
        member.ordered = None if alone else 0
        return SharedEpoch(order, need, self._partition, start=start, left=member.length - len(done))

    def _drop_epoch(self, member: Member) -> None:
        self._rngs.pop(member.name, None)
        if (left := self._epochs.pop(member.name, None)) is not None:
            self._directory.needed.end(left.need, whole=member.indices is None)

    def _protect(self, without: Member | None = None) -> None:
        batches = sum(m.batch_size for m in self._members.values() if m is not without)
        low, high = self.capacity // 10, self.capacity // 2
        self._directory.protected = min(max(_PROTECTED_ROUNDS * batches, low), high)
