"""Record of where the time of loading goes: seconds by stage, and how long samples took. `stage_clock` measures.

`StageTimes` is the only record of these times: workers send it with their results, shards and loaders add it up, and
`stats()` returns it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Annotated, TypeAlias

import msgspec

from torch_dpflow._core.checks import MAX_SECONDS

#: Buckets of the histogram per doubling of the time: each begins 9% later than the one before.
PER_DOUBLING = 8
#: Bounds of the histogram, in seconds: 2 ** MIN_POWER, about 1 µs, and 2 ** MAX_POWER, more than an hour.
MIN_POWER, MAX_POWER = -20, 12
BUCKETS = (MAX_POWER - MIN_POWER) * PER_DOUBLING
_MIN_S, _MAX_S = 2.0**MIN_POWER, 2.0**MAX_POWER
_OFFSET = -MIN_POWER * PER_DOUBLING

_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
_Bucket: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=BUCKETS)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class StageTimes(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Time that workers took to load: in total, by stage, and as a histogram of the times of samples.

    Samples that were loaded twice count twice. Reading and decoding in a user's own dataset class count as `dataset_s`.
    """

    #: Seconds in which the package's readers read from storage or the pool; of tables, with decoding their columns.
    read_s: _Seconds = 0.0
    #: Seconds in the package's decoders, and in functions that users give as `decode=`.
    decode_s: _Seconds = 0.0
    #: Other seconds in the dataset, including its transforms.
    dataset_s: _Seconds = 0.0
    #: Seconds in `collate_fn`; 0 for a flow, whose jobs collate.
    collate_s: _Seconds = 0.0
    #: Seconds in which workers encoded and sent results.
    hand_over_s: _Seconds = 0.0
    #: Histogram of the samples' times in the first three stages: number of samples by bucket. Bucket `b` begins at
    #: 2 ** (b / 8 - 20) seconds; the last has no end. The time of a batch is divided evenly among its samples if the
    #: dataset loads it in one call, or if samples take less than 20 µs.
    counts: dict[_Bucket, _Count] = {}

    @property
    def samples(self) -> int:
        """Number of samples that were loaded."""
        return sum(self.counts.values())

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by stage: "read", "decode", "dataset", "collate", "hand-over"."""
        return {name.removesuffix("_s").replace("_", "-"): getattr(self, name) for name in _STAGES}

    def percentile(self, share: float) -> float:
        """Return the seconds within which this share (0 to 1) of the samples was loaded, +- 5%; 0.0 without samples.

        Raises ValueError unless share is from 0 to 1.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"share={share!r}: give a number from 0 to 1, such as 0.99")
        left = max(1, math.ceil(share * self.samples))
        for bucket, count in sorted(self.counts.items()):
            left -= count
            if left <= 0:
                return float(2 ** ((bucket + 0.5) / PER_DOUBLING + MIN_POWER))
        return 0.0

    @property
    def p50_s(self) -> float:
        """Median time of a sample, in seconds."""
        return self.percentile(0.5)

    @property
    def p90_s(self) -> float:
        """Time within which 90% of the samples were loaded, in seconds."""
        return self.percentile(0.9)

    @property
    def p99_s(self) -> float:
        """Time within which 99% of the samples were loaded, in seconds."""
        return self.percentile(0.99)

    def add(self, other: StageTimes) -> None:
        """Add the times of another record to this one."""
        # By name, as a loop over names takes three times as long.
        self.read_s += other.read_s
        self.decode_s += other.decode_s
        self.dataset_s += other.dataset_s
        self.collate_s += other.collate_s
        self.hand_over_s += other.hand_over_s
        counts = self.counts
        for bucket, count in other.counts.items():
            counts[bucket] = counts.get(bucket, 0) + count

    def since(self, before: StageTimes) -> StageTimes:
        """Return this record minus an earlier one, `before`; differences below 0 become 0."""
        passed = {name: max(0.0, getattr(self, name) - getattr(before, name)) for name in _STAGES}
        counts = {bucket: count - before.counts.get(bucket, 0) for bucket, count in self.counts.items()}
        return StageTimes(**passed, counts={bucket: count for bucket, count in counts.items() if count > 0})

    def copy(self) -> StageTimes:
        """Return a copy. Another thread can add to this record at the same time."""
        return StageTimes(**{name: getattr(self, name) for name in _STAGES}, counts=self.counts.copy())

    def cumulative(self) -> list[tuple[str, float]]:
        """Return Prometheus buckets, ascending: (bound in seconds as text, or "+Inf"; number of samples up to it)."""
        bounds = range(MIN_POWER + 1, MAX_POWER)
        ends = [(repr(2.0**power), (power - MIN_POWER) * PER_DOUBLING) for power in bounds] + [("+Inf", BUCKETS)]
        return [(bound, sum(count for bucket, count in self.counts.items() if bucket < end)) for bound, end in ends]

    def shown(self) -> tuple[str, str]:
        """Return two texts for display: percentiles of samples' times, and stages' shares; both "" without samples."""
        total = sum(self.stages.values())
        if not self.counts or not total:
            return "", ""
        times = ", ".join(f"p{share} {_time(self.percentile(share / 100))}" for share in (50, 90, 99))
        shares = [f"{name} {seconds / total:.0%}" for name, seconds in self.stages.items() if seconds]
        return times, ", ".join(shares)


_STAGES = tuple(name for name in StageTimes.__struct_fields__ if name.endswith("_s"))


def total_of(records: Collection[StageTimes]) -> StageTimes:
    total = StageTimes()
    for one in records:
        total.add(one)
    return total


def _time(seconds: float) -> str:
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def bucket_of(seconds: float) -> int:
    """Return the bucket of the histogram for a sample that took this long."""
    if _MIN_S < seconds < _MAX_S:
        return int(math.log2(seconds) * PER_DOUBLING + _OFFSET)
    return 0 if seconds <= _MIN_S else BUCKETS - 1
