"""Drives a policy and its definition through the same random trace, and compares every answer."""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_dpflow.caches.policy import Policy
from torch_dpflow.lookahead import Lookahead
from torch_dpflow.testing.exact_policies import ExactPolicy

#: Powers of two, so that no comparison hangs on rounding.
_SPEEDS = (None, 1.0, 2.0, 0.5, 0.25)
_JOBS = 6


class ExactTrace:
    """A random trace of reads, offers, discards and lookaheads: singly and in bulk, with repeats and sizes that may be
    too large, by jobs that read as announced or not, leave and return.
    """

    def __init__(self, rng: np.random.Generator, policy: Policy, exact: ExactPolicy) -> None:
        self._rng, self._policy, self._exact = rng, policy, exact

    def step(self) -> None:
        """Apply one random action to both. Raises AssertionError if they differ."""
        actions = [
            self._read_one,
            self._read_some,
            self._give_lookahead,
            self._join,
            self._forget,
            self._offer,
        ]
        action = self._rng.choice(
            np.array([*actions, self._evict, self._discard]),
            p=[0.35, 0.25, 0.2, 0.03, 0.04, 0.06, 0.04, 0.03],
        )
        action(int(self._rng.integers(_JOBS)))
        assert sorted(self._policy) == sorted(self._exact.resident)

    def _keys_to_read(self, job: int, count: int) -> list[int]:
        """Keys mostly as announced, sometimes not, sometimes one of them twice."""
        due = self._exact.due(job) if self._rng.random() < 0.8 else []
        keys = [*due, *(key for key in self._rng.permutation(self._exact.keys).tolist() if key not in due)]
        read = keys[:count]
        if self._rng.random() < 0.1:
            read.append(read[int(self._rng.integers(len(read)))])
        return read

    def _sizes(self, count: int) -> list[int]:
        return (
            [1] * count if self._exact.max_bytes is None else self._rng.integers(1, 12, size=count).tolist()
        )

    def _read_one(self, job: int) -> None:
        key = self._keys_to_read(job, 1)[0]
        hit = self._exact.access(key, job)
        assert self._policy.access(key, job) == hit
        if not hit and self._rng.random() < 0.95:
            (size,) = self._sizes(1)
            assert list(self._policy.admit(key, size)) == self._exact.admit_many([key], [size])

    def _read_some(self, job: int) -> None:
        keys = self._keys_to_read(job, int(self._rng.integers(1, 9)))
        hits = [self._exact.access(key, job) for key in keys]
        assert self._policy.access_many(np.array(keys), job).tolist() == hits
        self._admit([key for key, hit in zip(keys, hits) if not hit])

    def _offer(self, _: int) -> None:
        """Offer keys that no job has read, resident or not."""
        self._admit(self._rng.integers(self._exact.keys, size=self._rng.integers(1, 6)).tolist())

    def _admit(self, keys: list[int]) -> None:
        sizes = self._sizes(len(keys))
        given = None if self._exact.max_bytes is None and self._rng.random() < 0.5 else np.array(sizes)
        gone = self._policy.admit_many(np.array(keys, dtype=np.int64), given).tolist()
        expected = self._exact.admit_many(keys, sizes)
        # A key that is too large is evicted at once; its place in the order is undefined.
        assert sorted(gone) == sorted(expected), f"{gone} went instead of {expected}"

    def _join(self, job: int) -> None:
        weight = float(2.0 ** self._rng.integers(-2, 3))
        self._exact.join(job, weight)
        self._policy.join(job, weight=weight)

    def _forget(self, job: int) -> None:
        self._exact.forget(job)
        self._policy.forget(job)

    def _evict(self, _: int) -> None:
        if self._exact.resident:
            assert self._policy.evict() == self._exact.evict()

    def _discard(self, _: int) -> None:
        key = int(self._rng.integers(self._exact.keys))
        assert self._policy.discard(key) == (self._exact.resident.pop(key, None) is not None)

    def _give_lookahead(self, job: int) -> None:
        lookahead = self._lookahead(job)
        self._exact.hint(job, lookahead)
        self._policy.hint(job, lookahead)

    def _lookahead(self, job: int) -> Lookahead:
        known, rng, keys = self._exact.jobs.get(job), self._rng, self._exact.keys
        length = int(rng.integers(2, keys + 1))
        members = rng.permutation(keys)[:length]
        epoch, position = int(rng.integers(3)), 0
        if known is not None and known.length and known.epoch is not None and rng.random() < 0.7:
            length, epoch = known.length, known.epoch
            position = int(rng.integers(min(known.position, length), length + 1))
            members = rng.permutation(np.array(sorted(known.unread), dtype=np.int64))
        elif rng.random() < 0.2:
            position = int(rng.integers(length))
        room = members[: length - position]
        certain = room[: int(rng.integers(len(room) + 1)) if rng.random() < 0.6 else len(room)]
        likely = room[len(certain) : len(certain) + int(rng.integers(4))]
        weights: Any = 2.0 ** rng.integers(0, 3, size=len(likely) if rng.random() < 0.5 else 0)
        return Lookahead(
            epoch=epoch,
            length=length,
            position=position,
            certain=certain,
            likely=likely,
            weights=weights,
            members=members if position == 0 and rng.random() < 0.7 else None,
            following=rng.permutation(keys)[:length] if rng.random() < 0.3 else None,
            speed=_SPEEDS[rng.integers(len(_SPEEDS))],
        )
