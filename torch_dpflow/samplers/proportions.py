"""Turns of several sources in exact proportion, which may change from phase to phase. Pure.

The turns are those of Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980): each source has a
release time and a deadline for each of its draws, and the released draw with the earliest deadline comes next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heappop, heappush
from math import lcm
from numbers import Rational
from typing import Any

import numpy as np

from torch_dpflow._core.checks import MAX_INT64, check_int, check_number
from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.samplers.indices import IndexArray

#: The most draws after which turns repeat. Computing them takes about a microsecond each.
MAX_PARTS = 1 << 16


@dataclass(frozen=True)
class Phase:
    """The weights of a mixture from a sample of the run on.

    Args:
        start: the first sample, counted over all epochs and ranks.
        weights: one number a source, 0 or more, of any sum; a source of weight 0 is not drawn.
    """

    start: int
    weights: Sequence[float]


def parts_of(weights: Sequence[float], sources: int) -> tuple[int, ...]:
    """Return the smallest whole numbers in the proportion of the weights.

    A float counts as the decimal that it is printed as: 0.7 is 7/10. If the numbers' sum would exceed `MAX_PARTS`, they
    are rounded to that sum, so each share is wrong by less than 1 / `MAX_PARTS`.

    Raises:
        OptionError: there are more or fewer weights than sources, one is negative or too small, or all are 0.
        OptionTypeError: a weight is no number.
    """
    exact = [_fraction(weight) for weight in weights]
    if len(exact) != sources:
        raise OptionError(f"{len(exact)} weights for {sources} sources; give one weight a source")
    total = sum(exact)
    if not total:
        raise OptionError(f"weights={list(weights)!r:.80} are all 0; give at least one above 0")
    shares = [share / total for share in exact]
    parts = lcm(*(share.denominator for share in shares))
    if parts > MAX_PARTS:
        return _rounded(shares)
    return tuple(int(share * parts) for share in shares)


def _fraction(weight: Any) -> Fraction:
    check_number("weight", weight)
    return Fraction(weight) if isinstance(weight, Rational) else Fraction(repr(float(weight)))


def _rounded(shares: Sequence[Fraction]) -> tuple[int, ...]:
    """Round to `MAX_PARTS` in all, those with the largest remainders up."""
    parts = [int(share * MAX_PARTS) for share in shares]
    by_remainder = sorted(range(len(parts)), key=lambda source: (parts[source] - shares[source] * MAX_PARTS, source))
    for source in by_remainder[: MAX_PARTS - sum(parts)]:
        parts[source] += 1
    for source, (part, share) in enumerate(zip(parts, shares)):
        if share and not part:
            raise OptionError(
                f"the weight of source {source} is {float(share):.1e} of the sum; give 0, or at least 1/{MAX_PARTS}"
            )
    return tuple(parts)


def turns_of(parts: Sequence[int]) -> list[int]:
    """Return the sources of one period's draws, `sum(parts)` of them; source s has `parts[s]`.

    With k sources in turn, the draws of a source in any prefix of n draws differ from n times its share by at most
    1 - 1 / (2k - 2); with one source, by 0. No order of draws has a smaller bound for all weights.
    """
    period, sources = sum(parts), [source for source, part in enumerate(parts) if part]
    if len(sources) == 1:
        return sources * period
    # Draw j of a source may come once n * part / period >= j + 1/m. It must before that exceeds j + 1 - 1/m.
    m = 2 * (len(sources) - 1)
    waiting = [(-(-period // (m * parts[source])), source, 0) for source in sources]
    heapify(waiting)
    released: list[tuple[int, int, int]] = []
    turns: list[int] = []
    for n in range(1, period + 1):
        while waiting and waiting[0][0] <= n:
            _, source, drawn = heappop(waiting)
            deadline = (m * (drawn + 1) - 1) * period // (m * parts[source]) + 1
            heappush(released, (deadline, source, drawn))
        _, source, drawn = heappop(released)
        turns.append(source)
        release = -(-(m * (drawn + 1) + 1) * period // (m * parts[source]))
        heappush(waiting, (release, source, drawn + 1))
    return turns


class Turns:
    """An endless sequence of turns, which repeats after a period; any part of it can be computed at once."""

    def __init__(self, parts: Sequence[int]) -> None:
        self._parts = np.array(parts, np.int64)
        self._sources = np.array(turns_of(parts), np.int32)
        #: Which of its source's draws in the period each is.
        self._numbers = np.empty(len(self._sources), np.int32)
        for source in range(len(parts)):
            own = np.flatnonzero(self._sources == source)
            self._numbers[own] = np.arange(len(own))

    def at(self, places: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Return the source of each of these draws, and which of its source's draws it is, from 0."""
        periods, rest = np.divmod(places, len(self._sources))
        sources = self._sources[rest].astype(np.int64)
        return sources, periods * self._parts[sources] + self._numbers[rest]

    def counts(self, n: int) -> IndexArray:
        """Return how many of the first `n` draws are of each source."""
        periods, rest = divmod(n, len(self._sources))
        return periods * self._parts + np.bincount(self._sources[:rest], minlength=len(self._parts))


#: Phases mostly follow each other; an epoch may change between a few.
_turns = lru_cache(maxsize=8)(Turns)


class Schedule:
    """The sources of a run's draws, phase by phase; each phase begins its turns again.

    Args:
        weights: one a source, or phases in the order of their starts.
        sources: number of sources.

    Raises:
        as `parts_of`; OptionError: no phase starts at 0, or two at once.
    """

    def __init__(self, weights: Sequence[float] | Sequence[Phase], sources: int) -> None:
        phases = _as_phases(weights)
        self.starts = [check_int("Phase.start", phase.start, minimum=0, maximum=MAX_INT64) for phase in phases]
        if self.starts[0] != 0 or any(here >= after for here, after in zip(self.starts, self.starts[1:])):
            raise OptionError(f"phases start at {self.starts}; the first must start at 0, each other one after it")
        self.parts = [parts_of(phase.weights, sources) for phase in phases]
        #: What each source has drawn before each phase, for the phases that were reached.
        self._before = [np.zeros(sources, np.int64)]

    def at(self, places: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Return the source of each of these draws of the run, and which of its source's draws it is, from 0."""
        sources, numbers = np.empty(len(places), np.int64), np.empty(len(places), np.int64)
        phases = np.searchsorted(np.array(self.starts), places, side="right") - 1
        for phase in np.unique(phases).tolist():
            own = phases == phase
            sources[own], numbers[own] = _turns(self.parts[phase]).at(places[own] - self.starts[phase])
            numbers[own] += self._counts_before(phase)[sources[own]]
        return sources, numbers

    def counts(self, n: int) -> IndexArray:
        """Return how many of the run's first `n` draws are of each source."""
        phase = int(np.searchsorted(np.array(self.starts), n, side="right")) - 1
        return self._counts_before(phase) + _turns(self.parts[phase]).counts(n - self.starts[phase])

    def begun(self, n: int) -> list[list[Any]]:
        """Return start and parts of the phases that the run's first `n` draws have reached, as plain data."""
        return [[start, list(parts)] for start, parts in zip(self.starts, self.parts) if start < n]

    def _counts_before(self, phase: int) -> IndexArray:
        for number in range(len(self._before) - 1, phase):
            drawn = _turns(self.parts[number]).counts(self.starts[number + 1] - self.starts[number])
            self._before.append(self._before[number] + drawn)
        return self._before[phase]


def _as_phases(weights: Any) -> list[Phase]:
    try:
        given = list(weights)
    except TypeError as error:
        raise OptionTypeError(f"weights={weights!r:.80}: give one number a source, or a list of Phase") from error
    phases = [phase for phase in given if isinstance(phase, Phase)]
    if phases and len(phases) < len(given):
        raise OptionTypeError(f"weights={given!r:.80}: give numbers or phases, not both")
    return phases or [Phase(0, given)]
