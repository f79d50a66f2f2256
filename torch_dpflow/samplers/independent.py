"""Every job for itself: torch's own orders, side by side."""

from torch_dpflow.samplers.fixed_order import FixedOrderGroup
from torch_dpflow.samplers.indices import IndexArray
from torch_dpflow.samplers.member import Member


class IndependentGroup(FixedOrderGroup):
    """Each job reads the permutation that torch's RandomSampler draws for its seed; nothing is shared."""

    strategy = "independent"

    def _epoch_order(self, member: Member, epoch: int) -> IndexArray:
        return member.order(epoch)
