"""Groups that draw for several jobs at once and buffer each one's samples until it draws them."""

from abc import abstractmethod
from collections import deque
from typing import Any, ClassVar

import numpy as np

from torch_dpflow.lookahead import Lookahead
from torch_dpflow.samplers.cells import MAX_MEMBERS, Cells, bits_of, free_bit
from torch_dpflow.samplers.group import Draw, SamplingGroup
from torch_dpflow.samplers.indices import IndexArray
from torch_dpflow.samplers.member import Member


class BufferedGroup(SamplingGroup):
    """Every job has a set of samples that are still to be picked for it, in cells, and a buffer of picked ones.

    In lookaheads the buffer is certain and the rest likely, weighted by how many jobs need a sample: the more
    jobs need it, the sooner one of their draws may pick it.
    """

    #: Most jobs of a group.
    max_jobs: ClassVar[int] = MAX_MEMBERS

    def __init__(self, size: int, *, capacity: int | None = None, seed: int = 0) -> None:
        super().__init__(size, capacity=capacity, seed=seed)
        self._cells = Cells(self.size)
        self._rng = np.random.default_rng(self.seed)
        #: By job: its number in the cells' masks.
        self._bits: dict[str, int] = {}
        #: By job in an epoch: picked but not drawn yet, in order.
        self._buffers: dict[str, deque[int]] = {}

    @abstractmethod
    def _fill(self, member: Member, n: int) -> None:
        """Add at least one sample to the member's buffer, which needs n; others' buffers may be filled too."""

    def _joined(self, member: Member) -> None:
        try:
            self._bits[member.name] = free_bit(self._bits.values(), self.max_jobs)
        except Exception:
            del self._members[member.name]
            raise

    def _left(self, member: Member) -> None:
        self._cells.delete(self._bits.pop(member.name))
        self._buffers.pop(member.name, None)

    def _started(self, member: Member, epoch: int, done: IndexArray) -> None:
        members = np.zeros(self.size, np.bool_)
        members[member.samples()] = True
        members[done] = False
        bit = self._bits[member.name]
        self._cells.delete(bit)
        self._cells.insert(bit, members)
        self._buffers[member.name] = deque()

    def _draw(self, member: Member, n: int) -> Draw:
        buffer = self._buffers[member.name]
        while len(buffer) < n:
            self._fill(member, n)
        return Draw(np.array([buffer.popleft() for _ in range(n)], np.int64))

    def _unpicked(self, member: Member) -> int:
        """Samples that the member needs beyond its buffer; 0 between epochs."""
        return self._cells.needed[self._bits[member.name]]

    def _to_fill(self, member: Member) -> list[Member]:
        """This member, then the others whose buffers hold less than a batch."""
        others = (
            m
            for m in self._members.values()
            if m is not member and self._unpicked(m) and len(self._buffers[m.name]) < m.batch_size
        )
        return [member, *others]

    def _lookahead(self, member: Member, epoch: int) -> Lookahead:
        bit = 1 << self._bits[member.name]
        cells = [(mask, samples) for mask, samples in self._cells.items() if mask & bit]
        cells.sort(key=lambda cell: -len(list(bits_of(cell[0]))))
        return Lookahead(
            epoch=epoch,
            length=member.length,
            position=member.position,
            certain=np.array(self._buffers[member.name], np.int64),
            likely=np.concatenate([samples for _, samples in cells] or [np.empty(0, np.int64)]),
            weights=np.concatenate(
                [np.full(len(samples), len(list(bits_of(mask))), np.float64) for mask, samples in cells]
                or [np.empty(0)]
            ),
            members=member.samples(),
            speed=member.speed,
        )

    def _validate(self) -> None:
        self._cells.validate()
        for name, buffer in self._buffers.items():
            member = self._members[name]
            left = member.length - member.position
            assert len(buffer) + self._unpicked(member) == left, name

    def _details(self) -> dict[str, Any]:
        return {
            "cells": self._cells.state_dict(),
            "rng": self._rng.bit_generator.state,
            "bits": dict(self._bits),
            "buffers": {name: list(buffer) for name, buffer in self._buffers.items()},
        }

    def _restore_details(self, members: dict[str, Member], details: dict[str, Any]) -> None:
        cells, rng = Cells(self.size), np.random.default_rng()
        cells.load_state_dict(details["cells"])
        rng.bit_generator.state = details["rng"]
        buffers = {name: deque(buffer) for name, buffer in details["buffers"].items()}
        self._bits = {name: details["bits"][name] for name in members}
        self._cells, self._rng, self._buffers = cells, rng, buffers
