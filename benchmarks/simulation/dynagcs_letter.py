"""DynaGCS to the letter of the thesis, for comparison with the reading that jobs may choose."""

from torch_dpflow.samplers.dynagcs_tree import DynaGCSGroup, group_size
from torch_dpflow.samplers.group import Member


class DynaGCSLetterGroup(DynaGCSGroup):
    """Algorithm 3.11 word for word: a round samples from every node that the asking job is in.

    The jobs of a node get the samples whether or not their buffers have room, and the round goes on to
    groups of fewer jobs when the asking job has its batch.
    """

    strategy = "dynagcs-letter"

    def _fill(self, member: Member, n: int) -> None:
        group = group_size(self._to_fill(member))
        for node in list(self._tree.with_job(self._bits[member.name])):
            self._sample(node, group)
