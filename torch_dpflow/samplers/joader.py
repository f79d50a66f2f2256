"""JOADER (Xie et al., NeurIPS 2022, sections 3 and 4): jobs draw in rounds from a dependent sampling tree.

The jobs that take part in a round, in ascending order of the sizes of their sets, span a tree: its root is the set
that all of them need, the smallest set's difference to it is a leaf, and the other child is the tree of
the other sets' differences. A round descends from the root. At each vertex the first job takes the
intersection with the probability that its set gives it, each next one with the ratio of the two sets'
sizes if the one before did; the jobs that take it read the same sample, the others continue below. Each job by itself
draws uniformly from its set (theorem 2), and two draws coincide with the highest probability that this
allows (theorem 1).

A vertex is a union of cells: inserting a set splits cells, deleting one merges them, and a job that takes no part
in a round, because it has enough samples, costs nothing and does not change the tree of the others.
"""

from collections.abc import Sequence

import numpy as np

from torch_dpflow.samplers.buffered import BufferedGroup, Cells, CellSlot, bits_of
from torch_dpflow.samplers.group import Member


class JoaderGroup(BufferedGroup):
    """Sampling group of Joader: jobs draw common samples in rounds of a sampling tree.

    When a job's buffer is short, rounds fill it, and all other buffers that contain less than a batch.

    Two jobs share most while they have about the same number of samples left: the ratio of these numbers is the
    probability that the second job draws the first one's sample. Each epoch of each job is uniform. At most 256 jobs.

    Cost: O(jobs * cells) for a round, which gives each job one sample; O(size) for the start of an epoch.
    """

    strategy = "joader"

    def _fill(self, member: Member, n: int) -> None:
        served = {self._bits[m.name]: self._buffers[m.name] for m in self._to_fill(member)}
        for bit, sample in sample_round(self._cells, list(served), self._rng).items():
            served[bit].append(sample)


def sample_round(cells: Cells, jobs: Sequence[int], rng: np.random.Generator) -> dict[int, int]:
    """Draw one round: for each of these jobs, all of which need something, the sample that it reads now.

    O(jobs * cells), for any number of samples.
    """
    needed = cells.needed
    level = sorted(jobs, key=lambda job: (needed[job], job))
    left = {job: needed[job] for job in level}
    above, everyone = 0, sum(1 << job for job in level)
    readers: dict[CellSlot, int] = {}
    while level:
        # A sample that more jobs need, all fewer need too, so the vertex above stands for all those above.
        vertex = cells.needed_by(everyone, above)
        size = cells.samples_in(vertex)
        takers = _takers([left[job] for job in level], size, rng)
        if takers:
            place = cells.pick(vertex, rng)
        else:
            place, takers = cells.pick(cells.needed_by(1 << level[0], everyone), rng), 1
        taking = sum(1 << job for job in level[:takers])
        readers[place] = readers.get(place, 0) | taking
        level, above, everyone = level[takers:], everyone, everyone & ~taking
        for job in level:
            left[job] -= size
    return _take(cells, readers)


def _takers(left: Sequence[int], size: int, rng: np.random.Generator) -> int:
    """Return how many of the jobs, ascending by what they have left, take an intersection of this size."""
    if size == 0 or rng.random() * left[0] >= size:
        return 0
    takers = 1
    # Of equal sizes the next always follows; no random number there saves most of them for jobs in step.
    while takers < len(left) and (left[takers] == left[takers - 1] or rng.random() * left[takers] < left[takers - 1]):
        takers += 1
    return takers


def _take(cells: Cells, readers: dict[CellSlot, int]) -> dict[int, int]:
    drawn: dict[int, int] = {}
    # From the end of each cell, because taking a sample moves the cell's last one into its slot.
    for place in sorted(readers, reverse=True):
        sample = cells.take(place, readers[place])
        drawn.update((job, sample) for job in bits_of(readers[place]))
    return drawn
