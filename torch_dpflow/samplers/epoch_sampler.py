"""Base class of samplers whose order follows from seed and epoch and is divided among ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch.utils.data import Sampler

from torch_dpflow._core import dealing
from torch_dpflow._core.checks import check_flag, check_int
from torch_dpflow._core.dealing import Places, RankPart, RankPosition
from torch_dpflow._core.ranks import own_rank
from torch_dpflow.errors import OptionError, StateError, UsageError
from torch_dpflow.samplers.indices import MAX_SEED

T = TypeVar("T")


class SamplerIterator(Iterator[T]):
    """One iteration of a sampler, with a state for torchdata's StatefulDataLoader: whether it has begun and ended.

    StatefulDataLoader loads the sampler's state, which has the position, and then the state of a new iterator. If the
    saved iteration had nothing left, this iterator yields nothing, and the next one reads a whole epoch.

    Args:
        items: the remaining items of the epoch, or a whole epoch.
        is_over: whether the sampler's state was at the end of an epoch, so that `items` are a whole epoch.
    """

    #: Tells this package's loader that the sampler's state suffices, so that it saves none of the iterator.
    is_placed_by_sampler = True

    def __init__(self, items: Iterator[T], *, is_over: bool) -> None:
        self._items = items
        self._is_over = is_over
        self._has_begun = False
        self._has_ended = False

    def __next__(self) -> T:
        self._has_begun = True
        try:
            return next(self._items)
        except StopIteration:
            self._has_ended = True
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return, as plain data, whether this iteration has begun and whether it has ended."""
        return {"has_begun": self._has_begun, "has_ended": self._has_ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the iteration that the state describes. Load the sampler's state first.

        Raises StateError: `state` is not the state of an iterator.
        """
        keys = ("has_begun", "has_ended")
        if not isinstance(state, dict) or any(type(state.get(key)) is not bool for key in keys):
            raise StateError(f"{state!r:.80} is no state of a sampler's iterator; pass what its state_dict() returned")
        self._has_begun = state["has_begun"]
        self._has_ended = state["has_ended"] or (self._has_begun and self._is_over)
        if self._has_ended:
            self._items = iter(())


STATE_VERSION = 1


def mixed_seed(*numbers: int) -> int:
    """Return a seed that is a hash of several numbers, so that neighbouring numbers give unrelated orders."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) & MAX_SEED


def restored_number(name: str, value: Any, *, minimum: int = 0, maximum: int | None = None) -> int:
    """Return a number from a state. Raises StateError if it is not an int, or out of range."""
    try:
        return check_int(name, value, minimum=minimum, maximum=maximum)
    except UsageError as error:
        raise StateError(f"the state is damaged: {error}") from error


class Start(NamedTuple):
    """Position in an epoch at which an iteration begins."""

    #: The places of the order that are dealt to ranks (see `dealing`), and how many items this rank has read.
    at: RankPosition
    #: The number of ranks that began the epoch.
    began_with: int
    #: In a group, the result of `SharedPass.shared_state`, to continue the epoch; else None.
    shared: Any = None


class Iteration:
    """One iteration over an epoch. `position` is the number of the epoch's items that this rank has read so far."""

    def __init__(self, epoch: int, start: Start, shared: Iterable[Any] | None = None) -> None:
        self.epoch = epoch
        self.start = start
        #: Iterable that draws the items from a group; None outside a group.
        self.shared = shared
        self.position = start.at.position
        #: Whether its iterator has reported the end of the epoch.
        self.is_exhausted = False


class EpochSampler(Sampler[T]):
    """Base class of samplers whose epoch has `size` items, of which each rank gets every `num_replicas`-th.

    Without ranks every iteration is a new epoch, as with RandomSampler. With ranks only `set_epoch` begins another
    epoch, as with DistributedSampler.

    Args:
        size: number of items in an epoch, of all ranks together.
        num_replicas, rank, ranks: as in `own_rank`.
        shuffle: whether the order is random.
        seed: determines the order, together with the epoch.
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
        #: The epoch that `set_epoch` has set for the next iteration; None if none was set since the latest iteration.
        self.named_epoch: int | None = None
        #: The iteration that was read last; None: the next one begins an epoch or resumes one.
        self._latest: Iteration | None = None
        #: Where the next iteration begins, if a state was loaded.
        self._resume: Start | None = None

    def __len__(self) -> int:
        """Return the number of items of each rank in a whole epoch."""
        return dealing.share(self.size, self.num_replicas, drop_last=self.drop_last)

    def __iter__(self) -> Iterator[T]:
        """Begin an epoch, or continue the one whose state was loaded."""
        # DistributedSampler's epoch is fixed here, RandomSampler's at the first item.
        iteration = Iteration(*self._upcoming()) if self.is_distributed else None
        return SamplerIterator(self._read(iteration), is_over=self._is_resumed_at_end())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration reads. A loaded position in this epoch stays, unless it is at the end.

        A running iteration continues; `state_dict` describes it until it ends or the next iteration is read.

        Raises OptionError or OptionTypeError if `epoch` is not an int in the allowed range.
        """
        epoch = check_int("epoch", epoch, minimum=0, maximum=self._max_epoch)
        if epoch != self.epoch or self._is_resumed_at_end():
            self._resume = None
        self.epoch = self.named_epoch = epoch

    def begin_next(self) -> None:
        """Make `state_dict` describe the next iteration, instead of the latest one.

        A loader calls this when it begins an iteration, because the iteration may end before it reads anything.
        """
        self.epoch, self._resume = self._upcoming()
        self._latest = None

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Restore a position: the next iteration yields the rest of the epoch, or a whole epoch if nothing is left.

        If the number of ranks has changed, the remaining items are divided among the present ranks; `drop_last` decides
        whether some of these are left out or repeated.

        Args:
            state: the state of any rank, if all ranks have read the same number of items; else a list of the states of
                all ranks, in any order.

        Raises StateError: a state is damaged or of a sampler with other arguments; a list lacks a rank or mixes epochs.
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
        shared = self._checked_rest(states, at)
        untouched = at.places == dealing.all_places(self.size) and not at.position
        self._resume = Start(at, self.num_replicas if untouched else states[0]["began_with"], shared)
        self.epoch, self._latest, self.named_epoch = epochs.pop(), None, None

    @abstractmethod
    def _reader(self, epoch: int, began_with: int) -> Callable[[Places], list[T]]:
        """Return a function that takes places in the order of an epoch and returns the items there.

        began_with: the number of ranks that began the epoch.
        """

    def _identity(self) -> dict[str, Any]:
        """Return the values that a fitting state must contain, by name."""
        return {
            "version": STATE_VERSION,
            "length": self.size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
        }

    def _state(self, consumed: int | None = None) -> dict[str, Any]:
        """Return the position as plain data, after `consumed` items of the epoch; None: all that were yielded."""
        latest = self._described(consumed)
        epoch, start = (self.epoch, self._next_start()) if latest is None else (latest.epoch, latest.start)
        at = start.at
        if latest is not None:
            reached = latest.position if consumed is None else consumed
            at = replace(at, position=check_int("consumed", reached, minimum=at.dealt_at, maximum=latest.position))
        elif consumed is not None and consumed != at.position:
            raise OptionError(f"consumed={consumed}, but the sampler is at {at.position} and has yielded nothing")
        place = at.as_dict(self.rank, self.num_replicas)
        return {**self._identity(), "epoch": epoch, "began_with": start.began_with, **place}

    def _left(self) -> int:
        """Return the number of items that this rank has not yielded yet of the epoch that `state_dict` describes."""
        latest = self._described(None)
        if latest is not None:
            return self._end(latest.start.at) - latest.position
        at = self._next_start().at
        return self._end(at) - at.position

    def _described(self, consumed: int | None) -> Iteration | None:
        """Return the iteration that `_state(consumed)` saves; None if it saves the beginning of the next iteration.

        consumed: the number of items that were delivered; None: all that were yielded.
        """
        latest = self._latest
        if latest is None or self.named_epoch is None:
            return latest
        # The end of a rank's epoch and its beginning resume equally, but the iteration may still be delivering.
        is_same = self.is_distributed and latest.epoch == self.epoch
        return None if latest.is_exhausted and consumed is None and not is_same else latest

    def _is_resumed_at_end(self) -> bool:
        """Return whether nothing was left of the epoch whose state was loaded."""
        return self._resume is not None and self._resume.at.position >= self._end(self._resume.at)

    def _end(self, at: RankPosition) -> int:
        """Return the number of items of this rank at the end of an epoch that continues at `at`."""
        return at.end(self.num_replicas, drop_last=self.drop_last)

    def _next_start(self) -> Start:
        """Return where an iteration of the epoch `epoch` begins."""
        return self._resume or Start(RankPosition.beginning(self.size), self.num_replicas)

    def _upcoming(self) -> tuple[int, Start]:
        """Return the epoch that the next iteration reads, and where it begins."""
        if (self._latest is None or self.named_epoch is not None) and not self._is_resumed_at_end():
            return self.epoch, self._next_start()
        following = self.epoch if self.is_distributed else self.epoch + 1
        return following, Start(RankPosition.beginning(self.size), self.num_replicas)

    def _read(self, iteration: Iteration | None) -> Iterator[T]:
        """Begin an iteration at the first item: torchdata makes iterators and reads none."""
        iteration = iteration or Iteration(*self._upcoming())
        items = self._items(iteration) if iteration.shared is None else iteration.shared
        self._latest, self._resume = iteration, None
        if not self.is_distributed:
            self.epoch = iteration.epoch
        if iteration.epoch == self.epoch:
            self.named_epoch = None
        for item in items:
            iteration.position += 1
            yield item
        iteration.is_exhausted = True

    def _items(self, iteration: Iteration) -> Iterator[T]:
        start = iteration.start
        part, first = self._part(start.at), start.at.position - start.at.dealt_at
        return part.items(self._reader(iteration.epoch, start.began_with), first) if first < len(part) else iter(())

    def _part(self, at: RankPosition) -> RankPart:
        return RankPart(at.places, self.rank, self.num_replicas, drop_last=self.drop_last)

    def _check_fits(self, state: Any) -> None:
        if not isinstance(state, dict) or not {"version", "position"} <= state.keys():
            raise StateError(f"this is no state of a {type(self).__name__}; pass what its state_dict() returned")
        for name, own in self._identity().items():
            if name not in state or state[name] != own:
                raise StateError(
                    f"the state was taken with {name}={state.get(name)!r:.80}, this sampler has {own!r:.80}; "
                    "make the sampler as the one that it was taken from"
                )
        restored_number("epoch", state.get("epoch"), maximum=self._max_epoch)

    def _checked_rest(self, states: Sequence[dict[str, Any]], at: RankPosition) -> Any:
        """Check the values of states in addition to the position, which was restored already. Raises StateError.

        at: the restored position.

        Returns the value for `Start.shared`.
        """
        for state in states:
            began_with = restored_number("began_with", state.get("began_with"), minimum=1, maximum=dealing.MAX_RANKS)
            # If nothing of an epoch was read, the number of ranks that would have begun it does not matter.
            if state["position"] and not state["dealt_at"] and began_with != state["num_replicas"]:
                raise StateError(
                    f"the state is damaged: began_with={began_with}, but num_replicas={state['num_replicas']} have "
                    "begun its epoch"
                )

    @property
    def _max_epoch(self) -> int:
        return MAX_SEED // max(1, self.size) - 1
