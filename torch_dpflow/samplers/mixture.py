"""MixtureSampler: several datasets in exact proportion, for torch's DataLoader or ours.

Sources take turns as in Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980): each draw of a
source has a release time and a deadline, and the released draw with the earliest deadline comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from math import lcm
from numbers import Rational
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset

from torch_dpflow._core import dealing
from torch_dpflow._core.checks import MAX_INT64, check_int, check_number, check_type
from torch_dpflow._core.dealing import Places, RankPosition
from torch_dpflow._core.permutation import torch_order
from torch_dpflow.errors import OptionError, OptionTypeError, StateError
from torch_dpflow.samplers.epoch_sampler import EpochSampler, mixed_seed, restored_number
from torch_dpflow.samplers.indices import IndexArray, Order


class MixtureSampler(EpochSampler[int]):
    """Sampler of positions in a `ConcatDataset`, in the proportion of its datasets' weights, which can change by phase.

    The proportion holds in any part of the run: sources are not drawn by chance. Of the first n samples of a phase with
    k sources, of all ranks together, the number that come from one source differs from n times its share by at most
    1 - 1 / (2k - 2) (Tijdeman 1980). So in a window of any length within a phase it differs by less than 2.

    Each source is read in separate epochs: all its samples in an order that depends on seed, source and source epoch,
    then the next epoch. An epoch of the run, of `samples` samples, continues where the previous one ended.

    Resuming computes at most 65,536 draws (100 ms) for each phase that was reached, and one permutation of each source.
    The permutations take 4 bytes per sample of the sources. Each rank computes its own samples only.

    Args:
        sources: the datasets, or their lengths, in the order of the `ConcatDataset`; or the `ConcatDataset` itself.
        weights: one number per source; or a list of `Phase`, in the order of their starts. Floats count as the decimals
            that they are printed as. Shares whose common denominator exceeds 65,536 are rounded to 65,536ths.
        samples: length of an epoch, of all ranks together; None: the sum of the sources' lengths.
        num_replicas: number of ranks; by default torch.distributed's, if it is initialised, else 1.
        rank: this rank; by default torch.distributed's, if it is initialised, else 0.
        ranks: a 1-D DeviceMesh, such as `mesh["dp"]`, or a process group that defines both.
        shuffle: False reads each source from its first sample to its last.
        seed: determines the order of each source, together with the source's epoch.
        drop_last: leave out the samples that do not divide evenly among the ranks, instead of repeating some.

    Raises:
        OptionError: a value is not allowed, or a source that has a weight is empty.
        OptionTypeError: an argument is of the wrong type.
    """

    def __init__(
        self,
        sources: Sequence[Sized | int] | ConcatDataset[Any],
        weights: Sequence[float] | Sequence[Phase],
        *,
        samples: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        ranks: Any = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        #: Number of samples of each source.
        self.lengths = _lengths_of(sources)
        if samples is None:
            samples = sum(self.lengths)
        super().__init__(
            check_int("samples", samples, minimum=1, maximum=MAX_INT64),
            num_replicas=num_replicas,
            rank=rank,
            ranks=ranks,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        self._schedule = Schedule(weights, len(self.lengths))
        for source, length in enumerate(self.lengths):
            if not length and any(parts[source] for parts in self._schedule.parts):
                raise OptionError(f"source {source} is empty and has a weight; give it 0")
        self._offsets = np.cumsum([0, *self.lengths])
        #: The order that was last read of each source, with its epoch; drawn as it is read.
        self._orders: dict[int, tuple[int, Order]] = {}

    def counts(self, samples: int) -> list[int]:
        """Return how many of the run's first `samples` samples, of all ranks together, come from each source.

        Raises OptionError or OptionTypeError if `samples` is not an int of at least 0.
        """
        counts: list[int] = self._schedule.counts(check_int("samples", samples, minimum=0)).tolist()
        return counts

    @property
    def samples_left(self) -> int:
        """Number of samples that this rank has not yielded yet of the epoch that `state_dict` describes."""
        return self._left()

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return the sampler's position as plain data; no side effect.

        Args:
            consumed: how many of the epoch's samples this rank has used, for a loader that draws ahead of
                delivery; None: all that were yielded.

        Raises:
            OptionError: `consumed` is out of range, such as more than were yielded.
        """
        state = self._state(consumed)
        drawn = self._drawn(state)
        return {**state, "drawn": drawn, "past": self._digest_before(drawn)}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_orders": {}}  # workers do not draw; the orders can be computed again

    def _reader(self, epoch: int, began_with: int) -> Callable[[Places], list[int]]:
        first = epoch * self.size
        return lambda places: self._positions(dealing.numbers(places) + first)

    def _positions(self, places: IndexArray) -> list[int]:
        """Return the positions in the ConcatDataset of these samples of the run."""
        sources, numbers = self._schedule.at(places)
        found = np.empty(len(places), np.int64)
        for source in np.unique(sources).tolist():
            own = np.flatnonzero(sources == source)
            epochs, within = np.divmod(numbers[own], self.lengths[source])
            for epoch in np.unique(epochs).tolist() if self.shuffle else ():
                now = epochs == epoch
                first, last = within[now].min(), within[now].max()
                within[now] = self._order(source, epoch)[first : last + 1][within[now] - first]
            found[own] = within + self._offsets[source]
        positions: list[int] = found.tolist()
        return positions

    def _order(self, source: int, epoch: int) -> Order:
        held = self._orders.get(source)
        if held is None or held[0] != epoch:
            order = torch_order(self.lengths[source], mixed_seed(self.seed, source, epoch))
            held = self._orders[source] = epoch, order
        return held[1]

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "sources": self.lengths}

    def _checked_rest(self, states: Sequence[dict[str, Any]], at: RankPosition) -> None:
        """Refuse also a state of a run whose weights differed before it; weights of later phases may differ."""
        super()._checked_rest(states, at)
        for state in states:
            drawn = restored_number("drawn", state.get("drawn"))
            if drawn != (read := self._drawn(state)):
                raise StateError(f"the state is damaged: drawn={drawn}, but its position is after {read} samples")
            if state.get("past") != self._digest_before(drawn):
                raise StateError(
                    f"the state was taken after {drawn} samples of a run with other weights; this sampler's phases up "
                    f"to there are {self._schedule.begun(drawn)!r:.200}, start and parts of each. Only phases that "
                    "begin later may change"
                )

    def _drawn(self, state: dict[str, Any]) -> int:
        """Return the number of the run's first samples that were reached, if all ranks are as far as this rank.

        Some of these samples may be unread, if ranks were out of step when the number of ranks changed.
        """
        places = dealing.from_lists(state["places"], self.size)
        read = [state["position"] - state["dealt_at"]] * int(state["num_replicas"])
        left = dealing.left_of(places, read, drop_last=self.drop_last)
        has_tail = left and left[-1].step == 1 and left[-1].stop == self.size
        return int(state["epoch"] * self.size + (left[-1].start if has_tail else self.size))

    def _digest_before(self, drawn: int) -> str:
        """Return a digest of the weights of the run's first samples."""
        return blake2b(repr(self._schedule.begun(drawn)).encode(), digest_size=16).hexdigest()


def _lengths_of(sources: Any) -> list[int]:
    if isinstance(sources, ConcatDataset):
        sources = sources.datasets
    if isinstance(sources, str | bytes) or not isinstance(sources, Sequence):
        raise OptionTypeError(
            f"sources={sources!r:.80} is of type {type(sources).__name__}; give a ConcatDataset, or a list of datasets "
            "or lengths"
        )
    lengths: list[int] = []
    for number, source in enumerate(sources):
        try:
            length = len(source)
        except TypeError:
            length = source
        lengths.append(check_int(f"sources[{number}]", length, minimum=0))
    if not lengths:
        raise OptionError("sources is empty; give at least one dataset")
    return lengths


#: Maximum length of a period of draws, which is repeated. Computing it takes about a microsecond per draw.
MAX_PARTS = 1 << 16


@dataclass(frozen=True)
class Phase:
    """Weights of a mixture for the samples of the run from number `start` until the next phase starts.

    Args:
        start: number of the first sample, from 0, counted over all epochs and ranks.
        weights: one number per source, 0 or more, of any sum; a source of weight 0 is not drawn.
    """

    start: int
    weights: Sequence[float]


def whole_parts(weights: Sequence[float], sources: int) -> tuple[int, ...]:
    """Return the smallest whole numbers in the proportion of the weights.

    A float counts as the decimal that it is printed as: 0.7 is 7/10. If the numbers' sum would exceed `MAX_PARTS`, they
    are rounded so that it is `MAX_PARTS`; each share is then wrong by less than 1 / `MAX_PARTS`.

    Raises:
        OptionError: the number of weights is not `sources`, a weight is negative or too small, or all are 0.
        OptionTypeError: a weight is not a number.
    """
    check_type("weights", weights, Iterable, "one number a source")
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
    """Round shares to whole numbers whose sum is `MAX_PARTS`; shares with the largest remainders are rounded up."""
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
    """Return the source of each of `sum(parts)` draws, a period. Source s has `parts[s]` of them, evenly spaced.

    With k sources, a source's number of draws among the first n differs from n times its share by at most
    1 - 1 / (2k - 2); with one source, by 0. No order of draws has a smaller bound for all weights.
    """
    period, sources = sum(parts), [source for source, part in enumerate(parts) if part]
    if len(sources) == 1:
        return sources * period
    # Draw j of a source may come once n * part / period >= j + 1/m, and must come before it exceeds j + 1 - 1/m.
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
    """Endless sequence of draws: the period of `turns_of`, repeated. Any part of it can be computed directly."""

    def __init__(self, parts: Sequence[int]) -> None:
        self._parts = np.array(parts, np.int64)
        self._sources = np.array(turns_of(parts), np.int32)
        #: Which of its source's draws in the period each is.
        self._numbers = np.empty(len(self._sources), np.int32)
        for source in range(len(parts)):
            own = np.flatnonzero(self._sources == source)
            self._numbers[own] = np.arange(len(own))

    def at(self, places: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Return (source of each of these draws, number of the draw among those of its source, from 0)."""
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
    """The draws of a whole run: for each phase a new sequence of `Turns`.

    Args:
        weights: one per source, or phases in the order of their starts.
        sources: number of sources.

    Raises:
        The errors of `whole_parts`.
        OptionError, OptionTypeError: the starts are not whole numbers that ascend from 0.
    """

    def __init__(self, weights: Sequence[float] | Sequence[Phase], sources: int) -> None:
        phases = _as_phases(weights)
        self.starts = [check_int("Phase.start", phase.start, minimum=0, maximum=MAX_INT64) for phase in phases]
        if self.starts[0] != 0 or any(here >= after for here, after in zip(self.starts, self.starts[1:])):
            raise OptionError(f"phases start at {self.starts}; the first must start at 0, each other one after it")
        self.parts = [whole_parts(phase.weights, sources) for phase in phases]
        #: What each source has drawn before each phase, for the phases that were reached.
        self._before = [np.zeros(sources, np.int64)]

    def at(self, places: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Return (source of each of these draws, number of the draw among those of its source in the run, from 0)."""
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
        """Return [start, parts] of each phase that the run's first `n` draws have reached, as plain data."""
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
