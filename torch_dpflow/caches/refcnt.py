"""RefCnt: evict the key that the fewest jobs still need (JOADER, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torch_dpflow._core.need_counts import NEEDED, READ, NeedCounts, States
from torch_dpflow._core.sparse_zeros import sparse_zeros
from torch_dpflow.caches.policy import Job, check_weight
from torch_dpflow.caches.ranked import RankedPolicy
from torch_dpflow.caches.residents import Distances, Loads, Ranking
from torch_dpflow.caches.timetable import grown
from torch_dpflow.lookahead import Keys, Lookahead


@dataclass(slots=True, eq=False)
class _Claim:
    """The keys that one job still needs in its epoch."""

    #: how many keys it reads in an epoch, 0: unknown; and how many of this one it has read
    length: int
    position: int = 0
    #: by key; None before the first epoch
    states: States | None = None
    #: whether the epoch began with every key needed
    is_whole: bool = True
    #: the epoch of the last lookahead, or the one after it; None before the first
    epoch: int | None = None
    #: None: every key
    members: Keys | None = None


class _Counts(Ranking):
    """Ranking by how many jobs need each key: the fewer jobs, the greater the distance."""

    def __init__(self) -> None:
        self.needs = NeedCounts(0)

    def distance(self, key: int, load: int) -> float:
        return -float(self.needs.of_one(key))

    def distances(self, keys: Keys, loads: Loads) -> Distances:
        return np.negative(self.needs.of(keys), dtype=np.float64)


class RefCnt(RankedPolicy):
    """Policy that evicts the key that the fewest jobs still have to read in their epochs.

    It uses the set of keys in lookaheads, not their order. A job that never had a lookahead is assumed to read every
    key once in an epoch. Among equals, the oldest load is evicted.

    An access costs O(log n), amortised. A job that begins an epoch or leaves costs O(resident keys), or O(keys) if it
    does not read all keys.
    """

    name = "refcnt"

    def __init__(self, *, max_items: int | None = None, max_bytes: int | None = None, keys: int | None = None) -> None:
        self._claims: dict[Job, _Claim] = {}
        self._counts = _Counts()
        super().__init__(self._counts, max_items=max_items, max_bytes=max_bytes, keys=keys)

    @property
    def jobs(self) -> tuple[Job, ...]:
        return tuple(self._claims)

    def join(self, job: Job, *, weight: float = 1.0) -> None:
        check_weight(job, weight)
        if job not in self._claims:
            self._begin(self._claim(job), None)

    def hint(self, job: Job, lookahead: Lookahead) -> None:
        for keys in (lookahead.certain, lookahead.members):
            if keys is not None:
                self._reach_many(keys)
        claim = self._claims.get(job)
        if claim is None or claim.epoch != lookahead.epoch or lookahead.position < claim.position:
            self._begin(self._claim(job), lookahead)

    def forget(self, job: Job) -> None:
        claim = self._claims.pop(job, None)
        if claim is not None:
            self._end(claim)
            self._residents.rebuild()

    def _read(self, key: int, job: Job) -> None:
        self._counts.needs.count_ended()
        claim, states = self._ready(job)
        if states[key] != READ:
            states[key] = READ
            self._counts.needs.extra[key] -= 1
        claim.position += 1

    def _read_many(self, keys: Keys, job: Job) -> None:
        self._counts.needs.count_ended()
        while len(keys):
            claim, states = self._ready(job)
            read = keys[: claim.length - claim.position] if claim.length else keys
            needed = read[states[read] != READ]
            states[read] = READ
            self._counts.needs.on_read(needed)
            claim.position += len(read)
            keys = keys[len(read) :]

    def _grow(self, span: int) -> None:
        self._counts.needs.grow(span)
        for claim in self._claims.values():
            if claim.states is not None:
                before = len(claim.states)
                claim.states = grown(claim.states, span)
                claim.states[before:] = NEEDED if claim.is_whole else READ

    def _ready(self, job: Job) -> tuple[_Claim, States]:
        """Return (claim of a job that reads now, states of the keys in it).

        Begins an epoch first if the job has none, or has read all keys of its last one.
        """
        claim = self._claim(job)
        if claim.states is None or claim.position >= claim.length > 0:
            self._begin(claim, None)
        assert claim.states is not None
        return claim, claim.states

    def _claim(self, job: Job) -> _Claim:
        return self._claims.setdefault(job, _Claim(length=self._known_keys or 0))

    def _end(self, claim: _Claim) -> None:
        if claim.states is not None:
            self._counts.needs.end(claim.states, whole=claim.is_whole)

    def _begin(self, claim: _Claim, lookahead: Lookahead | None) -> None:
        """Start an epoch of a job. Without a lookahead, the job has the keys of its last epoch."""
        self._end(claim)
        needed = claim.members
        claim.position = 0
        if lookahead is not None:
            claim.epoch, claim.length, claim.position = lookahead.epoch, lookahead.length, lookahead.position
            whole = lookahead.complete and lookahead.position == 0
            claim.members = lookahead.certain if lookahead.members is None and whole else lookahead.members
            needed = lookahead.certain if lookahead.complete else claim.members
        elif claim.epoch is not None:
            claim.epoch += 1
        claim.is_whole = needed is None
        claim.states = sparse_zeros(self._span, np.uint8)
        if needed is not None:
            claim.states[:] = READ
            claim.states[needed] = NEEDED
        self._counts.needs.begin(claim.states, np.empty(0, np.int64), whole=claim.is_whole)
        self._residents.rebuild()
