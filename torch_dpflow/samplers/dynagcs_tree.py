"""DynaGCS of the thesis (3.4.4): top-down sampling from an intersection tree.

Its orders are not uniform if jobs' sets overlap in part: shared samples come first. Orders of `shared_log` are uniform.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from torch_dpflow.samplers.buffered import BufferedGroup, Cells, bits_of
from torch_dpflow.samplers.group import Member
from torch_dpflow.samplers.indices import IndexArray


class IntersectionTree:
    """Tree of sets of jobs. A node on level l has l + 1 jobs, and stands for the samples that all of them need.

    Every level keeps the nodes of the highest contribution, at most as many as there are jobs. The tree therefore has
    O(jobs²) nodes instead of 2^jobs. A node is a mask of job numbers, as in `Cells`.

    Args:
        cells: the samples that jobs need; read only.
        speeds: samples per second by job number, None if not known. The caller can change them at any time.
    """

    def __init__(self, cells: Cells, speeds: Mapping[int, float | None]) -> None:
        self._cells = cells
        self._speeds = speeds
        #: Nodes by number of jobs, which is the level plus one; on each level in order of contribution.
        self.nodes: dict[int, list[int]] = {}

    @property
    def jobs(self) -> tuple[int, ...]:
        return tuple(job for leaf in self.nodes.get(1, ()) for job in bits_of(leaf))

    def insert(self, job: int) -> None:
        """Add a job: a node with this job alone, and a copy of each node with the job added. Drop surplus nodes."""
        bit = 1 << job
        self._regroup([bit, *self._all(), *(node | bit for node in self._all())])

    def remove(self, job: int) -> None:
        """Remove a job from all nodes. Nodes that had it and now have fewer than two jobs are dropped."""
        bit = 1 << job
        self._regroup(node & ~bit for node in self._all() if not node & bit or (node & ~bit).bit_count() > 1)

    def with_job(self, job: int) -> Iterator[int]:
        """Yield the nodes that contain a job, those with the most jobs first."""
        for count in sorted(self.nodes, reverse=True):
            yield from [node for node in self.nodes[count] if node >> job & 1]

    def contribution(self, node: int) -> float:
        """Return the number of samples that all jobs of a node need, divided by the sum of the numbers that each of
        them needs, times the `speed_likeness` of the jobs (eq. 3-6)."""
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
            count: sorted(level, key=self.contribution, reverse=True)[:limit] for count, level in levels.items()
        }


def speed_likeness(speeds: Sequence[float | None]) -> float:
    """Return exp(-standard deviation of the speeds / their mean): 1 for equal speeds, else less (eq. 3-7).

    An unknown speed counts as the mean of the known ones.
    """
    known = np.array([speed for speed in speeds if speed is not None])
    if not len(known):
        return 1.0
    mean = known.mean()
    return float(np.exp(-np.sqrt((((known - mean) / mean) ** 2).sum() / len(speeds))))


class DynaGCSGroup(BufferedGroup):
    """Sampling group of the thesis: algorithm 3.11, interpreted so that the jobs' buffers stay small.

    It samples only from nodes whose jobs all have space in their buffers, and only until the drawing job's buffer
    holds its batch. Interpreted literally (`benchmarks/simulation/dynagcs_letter.py`), the algorithm lets buffers grow
    and jobs diverge, and loads many samples for few jobs.

    Cost: O(jobs² * cells) to add one or more samples to the drawing job's buffer; O(size) for the start of an epoch,
    which also weighs all nodes. This takes 0.4 s with 64 jobs, the maximum; 128 would take eight times as long.
    """

    strategy = "dynagcs"
    max_jobs = 64

    def __init__(self, size: int, *, capacity: int | None = None, seed: int = 0) -> None:
        super().__init__(size, capacity=capacity, seed=seed)
        self._speeds: dict[int, float | None] = {}
        self._tree = IntersectionTree(self._cells, self._speeds)

    def _left(self, member: Member) -> None:
        self._leave_tree(self._bits[member.name])
        super()._left(member)

    def _started(self, member: Member, epoch: int, done: IndexArray) -> None:
        bit = self._bits[member.name]
        self._leave_tree(bit)
        super()._started(member, epoch, done)
        self._note_speeds()
        if self._cells.needed[bit]:
            self._tree.insert(bit)

    def _leave_tree(self, bit: int) -> None:
        self._note_speeds()
        self._tree.remove(bit)

    def _note_speeds(self) -> None:
        self._speeds.update((self._bits[name], member.speed) for name, member in self._members.items())

    def _fill(self, member: Member, n: int) -> None:
        served = self._to_fill(member)
        group, can_take = group_size(served), sum(1 << self._bits[m.name] for m in served)
        buffer = self._buffers[member.name]
        for node in list(self._tree.with_job(self._bits[member.name])):
            if len(buffer) >= n:
                return
            if not node & ~can_take:
                self._sample(node, min(group, n - len(buffer)))

    def _sample(self, node: int, count: int) -> None:
        """Sample up to `count` of the samples that all jobs of the node need into their buffers."""
        cells = self._cells.needed_by(node)
        count = min(count, self._cells.samples_in(cells))
        if not count:
            return
        places = self._cells.pick_many(cells, self._rng, count)
        # From the end of each cell, because taking a sample moves the cell's last one into its slot.
        taken = {place: self._cells.take(place, node) for place in sorted(places, reverse=True)}
        for name, bit in self._bits.items():
            if node >> bit & 1:
                self._buffers[name].extend(taken[place] for place in places)
                if not self._cells.needed[bit]:
                    self._leave_tree(bit)


def group_size(served: list[Member]) -> int:
    """Return how many samples to take from a node at once: half of these jobs' smallest batch (eq. 3-8), at least 1."""
    return max(1, min(member.batch_size for member in served) // 2)
