"""The dynamic intersection tree of DynaGCS (thesis 3.4.4): which groups of jobs are worth sampling for."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from torch_dpflow.samplers.cells import Cells, bits_of


class IntersectionTree:
    """Sets of jobs, by level: on level l are nodes of l + 1 jobs; a node stands for the samples that all of them need.

    Every level keeps at most as many nodes as there are jobs, those of the highest contribution, so the tree
    has O(jobs²) nodes instead of 2^jobs. A node is a mask of job numbers, as in `Cells`.

    Args:
        cells: the samples that jobs need; read only.
        speeds: samples per second of each job number, None where not known; read for each contribution.
    """

    def __init__(self, cells: Cells, speeds: Mapping[int, float | None]) -> None:
        self._cells = cells
        self._speeds = speeds
        #: Nodes by number of jobs, which is the level plus one; on each level in order of contribution.
        self.nodes: dict[int, list[int]] = {}

    @property
    def jobs(self) -> tuple[int, ...]:
        """The jobs in the tree."""
        return tuple(job for leaf in self.nodes.get(1, ()) for job in bits_of(leaf))

    def insert(self, job: int) -> None:
        """A job starts an epoch: add it to a copy of every node, and drop the nodes of least contribution."""
        bit = 1 << job
        self._regroup([bit, *self._all(), *(node | bit for node in self._all())])

    def remove(self, job: int) -> None:
        """A job ends its epoch or leaves: remove it from its nodes, and drop those that would have one job left."""
        bit = 1 << job
        self._regroup(node & ~bit for node in self._all() if not node & bit or (node & ~bit).bit_count() > 1)

    def with_job(self, job: int) -> Iterator[int]:
        """The nodes that a job is in, the highest level first."""
        for count in sorted(self.nodes, reverse=True):
            yield from [node for node in self.nodes[count] if node >> job & 1]

    def contribution(self, node: int) -> float:
        """A node's contribution: the size of the shared set over the sum of the sets' sizes, times the
        likeness of the speeds (eq. 3-6)."""
        jobs = list(bits_of(node))
        total = sum(self._cells.needed[job] for job in jobs)
        shared = self._cells.samples_in(self._cells.needed_by(node))
        return shared / total * speed_likeness([self._speeds.get(job) for job in jobs]) if total else 0.0

    def _all(self) -> Iterator[int]:
        for level in self.nodes.values():
            yield from level

    def _regroup(self, nodes: Iterable[int]) -> None:
        levels: dict[int, list[int]] = {}
        for node in dict.fromkeys(nodes):
            levels.setdefault(node.bit_count(), []).append(node)
        limit = len(levels.get(1, ()))
        self.nodes = {
            count: sorted(level, key=self.contribution, reverse=True)[:limit]
            for count, level in levels.items()
        }


def speed_likeness(speeds: Sequence[float | None]) -> float:
    """exp(-s), with s the standard deviation of the speeds over their mean: 1 for equal speeds (eq. 3-7).

    An unknown speed counts as the mean of the known ones.
    """
    known = np.array([speed for speed in speeds if speed is not None])
    if not len(known):
        return 1.0
    mean = known.mean()
    return float(np.exp(-np.sqrt((((known - mean) / mean) ** 2).sum() / len(speeds))))
