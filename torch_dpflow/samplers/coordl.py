"""CoorDL's coordinated preparation (Mohan et al., VLDB 2021): one order per epoch, which all jobs read."""

import numpy as np

from torch_dpflow.samplers.fixed_order import FixedOrderGroup
from torch_dpflow.samplers.indices import CompactArray, permutation
from torch_dpflow.samplers.member import Member


class CoorDLGroup(FixedOrderGroup):
    """Jobs in the same epoch read the same order, which depends on the group's seed and not on the jobs' seeds.

    Jobs share while they are in step: same start, same speed. A job with a set of its own reads the common
    order without the other samples, so its epoch is uniform too; the original CoorDL has one set only.
    """

    strategy = "coordl"

    def _epoch_order(self, member: Member, epoch: int) -> CompactArray:
        order = permutation(self.size, self.seed, epoch)
        if member.indices is None:
            return order
        wanted = np.zeros(self.size, np.bool_)
        wanted[member.indices] = True
        return order[wanted[order]]
