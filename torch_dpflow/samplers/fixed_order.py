"""Groups in which a job's order is fixed when its epoch begins, whatever the other jobs do."""

from abc import abstractmethod

import numpy as np

from torch_dpflow._core.permutation import epoch_order
from torch_dpflow.lookahead import Lookahead
from torch_dpflow.samplers.group import Draw, Member, SamplingGroup
from torch_dpflow.samplers.indices import CompactArray, IndexArray, Order


class FixedOrderGroup(SamplingGroup):
    """Base class of groups that fix a job's order when its epoch begins, and can predict that of the next epoch."""

    def __init__(self, size: int, *, capacity: int | None = None, seed: int = 0) -> None:
        super().__init__(size, capacity=capacity, seed=seed)
        #: By job: the order of its epoch; after a resume, the samples read before come first.
        self._orders: dict[str, Order] = {}
        #: By job: an epoch's number and its order, drawn for a lookahead and kept until that epoch begins.
        self._next_orders: dict[str, tuple[int, Order]] = {}

    @abstractmethod
    def _epoch_order(self, member: Member, epoch: int) -> Order:
        """Return the order of an epoch that is not resumed."""

    def _joined(self, member: Member) -> None:
        pass

    def _left(self, member: Member) -> None:
        for by_job in (self._orders, self._next_orders):
            by_job.pop(member.name, None)

    def _started(self, member: Member, epoch: int, done: IndexArray) -> None:
        self._orders[member.name] = self._resumed_order(member, epoch, done)

    def _draw(self, member: Member, n: int) -> Draw:
        order = self._orders[member.name]
        return Draw(order[member.position : member.position + n].astype(np.int64))

    def _lookahead(self, member: Member, epoch: int) -> Lookahead:
        return Lookahead.of_order(
            self._orders[member.name][:],
            epoch=epoch,
            position=member.position,
            following=self._order_of(member, epoch + 1)[:],
        )

    def _near_lookahead(self, member: Member, epoch: int, horizon: int) -> Lookahead:
        certain = self._orders[member.name][member.position : member.position + horizon]
        return Lookahead(epoch=epoch, length=member.length, position=member.position, certain=certain)

    def _order_of(self, member: Member, epoch: int) -> Order:
        known = self._next_orders.get(member.name)
        if known is None or known[0] != epoch:
            known = epoch, self._epoch_order(member, epoch)
            self._next_orders[member.name] = known
        return known[1]

    def _resumed_order(self, member: Member, epoch: int, done: IndexArray) -> Order:
        order = self._order_of(member, epoch)
        if not len(done):
            return order
        read = np.zeros(self.size, np.bool_)
        read[done] = True
        if read[order[: len(done)]].all():
            return order
        whole = order[:]
        return np.concatenate([done.astype(whole.dtype), whole[~read[whole]]])


class CoorDLGroup(FixedOrderGroup):
    """Group whose jobs all read the same order in the same epoch, drawn from the group's seed and the epoch.

    Jobs share reads if they start an epoch at the same time and read at the same speed. A job with a smaller set reads
    this order without the samples outside its set, so its order is a uniformly random permutation of its set.
    """

    strategy = "coordl"

    def _epoch_order(self, member: Member, epoch: int) -> Order:
        order = epoch_order(self.size, self.seed + epoch)
        if member.indices is None:
            return order
        wanted = np.zeros(self.size, np.bool_)
        wanted[member.indices] = True
        whole: CompactArray = order[:]
        return whole[wanted[whole]]


class IndependentGroup(FixedOrderGroup):
    """Group that shares nothing: each job reads its own `Member.order` in each epoch."""

    strategy = "independent"

    def _started(self, member: Member, epoch: int, done: IndexArray) -> None:
        super()._started(member, epoch, done)
        if self._orders[member.name] is self._order_of(member, epoch):
            member.ordered = None

    def _epoch_order(self, member: Member, epoch: int) -> Order:
        return member.order(epoch)
