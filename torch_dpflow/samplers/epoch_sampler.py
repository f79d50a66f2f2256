"""Base of samplers whose epochs are functions of seed and epoch, dealt to ranks, with a position that is a number."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import Sampler

from torch_dpflow._core import dealing
from torch_dpflow._core.checks import check_flag, check_int
from torch_dpflow._core.dealing import RankPosition
from torch_dpflow._core.ranks import own_rank
from torch_dpflow.errors import OptionError, StateError, UsageError
from torch_dpflow.samplers.indices import MAX_SEED, IndexArray
from torch_dpflow.samplers.sampler_iterator import SamplerIterator

T = TypeVar("T")

STATE_VERSION = 1
#: Items that are computed at once: many, which is cheap, but not all, which takes memory.
_CHUNK = 4096


def mixed_seed(*numbers: int) -> int:
    """Return one seed from several numbers, so that neighbouring ones give unrelated orders."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) & MAX_SEED


def restored_number(name: str, value: Any, *, minimum: int = 0, maximum: int | None = None) -> int:
    """Return a number of a state. Raises StateError unless it is an int in range."""
    try:
        return check_int(name, value, minimum=minimum, maximum=maximum)
    except UsageError as error:
        raise StateError(f"the state is damaged: {error}") from error


class EpochSampler(Sampler[T]):
    """Sampler of an epoch of so many items, of which each rank gets every `num_replicas`-th.

    Without ranks every iteration is a new epoch, as RandomSampler's. With ranks only `set_epoch` begins another one, as
    DistributedSampler's.

    Args:
        size: items of an epoch, of all ranks together.
        num_replicas, rank, ranks: as of `own_rank`.
        shuffle, seed: of the order.
        drop_last: leave out the items that do not divide evenly among the ranks, instead of repeating some.
    """

    def __init__(
        self,
        size: int,
        *,
        num_replicas: int | None,
        rank: int | None,
        ranks: Any,
        shuffle: bool,
        seed: int,
        drop_last: bool,
    ) -> None:
        self.size = size
        self.num_replicas, self.rank, self.is_distributed = own_rank(num_replicas, rank, ranks)
        self.shuffle = check_flag("shuffle", shuffle)
        self.seed = check_int("seed", seed, minimum=0, maximum=MAX_SEED)
        self.drop_last = check_flag("drop_last", drop_last)
        #: The running epoch; before the first iteration, and after `set_epoch`, the next one.
        self.epoch = 0
        #: The epoch that `set_epoch` has set for the next iteration; None if it was not called since the latest one.
        self.named_epoch: int | None = None
        #: The iteration that was read last; None: the next one begins an epoch or resumes one.
        self._latest: _Iteration | None = None
        #: A loaded position, until the next iteration, and the number of ranks that began its epoch.
        self._resume: tuple[RankPosition, int] | None = None

    def __len__(self) -> int:
        """Return the number of items of each rank in a whole epoch."""
        return dealing.share(self.size, self.num_replicas, drop_last=self.drop_last)

    def __iter__(self) -> Iterator[T]:
        """Begin an epoch, or continue the one whose state was loaded."""
        # DistributedSampler's epoch is fixed here, RandomSampler's at the first item.
        upcoming = self._upcoming() if self.is_distributed else None
        return SamplerIterator(self._from_first_item(upcoming), is_over=self._is_resumed_at_end())

    def set_epoch(self, epoch: int) -> None:
        """Have the next iteration read this epoch. A loaded position stays if it is of the same epoch.

        An iteration that is running goes on, and `state_dict` describes it until the next one is read.

        Raises:
            OptionError: `epoch` is negative or too large.
        """
        epoch = self._checked_epoch(epoch)
        if epoch != self.epoch or self._is_resumed_at_end():
            self._resume = None
        self.epoch = self.named_epoch = epoch

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Restore a position: the next iteration yields the rest of its epoch, or a whole one if nothing is left.

        With another number of ranks, what is left of the epoch is dealt to them. It is evened out once more.

        Args:
            state: of any rank, if all have read as much; else a list of the states of all ranks, in order.

        Raises:
            StateError: the state is damaged, of other arguments than these, or ranks are missing.
        """
        states = [state] if isinstance(state, dict) else state
        if not isinstance(states, list | tuple) or not states:
            raise StateError(f"{states!r:.80} is no state of a {type(self).__name__}; pass what state_dict() returned")
        for one in states:
            self._check_fits(one)
        epochs = {one["epoch"] for one in states}
        if len(epochs) > 1:
            raise StateError(f"the states are of epochs {sorted(epochs)}; give those of one step of all ranks")
        at = RankPosition.restored(state, self.size, self.num_replicas, drop_last=self.drop_last)
        for one in states:
            self._check_restored(one)
        began_with = int(states[0]["began_with"])
        untouched = at.places == dealing.all_places(self.size)
        self._resume = at, self.num_replicas if untouched and not at.position else began_with
        self.epoch, self._latest, self.named_epoch = epochs.pop(), None, None

    @abstractmethod
    def _reader(self, epoch: int, began_with: int) -> Callable[[IndexArray], list[T]]:
        """Return the function from places in the order of an epoch to the items there.

        began_with: the number of ranks that began the epoch.
        """

    def _identity(self) -> dict[str, Any]:
        """Return the values that a state must have to fit this sampler."""
        return {
            "version": STATE_VERSION,
            "length": self.size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
        }

    def _state(self, consumed: int | None = None) -> dict[str, Any]:
        """Return the position as plain data, after `consumed` items of the epoch; None: all that were yielded."""
        latest, epoch = self._described(consumed), self.epoch
        if latest is not None:
            epoch, at, began_with = latest.epoch, latest.start, latest.began_with
            if consumed is None:
                consumed = latest.position
            at = replace(at, position=check_int("consumed", consumed, minimum=at.dealt_at, maximum=latest.position))
        else:
            at, began_with = self._resume or (RankPosition.beginning(self.size), self.num_replicas)
            if consumed is not None and consumed != at.position:
                raise OptionError(f"consumed={consumed}, but the sampler is at {at.position} and has yielded nothing")
        place = at.as_dict(self.rank, self.num_replicas)
        return {**self._identity(), "epoch": epoch, "began_with": began_with, **place}

    def _left(self) -> int:
        """Return the number of items that this rank has not yielded yet of the epoch that `state_dict` describes."""
        latest = self._described(None)
        if latest is not None:
            return self._end(latest.start) - latest.position
        at, _ = self._resume or (RankPosition.beginning(self.size), 0)
        return self._end(at) - at.position

    def _described(self, consumed: int | None) -> _Iteration | None:
        """Return the iteration that a state describes; None for the next one."""
        latest = self._latest
        if latest is None or self.named_epoch is None:
            return latest
        # The end of a rank's epoch and its beginning resume equally, but the iteration may still be delivering.
        is_same = self.is_distributed and latest.epoch == self.epoch
        return None if latest.is_exhausted and consumed is None and not is_same else latest

    def _is_resumed_at_end(self) -> bool:
        """Return whether nothing was left of the epoch whose state was loaded."""
        return self._resume is not None and self._resume[0].position >= self._end(self._resume[0])

    def _end(self, start: RankPosition) -> int:
        return start.end(self.num_replicas, drop_last=self.drop_last)

    def _upcoming(self) -> tuple[int, RankPosition, int]:
        """Epoch and position with which the next iteration begins, and the number of ranks that began the epoch."""
        whole = RankPosition.beginning(self.size), self.num_replicas
        if (self._latest is None or self.named_epoch is not None) and not self._is_resumed_at_end():
            return self.epoch, *(self._resume or whole)
        return (self.epoch if self.is_distributed else self.epoch + 1), *whole

    def _from_first_item(self, upcoming: tuple[int, RankPosition, int] | None) -> Iterator[T]:
        """Begin an iteration at the first item: torchdata makes iterators and reads none."""
        epoch, start, began_with = upcoming or self._upcoming()
        iteration = self._latest = _Iteration(epoch, start, began_with)
        self._resume = None
        if not self.is_distributed:
            self.epoch = epoch
        if epoch == self.epoch:
            self.named_epoch = None
        yield from self._read(iteration)
        iteration.is_exhausted = True

    def _read(self, iteration: _Iteration) -> Iterator[T]:
        start, end = iteration.start, self._end(iteration.start)
        if iteration.position == end:
            return
        items = self._reader(iteration.epoch, iteration.began_with)
        for first in range(iteration.position, end, _CHUNK):
            places = self._places(start, first - start.dealt_at, min(first + _CHUNK, end) - start.dealt_at)
            for item in items(places):
                iteration.position += 1
                yield item

    def _places(self, start: RankPosition, first: int, stop: int) -> IndexArray:
        """Return this rank's places from its `first` to before its `stop`; those that fill up are the first ones."""
        length, ranks = dealing.count(start.places), self.num_replicas
        whole = min(stop, -(-(length - self.rank) // ranks))
        own = dealing.cut(start.places, self.rank + first * ranks, min(length, self.rank + whole * ranks), ranks)
        filled = [(self.rank + number * ranks) % length for number in range(max(first, whole), stop)]
        return dealing.numbers(own + tuple(part for at in filled for part in dealing.cut(start.places, at, at + 1)))

    def _check_fits(self, state: Any) -> None:
        if not isinstance(state, dict) or not {"version", "position", "began_with"} <= state.keys():
            raise StateError(f"this is no state of a {type(self).__name__}; pass what its state_dict() returned")
        for name, own in self._identity().items():
            if name not in state or state[name] != own:
                raise StateError(
                    f"the state was taken with {name}={state.get(name)!r:.80}, this sampler has {own!r:.80}; "
                    "make the sampler as the one that it was taken from"
                )
        restored_number("epoch", state.get("epoch"), maximum=self._max_epoch)

    def _check_restored(self, state: dict[str, Any]) -> None:
        """Check what the position in a state determines. Raises StateError."""
        began_with = restored_number("began_with", state["began_with"], minimum=1, maximum=dealing.MAX_RANKS)
        # Of an epoch of which nothing was read it does not matter how many ranks would have begun it.
        if state["position"] and not state["dealt_at"] and began_with != state["num_replicas"]:
            raise StateError(
                f"the state is damaged: began_with={began_with}, but num_replicas={state['num_replicas']} have begun "
                "its epoch"
            )

    @property
    def _max_epoch(self) -> int:
        return MAX_SEED // max(1, self.size) - 1

    def _checked_epoch(self, epoch: int) -> int:
        return check_int("epoch", epoch, minimum=0, maximum=self._max_epoch)


class _Iteration:
    """One iteration over an epoch; `position` counts this rank's items since the epoch's beginning."""

    def __init__(self, epoch: int, start: RankPosition, began_with: int) -> None:
        self.epoch = epoch
        self.start = start
        self.began_with = began_with
        self.position = start.position
        #: Whether its iterator has reported the end of the epoch.
        self.is_exhausted = False
