"""JOADER (Xie et al., NeurIPS 2022, sections 3 and 4): jobs draw in rounds from a dependent sampling tree.

A job's set is the samples that it still needs. A round orders its jobs by the size of their sets, the smallest first,
and draws one sample for each. The tree's root is the samples that all of them need. Its children are a leaf, the
remainder of the first job's set, and the tree of the other jobs' sets without the root's samples. The round descends
from the root. At each vertex it draws a sample of the vertex:

- the first job takes it with the probability (size of the vertex) / (size of the job's set), else a sample of the leaf
- each next job takes it, if the job before did, with the probability (size of the former job's set) / (size of its set)
- the other jobs continue with the child that is a tree

Each job draws uniformly from its set (theorem 2), and two draws coincide with the highest probability that this allows
(theorem 1). A vertex is a union of cells. Jobs that have enough samples take no part in a round.
"""

from collections.abc import Sequence

import numpy as np

from torch_dpflow.samplers.buffered import BufferedGroup, Cells, CellSlot, bits_of
from torch_dpflow.samplers.group import Member


class JoaderGroup(BufferedGroup):
    """Sampling group of Joader: jobs draw common samples in rounds of a sampling tree.

    When a job's buffer has too few samples for a draw, rounds fill it and all other buffers with less than a batch.

    Two jobs share most while they have about the same number of samples left: if the job with fewer draws a sample that
    both need, the ratio of these numbers is the probability that the other draws it too. Each epoch of each job is
    uniform. At most 256 jobs.

    Cost: O(jobs * cells) for a round, which gives each of its jobs one sample; O(size) for the start of an epoch.
    """

    strategy = "joader"

    def _fill(self, member: Member, n: int) -> None:
        served = {self._bits[m.name]: self._buffers[m.name] for m in self._to_fill(member)}
        for bit, sample in sample_round(self._cells, list(served), self._rng).items():
            served[bit].append(sample)


def sample_round(cells: Cells, jobs: Sequence[int], rng: np.random.Generator) -> dict[int, int]:
    """Draw one round, and return the next sample of each job, by job number. Each job must need at least one sample.

    O(jobs * cells), for any number of samples.
    """
    needed = cells.needed
    level = sorted(jobs, key=lambda job: (needed[job], job))
    left = {job: needed[job] for job in level}
    above, everyone = 0, sum(1 << job for job in level)
    readers: dict[CellSlot, int] = {}
    while level:
        # A sample that a larger set of jobs needs, all of `above` need too: this excludes all vertices higher up.
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
    """Draw how many jobs take a sample of an intersection of this size. left: unread samples of each job, ascending."""
    if size == 0 or rng.random() * left[0] >= size:
        return 0
    takers = 1
    # With equal sizes the next job always follows; jobs in step then need almost no random numbers.
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
