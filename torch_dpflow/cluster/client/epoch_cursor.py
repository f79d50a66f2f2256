"""Which samples of its epoch a job has delivered: a bit for each, and the state to resume from."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_dpflow.cluster.messages.router import JobRank
from torch_dpflow.errors import StateError

Marks = npt.NDArray[np.uint8]


def mark(marks: Marks, keys: npt.NDArray[np.int64]) -> None:
    """Set the bits of these samples, the most significant bit of a byte first."""
    np.bitwise_or.at(marks, keys >> 3, (128 >> (keys & 7)).astype(np.uint8))


class EpochCursor:
    """Where a job, or a rank of one, is in its epoch; new ones are at its start.

    Args:
        size: samples of the flow.
        seed: of the job.
        rank: which part of the job this is; None: all of it.
    """

    def __init__(self, size: int, seed: int, rank: JobRank | None, epoch: int) -> None:
        self._size = size
        self._seed = seed
        self._rank = None if rank is None else [rank.rank, rank.replicas]
        self.epoch = epoch
        self.position = 0
        self.marks: Marks = np.zeros(-(-size // 8), np.uint8)

    def add(self, keys: list[int], position: int) -> None:
        """A batch of these samples was delivered, `position` samples in all by then. May be repeated."""
        # For the few samples of a batch numpy would take twice as long.
        marks = self.marks.data
        for key in keys:
            marks[key >> 3] |= 128 >> (key & 7)
        self.position = position

    def state(self) -> dict[str, Any]:
        """The state as plain data: O(size / 8)."""
        return {
            "epoch": self.epoch,
            "size": self._size,
            "seed": self._seed,
            "rank": self._rank,
            "position": self.position,
            "done": base64.b64encode(self.marks.tobytes()).decode("ascii"),
        }

    def resume(self, epoch: int, state: dict[str, Any]) -> None:
        """Take the position of `state`. Raises StateError, and changes nothing, unless it is of this epoch."""
        try:
            self._check(epoch, state)
            marks = np.frombuffer(base64.b64decode(state["done"], validate=True), np.uint8)
            position = int(state["position"])
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"the job's state is damaged: {error!r}") from error
        if len(marks) != len(self.marks) or not 0 <= position <= self._size:
            raise StateError(
                f"the job's state is damaged: {len(marks)} bytes of marks and position {position}; "
                f"{len(self.marks)} bytes and 0 to {self._size} are right"
            )
        self.epoch, self.marks, self.position = epoch, marks.copy(), position

    def _check(self, epoch: int, state: dict[str, Any]) -> None:
        if (state["epoch"], state["size"]) != (epoch, self._size):
            raise StateError(
                f"the state is of epoch {state['epoch']!r} of {state['size']!r} samples, to be begun is epoch "
                f"{epoch} of {self._size}; give the epoch's own state, or none"
            )
        if state["rank"] != self._rank:
            raise StateError(
                f"the state is of [rank, ranks] {state['rank']!r}, this job's are {self._rank!r}; resume every rank "
                "from its own state, with as many ranks, or begin the epoch afresh"
            )
