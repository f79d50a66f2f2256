"""One job's position in its epoch, and estimated distances of the keys whose position is not certain."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torch_dpflow.lookahead import Keys, Lookahead


def _no_keys() -> Keys:
    return np.empty(0, dtype=np.int64)


@dataclass(slots=True, eq=False)
class JobProgress:
    """A policy's record of a job, besides its cells in the timetable."""

    #: the column of its cells; the plane of its codes, and their place in it
    column: int
    plane: int
    place: int
    #: alpha of eq. 3-5
    weight: float
    #: the epoch of the last lookahead; None before the first
    epoch: int | None = None
    #: N, and k: how many samples of the epoch it has read
    length: int = 0
    position: int = 0
    #: whether the epoch ends after `length` reads; False if the length is a guess
    turns: bool = False
    #: cell value of keys that are in no lookahead
    outsiders: int = -1
    #: the position after the last certain one
    certain_end: int = 0
    #: whether some of its cells may be estimates, which change as it reads
    estimates: bool = False
    #: announced positions that a later lookahead may revise: the first, and their keys in order.
    #: None: not recorded, find them in the cells
    announced: tuple[int, Keys] | None = None
    #: S_uc as announced, how many of it are unread, and its mean rank by weight, as a share of its size
    likely: Keys = field(default_factory=_no_keys)
    likely_left: int = 0
    likely_rank: float = 1.0
    #: by key, its position in the next epoch, which its cell holds once it is read. None: not known
    following: npt.NDArray[np.int32] | None = None
    following_of: memoryview | None = None
    #: time for one sample, and the time at which it read position 0, or would have
    pace: float = 1.0
    base: float = 0.0
    #: the time at which the epoch began, and its reads since then, from which its pace is measured
    began: float = 0.0
    reads: int = 0

    @property
    def certain_left(self) -> int:
        """|S_c|"""
        return max(0, self.certain_end - self.position)

    @property
    def likely_distance(self) -> float:
        """Eq. 3-2, in samples; its positions count from k, so k is not subtracted."""
        certain = self.certain_left
        return certain + self.likely_rank * max(0, self.length - self.position - certain)

    @property
    def unknown_distance(self) -> float:
        """Eq. 3-3, in samples."""
        announced = self.certain_left + self.likely_left
        return announced + max(0, self.length - self.position - announced) / 2

    def note_lookahead(self, lookahead: Lookahead, likely: Keys) -> None:
        """Record a lookahead, of whose likely keys `likely` are unread."""
        self.certain_end = lookahead.position + len(lookahead.certain)
        self.announced = None if lookahead.complete else (lookahead.position, lookahead.certain)
        self.likely = likely
        self.likely_left = len(likely)
        self.likely_rank = _mean_rank(lookahead)

    def announced_from(self, start: int) -> Keys | None:
        """The keys announced for positions from `start` on; None if that is not recorded."""
        if self.announced is None or start < self.announced[0]:
            return None
        first, keys = self.announced
        return keys[start - first :]

    def follow(self, following: npt.NDArray[np.int32] | None) -> None:
        """Record the next epoch's positions."""
        self.following = following
        self.following_of = None if following is None else following.data


def _mean_rank(lookahead: Lookahead) -> float:
    """The sum of w_i * i / m over the likely keys, i from 1: eq. 3-2 without the common terms."""
    count = len(lookahead.likely)
    if count == 0:
        return 1.0
    ranks = np.arange(1, count + 1) / count
    if len(lookahead.weights) == 0:
        return float(ranks.mean())
    return float(np.average(ranks, weights=lookahead.weights))
