"""A pool for samples of two parts: a deterministic one that is kept, and a rest drawn by chance for each job.

Two pools, one behind the other, over one budget of bytes. The *kept* pool has what the first part gives, one object
for each sample, under the cache's policy. The *drawn* pool has what the rest makes of it, one object for each sample
and draw, for as long as a job wants it. What is to be drawn waits for its first part, which goes to a worker as the
task's input; it stays in the kept pool until the rest is done.

A pure state machine like `pool`, with the same calls.

**Room.** The drawn pool may take half of it; the kept pool has what the drawn one does not use. As many rests are
under way as loads may be, so few first parts are held for them, and the first part that a rest waits for makes room
for itself as what a job waits for does. Hence neither pool can keep the other waiting for ever.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from torch_dpflow.caches.policy import Policy
from torch_dpflow.errors import UsageError
from torch_dpflow.lookahead import Lookahead
from torch_dpflow.remote.pool.objects import (
    Arrival,
    Cancel,
    Load,
    PoolInstruction,
    PoolStatistics,
    RequestId,
    Serve,
    Ticket,
)
from torch_dpflow.remote.pool.pool import Pool

#: In whose name the kept pool is asked for inputs; no job has it.
_REST = ""
#: The part of all room that the drawn pool may take.
_DRAWN_SHARE = 0.5
#: The kept pool's room is changed in steps of this part of all room.
_STEP = 1 / 32


class Loaded(Protocol):
    """What a load came to."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""

    @property
    def is_sample(self) -> bool:
        """Whether it is a sample, and not why there is none."""


@dataclass(eq=False, slots=True)
class _Rest:
    """A load of the drawn pool. It is its own request for its input, under a ticket that is its number."""

    load: Load
    #: Whether it has its input, and is at a worker or done.
    under_way: bool = False


class StagedPool:
    """Decides what is loaded, kept, drawn and served. Not thread-safe: one thread owns it.

    A job asks either for samples or, with a draw of None, for what the first part gives.

    Args:
        capacity_bytes: as for `Pool`, of both pools together.
        concurrency: most loads under way, and most rests.
        policy: of what is kept; None keeps nothing.
    """

    def __init__(
        self, *, capacity_bytes: int, concurrency: int, policy: Callable[[int], Policy] | None = None
    ) -> None:
        self._capacity = capacity_bytes
        numbers = itertools.count(1)
        self._kept = Pool(
            capacity_bytes=capacity_bytes,
            concurrency=concurrency,
            repeatable=True,
            policy=policy,
            numbers=numbers,
        )
        self._drawn = Pool(
            capacity_bytes=_drawn_bytes(capacity_bytes),
            concurrency=concurrency,
            repeatable=True,
            by_draw=True,
            numbers=numbers,
        )
        self._kept.join(_REST, counts=False)
        #: The drawn pool's loads, by number.
        self._rests: dict[int, _Rest] = {}
        #: By job, whether it asks for the first part alone, once it has asked.
        self._first_only: dict[str, bool] = {}

    # -- room ------------------------------------------------------------------------------------------------

    @property
    def concurrency(self) -> int:
        """Most loads under way, and most rests; may be changed at any time."""
        return self._kept.concurrency

    @concurrency.setter
    def concurrency(self, most: int) -> None:
        self._kept.concurrency = self._drawn.concurrency = most

    @property
    def room(self) -> int:
        """As `Pool.room`, of first parts."""
        return self._kept.room

    def resize(self, capacity_bytes: int) -> list[PoolInstruction]:
        """As `Pool.resize`."""
        out = self._of_drawn(self._drawn.resize(_drawn_bytes(capacity_bytes)))
        self._capacity = capacity_bytes
        return self._balanced(out)

    # -- jobs ------------------------------------------------------------------------------------------------

    def join(self, job: str) -> None:
        """As `Pool.join`."""
        self._kept.join(job)
        self._drawn.join(job)

    def leave(self, job: str) -> list[PoolInstruction]:
        """As `Pool.leave`."""
        self._first_only.pop(job, None)
        out = self._of_drawn(self._drawn.leave(job))
        return self._balanced(out + self._of_kept(self._kept.leave(job)))

    def foresee(self, job: str, lookahead: Lookahead) -> None:
        """As `Pool.foresee`."""
        self._kept.foresee(job, lookahead)

    # -- reading ---------------------------------------------------------------------------------------------

    def want(self, job: str, wants: Iterable[tuple[Ticket, int]], draw: int | None) -> list[PoolInstruction]:
        """As `Pool.want`.

        draw: decides what is drawn by chance; None: the first part is wanted.
        Raises UsageError too where the job has asked for the other.
        """
        wanted = list(wants)
        if wanted and self._first_only.setdefault(job, draw is None) != (draw is None):
            raise UsageError(f"job {job!r} asks for samples and for their first part; join as two jobs")
        if draw is None:
            return self._balanced(self._of_kept(self._kept.want(job, wanted, 0)))
        for ticket, key in wanted:
            if not self._drawn.is_wanted(job, ticket):
                self._kept.note_read(job, key)
        return self._balanced(self._of_drawn(self._drawn.want(job, wanted, draw)))

    def fetch(self, job: str, request: RequestId, tickets: Sequence[Ticket]) -> list[PoolInstruction]:
        """As `Pool.fetch`."""
        if self._first_only.get(job):
            return self._balanced(self._of_kept(self._kept.fetch(job, request, tickets)))
        return self._balanced(self._of_drawn(self._drawn.fetch(job, request, tickets)))

    def release(self, job: str, tickets: Iterable[Ticket]) -> list[PoolInstruction]:
        """As `Pool.release`."""
        if self._first_only.get(job):
            return self._balanced(self._of_kept(self._kept.release(job, tickets)))
        return self._balanced(self._of_drawn(self._drawn.release(job, tickets)))

    def tickets_outside(self, job: str, first: int, end: int) -> list[Ticket]:
        """As `Pool.tickets_outside`."""
        return [
            *self._kept.tickets_outside(job, first, end),
            *self._drawn.tickets_outside(job, first, end),
        ]

    # -- loading ---------------------------------------------------------------------------------------------

    def loaded(self, arrivals: Iterable[Arrival]) -> list[PoolInstruction]:
        """As `Pool.loaded`."""
        firsts: list[Arrival] = []
        out: list[PoolInstruction] = []
        for arrival in arrivals:
            rest = self._rests.get(arrival.load)
            if rest is None:
                firsts.append(arrival)
            else:
                out += self._finish(rest, arrival.value, arrival.size)
        if firsts:
            out += self._of_kept(self._kept.loaded(firsts))
        return self._balanced(out)

    def statistics(self) -> PoolStatistics:
        """What was counted of the first part, what both pools hold together, and how many rests were drawn."""
        kept, drawn = self._kept.statistics(), self._drawn.statistics()
        return replace(
            kept,
            held_bytes=kept.held_bytes + drawn.held_bytes,
            reserved_bytes=kept.reserved_bytes + drawn.reserved_bytes,
            capacity_bytes=self._capacity,
            ready=kept.ready + drawn.ready,
            loading=kept.loading + sum(rest.under_way for rest in self._rests.values()),
            queued=kept.queued + drawn.queued,
            jobs=drawn.jobs,
            drawn=drawn.loads,
        )

    # -- inside ----------------------------------------------------------------------------------------------

    def _of_drawn(self, instructions: list[PoolInstruction]) -> list[PoolInstruction]:
        """What the drawn pool says, in terms of tasks: what it has loaded needs its input first."""
        out: list[PoolInstruction] = []
        for instruction in instructions:
            match instruction:
                case Load():
                    out += self._ask_for_input(instruction)
                case Cancel(loads):
                    for load in loads:
                        out += self._abandon(load)
                case Serve():
                    out.append(instruction)
        return out

    def _of_kept(self, instructions: list[PoolInstruction]) -> list[PoolInstruction]:
        """What the kept pool says, in terms of tasks: what it serves to `_REST` is input."""
        out: list[PoolInstruction] = []
        for instruction in instructions:
            match instruction:
                case Serve(_Rest() as rest, samples):
                    if samples:
                        out += self._take_input(rest, samples[0][1])
                case _:
                    out.append(instruction)
        return out

    def _ask_for_input(self, load: Load) -> list[PoolInstruction]:
        rest = self._rests[load.load] = _Rest(load)
        out = self._kept.want(_REST, [(load.load, load.key)], 0)
        return self._of_kept(out + self._kept.fetch(_REST, rest, [load.load]))

    def _take_input(self, rest: _Rest, value: Loaded) -> list[PoolInstruction]:
        if rest.load.load not in self._rests:
            return []
        rest.under_way = True
        if value.is_sample:
            return [msgspec.structs.replace(rest.load, input=value)]
        return self._finish(rest, value, value.nbytes)

    def _finish(self, rest: _Rest, value: Loaded, size: int) -> list[PoolInstruction]:
        """The rest is done, or cannot be for want of a first part."""
        number = rest.load.load
        del self._rests[number]
        out = self._of_kept(self._kept.release(_REST, [number]))
        return out + self._of_drawn(self._drawn.loaded([Arrival(number, value, size)]))

    def _abandon(self, number: int) -> list[PoolInstruction]:
        """Nobody wants this any more."""
        out: list[PoolInstruction] = [Cancel([number])] if self._rests.pop(number).under_way else []
        return out + self._of_kept(self._kept.release(_REST, [number]))

    def _balanced(self, out: list[PoolInstruction]) -> list[PoolInstruction]:
        """Give the kept pool what the drawn one does not use; ends every call."""
        room = max(1, self._capacity - self._drawn.used)
        if abs(room - self._kept.capacity) > self._capacity * _STEP:
            out += self._of_kept(self._kept.resize(room))
        return out

    def validate(self) -> None:
        """Check every invariant; O(n), for tests. Raises AssertionError."""
        self._kept.validate()
        self._drawn.validate()
        assert all(self._kept.is_wanted(_REST, number) for number in self._rests)


def _drawn_bytes(capacity: int) -> int:
    return max(1, int(capacity * _DRAWN_SHARE))
