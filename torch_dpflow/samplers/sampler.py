"""DynaGCSSampler: a random order, private or shared with other jobs, for torch's DataLoader or ours."""

from __future__ import annotations

from array import array as array_of_numbers
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set, Sized, ValuesView
from functools import cached_property
from numbers import Number
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from torch_dpflow._core.checks import check_int, check_number, check_type
from torch_dpflow._core.dealing import Places, RankPosition, describe_numbers, taken
from torch_dpflow._core.permutation import Permutation, torch_order
from torch_dpflow.errors import OptionError, OptionTypeError, StateError, UsageError
from torch_dpflow.lookahead import Lookahead
from torch_dpflow.samplers.epoch_sampler import EpochSampler, Iteration, SamplerIterator
from torch_dpflow.samplers.group import SamplingGroup
from torch_dpflow.samplers.indices import MAX_SEED, CompactArray, IndexArray, check_indices, compact, has_flags
from torch_dpflow.samplers.passes import RankShares, SharedPass
from torch_dpflow.samplers.strategy_registry import check_strategy

STATE_VERSION = 3
#: Number of samples that are drawn from a group at once if no batch size is given.
_DRAWN_AT_ONCE = 64
_LEFT = "the sampler has left its group; make a new one to join again"
_SUPERSEDED = (
    "a newer iteration of the sampler has begun; in a group only the latest goes on, because a job is in one "
    "epoch at a time"
)


class DynaGCSSampler(EpochSampler[int]):
    """Sampler of a random order without repetition. In a group, it reads what other jobs have just loaded.

    Without a group, the order of an epoch is ``torch.randperm`` of a generator seeded with ``seed + epoch``. With
    `num_replicas`, `ranks` or an initialised torch.distributed, the sampler follows DistributedSampler's contract
    exactly: padding, `drop_last`, `set_epoch`. Otherwise it follows RandomSampler's: every iteration that is read is a
    new epoch, and `set_epoch` sets the next one.

    In a group, the sampler is one of the jobs. Each epoch is still a permutation of its samples, but it depends on what
    the other jobs read meanwhile. Under the default strategy, all permutations are equally likely. Ranks get
    consecutive slices of each global batch. Each rank's process has a copy of the group and draws whole batches: ranks
    agree only if they make the same calls.

    Only one thread at a time may use the samplers of a group. A pickle of a sampler contains a copy of its group.

    Args:
        data_source: a data set, of which all positions are read; or the indices to read, as a sequence,
            array, tensor or range of whole numbers.
        group: the jobs to share with, `sampling_group(...)`; None: alone.
        batch_size: in a group, the samples that a rank takes at once; None: 64. Not used without a group.
        num_replicas: number of ranks; by default torch.distributed's, if it is initialised, else 1.
        rank: this rank; by default torch.distributed's, if it is initialised, else 0.
        ranks: a 1-D DeviceMesh, such as `mesh["dp"]`, or a process group, which defines `num_replicas` and `rank`.
            Peers in other dimensions of the mesh read the same samples.
        shuffle: False reads the indices in the order given; not in a group.
        seed: without a group, determines the order, together with the epoch. Jobs of a group may have equal seeds.
        drop_last: leave out the last samples that do not divide evenly among the ranks, instead of repeating some.
        strategy: the strategy of the group; no effect without a group.
        independence: with "shared-log", share of samples, 0 to 1, that are picked whatever others have loaded.

    Raises:
        OptionError: a value is not allowed, the group has a different strategy or size, or `ranks` lacks this process.
        OptionTypeError: an argument is of the wrong type; `data_source` contains bools or numbers that are not whole,
            or has no order.
    """

    def __init__(
        self,
        data_source: Sized,
        *,
        group: SamplingGroup | None = None,
        batch_size: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        ranks: Any = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        strategy: str = "shared-log",
        independence: float = 0.0,
    ) -> None:
        #: The sample numbers to read; None: all positions of a data set of length `size`.
        self.indices: IndexArray | range | None
        if group is None and isinstance(data_source, range) and data_source == range(len(data_source)):
            self.indices = data_source  # its positions are its numbers, so it needs no array
        else:
            self.indices = given_indices(data_source)
        super().__init__(
            length_of(data_source) if self.indices is None else len(self.indices),
            num_replicas=num_replicas,
            rank=rank,
            ranks=ranks,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        self.batch_size = batch_size
        if batch_size is not None:
            check_int("batch_size", batch_size, minimum=1)
        self.independence = check_number("independence", independence, minimum=0, maximum=1)
        self.strategy = check_strategy(strategy)
        #: The order that was read last, and its epoch and the number of ranks that began that.
        self._drawn: tuple[tuple[int, int], CompactArray | Permutation] | None = None
        #: The pass that draws from the group; its iterator may still be in use after `_latest` is reset.
        self._running: SharedPass | None = None
        self.group = group
        #: The name of this job in its group; None without a group, and after `leave`.
        self.job: str | None = None if group is None else self._join(group)

    def __iter__(self) -> Iterator[int]:
        """Begin an epoch, or continue the one whose state was loaded. In a group, an earlier iteration ends.

        Raises:
            UsageError: the sampler has left its group.
        """
        if self.group is None:
            return super().__iter__()
        if self.job is None:
            raise UsageError(_LEFT)
        epoch, start = self._upcoming()
        self._end_running(_SUPERSEDED)
        self._running = SharedPass(
            epoch,
            group=self.group,
            job=self.job,
            shares=RankShares(self.size, self.num_replicas, self.drop_last),
            rank=self.rank,
            batch_size=self.batch_size or _DRAWN_AT_ONCE,
            state=start.shared,
            position=start.at.position,
        )
        return SamplerIterator(self._read(Iteration(epoch, start, self._running)), is_over=self._is_resumed_at_end())

    def leave(self) -> None:
        """Leave the group; its other jobs no longer take this job into account. Further calls do nothing."""
        if self.group is not None and self.job is not None:
            self.group.leave(self.job)
            self.job = None
            self._end_running(_LEFT)

    @property
    def samples_left(self) -> int:
        """Number of samples that this rank has not yielded yet of the epoch that `state_dict` describes."""
        return self._left()

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return the sampler's position as plain data; no side effect. O(1), in a group O(samples).

        Args:
            consumed: how many of the epoch's samples this rank has used, for a loader that draws ahead of
                delivery; None: all that were yielded.

        Raises:
            OptionError: `consumed` is out of range, such as more than were yielded.
            StateError: in a group, `consumed` is before the position at which the epoch was resumed.
        """
        state = self._state(consumed)
        latest = self._described(consumed)
        if latest is None:
            return {**state, "shared": self._next_start().shared}
        drawn = latest.shared
        return {**state, "shared": drawn.shared_state(state["position"]) if isinstance(drawn, SharedPass) else None}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_drawn": None}  # can be drawn again

    def lookahead(self) -> Lookahead | None:
        """Return this rank's next reads, for a cache in the process that draws. Draws nothing.

        Without a group: the whole order of the epoch and, without ranks, of the next epoch. In a group: the group's
        lookahead, but no order before the epoch's first read, or if there are several ranks. None after `leave`, and in
        a worker, whose copy of the sampler draws nothing.
        """
        if get_worker_info() is not None or (self.group is not None and self.job is None):
            return None
        latest = self._latest if self.named_epoch is None else None
        if latest is not None and isinstance(latest.shared, SharedPass):
            return latest.shared.lookahead(latest.position)
        epoch, start = self._upcoming() if latest is None else (latest.epoch, latest.start)
        position = start.at.position if latest is None else latest.position
        if self.group is not None:
            members = None if self.num_replicas > 1 or isinstance(self.indices, range) else self.indices
            return Lookahead(epoch=epoch, length=len(self), position=position, members=members)
        order = taken(self._order_of(epoch, start.began_with), self._part(start.at)[:])
        following = None if self.is_distributed else self._mapped(self._order(epoch + 1, 1))[:]
        return Lookahead.of_order(order, epoch=epoch, position=position - start.at.dealt_at, following=following)

    def _reader(self, epoch: int, began_with: int) -> Callable[[Places], list[int]]:
        order = self._order_of(epoch, began_with)
        return lambda places: taken(order, places).tolist()

    def _order_of(self, epoch: int, began_with: int) -> CompactArray | Permutation:
        """Return the samples of an unshared epoch, before they are dealt to ranks; drawn as they are read."""
        if self._drawn is None or self._drawn[0] != (epoch, began_with):
            self._drawn = (epoch, began_with), self._mapped(self._order(epoch, began_with))
        return self._drawn[1]

    def _mapped(self, order: CompactArray | Permutation) -> CompactArray | Permutation:
        return order if self.indices is None or isinstance(self.indices, range) else self.indices[order[:]]

    def _order(self, epoch: int, began_with: int) -> CompactArray | Permutation:
        """Return the order of an epoch as positions in `indices`. began_with: as in `_reader`."""
        if self.shuffle:
            return torch_order(self.size, self.seed + epoch)
        return np.arange(self.size, dtype=compact(self.size))

    def _end_running(self, why: str) -> None:
        if self._running is not None:
            self._running.end(why)

    def _checked_rest(self, states: Sequence[dict[str, Any]], at: RankPosition) -> dict[str, Any] | None:
        """Return the group's part of this rank's state, at the position that was restored."""
        super()._checked_rest(states, at)
        if not all("shared" in state for state in states):
            raise StateError("the state is damaged: it lacks 'shared'")
        if self.group is None:
            return None
        before = states[0]["num_replicas"]
        if before != self.num_replicas or len({state["position"] for state in states}) > 1:
            if not at.position:
                return None
            raise StateError(
                f"the state was taken in an epoch that {before} ranks read, and there are {self.num_replicas} now, or "
                "ranks are out of step: ranks of a group continue an epoch with the same number of ranks, in step; "
                "resume so, or begin the epoch again"
            )
        own = next((one for one in states if one["rank"] == self.rank), states[0])
        shared: dict[str, Any] | None = own["shared"]
        if shared is None and 0 < at.position < at.end(self.num_replicas, drop_last=self.drop_last):
            raise StateError("the state is damaged: it lacks the samples that were read of the epoch")
        return shared

    def _identity(self) -> dict[str, Any]:
        """Return the values that a fitting state must contain, by name."""
        return {
            **super()._identity(),
            "version": STATE_VERSION,
            "indices": self._described_indices,
            "strategy": None if self.group is None else self.strategy,
        }

    @property
    def _max_epoch(self) -> int:
        return MAX_SEED - self.seed

    @cached_property
    def _described_indices(self) -> str | None:
        if self.indices is None or isinstance(self.indices, range):
            return None
        return None if np.array_equal(self.indices, np.arange(self.size)) else describe_numbers(self.indices)

    def _join(self, group: SamplingGroup) -> str:
        check_group(group, self.strategy, None if self.indices is not None else self.size)
        if not self.shuffle:
            raise OptionError(
                "shuffle=False in a group: a group shares by choosing the order; leave out one of the two"
            )
        job = next(name for k in range(len(group.jobs) + 1) if (name := f"job-{k}") not in group.jobs)
        group.join(
            job,
            self.indices,
            seed=self.seed,
            batch_size=self.batch_size or _DRAWN_AT_ONCE,
            independence=self.independence,
        )
        return job


def length_of(data_source: Sized) -> int:
    try:
        return len(data_source)
    except TypeError as error:
        raise OptionTypeError(
            f"data_source is a {type(data_source).__name__} without a length; give a map-style data set, "
            "or the indices to read"
        ) from error


def check_group(group: SamplingGroup, strategy: str, length: int | None) -> None:
    check_type("group", group, SamplingGroup, "what sampling_group() returns")
    if group.strategy != strategy:
        raise OptionError(
            f"the group's strategy is {group.strategy!r}, the sampler's {strategy!r}; "
            f"pass strategy={group.strategy!r}, or a group made with {strategy!r}"
        )
    if length is not None and length != group.size:
        raise OptionError(
            f"the group is for {group.size} samples, the data set has {length}; "
            "make the group for this data set, or pass the indices to read"
        )


def given_indices(data_source: object) -> IndexArray | None:
    """Return `data_source` as an array of indices if it is a sequence of whole numbers; None if it is a data set.

    Raises:
        OptionTypeError: `data_source` is a sequence of other numbers, numbers without an order, or text.
        OptionError: an index is negative, too large, or repeated.
    """
    if isinstance(data_source, str | bytes | bytearray):
        raise OptionTypeError(f"data_source={data_source!r:.80} is text; give a data set, or the indices to read")
    numbers = _numbers_of(data_source)
    if numbers is None:
        return None
    if not len(numbers):
        return np.empty(0, np.int64)
    if isinstance(numbers, np.ndarray) and numbers.dtype.kind not in "iu":
        raise OptionTypeError(
            f"data_source is a {type(data_source).__name__} of {numbers.dtype} numbers. Whole numbers are taken as "
            "indices: convert them to int, or those of a mask by numpy.flatnonzero(mask); for a data set made of them "
            "pass range(len(...))"
        )
    try:
        return check_indices(numbers, name="data_source")
    except OptionError as error:
        raise OptionError(
            f"{error}. Whole numbers are taken as indices; for a data set made of them pass range(len(...))"
        ) from error


def _numbers_of(data_source: Any) -> range | NDArray[Any] | None:
    """Return `data_source` as a range or array if it is one row of numbers, of any type; None for anything else.

    Raises OptionTypeError for numbers without an order.
    """
    if isinstance(data_source, range):
        return data_source
    if isinstance(data_source, torch.Tensor):
        is_small_float = data_source.is_floating_point()  # NumPy lacks some of torch's types
        array = (data_source.float() if is_small_float else data_source).numpy(force=True)
        return array if array.ndim == 1 else None
    if callable(getattr(type(data_source), "__array__", None)):  # of NumPy, pandas and others
        is_row = len(getattr(data_source, "shape", (0,))) == 1
        row = np.asarray(data_source) if is_row else None
        return row if row is not None and row.ndim == 1 and row.dtype.kind in "iufcb" else None
    if isinstance(data_source, Set | ValuesView) and len(data_source) and all(map(_is_number, data_source)):
        raise OptionTypeError(
            f"data_source is a {type(data_source).__name__} of numbers, which have no order; give a list, as "
            "sorted(...)"
        )
    if isinstance(data_source, list | tuple | deque | array_of_numbers) and all(map(_is_number, data_source)):
        values = [one.item() if isinstance(one, torch.Tensor) else one for one in data_source]
        array = np.asarray(values or np.empty(0, np.int64))
        return array.astype(bool) if has_flags(values) else array
    return None


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.ndim
    return isinstance(value, Number | np.number | np.bool_)
