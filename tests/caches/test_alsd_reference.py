"""ALSD and use distance evict what the formulas say, key for key, on random traces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.caches.plain_alsd import PlainALSD
from torch_dpflow.caches.alsd import ALSD
from torch_dpflow.caches.ranked import RankedPolicy
from torch_dpflow.caches.use_distance import UseDistance
from torch_dpflow.lookahead import Lookahead


class SmallALSD(ALSD):
    """Its queue has slabs even with a handful of keys."""

    front = 2


class SmallUseDistance(UseDistance):
    front = 2


SPEEDS = (None, 1.0, 2.0, 0.5, 0.25)


class Pair:
    """The policy and its plain double, driven alike; every answer is compared."""

    def __init__(self, rng: np.random.Generator, keys: int, aggregate: str, *, in_bytes: bool) -> None:
        self.rng, self.keys, self.in_bytes = rng, keys, in_bytes
        budget = int(rng.integers(1, keys + 1))
        budgets = {"max_items": None if in_bytes else budget, "max_bytes": 3 * budget if in_bytes else None}
        self.plain = PlainALSD(keys, aggregate=aggregate, **budgets)
        self.policy: RankedPolicy
        if aggregate == "certain":
            self.policy = SmallUseDistance(keys=keys, **budgets)
        else:
            self.policy = SmallALSD(keys=keys, aggregate=aggregate, **budgets)

    def step(self) -> None:
        job = int(self.rng.integers(6))
        action = self.rng.choice(
            [self.read_one, self.read_some, self.tell, self.join, self.forget, self.evict],
            p=[0.4, 0.3, 0.2, 0.03, 0.03, 0.04],
        )
        action(job)

    def keys_to_read(self, job: int, count: int) -> list[int]:
        """Mostly as announced, sometimes not."""
        known = self.plain.jobs.get(job)
        due: list[int] = []
        if known is not None and self.rng.random() < 0.8:
            due = sorted((k for k in known.certain if k not in known.visited), key=known.certain.__getitem__)
        rest = [key for key in self.rng.permutation(self.keys).tolist() if key not in due]
        return (due + rest)[:count]

    def sizes(self, count: int) -> list[int]:
        return self.rng.integers(1, 12, size=count).tolist() if self.in_bytes else [1] * count

    def read_one(self, job: int) -> None:
        (key,) = self.keys_to_read(job, 1)
        hit = self.plain.access(key, job)
        assert self.policy.access(key, job) == hit
        if not hit:
            sizes = self.sizes(1)
            assert list(self.policy.admit(key, sizes[0])) == self.plain.admit_many([key], sizes)

    def read_some(self, job: int) -> None:
        keys = self.keys_to_read(job, int(self.rng.integers(1, 7)))
        hits = self.plain.access_many(keys, job)
        assert self.policy.access_many(np.array(keys), job).tolist() == hits
        missed = [key for key, hit in zip(keys, hits) if not hit]
        if missed:
            sizes = self.sizes(len(missed))
            given = np.array(sizes) if self.in_bytes or self.rng.random() < 0.5 else None
            gone = self.policy.admit_many(np.array(missed), given)
            assert gone.tolist() == self.plain.admit_many(missed, sizes)

    def tell(self, job: int) -> None:
        told = self.lookahead(job)
        self.plain.foresee(job, told)
        self.policy.foresee(job, told)

    def lookahead(self, job: int) -> Lookahead:
        known, rng = self.plain.jobs.get(job), self.rng
        length = int(rng.integers(2, self.keys + 1))
        members = rng.permutation(self.keys)[:length]
        epoch, position = int(rng.integers(3)), 0
        if known is not None and known.length and known.epoch is not None and rng.random() < 0.7:
            length, epoch = known.length, known.epoch
            position = int(rng.integers(min(known.position, length), length + 1))
            unread = [key for key in sorted(known.members) if key not in known.visited]
            members = rng.permutation(np.array(unread, dtype=np.int64))
        elif rng.random() < 0.2:
            position = int(rng.integers(length))
        room = members[: length - position]
        certain = room[: int(rng.integers(len(room) + 1)) if rng.random() < 0.6 else len(room)]
        likely = room[len(certain) : len(certain) + int(rng.integers(4))]
        weights = 2.0 ** rng.integers(0, 3, size=len(likely) if rng.random() < 0.5 else 0)
        return Lookahead(
            epoch=epoch,
            length=length,
            position=position,
            certain=certain,
            likely=likely,
            weights=weights,
            members=members if position == 0 and rng.random() < 0.7 else None,
            following=rng.permutation(self.keys)[:length] if rng.random() < 0.3 else None,
            speed=SPEEDS[rng.integers(len(SPEEDS))],
        )

    def join(self, job: int) -> None:
        weight = float(2.0 ** self.rng.integers(-2, 3))
        self.plain.join(job, weight)
        self.policy.join(job, weight=weight)

    def forget(self, job: int) -> None:
        self.plain.forget(job)
        self.policy.forget(job)

    def evict(self, _: int) -> None:
        if self.plain.resident:
            assert self.policy.evict() == self.plain.evict()


@pytest.mark.parametrize("in_bytes", [False, True], ids=["items", "bytes"])
@pytest.mark.parametrize("aggregate", ["min", "mean", "certain"])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_evicts_what_the_formulas_say(seed: int, aggregate: str, in_bytes: bool) -> None:
    pair = Pair(np.random.default_rng(seed), keys=24, aggregate=aggregate, in_bytes=in_bytes)
    for _ in range(120):
        pair.step()
        assert set(pair.policy) == set(pair.plain.resident)
