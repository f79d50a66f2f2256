"""What a flow's router knows of a job's future reads, cut to the keys of one shard (thesis 3.4.3, 3.4.4).

Pure functions; there is no socket, thread or clock inside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_dpflow.cluster.messages.router import JobLookahead
from torch_dpflow.lookahead import Keys, Lookahead
from torch_dpflow.samplers.indices import IndexArray, compact

#: A change of a job's measured speed by less than this factor is no news.
SPEED_STEP = 1.25


@dataclass(frozen=True, slots=True)
class KnownEpoch:
    """An epoch of a job as its router knows it.

    Args:
        ahead: of the job's sampling group, or of the job's own sampler.
        drawn: the samples that were drawn since the epoch was begun with this router, in order.
        done: those that the job had before, ascending.
    """

    ahead: Lookahead
    drawn: Keys
    done: Keys

    def cut(self, first: int, end: int, size: int) -> tuple[JobLookahead, list[Any]]:
        """The answer to a shard that owns the keys from `first` to before `end`, and its arrays.

        size: samples of the flow.
        """
        ahead, dtype = self.ahead, compact(size)
        certain = _within(np.concatenate([self.drawn, ahead.certain]), first, end)
        members = None if ahead.members is None else _within(ahead.members, first, end)
        if members is not None and len(members) == end - first:
            members = None
        length = end - first if members is None else len(members)
        if not ahead.complete and len(self.done):
            members = np.setdiff1d(np.arange(first, end) if members is None else members, self.done)
        is_likely = (ahead.likely >= first) & (ahead.likely < end)
        speed = 0.0
        if ahead.speed is not None and ahead.length:
            speed = ahead.speed * length / ahead.length
        answer = JobLookahead(
            ahead.epoch,
            0,
            ahead.complete,
            length,
            members is not None,
            ahead.following is not None,
            speed,
        )
        empty = np.empty(0, dtype)
        arrays: list[npt.NDArray[Any]] = [
            certain.astype(dtype),
            ahead.likely[is_likely].astype(dtype),
            ahead.weights[is_likely].astype(np.float64) if len(ahead.weights) else np.empty(0, np.float64),
            empty if members is None else members.astype(dtype),
            empty if ahead.following is None else _within(ahead.following, first, end).astype(dtype),
        ]
        return answer, arrays


def speed_step(speed: float | None) -> int | None:
    """The same number for speeds that differ by less than `SPEED_STEP`; None for one that is not measured."""
    return None if speed is None else round(math.log(speed, SPEED_STEP))


def joint_order(parts: dict[int, IndexArray], replicas: int) -> IndexArray:
    """The order of a job whose ranks have announced theirs, as if they read in turn; of those that have, by rank."""
    if replicas == 1:
        return parts[0]
    places = np.concatenate([np.arange(len(part)) * replicas + rank for rank, part in parts.items()])
    joint: IndexArray = np.concatenate(list(parts.values()))[np.argsort(places)]
    return joint


def _within(keys: Keys, first: int, end: int) -> Keys:
    return keys[(keys >= first) & (keys < end)]
