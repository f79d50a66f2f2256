"""A sample cache for datasets with two stages: a cacheable one, and a per-draw one that is run for each job and epoch.

Two caches, one behind the other, over one budget of bytes. The *kept* cache has the outputs of the cacheable stage, one
object for each sample, under the cache's policy. The *drawn* cache has the outputs of the per-draw stage, one object
for each sample and draw, while a job wants it. A load of the drawn cache waits for the kept cache's output, which a
worker gets as the task's input and which stays in the kept cache until the per-draw stage has run.

A pure state machine like `sample_cache`, with the same calls.

**Capacity.** The drawn cache may take half of it; the kept cache has what the drawn one does not use. There are at most
`concurrency` loads of the drawn cache, so few inputs are held for them. The kept cache makes room for the input of such
a load as for a sample that a job waits for. So neither cache can block the other forever.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from torch_dpflow.caches.policy import Policy
from torch_dpflow.cluster.cache.objects import (
    Arrival,
    CacheInstruction,
    Cancel,
    Load,
    RequestId,
    Serve,
    ShardCacheStatistics,
    Ticket,
)
from torch_dpflow.cluster.cache.sample_cache import SampleCache
from torch_dpflow.errors import UsageError
from torch_dpflow.lookahead import Lookahead

#: The job of the kept cache that wants inputs; no other job has this name.
_INPUTS = ""
#: The share of the capacity that the drawn cache may take.
_DRAWN_SHARE = 0.5
#: The kept cache is resized in steps of this share of the capacity.
_STEP = 1 / 32


class Loaded(Protocol):
    """The outcome of a load."""

    @property
    def nbytes(self) -> int:
        """Its bytes."""

    @property
    def is_sample(self) -> bool:
        """Whether the outcome is a sample, and not an error."""


@dataclass(eq=False, slots=True)
class _DrawnLoad:
    """A load of the drawn cache. It is its own request for its input, under a ticket that is its number."""

    load: Load
    #: Whether it has its input.
    started: bool = False


class StagedSampleCache:
    """Decides what is loaded, kept, drawn and served. Not thread-safe: one thread owns it.

    A job wants either samples or, with a draw of None, outputs of the cacheable stage.

    Args:
        capacity_bytes: as for `SampleCache`, of both caches together.
        concurrency: maximum number of running loads of each cache.
        policy: makes the kept cache's policy; None keeps nothing.
    """

    def __init__(self, *, capacity_bytes: int, concurrency: int, policy: Callable[[int], Policy] | None = None) -> None:
        self._capacity = capacity_bytes
        numbers = itertools.count(1)
        self._kept = SampleCache(
            capacity_bytes=capacity_bytes,
            concurrency=concurrency,
            repeatable=True,
            policy=policy,
            numbers=numbers,
        )
        self._drawn = SampleCache(
            capacity_bytes=_drawn_bytes(capacity_bytes),
            concurrency=concurrency,
            repeatable=True,
            by_draw=True,
            numbers=numbers,
        )
        self._kept.join(_INPUTS, counts=False)
        #: The drawn cache's loads, by number.
        self._draws: dict[int, _DrawnLoad] = {}
        #: By job, whether it wants outputs of the cacheable stage, once it has wanted anything.
        self._cacheable_only: dict[str, bool] = {}

    # -- capacity --------------------------------------------------------------------------------------------

    @property
    def concurrency(self) -> int:
        """Maximum number of running loads of each cache; may be changed at any time."""
        return self._kept.concurrency

    @concurrency.setter
    def concurrency(self, most: int) -> None:
        self._kept.concurrency = self._drawn.concurrency = most

    @property
    def cache_samples(self) -> int:
        """How many outputs of the cacheable stage the cache can hold, by the size of the latest; 0 before the first."""
        return self._kept.cache_samples

    def resize(self, capacity_bytes: int) -> list[CacheInstruction]:
        """As `SampleCache.resize`."""
        out = self._of_drawn(self._drawn.resize(_drawn_bytes(capacity_bytes)))
        self._capacity = capacity_bytes
        return self._balanced(out)

    # -- jobs ------------------------------------------------------------------------------------------------

    def join(self, reader: str, job: str = "") -> None:
        """As `SampleCache.join`."""
        self._kept.join(reader, job)
        self._drawn.join(reader, job)

    def leave(self, job: str) -> list[CacheInstruction]:
        """As `SampleCache.leave`."""
        self._cacheable_only.pop(job, None)
        out = self._of_drawn(self._drawn.leave(job))
        return self._balanced(out + self._of_kept(self._kept.leave(job)))

    def hint(self, job: str, lookahead: Lookahead, *, weight: float = 1.0) -> None:
        """As `SampleCache.hint`."""
        self._kept.hint(job, lookahead, weight=weight)

    # -- reading ---------------------------------------------------------------------------------------------

    def want(
        self, job: str, wants: Iterable[tuple[Ticket, int]], draw: int | None, *, counts: bool = True
    ) -> list[CacheInstruction]:
        """Record what `job` will fetch, as `SampleCache.want` does.

        draw: determines the random draws; None: outputs of the cacheable stage are wanted.
        Raises UsageError also if the job has wanted samples before and wants outputs now, or the reverse.
        """
        wanted = list(wants)
        if wanted and self._cacheable_only.setdefault(job, draw is None) != (draw is None):
            raise UsageError(f"job {job!r} wants samples and outputs of the cacheable stage; join as two jobs")
        if draw is None:
            return self._balanced(self._of_kept(self._kept.want(job, wanted, 0, counts=counts)))
        if counts:
            new = [key for ticket, key in wanted if not self._drawn.is_wanted(job, ticket)]
            self._kept.note_reads(job, new)
        return self._balanced(self._of_drawn(self._drawn.want(job, wanted, draw)))

    def fetch(self, job: str, request: RequestId, tickets: Sequence[Ticket]) -> list[CacheInstruction]:
        """As `SampleCache.fetch`."""
        if self._cacheable_only.get(job):
            return self._balanced(self._of_kept(self._kept.fetch(job, request, tickets)))
        return self._balanced(self._of_drawn(self._drawn.fetch(job, request, tickets)))

    def release(self, job: str, tickets: Iterable[Ticket]) -> list[CacheInstruction]:
        """As `SampleCache.release`."""
        if self._cacheable_only.get(job):
            return self._balanced(self._of_kept(self._kept.release(job, tickets)))
        return self._balanced(self._of_drawn(self._drawn.release(job, tickets)))

    def tickets_outside(self, job: str, first: int, end: int) -> list[Ticket]:
        """As `SampleCache.tickets_outside`."""
        return [
            *self._kept.tickets_outside(job, first, end),
            *self._drawn.tickets_outside(job, first, end),
        ]

    # -- loading ---------------------------------------------------------------------------------------------

    def key_of(self, load: int) -> int | None:
        """As `SampleCache.key_of`, of both stages."""
        drawn = self._draws.get(load)
        return self._kept.key_of(load) if drawn is None else drawn.load.key

    def loaded(self, arrivals: Iterable[Arrival]) -> list[CacheInstruction]:
        """As `SampleCache.loaded`."""
        outputs: list[Arrival] = []
        out: list[CacheInstruction] = []
        for arrival in arrivals:
            drawn = self._draws.get(arrival.load)
            if drawn is None:
                outputs.append(arrival)
            else:
                out += self._finish(drawn, arrival.value, arrival.size)
        if outputs:
            out += self._of_kept(self._kept.loaded(outputs))
        return self._balanced(out)

    def statistics(self) -> ShardCacheStatistics:
        """The kept cache's counts, the bytes and samples of both caches, and how often the per-draw stage was run."""
        kept, drawn = self._kept.statistics(), self._drawn.statistics()
        return replace(
            kept,
            held_bytes=kept.held_bytes + drawn.held_bytes,
            reserved_bytes=kept.reserved_bytes + drawn.reserved_bytes,
            capacity_bytes=self._capacity,
            ready=kept.ready + drawn.ready,
            loading=kept.loading + sum(load.started for load in self._draws.values()),
            queued=kept.queued + drawn.queued,
            jobs=drawn.jobs,
            drawn=drawn.loads,
        )

    # -- inside ----------------------------------------------------------------------------------------------

    def _of_drawn(self, instructions: list[CacheInstruction]) -> list[CacheInstruction]:
        """Translate the drawn cache's instructions into tasks; each load first fetches its input from the kept one."""
        out: list[CacheInstruction] = []
        for instruction in instructions:
            match instruction:
                case Load():
                    out += self._fetch_input(instruction)
                case Cancel(loads):
                    for load in loads:
                        out += self._abandon(load)
                case Serve():
                    out.append(instruction)
        return out

    def _of_kept(self, instructions: list[CacheInstruction]) -> list[CacheInstruction]:
        """Translate the kept cache's instructions into tasks; what it serves to `_INPUTS` starts a per-draw stage."""
        out: list[CacheInstruction] = []
        for instruction in instructions:
            match instruction:
                case Serve(_DrawnLoad() as drawn, samples):
                    if samples:
                        out += self._start(drawn, samples[0][1])
                case _:
                    out.append(instruction)
        return out

    def _fetch_input(self, load: Load) -> list[CacheInstruction]:
        drawn = self._draws[load.load] = _DrawnLoad(load)
        out = self._kept.want(_INPUTS, [(load.load, load.key)], 0)
        return self._of_kept(out + self._kept.fetch(_INPUTS, drawn, [load.load]))

    def _start(self, drawn: _DrawnLoad, value: Loaded) -> list[CacheInstruction]:
        if drawn.load.load not in self._draws:
            return []
        drawn.started = True
        if value.is_sample:
            return [msgspec.structs.replace(drawn.load, input=value)]
        return self._finish(drawn, value, value.nbytes)

    def _finish(self, drawn: _DrawnLoad, value: Loaded, size: int) -> list[CacheInstruction]:
        """Release the input and store the result: of the per-draw stage, or the error of its input."""
        number = drawn.load.load
        del self._draws[number]
        out = self._of_kept(self._kept.release(_INPUTS, [number]))
        return out + self._of_drawn(self._drawn.loaded([Arrival(number, value, size)]))

    def _abandon(self, number: int) -> list[CacheInstruction]:
        """Cancel a load of the drawn cache that no job needs any more, and release its input."""
        out: list[CacheInstruction] = [Cancel([number])] if self._draws.pop(number).started else []
        return out + self._of_kept(self._kept.release(_INPUTS, [number]))

    def _balanced(self, out: list[CacheInstruction]) -> list[CacheInstruction]:
        """Assign the kept cache the capacity that the drawn one does not use; every call ends with this."""
        capacity = max(1, self._capacity - self._drawn.used)
        if abs(capacity - self._kept.capacity) > self._capacity * _STEP:
            out += self._of_kept(self._kept.resize(capacity))
        return out


def _drawn_bytes(capacity: int) -> int:
    return max(1, int(capacity * _DRAWN_SHARE))
