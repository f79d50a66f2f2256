"""DynaGCSSampler: an order for torch's DataLoader or ours, private or shared with other jobs."""

from collections.abc import Iterator, Sequence, Sized
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from torch.utils.data import Sampler, get_worker_info

from torch_dpflow._core import dealing
from torch_dpflow._core.checks import check_flag, check_int, check_number
from torch_dpflow._core.dealing import Places, RankPosition
from torch_dpflow._core.permutation import Permutation, torch_order
from torch_dpflow._core.ranks import own_rank
from torch_dpflow._core.sample_numbers import describe_numbers
from torch_dpflow.errors import OptionError, OptionTypeError, StateError, UsageError
from torch_dpflow.lookahead import Lookahead
from torch_dpflow.samplers.given_indices import given_indices
from torch_dpflow.samplers.group import SamplingGroup
from torch_dpflow.samplers.indices import MAX_SEED, CompactArray, compact
from torch_dpflow.samplers.passes import Order, Pass, PrivatePass, RankShares, SharedPass
from torch_dpflow.samplers.sampler_iterator import SamplerIterator
from torch_dpflow.samplers.strategy_registry import check_strategy

STATE_VERSION = 2
#: Samples that are drawn from a group at once if no batch size is given.
_DRAWN_AT_ONCE = 64
_LEFT = "the sampler has left its group; make a new one to join again"
_SUPERSEDED = (
    "a newer iteration of the sampler has begun; in a group only the latest goes on, because a job is in one "
    "epoch at a time"
)


class DynaGCSSampler(Sampler[int]):
    """Random order without repetition; in a group, one that reads what other jobs have just loaded.

    Alone it is torch's sampler: the order of an epoch is ``torch.randperm`` of a generator seeded with
    ``seed + epoch``. With `num_replicas` or an initialised torch.distributed it follows DistributedSampler's
    contract exactly: padding, `drop_last`, `set_epoch`. Otherwise it follows RandomSampler's: every
    iteration that is read is a new epoch, and `set_epoch` sets the next one.

    In a group it is a job of its own. Its epochs are permutations of its set too, uniform ones under the
    default strategy, but they depend on what the other jobs do meanwhile. Ranks get consecutive
    slices of each global batch; each rank's process has a copy of the group and draws the whole batch, so
    the ranks agree as long as they make the same calls.

    One thread at a time may use the samplers of a group. A sampler pickles, with a copy of its group.

    Args:
        data_source: a data set, of which all positions are read; or the indices to read, as a sequence,
            array, tensor or range of whole numbers.
        group: the jobs to share with, `sampling_group(...)`; None: alone.
        batch_size: samples that a rank takes at once; used in a group, where None draws 64 at a time.
        num_replicas: number of ranks; by default torch.distributed's, if it is initialised, else 1.
        rank: this rank; by default torch.distributed's, if it is initialised, else 0.
        ranks: a 1-D DeviceMesh, such as `mesh["dp"]`, or a process group: `num_replicas` and `rank` are
            this process's there. Its peers in other dimensions read the same samples.
        shuffle: False reads the indices in the order given; not in a group.
        seed: determines the order; in a group together with the job's name. Seeds of one group may be equal.
        drop_last: leave out the tail that does not divide evenly among the ranks, instead of repeating
            samples.
        strategy: how the group shares; must be the group's. Without a group nothing is shared.
        independence: share of the picks, 0 to 1, that ignore what others have loaded; see
            `SharedLogGroup`.

    Raises:
        OptionError: a value is out of range, the group is of another strategy or size, or this process is
            outside `ranks`.
        OptionTypeError: an argument is of the wrong type; `data_source` is a row of numbers that are not
            whole, of bools, or without an order.
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
        #: The samples that it chooses from; None: all positions of a data set of `size`.
        self.indices = given_indices(data_source)
        #: Samples that all ranks choose from.
        self.size = length_of(data_source) if self.indices is None else len(self.indices)
        #: `is_distributed`: it has ranks, so that only `set_epoch` begins another epoch.
        self.num_replicas, self.rank, self.is_distributed = own_rank(num_replicas, rank, ranks)
        self.drop_last = check_flag("drop_last", drop_last)
        self._shares = RankShares(self.size, self.num_replicas, self.drop_last)
        self.shuffle = check_flag("shuffle", shuffle)
        self.seed = check_int("seed", seed, minimum=0, maximum=MAX_SEED)
        if batch_size is not None:
            check_int("batch_size", batch_size, minimum=1)
        self.batch_size = batch_size
        self.independence = check_number("independence", independence, minimum=0, maximum=1)
        self.strategy = check_strategy(strategy)
        #: The running epoch; before the first iteration, and after `set_epoch`, the next one.
        self.epoch = 0
        #: The epoch that `set_epoch` has set for the next iteration; None if it was not called since the latest one.
        self.named_epoch: int | None = None
        #: The iteration that was read last; None: the next one begins an epoch or resumes one.
        self._latest: Pass | None = None
        #: Position and shared state that were loaded, until the next iteration.
        self._resume: tuple[RankPosition, dict[str, Any] | None] | None = None
        #: Where the latest iteration began.
        self._start = RankPosition.beginning(self.size)
        #: The pass that draws from the group; its iterator may still be in use after `_latest` is reset.
        self._running: SharedPass | None = None
        self.group = group
        #: The name of this job in its group; None without one, and after `leave`.
        self.job: str | None = None if group is None else self._join(group)

    def __len__(self) -> int:
        """Return the number of samples that this rank reads in an epoch."""
        return self._shares.per_rank

    def __iter__(self) -> Iterator[int]:
        """Begin an epoch, or continue the one whose state was loaded.

        Raises:
            UsageError: the sampler has left its group.
        """
        if self.group is not None and self.job is None:
            raise UsageError(_LEFT)
        is_over = self._is_resumed_at_end()
        if self.group is not None:
            return SamplerIterator(iter(self._next_pass(self._upcoming())), is_over=is_over)
        # DistributedSampler's epoch is fixed here, RandomSampler's at the first draw.
        upcoming = self._upcoming() if self.is_distributed else None
        return SamplerIterator(self._from_first_draw(upcoming), is_over=is_over)

    def set_epoch(self, epoch: int) -> None:
        """Have the next iteration read this epoch. A loaded position stays if it is of the same epoch.

        An iteration that is running goes on, and `state_dict` describes it until the next one is read.

        Raises:
            OptionError: `epoch` is negative or too large.
        """
        epoch = check_int("epoch", epoch, minimum=0, maximum=MAX_SEED - self.seed)
        if epoch != self.epoch or self._is_resumed_at_end():
            self._resume = None
        self.epoch = self.named_epoch = epoch

    def leave(self) -> None:
        """Leave the group. May be called twice."""
        if self.group is not None and self.job is not None:
            self.group.leave(self.job)
            self.job = None
            self._end_running(_LEFT)

    @property
    def samples_left(self) -> int:
        """Number of samples that this rank has not yielded yet of the epoch that `state_dict` describes."""
        _, at, _ = self._position(None)
        return at.end(self.num_replicas, drop_last=self.drop_last) - at.position

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return the sampler's position as plain data; no side effect. O(1) alone, O(samples) in a group.

        Args:
            consumed: how many of the epoch's samples this rank has used, for a loader that draws ahead of
                delivery; None: all that were yielded.

        Raises:
            OptionError: `consumed` is below 0, or more than were yielded.
        """
        epoch, at, shared = self._position(consumed)
        return self._identity() | {"epoch": epoch, "shared": shared} | at.as_dict(self.rank, self.num_replicas)

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Restore a position: the next iteration yields the rest of its epoch.

        If nothing is left of that epoch, the next iteration is a whole one. In a group, samples drawn
        but not consumed come first, then those that the job has not read yet.

        The number of ranks may be another one than that of the state: what is left of the epoch is dealt to the new
        ranks, and evened out once more. The following epochs are those of a run that began with them.

        Args:
            state: of a sampler with the same arguments but for `num_replicas`, `rank` and `batch_size`. The state of
                any rank, if all ranks have read as many samples; else a list of the states of all ranks.

        Raises:
            StateError: the state is of other data, or other arguments; or it is damaged; or ranks are missing.
        """
        states = [state] if isinstance(state, dict) else state
        if not isinstance(states, list | tuple) or not states:
            raise StateError(f"{states!r:.80} is no state of a DynaGCSSampler; pass what its state_dict() returned")
        (epoch, *others) = map(self._checked_epoch, states)
        if set(others) - {epoch}:
            raise StateError(
                f"the states are of epochs {sorted({epoch, *others})}; give those of one step of all ranks"
            )
        position = RankPosition.restored(state, self.size, self.num_replicas, drop_last=self.drop_last)
        self._resume = position, self._checked_share(states, position)
        self.epoch, self._latest, self.named_epoch = epoch, None, None

    def lookahead(self) -> Lookahead | None:
        """Return what this rank reads next, for a cache in the process that draws. Draws nothing.

        Alone, the whole order, and the next epoch's too unless `set_epoch` sets that. In a
        group, the group's lookahead; for one of several ranks, only how much is left. None
        after `leave`, and in a worker, whose copy of the sampler draws nothing.
        """
        if get_worker_info() is not None or (self.group is not None and self.job is None):
            return None
        latest = self._latest if self.named_epoch is None else None
        if self.group is not None:
            return self._upcoming_in_group() if latest is None else latest.lookahead()
        ahead = (latest or self._begin(*self._upcoming())).lookahead()
        return ahead if self.is_distributed else replace(ahead, following=self._part(ahead.epoch + 1)[:])

    def _next_pass(self, upcoming: tuple[int, RankPosition, dict[str, Any] | None]) -> Pass:
        epoch, self._start, shared = upcoming
        self._latest, self._resume = self._begin(epoch, self._start, shared), None
        if not self.is_distributed:
            self.epoch = epoch
        if epoch == self.epoch:
            self.named_epoch = None
        return self._latest

    def _from_first_draw(self, upcoming: tuple[int, RankPosition, dict[str, Any] | None] | None) -> Iterator[int]:
        """Begin a pass at the first draw: torchdata makes iterators and reads none."""
        yield from self._next_pass(upcoming or self._upcoming())

    def _upcoming(self) -> tuple[int, RankPosition, dict[str, Any] | None]:
        """Epoch, position and shared state with which the next iteration begins."""
        if self._latest is not None and not self._latest.begun and self._latest.epoch == self.epoch:
            return self.epoch, self._start, self._latest.shared_state(self._latest.position)
        start, shared = self._resume or (RankPosition.beginning(self.size), None)
        finished = (self._latest is not None and self.named_epoch is None) or self._is_resumed_at_end()
        if not finished:
            return self.epoch, start, shared
        # RandomSampler has another order in each iteration, DistributedSampler only after set_epoch().
        following = self.epoch if self.is_distributed else self.epoch + 1
        return following, RankPosition.beginning(self.size), None

    def _is_resumed_at_end(self) -> bool:
        """Return whether nothing was left of the epoch whose state was loaded."""
        if self._resume is None:
            return False
        start, _ = self._resume
        return start.position >= start.end(self.num_replicas, drop_last=self.drop_last)

    def _upcoming_in_group(self) -> Lookahead:
        epoch, start, _ = self._upcoming()
        members = self.indices if self.num_replicas == 1 else None
        return Lookahead(epoch=epoch, length=len(self), position=start.position, members=members)

    def _begin(self, epoch: int, start: RankPosition, shared: dict[str, Any] | None) -> Pass:
        if self.group is None or self.job is None:
            return PrivatePass(epoch, start.position, self._part(epoch, start.places), dealt_at=start.dealt_at)
        self._end_running(_SUPERSEDED)
        self._running = SharedPass(
            epoch,
            group=self.group,
            job=self.job,
            shares=self._shares,
            rank=self.rank,
            batch_size=self.batch_size or _DRAWN_AT_ONCE,
            state=shared,
            position=start.position,
        )
        return self._running

    def _part(self, epoch: int, places: Places | None = None) -> Order:
        """Return this rank's part of an unshared epoch, or of these places of the epoch; drawn as it is read."""
        order = self._order(epoch)
        if places is not None and places != dealing.all_places(self.size):
            dealt = dealing.dealt(places, self.rank, self.num_replicas, drop_last=self.drop_last)
            return order[:][dealt] if self.indices is None else self.indices[order[:][dealt]]
        if self.indices is not None:
            order = self.indices[order[:]]
        if self.num_replicas == 1:
            return order
        return self._shares.of(order, self.rank)

    def _order(self, epoch: int) -> CompactArray | Permutation:
        """Return the order of an epoch, before it is dealt to ranks, as positions in `indices`."""
        return (
            torch_order(self.size, self.seed + epoch)
            if self.shuffle
            else np.arange(self.size, dtype=compact(self.size))
        )

    def _end_running(self, why: str) -> None:
        if self._running is not None:
            self._running.end(why)

    def _described(self, consumed: int | None) -> Pass | None:
        """Return the iteration that a state describes; None for the next one."""
        latest = self._latest
        if latest is None or self.named_epoch is None:
            return latest
        is_same = latest.epoch == self.epoch
        if not latest.begun:
            return latest if is_same else None
        # The end of a rank's epoch and its beginning resume equally, but the iteration may still be delivering.
        is_over = latest.is_exhausted and consumed is None and not (is_same and self.is_distributed)
        return None if is_over else latest

    def _position(self, consumed: int | None) -> tuple[int, RankPosition, dict[str, Any] | None]:
        latest = self._described(consumed)
        if latest is None:
            start, shared = self._resume or (RankPosition.beginning(self.size), None)
            if consumed is not None and consumed != start.position:
                raise OptionError(
                    f"consumed={consumed}, but the sampler is at {start.position} and has yielded nothing"
                )
            return self.epoch, start, shared
        if consumed is None:
            consumed = latest.position
        consumed = check_int("consumed", consumed, minimum=self._start.dealt_at, maximum=latest.position)
        return latest.epoch, replace(self._start, position=consumed), latest.shared_state(consumed)

    def _checked_epoch(self, state: Any) -> int:
        """Return the epoch of one rank's state, which fits this sampler."""
        if not isinstance(state, dict) or not {"version", "position", "shared"} <= state.keys():
            raise StateError("this is no state of a DynaGCSSampler; pass what its state_dict() returned")
        for name, own in self._identity().items():
            if name not in state or state[name] != own:
                raise StateError(
                    f"the state was taken with {name}={state.get(name)!r:.80}, this sampler has {own!r}; "
                    "make the sampler as the one that it was taken from"
                )
        try:
            return check_int("epoch", state.get("epoch"), minimum=0, maximum=MAX_SEED - self.seed)
        except UsageError as error:
            raise StateError(f"the state is damaged: {error}") from error

    def _checked_share(self, states: Sequence[dict[str, Any]], at: RankPosition) -> dict[str, Any] | None:
        """Return the group's part of this rank's state, at the position that was restored."""
        if self.group is None:
            return None
        before = states[0]["num_replicas"]
        if before != self.num_replicas or len({state["position"] for state in states}) > 1:
            if not at.position:
                return None
            raise StateError(
                f"the state was taken in an epoch that {before} ranks read, and there are {self.num_replicas} now, or "
                "ranks are out of step: ranks of a group continue an epoch with as many ranks, in step; resume so, or "
                "begin the epoch anew"
            )
        shared: dict[str, Any] | None = next((one for one in states if one["rank"] == self.rank), states[0])["shared"]
        if shared is None and 0 < at.position < at.end(self.num_replicas, drop_last=self.drop_last):
            raise StateError("the state is damaged: it lacks the samples that were read of the epoch")
        return shared

    def _identity(self) -> dict[str, Any]:
        """Return the values that a state must have to fit this sampler."""
        return {
            "version": STATE_VERSION,
            "length": self.size,
            "indices": self._described_indices,
            "drop_last": self.drop_last,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "strategy": None if self.group is None else self.strategy,
        }

    @cached_property
    def _described_indices(self) -> str | None:
        is_all = self.indices is None or np.array_equal(self.indices, np.arange(self.size))
        return None if is_all or self.indices is None else describe_numbers(self.indices)

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
    if not isinstance(group, SamplingGroup):
        raise OptionTypeError(f"group={group!r} is of type {type(group).__name__}; make one with sampling_group()")
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
