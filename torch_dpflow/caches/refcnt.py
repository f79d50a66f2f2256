"""RefCnt: evict the key that the fewest jobs still need (JOADER, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torch_dpflow.caches.policy import Job, check_weight
from torch_dpflow.caches.ranked import RankedPolicy
from torch_dpflow.caches.residents import Distances, Loads, Ranking
from torch_dpflow.lookahead import Keys, Lookahead


@dataclass(slots=True, eq=False)
class _Claim:
    """The keys that one job still needs in its epoch."""

    #: by key
    needs: npt.NDArray[np.bool_]
    #: how many keys it reads in an epoch, 0: unknown; and how many of this one it has read
    length: int
    position: int = 0
    #: the epoch of the last lookahead, or the one after it; None before the first
    epoch: int | None = None
    #: None: every key
    members: Keys | None = None


class _Counts(Ranking):
    """Ranking by how many jobs need each key: the fewer jobs, the greater the distance."""

    def __init__(self) -> None:
        self.grow(np.zeros(0, dtype=np.int32))

    def grow(self, counts: npt.NDArray[np.int32]) -> None:
        """Replace the counts by longer ones."""
        self.counts = counts
        self.count_of = counts.data

    def distance(self, key: int, load: int) -> float:
        return -float(self.count_of[key])

    def distances(self, keys: Keys, loads: Loads) -> Distances:
        return np.negative(self.counts.take(keys), dtype=np.float64)


class RefCnt(RankedPolicy):
    """Counts, for every key, the jobs that have not read it in their epoch; evicts the lowest count.

    It uses the set of keys in lookaheads, not their order. A job without a lookahead is assumed to read
    every key once in an epoch.

    Amortised, an access costs O(log n); when a job begins an epoch or leaves, O(keys).
    """

    name = "refcnt"

    def __init__(self, *, max_items: int | None = None, max_bytes: int | None = None, keys: int | None = None) -> None:
        self._claims: dict[Job, _Claim] = {}
        self._needs = _Counts()
        super().__init__(self._needs, max_items=max_items, max_bytes=max_bytes, keys=keys)

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
            self._needs.counts -= claim.needs
            self._residents.rebuild()

    def _read(self, key: int, job: Job) -> None:
        claim = self._ready(job)
        if claim.needs[key]:
            claim.needs[key] = False
            self._needs.count_of[key] -= 1
        claim.position += 1

    def _read_many(self, keys: Keys, job: Job) -> None:
        while len(keys):
            claim = self._ready(job)
            read = keys[: claim.length - claim.position] if claim.length else keys
            # A key that occurs twice must be counted once: fancy-indexed subtraction and assignment both do so.
            self._needs.counts[read] -= claim.needs.take(read)
            claim.needs[read] = False
            claim.position += len(read)
            keys = keys[len(read) :]

    def _grow(self, span: int) -> None:
        added = span - len(self._needs.counts)
        newcomers = 0
        for claim in self._claims.values():
            expected = claim.members is None
            claim.needs = np.concatenate([claim.needs, np.full(added, expected)])
            newcomers += expected
        self._needs.grow(np.concatenate([self._needs.counts, np.full(added, newcomers, dtype=np.int32)]))

    def _ready(self, job: Job) -> _Claim:
        """Return the claim of a job that reads now; the claim of the next epoch if the job has read all of this one."""
        claim = self._claims.get(job)
        if claim is None:
            claim = self._claim(job)
            self._begin(claim, None)
        elif claim.position >= claim.length > 0:
            self._begin(claim, None)
        return claim

    def _claim(self, job: Job) -> _Claim:
        fresh = _Claim(np.zeros(self._span, dtype=np.bool_), length=self._known_keys or 0)
        return self._claims.setdefault(job, fresh)

    def _begin(self, claim: _Claim, lookahead: Lookahead | None) -> None:
        """Start an epoch of a job; None: without a lookahead, so with the keys of the last one."""
        self._needs.counts -= claim.needs
        needed = claim.members
        claim.position = 0
        if lookahead is not None:
            claim.epoch, claim.length, claim.position = lookahead.epoch, lookahead.length, lookahead.position
            whole = lookahead.complete and lookahead.position == 0
            claim.members = lookahead.certain if lookahead.members is None and whole else lookahead.members
            needed = lookahead.certain if lookahead.complete else claim.members
        elif claim.epoch is not None:
            claim.epoch += 1
        claim.needs[:] = needed is None
        if needed is not None:
            claim.needs[needed] = True
        self._needs.counts += claim.needs
        self._residents.rebuild()
