"""The contract of a sampling group: jobs that read overlapping samples and are handed one order each.

A group is pure: no clock, thread or socket. Time enters as an argument, chance as a seed; the same calls give
the same draws. It is not thread-safe: one thread at a time may call it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from torch_dpflow.lookahead import Lookahead

IndexArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]
#: What a caller may pass as a set of sample numbers.
Indices: TypeAlias = Sequence[int] | NDArray[np.integer[Any]] | Iterable[int]


@dataclass(frozen=True)
class Draw:
    """What one call of `SamplingGroup.draw` decided for one job."""

    #: Sample numbers in the order in which the job reads them; shape (n,).
    indices: IndexArray
    #: True where the sample has to be loaded, False where it is resident; shape (n,). None where the strategy
    #: keeps no directory of residents, so that the cache policy decides.
    led: BoolArray | None
    #: Samples that the directory gave up to make room for this draw; shape (m,). A sample that was given up
    #: and loaded again by the same draw is not among them.
    evicted: IndexArray


class SamplingGroup(ABC):
    """Jobs over the samples 0 … size-1, and who reads what next.

    A job's life is ``join``, then for every epoch ``start_epoch`` and ``draw`` until nothing is left, then
    ``leave``. Every epoch that is drawn to its end is a permutation of the job's set, whatever the other jobs
    do meanwhile.

    Args:
        size: number of samples that the jobs choose from; at least 1.
        capacity: number of samples that the caches together may hold. Only strategies with a directory use it.
        seed: decides whatever the group itself draws by chance.
    """

    #: The name in the registry.
    strategy: str

    def __init__(self, size: int, *, capacity: int | None = None, seed: int = 0) -> None: ...

    # -- membership ------------------------------------------------------------------------------------------

    def join(
        self,
        job: str,
        indices: Indices | None = None,
        *,
        seed: int = 0,
        batch_size: int = 1,
        speed: float | None = None,
        independence: float = 0.0,
    ) -> None:
        """Register a job and its set; None means every sample. It draws nothing before `start_epoch`.

        Args:
            seed: with the epoch it decides the job's private permutation, as torch's DistributedSampler does.
            batch_size: samples that the job consumes at once.
            speed: samples per second, where known; see `set_speed`.
            independence: share of the picks, 0 to 1, that ignore what others have loaded.

        Raises:
            UsageError: the job is a member already.
            OptionError: an index is negative, too large or there twice; a number is out of range.
        """

    def leave(self, job: str) -> None:
        """Forget a job that ended or died, at any time; nobody else's epoch is touched."""

    def start_epoch(self, job: str, epoch: int, *, done: Indices | None = None) -> None:
        """Begin the job's epoch, dropping what was left of one that it was in.

        `done`: samples that the job has read in this epoch already (a resume); they are not drawn again.
        """

    # -- drawing ---------------------------------------------------------------------------------------------

    def draw(self, job: str, n: int, now: float | None = None) -> Draw:
        """Decide the job's next `n` samples; fewer, finally none, at the end of its epoch.

        `now`: seconds on any steady clock, from which strategies that need speeds measure them.

        Raises:
            UsageError: unknown job (never joined, or it left), or its epoch was not started.
            OptionError: `n` is below 1.
        """

    def next(self, job: str, n: int, now: float | None = None) -> IndexArray:
        """The indices of `draw`, for callers without use for the rest."""
        return self.draw(job, n, now).indices

    def remaining(self, job: str) -> int:
        """Number of samples left in the job's epoch; 0 before its first."""

    def lookahead(self, job: str) -> Lookahead:
        """What can be said now of the job's coming reads, for cache policies. Draws nothing."""

    def set_speed(self, job: str, speed: float) -> None:
        """Tell the job's speed, samples per second, to strategies that weigh by it; others ignore it."""

    @property
    def jobs(self) -> tuple[str, ...]:
        """The members' names, in the order in which they joined."""

    # -- state -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly here, as plain data and arrays. No side effect."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state of a group of the same strategy and size; raises StateError where it does not fit."""
