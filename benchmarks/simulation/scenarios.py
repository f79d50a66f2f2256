"""The named workloads: four thesis scenarios (table 5-2), partial overlap of two kinds, churn."""

from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.simulation.workload import Job, Timing, Workload

#: seconds pass, jobs come: starts of the staggered scenarios, in passes
STAGGER = (0.0, 1 / 3, 2 / 3, 1.0)
#: speeds of the scenarios with unequal speeds
SPEEDS = (1.0, 0.8, 0.6, 0.4)


def equal_sets(
    name: str,
    samples: int,
    *,
    starts: Sequence[float],
    speeds: Sequence[float],
    epochs: int = 1,
    batch_size: int = 8,
    timing: Timing = "steady",
) -> Workload:
    """Jobs that all read the whole data set; one job for each of `starts` and `speeds`."""
    if len(starts) != len(speeds):
        raise ValueError(f"{len(starts)} starts and {len(speeds)} speeds: give one of each for every job")
    everything = np.arange(samples, dtype=np.int64)
    jobs = [
        Job(indices=everything, start=start, speed=speed, epochs=epochs, batch_size=batch_size, timing=timing)
        for start, speed in zip(starts, speeds, strict=True)
    ]
    return Workload(name=name, samples=samples, jobs=tuple(jobs))


def same1(samples: int, seed: int = 0) -> Workload:
    """Four jobs, same start, same speed."""
    return equal_sets("same1", samples, starts=(0.0,) * 4, speeds=(1.0,) * 4)


def same2(samples: int, seed: int = 0) -> Workload:
    """Four jobs, a third of an epoch apart, same speed."""
    return equal_sets("same2", samples, starts=STAGGER, speeds=(1.0,) * 4)


def speed1(samples: int, seed: int = 0) -> Workload:
    """Four jobs, same start, four speeds."""
    return equal_sets("speed1", samples, starts=(0.0,) * 4, speeds=SPEEDS)


def speed2(samples: int, seed: int = 0) -> Workload:
    """Four jobs, a third of an epoch apart, four speeds."""
    return equal_sets("speed2", samples, starts=STAGGER, speeds=SPEEDS)


def irregular(samples: int, seed: int = 0) -> Workload:
    """same1 with exponential batch times."""
    four = (1.0,) * 4
    return equal_sets("irregular", samples, starts=(0.0,) * 4, speeds=four, timing="exponential")


def core(samples: int, seed: int = 0) -> Workload:
    """Partial overlap, first kind: half of the samples belong to all four jobs, an eighth to each alone."""
    common, eighth = np.arange(samples // 2), samples // 8
    own = [np.arange(samples // 2 + k * eighth, samples // 2 + (k + 1) * eighth) for k in range(4)]
    return _partial("core", samples, [np.concatenate([common, block]) for block in own])


def windows(samples: int, seed: int = 0) -> Workload:
    """Partial overlap, second kind: four intervals of two fifths, each shifted by a fifth, as a chain."""
    fifth = samples // 5
    return _partial("windows", samples, [np.arange(k * fifth, (k + 2) * fifth) for k in range(4)])


def churn(samples: int, seed: int = 0) -> Workload:
    """Eight jobs on three overlapping sets, random starts and speeds, two of them killed."""
    rng = np.random.default_rng(seed)
    sets = [np.arange(samples), np.arange(samples * 7 // 10), np.arange(samples * 3 // 10, samples)]
    starts, speeds = rng.uniform(0, 2, 8), rng.uniform(0.4, 1, 8)
    killed = set(rng.choice(8, 2, replace=False).tolist())
    deaths = starts + rng.uniform(0.3, 1.5, 8)
    jobs = [
        Job(
            indices=sets[k % 3].astype(np.int64),
            start=float(starts[k]),
            speed=float(speeds[k]),
            epochs=2,
            killed_at=float(deaths[k]) if k in killed else None,
        )
        for k in range(8)
    ]
    return Workload(name="churn", samples=samples, jobs=tuple(jobs))


def _partial(name: str, samples: int, sets: Sequence[np.ndarray]) -> Workload:
    jobs = [Job(indices=s.astype(np.int64)) for s in sets]
    return Workload(name=name, samples=samples, jobs=tuple(jobs))


#: name -> factory (samples, seed); the seed matters to `churn` only
SCENARIOS: dict[str, Callable[[int, int], Workload]] = {
    "same1": same1,
    "same2": same2,
    "speed1": speed1,
    "speed2": speed2,
    "irregular": irregular,
    "core": core,
    "windows": windows,
    "churn": churn,
}
