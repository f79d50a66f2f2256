"""Clock of a worker: how long samples take, and which part of that is the stages "read" and "decode".

The package's datasets and decoders mark these stages by `stage`. A sample's other time counts as "dataset".
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, TypeAlias

from torch_dpflow._core.stage_times import StageTimes, bucket_of

Stage: TypeAlias = Literal["read", "decode"]


class _Marked(threading.local):
    """Seconds in the stages that this thread has marked since they were last taken."""

    read = decode = 0.0
    #: In the stages that have ended within the one that runs now.
    inner = 0.0


_marked = _Marked()


class stage:
    """Context manager whose body counts as the stage `name`. Time in an inner stage does not count for the outer one.

    Use an object in one thread only. A class, because `contextmanager` takes three times as long.
    """

    __slots__ = ("_began", "_name", "_outer")

    def __init__(self, name: Stage) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._outer, _marked.inner = _marked.inner, 0.0
        self._began = perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        passed, marked = perf_counter() - self._began, _marked
        if self._name == "read":
            marked.read += passed - marked.inner
        else:
            marked.decode += passed - marked.inner
        marked.inner = self._outer + passed


def timed(load: Callable[[Any], Any], index: Any) -> tuple[Any, float, float, float]:
    """Call `load(index)`; return (result, seconds in total, seconds in stage "read", seconds in stage "decode")."""
    marked = _marked
    marked.read = marked.decode = marked.inner = 0.0
    began = perf_counter()
    value = load(index)
    return value, perf_counter() - began, marked.read, marked.decode


#: If the samples of a batch take fewer seconds than this on average, the next batch is measured as a whole, because
#: measuring each sample would cost a tenth of this time.
SHORT_S = 2e-5


class StageClock:
    """Clock of the stages of one worker. Not thread-safe."""

    def __init__(self) -> None:
        self._times = StageTimes()
        #: Whether the samples of the latest batch took less than `SHORT_S` on average.
        self._is_short = False
        #: By `time.perf_counter`: when the latest batch was begun, its latest sample loaded, and when it was collated.
        self._began = self._last = self._fetched_at = 0.0
        #: Seconds of the samples that `load_sample` loaded and `take` has not returned.
        self._seconds: list[float] = []
        #: Seconds in "read" and "decode" without the latest sample, which may turn out to have failed.
        self._before = 0.0, 0.0

    def take(self) -> StageTimes | None:
        """Return the times that were measured since the last call of `take`; None if nothing was measured."""
        if self._seconds:
            self._add_loaded()
        times, self._times = self._times, StageTimes()
        return times if times.counts or times.hand_over_s or times.collate_s else None

    def add_sample(self, seconds: float, read_s: float, decode_s: float) -> None:
        """Add a sample: the seconds that it took in total, and in the stages "read" and "decode"."""
        self._add(seconds, read_s, decode_s, 1)

    def load_sample(self, load: Callable[[Any], Any], index: Any) -> Any:
        """Return `load(index)` and measure it. Use it with one clock per thread only, and without `fetch`."""
        marked = _marked
        if not self._seconds:
            marked.read = marked.decode = 0.0
        self._before = marked.read, marked.decode
        began = perf_counter()
        value = load(index)
        self._last = now = perf_counter()
        self._seconds.append(now - began)
        return value

    def drop_sample(self) -> None:
        """Drop the times of the latest result of `load_sample`, because it is no sample."""
        self._seconds.pop()
        _marked.read, _marked.decode = self._before

    def handed_over(self) -> None:
        """Count the time since the latest sample was loaded as time of encoding and sending."""
        self._times.hand_over_s += perf_counter() - self._last

    def hand_over(self, seconds: float) -> None:
        """Add the seconds in which a result was encoded and sent."""
        self._times.hand_over_s += seconds

    def collating(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def collate(data: Any) -> Any:
            self._fetched_at = began = perf_counter()
            batch = collate_fn(data)
            self._times.collate_s += perf_counter() - began
            return batch

        return collate

    def fetch(
        self, load: Callable[[Any], Any], index: Any, *, one_by_one: bool, samples: int, is_whole: bool = True
    ) -> Any:
        """Return `load(index)` and measure it. If `load` collates, its `collate_fn` must be a result of `collating`.

        one_by_one: whether `load` iterates over `index`, and loads each sample before it requests the next number.
        samples: number of samples in the batch.
        is_whole: False if the batch may have fewer samples, as at the end of an iterable dataset.
        """
        marked = _marked
        marked.read = marked.decode = marked.inner = 0.0
        self._began = self._last = began = perf_counter()
        if not one_by_one or (self._is_short and is_whole):
            batch = load(index)
            fetched_at = self._fetched_at
            seconds = (fetched_at if fetched_at >= began else perf_counter()) - began
            self._add(seconds, marked.read, marked.decode, samples)
        else:
            self._before = 0.0, 0.0
            try:
                batch = load(_Numbers(index, self))
            finally:  # of a batch that fails, the samples before the error
                seconds = self._last - began
                self._add(seconds, *self._before, 0)
        self._is_short = seconds < samples * SHORT_S
        return batch

    def numbers(self, index: Any) -> Iterator[Any]:
        """Yield each number of `index`; record the time until the next one is requested as the time of its sample."""
        counts, last, marked = self._times.counts, self._last, _marked
        for number in index:
            yield number
            self._last = now = perf_counter()
            self._before = marked.read, marked.decode
            bucket = bucket_of(now - last)
            counts[bucket] = counts.get(bucket, 0) + 1
            last = now

    def _add_loaded(self) -> None:
        seconds, self._seconds = self._seconds, []
        total, samples = sum(seconds), len(seconds)
        is_short = total < samples * SHORT_S
        self._add(total, _marked.read, _marked.decode, samples if is_short else 0)
        if not is_short:
            counts = self._times.counts
            for bucket in map(bucket_of, seconds):
                counts[bucket] = counts.get(bucket, 0) + 1

    def _add(self, seconds: float, read_s: float, decode_s: float, samples: int) -> None:
        times = self._times
        times.dataset_s += max(0.0, seconds - read_s - decode_s)
        times.read_s += read_s
        times.decode_s += decode_s
        if samples:
            bucket = bucket_of(seconds / samples)
            times.counts[bucket] = times.counts.get(bucket, 0) + samples


class _Numbers:
    """The indices of a batch, for a fetcher that loads one sample after the other."""

    def __init__(self, index: Any, clock: StageClock) -> None:
        self._index, self._clock = index, clock

    def __iter__(self) -> Iterator[Any]:
        return self._clock.numbers(self._index)

    def __len__(self) -> int:
        return len(self._index)
