"""Joader (Xie et al., NeurIPS 2022): jobs draw in rounds from a dependent sampling tree."""

from torch_dpflow.samplers.buffered import BufferedGroup
from torch_dpflow.samplers.member import Member
from torch_dpflow.samplers.sampling_tree import sample_round


class JoaderGroup(BufferedGroup):
    """When a job's buffer is short, rounds of the sampling tree fill it and those that hold less than a batch.

    Jobs share while they have about equally many samples left, because the ratio of what two jobs have
    left is the probability that the second follows the first. Each epoch of each job is uniform. At most
    256 jobs.

    Cost: O(jobs * cells) for a round, which gives each job one sample; O(size) for the start of an epoch.
    """

    strategy = "joader"

    def _fill(self, member: Member, n: int) -> None:
        served = {self._bits[m.name]: self._buffers[m.name] for m in self._to_fill(member)}
        for bit, sample in sample_round(self._cells, list(served), self._rng).items():
            served[bit].append(sample)
