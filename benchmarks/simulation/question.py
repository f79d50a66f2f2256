"""A user's own question: real sizes scaled down to a number of samples that simulates in seconds."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.simulation.contestants import DIRECTORY, has_directory
from benchmarks.simulation.scenarios import equal_sets
from benchmarks.simulation.study import Case
from benchmarks.simulation.workload import Timing, Workload


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a user asks, in real sizes."""

    #: samples in the data set
    samples: int
    #: bytes a cached sample takes
    sample_size: int
    #: bytes the cache holds; several are compared
    capacities: Sequence[int]
    #: one for each job: when it starts, in epochs of the fastest job
    starts: Sequence[float]
    #: one for each job, relative to each other
    speeds: Sequence[float]
    epochs: int
    batch_size: int
    timing: Timing
    samplers: Sequence[str]
    policies: Sequence[str]
    independence: float
    #: samples simulated, at most; everything shrinks in proportion
    simulated: int

    @property
    def scale(self) -> float:
        """Simulated samples for each real one, at most 1."""
        return min(1.0, self.simulated / self.samples)

    def describe_scale(self) -> str:
        """What was shrunk, in words."""
        size = self.samples * self.sample_size / 2**30
        real = f"{self.samples:,} samples of {self.sample_size:,} bytes ({size:,.1f} GiB)"
        if self.scale == 1.0:
            return f"{real}, simulated one to one"
        model = self._workload(0)
        return (
            f"{real}, simulated with {model.samples:,} samples (1 : {1 / self.scale:.0f}); "
            f"batches of {self.batch_size} become {model.jobs[0].batch_size}, shares of the data set stay"
        )

    def shares(self) -> list[float]:
        """The capacities as shares of the data set, at most 1."""
        whole = self.samples * self.sample_size
        return [min(1.0, capacity / whole) for capacity in self.capacities]

    def cases(self, shares: Sequence[float]) -> list[Case]:
        """Every sampler with every policy that fits it, at each of these shares of the data set."""
        return [
            Case(
                scenario=f"{len(self.starts)} jobs",
                workload=self._workload,
                sampler=sampler,
                policy=policy,
                capacity=share,
                independence=self.independence,
            )
            for share in shares
            for sampler in self.samplers
            for policy in self._policies_of(sampler)
        ]

    def _policies_of(self, sampler: str) -> list[str]:
        """A directory where the sampler has one; "directory" stands for ALSD where it has none."""
        known = has_directory(sampler)
        return list(dict.fromkeys("alsd" if p == DIRECTORY and not known else p for p in self.policies))

    def _workload(self, seed: int) -> Workload:
        fastest = max(self.speeds)
        return equal_sets(
            "question",
            max(1, round(self.samples * self.scale)),
            starts=self.starts,
            speeds=[speed / fastest for speed in self.speeds],
            epochs=self.epochs,
            batch_size=max(1, round(self.batch_size * self.scale)),
            timing=self.timing,
        )
