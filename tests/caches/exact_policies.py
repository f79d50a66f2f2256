"""Policies as the papers define them, and a suite that compares a policy with its definition, key by key.

Each eviction computes every distance of every resident key. A random trace drives a policy and its definition, and
compares every answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.contracts.policies import PolicyContract
from torch_dpflow.caches.policy import Policy
from torch_dpflow.lookahead import Lookahead

#: Powers of two, so that no comparison hangs on rounding.
_JOBS = 6


class ExactPolicy(ABC):
    """Evicts the resident key of the greatest distance; among equals, the one loaded first.

    Keys that are offered together are all admitted before anything is evicted.
    """

    def __init__(self, keys: int, *, max_items: int | None = None, max_bytes: int | None = None) -> None:
        self.keys, self.max_items, self.max_bytes = keys, max_items, max_bytes
        #: by name: its epoch, length, position, and the keys that it has not read
        self.jobs: dict[object, Any] = {}
        #: key -> number of its load, size
        self.resident: dict[int, tuple[int, int]] = {}
        self.loads = 0

    @abstractmethod
    def distance(self, key: int) -> float: ...

    @abstractmethod
    def read(self, key: int, name: object) -> None: ...

    @abstractmethod
    def join(self, name: object, weight: float) -> None: ...

    @abstractmethod
    def hint(self, name: object, lookahead: Lookahead) -> None: ...

    @abstractmethod
    def forget(self, name: object) -> None: ...

    @abstractmethod
    def due(self, name: object) -> list[int]:
        """Keys that the job is next expected to read, in order."""

    def access(self, key: int, name: object) -> bool:
        self.read(key, name)
        return key in self.resident

    def admit_many(self, keys: Sequence[int], sizes: Sequence[int]) -> list[int]:
        gone = []
        for key, size in dict(zip(keys, sizes)).items():
            if self.max_bytes is not None and size > self.max_bytes:
                self.resident.pop(key, None)
                gone.append(key)
            elif key in self.resident:
                self.resident[key] = (self.resident[key][0], size)
            else:
                self.loads += 1
                self.resident[key] = (self.loads, size)
        while self._is_over():
            gone.append(self.evict())
        return gone

    def evict(self) -> int:
        key = max(self.resident, key=lambda key: (self.distance(key), -self.resident[key][0]))
        del self.resident[key]
        return key

    def _is_over(self) -> bool:
        size = sum(size for _, size in self.resident.values())
        return (self.max_items is not None and len(self.resident) > self.max_items) or (
            self.max_bytes is not None and size > self.max_bytes
        )


@dataclass
class _ExactJob:
    """A job's position and its sets of keys: S_v, S_c, S_uc, and S_uk for the other members."""

    weight: float
    epoch: int | None = None
    length: int = 0
    position: int = 0
    members: set[int] = field(default_factory=set)
    visited: set[int] = field(default_factory=set)
    certain: dict[int, int] = field(default_factory=dict)
    certain_end: int = 0
    likely: set[int] = field(default_factory=set)
    likely_rank: float = 1.0
    following: list[int] | None = None
    pace: float = 1.0
    base: float = 0.0
    began: float = 0.0
    reads: int = 0
    is_measured: bool = False

    @property
    def unread(self) -> set[int]:
        return self.members - self.visited

    def place(self, key: int) -> int | None:
        """The position at which the job certainly reads `key`, if there is one."""
        if key in self.visited:
            if self.following is not None and key in self.following:
                return self.length * (1 if self.epoch else 2) + self.following.index(key)
            return None
        return self.certain.get(key)

    def estimate(self, key: int) -> float:
        """Eq. 3-4 for a member without a certain position."""
        left = max(0, self.certain_end - self.position)
        if key in self.visited:
            return self.length
        if key in self.likely:
            return left + self.likely_rank * max(0, self.length - self.position - left)
        announced = left + len(self.likely)
        return announced + max(0, self.length - self.position - announced) / 2


class ExactALSD(ExactPolicy):
    """By `aggregate`: "min", "mean" (thesis, eq. 3-1 to 3-5), or "certain", the mean without estimates."""

    def __init__(
        self, keys: int, *, max_items: int | None = None, max_bytes: int | None = None, aggregate: str = "min"
    ) -> None:
        super().__init__(keys, max_items=max_items, max_bytes=max_bytes)
        self.aggregate = aggregate
        self.now = 0
        self.measured = 0

    def due(self, name: object) -> list[int]:
        job = self.jobs.get(name, _ExactJob(1.0))
        return sorted((key for key in job.certain if key not in job.visited), key=job.certain.__getitem__)

    # -- distances -------------------------------------------------------------------------------------------

    def distance(self, key: int) -> float:
        if self.aggregate == "min":
            times: list[float] = [self.time(job, key) for job in self.jobs.values()]
            return min(times, default=float("inf"))
        return float(sum(job.weight * self.samples(job, key) for job in self.jobs.values()))

    def time(self, job: _ExactJob, key: int) -> float:
        place = job.place(key)
        if place is not None:
            return job.base + place * job.pace - self.now
        return job.estimate(key) * job.pace if key in job.members else float("inf")

    def samples(self, job: _ExactJob, key: int) -> float:
        place = job.place(key)
        if place is not None:
            return place - job.position
        if key not in job.members or self.aggregate == "certain":
            return job.length
        return job.estimate(key)

    # -- reading ---------------------------------------------------------------------------------------------

    def read(self, key: int, name: object) -> None:
        job = self.ready(name)
        place = job.certain.get(key) if key not in job.visited else None
        job.position = job.position + 1 if place is None else max(job.position, place + 1)
        job.likely.discard(key)
        job.visited.add(key)
        job.members.add(key)
        job.reads += 1
        if self.aggregate == "min":
            self.now += 1
            if self.now >= self.measured + max(1, self.reads_between // 8):
                self.measure()

    def measure(self) -> None:
        """Measure all paces, in reads of all jobs a sample: eight times in the jobs' epochs."""
        for job in self.jobs.values():
            elapsed = self.now - job.began
            if elapsed >= 8:
                rate = job.reads / elapsed
                if job.is_measured:
                    rate = (1 / job.pace + rate) / 2
                job.pace, job.is_measured = 1 / max(rate, 1e-9), True
                job.reads, job.began = 0, self.now
            job.base = self.now - job.position * job.pace
        self.measured = self.now
        self.reads_between = sum(job.length for job in self.jobs.values())

    def new_job(self, name: object, weight: float) -> _ExactJob:
        rates = [1 / other.pace for other in self.jobs.values()]
        job = self.jobs[name] = _ExactJob(weight, began=self.now)
        job.pace = len(rates) / sum(rates) if rates else 1.0
        return job

    # -- jobs and epochs -------------------------------------------------------------------------------------

    def join(self, name: object, weight: float) -> None:
        if name in self.jobs:
            self.jobs[name].weight = weight
        else:
            job = self.new_job(name, weight)
            self.begin(job, Lookahead.unknown(self.keys, epoch=0))
            job.epoch = None

    def forget(self, name: object) -> None:
        self.jobs.pop(name, None)

    def hint(self, name: object, lookahead: Lookahead) -> None:
        job = self.jobs[name] if name in self.jobs else self.new_job(name, 1.0)
        goes_on = (job.epoch, job.length) == (
            lookahead.epoch,
            lookahead.length,
        ) and lookahead.position >= job.position
        if not goes_on:
            self.begin(job, lookahead)
            return
        job.certain = {k: p for k, p in job.certain.items() if p < lookahead.position or k in job.visited}
        self.apply(job, lookahead)
        if lookahead.following is not None and job.following is None:
            job.following = lookahead.following.tolist()

    def ready(self, name: object) -> _ExactJob:
        if name not in self.jobs:
            self.join(name, 1.0)
        job: _ExactJob = self.jobs[name]
        if job.position >= job.length:
            epoch = job.epoch
            if job.following is not None and epoch is not None:
                self.begin(job, Lookahead.of_order(np.array(job.following), epoch=epoch + 1))
            else:
                members = np.array(sorted(job.members))
                self.begin(job, Lookahead.unknown(job.length, epoch=0, members=members))
                job.epoch = None if epoch is None else epoch + 1
        return job

    def begin(self, job: _ExactJob, lookahead: Lookahead) -> None:
        certain = set(lookahead.certain.tolist())
        everyone = certain if lookahead.complete and lookahead.position == 0 else set(range(self.keys))
        job.members = everyone if lookahead.members is None else set(lookahead.members.tolist())
        job.epoch, job.length, job.position = lookahead.epoch, lookahead.length, lookahead.position
        job.visited = job.members - certain if lookahead.complete else set()
        job.certain = {}
        job.following = None if lookahead.following is None else lookahead.following.tolist()
        job.base = self.now - job.position * job.pace
        self.reads_between = sum(job.length for job in self.jobs.values())
        self.apply(job, lookahead)

    def apply(self, job: _ExactJob, lookahead: Lookahead) -> None:
        for place in reversed(range(len(lookahead.certain))):
            job.certain[int(lookahead.certain[place])] = lookahead.position + place
        job.likely = set(lookahead.likely.tolist()) - job.visited - set(job.certain)
        job.members |= job.likely | set(job.certain)
        job.certain_end = lookahead.position + len(lookahead.certain)
        count = len(lookahead.likely)
        weights = lookahead.weights if len(lookahead.weights) else np.ones(count)
        ranks = np.arange(1, count + 1) / max(1, count)
        job.likely_rank = float((weights * ranks).sum() / weights.sum()) if count else 1.0


class ExactRefCnt(ExactPolicy):
    """The fewer jobs still need a key in their epoch, the farther it is (JOADER, 3.2)."""

    def distance(self, key: int) -> float:
        return -sum(key in claim.unread for claim in self.jobs.values())

    def due(self, name: object) -> list[int]:
        return sorted(self.jobs[name].unread) if name in self.jobs else []

    def read(self, key: int, name: object) -> None:
        self.join(name, 1.0)
        claim = self.jobs[name]
        if claim.position >= claim.length:
            claim.unread, claim.position = set(claim.members), 0
            claim.epoch = None if claim.epoch is None else claim.epoch + 1
        claim.unread.discard(key)
        claim.position += 1

    def join(self, name: object, weight: float) -> None:
        everything = set(range(self.keys))
        self.jobs.setdefault(name, _ExactClaim(everything, set(everything), self.keys))

    def forget(self, name: object) -> None:
        self.jobs.pop(name, None)

    def hint(self, name: object, lookahead: Lookahead) -> None:
        old = self.jobs.get(name)
        if old is not None and old.epoch == lookahead.epoch and lookahead.position >= old.position:
            return
        everything = set(range(self.keys)) if lookahead.members is None else set(lookahead.members.tolist())
        certain = set(lookahead.certain.tolist())
        if lookahead.members is None and lookahead.complete and lookahead.position == 0:
            everything = certain
        needs = set(certain if lookahead.complete else everything)
        self.jobs[name] = _ExactClaim(everything, needs, lookahead.length, lookahead.position, lookahead.epoch)


@dataclass
class _ExactClaim:
    """What a job reads in an epoch, what it still needs of it, and where it is."""

    members: set[int]
    unread: set[int]
    length: int
    position: int = 0
    epoch: int | None = None


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
        return [1] * count if self._exact.max_bytes is None else self._rng.integers(1, 12, size=count).tolist()

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
        )


class DefinedPolicyContract(PolicyContract):
    """For a policy that has an exact definition, whose victims its own must equal, key for key."""

    #: How many traces are compared.
    traces = 15

    def make_definition(self, *, keys: int, max_items: int | None = None, max_bytes: int | None = None) -> ExactPolicy:
        raise NotImplementedError(f"{type(self).__name__} must say what defines the policy")

    def test_evicts_what_its_definition_says(self) -> None:
        nothing = np.empty(0, dtype=np.int64)
        for seed in range(self.traces):
            rng = np.random.default_rng(seed)
            items, size = int(rng.integers(1, 24)), int(rng.integers(3, 72))
            budgets = [{"max_items": items}, {"max_bytes": size}, {"max_items": items, "max_bytes": size}]
            budget: dict[str, int] = budgets[seed % 3]
            policy = self.make_policy(stream=nothing, keys=24, **budget)
            trace = ExactTrace(rng, policy, self.make_definition(keys=24, **budget))
            for _ in range(120):
                trace.step()
