"""A sampling group's record of one job, for every strategy."""

import hashlib
from dataclasses import dataclass

import numpy as np

from torch_dpflow.samplers.indices import CompactArray, compact, permutation

#: Weight of the latest interval in a job's measured speed; one batch alone says little.
_SPEED_WEIGHT = 0.2


@dataclass(kw_only=True)
class Member:
    """One job: its arguments of `join`, and its position."""

    name: str
    #: Its set in the order given; None: every sample of the group.
    indices: CompactArray | None
    #: Number of samples in its set.
    length: int
    seed: int
    batch_size: int
    independence: float
    #: Whether `name` identifies the job; else its set does.
    named: bool = True
    #: Samples per second, set or measured; None until then.
    speed: float | None = None
    #: None before the first epoch.
    epoch: int | None = None
    #: Samples of this epoch that were drawn; `length` when it is over.
    position: int = 0
    #: The time of its latest draw, by the caller's clock, and how many samples it drew then.
    drew_at: float | None = None
    drew: int = 0

    def measure(self, n: int, now: float) -> None:
        """Measure its speed: it draws `n` samples at `now`, and has consumed those drawn before."""
        if self.drew_at is None or now > self.drew_at:
            if self.drew_at is not None:
                latest = self.drew / (now - self.drew_at)
                known = latest if self.speed is None else self.speed
                self.speed = known + _SPEED_WEIGHT * (latest - known)
            self.drew_at, self.drew = now, 0
        self.drew += n

    def samples(self) -> CompactArray:
        """Its set as an array, in the order given."""
        return np.arange(self.length) if self.indices is None else self.indices

    def order(self, epoch: int) -> CompactArray:
        """The private permutation of its set in an epoch: that of torch's RandomSampler for its seed."""
        return self._taken(permutation(self.length, self.seed, epoch))

    def own_order(self, epoch: int) -> CompactArray:
        """A private permutation that no other job has, not even one of the same seed."""
        return self._taken(self.own_rng(epoch).permutation(self.length).astype(compact(self.length)))

    def own_rng(self, *what: int) -> np.random.Generator:
        """The job's own generator, seeded with its seed, its identity and `what` it draws for."""
        key = hashlib.blake2b(repr((self.seed, self._identity(), *what)).encode(), digest_size=16).digest()
        return np.random.default_rng(int.from_bytes(key, "little"))

    def reads_as(self, other: "Member") -> bool:
        """Whether both have the same samples, given in the same order."""
        if self.indices is None or other.indices is None:
            return self.indices is other.indices
        return np.array_equal(self.indices, other.indices)

    def _identity(self) -> str:
        if self.named:
            return self.name
        return "" if self.indices is None else hashlib.blake2b(self.indices.tobytes()).hexdigest()

    def _taken(self, places: CompactArray) -> CompactArray:
        return places if self.indices is None else self.indices[places]
