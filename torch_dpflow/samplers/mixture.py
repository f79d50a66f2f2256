"""MixtureSampler: several datasets in exact proportion, for torch's DataLoader or ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from hashlib import blake2b
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset

from torch_dpflow._core import dealing
from torch_dpflow._core.checks import MAX_INT64, check_int
from torch_dpflow._core.dealing import Places, RankPosition
from torch_dpflow.errors import OptionError, OptionTypeError, StateError
from torch_dpflow.samplers.epoch_sampler import EpochSampler, mixed_seed, restored_number
from torch_dpflow.samplers.indices import CompactArray, IndexArray, permutation
from torch_dpflow.samplers.proportions import Phase, Schedule


class MixtureSampler(EpochSampler[int]):
    """Positions in a `ConcatDataset` of several datasets, in the proportion of weights that may change by phase.

    The proportion is exact in any part of the run, as nothing is drawn by chance. With k sources in a phase, the
    number of samples of a source among the first n of the phase, of all ranks together, differs from n times its share
    by at most 1 - 1 / (2k - 2) (Tijdeman 1980). So in a window of any length within a phase it differs by less than 2.

    Each source is read in epochs of its own: all its samples in an order by seed, source and source epoch, then the
    next epoch. The run's epochs of `samples` continue each other.

    A position is three numbers and is restored at once, however deep in the run: at most 65,536 turns are computed,
    0.1 s, for each phase that the run has reached, and one permutation of each source. Memory is that of the
    permutations, 4 bytes a sample of the sources. Each rank computes its own samples only.

    Args:
        sources: the datasets, or their lengths, in the order of the `ConcatDataset`; or that itself.
        weights: one number a source; or a list of `Phase`, in the order of their starts. Floats count as the decimals
            that they are printed as. A common denominator above 65,536 is rounded to that.
        samples: length of an epoch, of all ranks together; None: that of all sources.
        num_replicas: number of ranks; by default torch.distributed's, if it is initialised, else 1.
        rank: this rank; by default torch.distributed's, if it is initialised, else 0.
        ranks: a 1-D DeviceMesh, such as `mesh["dp"]`, or a process group to take both from.
        shuffle: False reads each source in its own order.
        seed: of the sources' orders.
        drop_last: leave out the samples that do not divide evenly among the ranks, instead of repeating some.

    Raises:
        OptionError: a value is out of range, or a source that has a weight is empty.
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
        #: Samples of each source.
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
        #: The order that was last read of each source, with its epoch.
        self._orders: dict[int, tuple[int, CompactArray]] = {}

    def counts(self, samples: int) -> list[int]:
        """Return how many of the run's first `samples`, of all ranks together, are of each source."""
        counts: list[int] = self._schedule.counts(check_int("samples", samples, minimum=0)).tolist()
        return counts

    @property
    def samples_left(self) -> int:
        """Number of samples that this rank has not yielded yet of the epoch that `state_dict` describes."""
        return self._left()

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return the sampler's position as plain data; no side effect, and no larger deep in a run.

        Args:
            consumed: how many of the epoch's samples this rank has used, for a loader that draws ahead of
                delivery; None: all that were yielded.

        Raises:
            OptionError: `consumed` is below 0, or more than were yielded.
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
                within[now] = self._order(source, epoch)[within[now]]
            found[own] = within + self._offsets[source]
        positions: list[int] = found.tolist()
        return positions

    def _order(self, source: int, epoch: int) -> CompactArray:
        held = self._orders.get(source)
        if held is None or held[0] != epoch:
            held = self._orders[source] = (
                epoch,
                permutation(self.lengths[source], mixed_seed(self.seed, source, epoch), 0),
            )
        return held[1]

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "sources": self.lengths}

    def _checked_rest(self, states: Sequence[dict[str, Any]], at: RankPosition) -> None:
        """Refuse also a state whose run had other weights so far; weights of later phases may have changed."""
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
        """Return after how many samples of the run nothing was read, if ranks are as far as this one.

        Some of the samples before may be left, those at which ranks were behind when their number changed.
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
