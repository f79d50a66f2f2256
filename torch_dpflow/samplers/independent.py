"""Jobs that share nothing: each reads torch's own order."""

from torch_dpflow.samplers.fixed_order import FixedOrderGroup
from torch_dpflow.samplers.indices import CompactArray
from torch_dpflow.samplers.member import Member


class IndependentGroup(FixedOrderGroup):
    """Each job reads the permutation that torch's RandomSampler draws for its seed; nothing is shared."""

    strategy = "independent"

    def _epoch_order(self, member: Member, epoch: int) -> CompactArray:
        return member.order(epoch)
