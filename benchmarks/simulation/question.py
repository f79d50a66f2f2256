"""A user's own question: real sizes scaled down to a number of samples that simulates in seconds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.simulation.contestants import DIRECTORY, has_directory
from benchmarks.simulation.scenarios import SCENARIOS, equal_sets
from benchmarks.simulation.sizes import Capacity
from benchmarks.simulation.study import Case
from benchmarks.simulation.workload import Timing, Workload


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a user asks, in real sizes. Raises ValueError for jobs that cannot be."""

    #: samples in the data set
    samples: int
    #: bytes a cached sample takes
    sample_size: int
    #: several are compared
    capacities: Sequence[Capacity]
    #: named workloads; if there are none, jobs as described by `starts` and `speeds`
    scenarios: Sequence[str]
    #: one for each job: when it starts, in epochs of the fastest job
    starts: Sequence[float]
    #: one for each job, relative to each other
    speeds: Sequence[float]
    #: None: one, or what the scenario says
    epochs: int | None
    batch_size: int
    timing: Timing
    samplers: Sequence[str]
    policies: Sequence[str]
    independence: float
    #: samples simulated, at most; everything shrinks in proportion
    simulated: int

    def __post_init__(self) -> None:
        if not 0 <= self.independence <= 1:
            raise ValueError(f"independence={self.independence}: a share from 0 to 1 is required")
        for build in self._workloads().values():
            build(0)

    @property
    def scale(self) -> float:
        """Simulated samples for each real one, at most 1."""
        return min(1.0, self.simulated / self.samples)

    @property
    def model_batch(self) -> int:
        """Simulated samples for a batch."""
        return max(1, round(self.batch_size * self.scale))

    @property
    def model_samples(self) -> int:
        return max(1, round(self.samples * self.scale))

    def describe_scale(self) -> str:
        """What was shrunk, in words."""
        size = self.samples * self.sample_size / 2**30
        real = f"{self.samples:,} samples of {self.sample_size:,} bytes ({size:,.1f} GiB)"
        if self.scale == 1.0:
            return f"{real}, simulated one to one"
        return (
            f"{real}, simulated with {self.model_samples:,} (1 : {1 / self.scale:.0f}), "
            f"batches of {self.batch_size} with {self.model_batch}"
        )

    def shares(self) -> list[float]:
        """The capacities as shares of the data set."""
        return [capacity.share_of(self.samples * self.sample_size) for capacity in self.capacities]

    def cases(self, shares: Sequence[float]) -> list[Case]:
        """Every sampler with every policy that fits it, at each of these shares of the data set."""
        return [
            Case(
                scenario=name,
                workload=workload,
                sampler=sampler,
                policy=policy,
                capacity=share,
                independence=self.independence,
            )
            for name, workload in self._workloads().items()
            for share in shares
            for sampler in self.samplers
            for policy in self._policies_of(sampler)
        ]

    def _policies_of(self, sampler: str) -> list[str]:
        """A directory where the sampler has one; "directory" stands for ALSD where it has none."""
        known = has_directory(sampler)
        return list(dict.fromkeys("alsd" if p == DIRECTORY and not known else p for p in self.policies))

    def _workloads(self) -> dict[str, Callable[[int], Workload]]:
        if not self.scenarios:
            return {f"{len(self.starts)} jobs": self._described}
        return {name: partial(self._named, name) for name in self.scenarios}

    def _named(self, name: str, seed: int) -> Workload:
        workload = SCENARIOS[name](self.model_samples, seed).with_jobs(batch_size=self.model_batch)
        return workload if self.epochs is None else workload.with_jobs(epochs=self.epochs)

    def _described(self, seed: int) -> Workload:
        fastest = max(self.speeds)
        return equal_sets(
            "described",
            self.model_samples,
            starts=self.starts,
            speeds=[speed / fastest for speed in self.speeds],
            epochs=self.epochs or 1,
            batch_size=self.model_batch,
            timing=self.timing,
        )
