"""Plan of one epoch: batches of indices, which are drawn when they are needed, and drawn again to resume."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler

from torch_dpflow._core.checks import length_or_none, working
from torch_dpflow._core.ranks import nested_samplers
from torch_dpflow.epoch.checksum import READ, extended
from torch_dpflow.epoch.index_order import batches_of, indices_of, is_drawn_at_start, is_drawn_here
from torch_dpflow.epoch.own_state import (
    Unsaved,
    copied_state_of,
    has_state,
    opened,
    restore_sampler,
    restore_state,
    takes,
)
from torch_dpflow.epoch.rank_order import RankOrder, end_after, inner_sampler, regrouped
from torch_dpflow.epoch.rng import Generator, is_own_generator, preserved_rng, restore_generator, restore_rng
from torch_dpflow.epoch.state import LoaderState, OpeningStep, StreamState
from torch_dpflow.errors import StateError

#: Samples that are drawn again at once.
_CHUNK = 4096
#: The outcome of a batch that the training loop has received.
TAKEN: Any = object()


@dataclass(slots=True, eq=False)
class PlannedBatch:
    """Batch on its way from the sampler to the training loop, with the changes to record when it is delivered.

    Control-C may interrupt the training thread between any two steps. A batch therefore stays the next one to deliver
    until a single assignment, `batch.outcome = TAKEN`, marks it as delivered. Nothing is called between this assignment
    and the return of the batch, because Python handles signals only at calls and backward jumps.
    """

    position: int
    #: The batch's indices.
    index: Any
    #: The worker that has to load it; None if any worker may load it.
    worker: int | None = None
    #: Its result or error; None until it arrives, `TAKEN` once it is delivered.
    outcome: Any = None
    samples: int = 0
    #: Position of its worker's stream after this batch; None if that does not change.
    stream: StreamState | None = None
    #: Positions that were cancelled because its worker's stream has ended; they count as delivered with this batch.
    dropped: Sequence[int] = ()
    #: The workers of the later batches in flight, in order, and the worker whose turn is next; None without turns.
    workers_after: tuple[list[int], int] | None = None


class _Iterated:
    """Wrapper of an iterator whose `iter` is not called again: some samplers would restart their epoch."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self._iterator


class Plan:
    """Plan of one epoch: batches of indices in the sampler's order, and the sampler's state after each batch.

    Args:
        batches: iterator over the loader's index sampler.
        sampler: the sampler that has a state, see `stateful_part`; None if none has.
        position: number of batches that were drawn before this plan began.
        ended_at: number of batches in the epoch, if the sampler has already yielded all of them.
        end: number of batches in a resumed epoch, including those before the resume; None for a whole epoch.
        checksum: checksum of the indices before this plan began; None: compute no checksums.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        *,
        sampler: Any = None,
        position: int = 0,
        ended_at: int | None = None,
        end: int | None = None,
        checksum: int | None = None,
    ) -> None:
        self._batches = _Iterated(batches)
        self.end = end
        #: The position after the last batch, once the sampler has ended.
        self.ended_at = ended_at
        self._sampler = sampler if sampler is not batches else None
        self._iterator = batches if has_state(batches) and not working(batches, "is_placed_by_sampler") else None
        self._by_count = takes(sampler, "consumed")
        #: The position that the next drawn batch will have.
        self.drawn = position
        self._is_begun = False
        self._snapshots: dict[int, Any] = {}
        self._checksums = {position: checksum}
        #: The batch that was prefetched from the sampler for the next `draw`; empty if there is none.
        self.held: list[Any] = []
        #: Whether Control-C interrupted the sampler, so that its remaining batches are lost.
        self.is_torn = False
        self._snapshot(position)

    def draw(self) -> tuple[int, Any]:
        """Draw the next batch; return its position and indices. Raises StopIteration at the end of the epoch."""
        position, index = self.peek()
        self.drawn, self.held = position + 1, []
        return position, index

    def peek(self) -> tuple[int, Any]:
        """Return the position and indices of the next batch, which stays the next one.

        A caller draws it by assigning `drawn = position + 1` and `held = []`, so that Control-C loses no batch. Raises
        StopIteration at the end of the epoch.
        """
        if not self.held:
            self.prefetch_one()
        if not self.held:
            raise StopIteration
        self._snapshot(self.drawn + 1)
        if (checksum := self._checksums[self.drawn]) is not None:
            checksum = extended(checksum, self.held[0])
        self._checksums[self.drawn + 1] = checksum
        return self.drawn, self.held[0]

    def prefetch_one(self) -> None:
        """Fetch the sampler's next batch, and keep it for the next `draw`. Does nothing once the sampler has ended."""
        if self.ended_at is not None:  # an iterator that is asked again may begin another epoch
            return
        self._is_begun = True
        try:
            self.held.extend(islice(self._batches, 1))
        except KeyboardInterrupt:
            self.is_torn = not self.held
            raise
        if not self.held:
            # Its state may be that of its next epoch now.
            self._snapshot(self.drawn)
            self.ended_at = self.drawn

    def settle(self, length: int) -> list[Any]:
        """Return the undrawn batches among the epoch's first `length` batches; `draw` returns them later too.

        Only for batches whose order is fixed at the first batch (`settled_length`): drawn early, they are the same.
        """
        self._is_begun = True
        settled: list[Any] = []
        try:
            settled.extend(islice(self._batches, max(0, length - self.drawn - len(self.held))))
        except KeyboardInterrupt:
            self.is_torn = True
            raise
        finally:
            self._batches = _Iterated(chain(settled, self._batches))
        return [*self.held, *settled]

    def skip(self, batches: int) -> None:
        """Draw and drop this many batches. Raises StateError if the epoch is shorter."""
        self._is_begun = True
        checksum = self._checksums[self.drawn]
        for skipped in range(batches):
            try:
                checksum = extended(checksum, next(iter(self._batches)))
            except StopIteration:
                raise StateError(
                    f"the state is at batch {batches}, but this epoch has {skipped}: the sampler or the data set "
                    "is not the one that the state was taken with"
                ) from None
        self.drawn += batches
        self._checksums = {self.drawn: checksum}

    def checksum(self, position: int) -> int | None:
        """Return the checksum of the indices before `position`; None if unknown. Not after `forget` has dropped it."""
        return self._checksums[position]

    def sampler_state(self, position: int, samples: int, length: int | None) -> Any:
        """Return `LoaderState.sampler` after all batches before `position`; None if the sampler has no state.

        samples: number of samples in these batches.
        length: number of batches in a whole epoch; None if unknown.

        Raises StateError: the `state_dict` of the sampler or of its iterator failed.
        """
        length = length if self.end is None else self.end
        while self.drawn < position:  # delivered before the epoch was resumed, ahead of others
            self.draw()
        if self._sampler is None and self._iterator is None:
            return None
        if position == self.drawn == length and not self.held:
            # Whether a sampler moves to its next epoch with its last index depends on whether that index fills a batch.
            # After a request for one more batch it has always moved.
            self.prefetch_one()
        if self._by_count:
            # Before its first batch is requested, the sampler still has its state of the epoch before.
            consumed = {"consumed": samples} if self._is_begun else {}
            return opened(_kept(copied_state_of(self._sampler, **consumed), None))
        return opened(self._snapshots[position])

    def forget(self, position: int) -> None:
        """Drop the checksums and sampler states before `position`, the position of the oldest undelivered batch."""
        position = min(position, self.drawn)  # a resumed epoch may not have drawn again what was delivered ahead
        for kept in (self._snapshots, self._checksums):
            while kept and (oldest := next(iter(kept))) < position:
                del kept[oldest]

    def _snapshot(self, position: int) -> None:
        if not self._by_count and (self._sampler is not None or self._iterator is not None):
            self._snapshots[position] = _kept(copied_state_of(self._sampler), copied_state_of(self._iterator))

    def sampler_at_rest(self) -> Any:
        """Return `LoaderState.sampler` at the epoch's end; None without one or for a `RankOrder`. Raises StateError."""
        if isinstance(self._sampler, RankOrder):
            return None  # its next epoch is what `set_epoch` says
        self.prefetch_one()
        return opened(_kept(copied_state_of(self._sampler), copied_state_of(self._iterator)))


def sampler_before(index_sampler: Any, sampler: Any) -> Any:
    """Return `LoaderState.sampler` before any epoch; None if the sampler has no state, or its `state_dict` fails."""
    kept = _kept(copied_state_of(stateful_part(index_sampler, sampler)), None)
    return None if isinstance(kept, Unsaved) else kept


def _kept(of_sampler: Any, of_iterator: Any) -> Any:
    for kept in (of_sampler, of_iterator):
        if isinstance(kept, Unsaved):
            return kept
    if of_sampler is None and of_iterator is None:
        return None
    return {"sampler": of_sampler, "iterator": of_iterator}


def stateful_part(index_sampler: Any, sampler: Any) -> Any:
    """Return the index sampler, or else the sampler inside it, whichever has a state (see `has_state`); else None."""
    sampler = inner_sampler(index_sampler, sampler)
    return next((part for part in (index_sampler, sampler) if has_state(part)), None)


def new_plan(batches: Iterator[Any], index_sampler: Any, sampler: Any) -> Plan:
    """Return the plan of a whole epoch. `batches` is a new iterator over the index sampler."""
    part = stateful_part(index_sampler, sampler)
    if callable(begin := working(part, "begin_next")):
        begin()
    if part is None and (part := RankOrder.of(index_sampler, sampler)) is not None:
        batches = part.begun(index_sampler)
    elif part is None and is_drawn_here(inner_sampler(index_sampler, sampler)):
        batches = batches_of(index_sampler)  # `batches` is torch's iteration, which has drawn nothing yet
    return Plan(batches, sampler=part, checksum=None if part is not None or is_drawn_at_start(index_sampler) else 0)


def return_sampler(state: LoaderState, index_sampler: Any, sampler: Any) -> Iterator[Any]:
    """Restore the sampler, and a new iterator over the index sampler, each if `state` holds its state.

    Returns this iterator, or an empty one if its state was not saved. Raises StateError if a state cannot be restored.
    """
    kept = state.sampler or {"sampler": None, "iterator": None}
    if kept["sampler"] is not None:
        part = stateful_part(index_sampler, sampler)
        restore_sampler(sampler if part is None else part, kept["sampler"], begun=bool(state.position or state.ahead))
    if kept["iterator"] is None:
        return iter(())
    batches: Iterator[Any] = iter(index_sampler)
    restore_state(batches, kept["iterator"], "sampler")
    return batches


def repeat_draws(state: LoaderState, index_sampler: Any, generator: torch.Generator | None) -> None:
    """Set the process's generators as they were after the latest epoch before `state` was saved.

    For this, the loader's draws of that epoch are repeated from its start: the seeds and, unless `state` has the
    sampler's state or the dataset is iterable, the order.
    """
    restore_rng(state.plan_rng or {})
    if state.sampler is not None or state.kind == "iterable":  # their order is not drawn here
        open_order(_without_order(state.opening), index_sampler, generator)
        return
    batches = open_order(state.opening, index_sampler, generator)
    deque(islice(batches, 1) if is_drawn_at_start(index_sampler) else batches, maxlen=0)


def _without_order(opening: Sequence[OpeningStep]) -> list[OpeningStep]:
    return [step for step in opening if step != "order"]


def open_order(opening: Sequence[OpeningStep], index_sampler: Any, generator: torch.Generator | None) -> Iterator[Any]:
    """Run the steps that begin an epoch; return an iterator over the last "order" step's batches, empty without one."""
    batches: Iterator[Any] = iter(())
    for step in opening:
        if step == "order":
            batches = batches_of(index_sampler)
        else:
            torch.empty((), dtype=torch.int64).random_(generator=generator)
    return batches


def replay(
    state: LoaderState,
    index_sampler: Any,
    sampler: Any,
    generator: torch.Generator | None,
    on_opened: Callable[[], None],
) -> Plan:
    """Return the plan of the epoch in which `state` was saved, starting at its first undelivered batch.

    The process's random generators change; the caller has to restore them. If `state` does not hold the sampler's
    state, earlier indices are drawn again. Before that, and after the steps in `state.opening`, `on_opened` is called.

    Raises StateError: the state does not fit the sampler or the dataset.
    """
    if state.plan_rng is not None:
        restore_rng(state.plan_rng)
    if generator is not None and state.plan_generator is not None:
        restore_generator(generator, state.plan_generator)
    return_generators(state.plan_sampler_generators, index_sampler, sampler, generator)
    if state.sampler is not None:
        open_order(_without_order(state.opening), index_sampler, generator)
        return _resume_sampler(state, index_sampler, sampler)
    batches = open_order(state.opening, index_sampler, generator)
    on_opened()
    if state.draw_rng is not None:
        restore_rng(state.draw_rng)
    if type(index_sampler) is BatchSampler and state.kind == "map" and state.position:
        # By samples, because the batches before may have had another size.
        rest, checksum = _after(state.samples, index_sampler.sampler)
        _check_same(state, checksum, index_sampler.sampler)
        if state.ended:
            deque(rest, maxlen=0)  # what `drop_last` drops, and the draws at the end
            return Plan(iter(()), position=state.position, ended_at=state.position)
        left = length_or_none(index_sampler.sampler)
        end = end_after(state, index_sampler, None if left is None else left - state.samples)
        part = stateful_part(index_sampler, sampler)
        batches = regrouped(index_sampler, rest)
        plan = Plan(batches, sampler=part, position=state.position, end=end, checksum=checksum)
    else:
        plan = new_plan(batches, index_sampler, sampler)
        plan.skip(state.position)
        _check_same(state, plan.checksum(state.position), index_sampler)
    plan.prefetch_one()
    return plan


def _after(samples: int, sampler: Any) -> tuple[_Iterated, int | None]:
    """Draw and drop this many samples; return the iteration of the others, and the checksum of the dropped samples.

    Raises StateError if there are fewer.
    """
    length = length_or_none(sampler)
    if is_drawn_here(sampler) and length is not None and samples <= length:
        return _Iterated(indices_of(sampler, samples)), None
    indices, dropped = iter(sampler), 0
    checksum = None if is_drawn_at_start(sampler) else 0
    while chunk := [*islice(indices, min(_CHUNK, samples - dropped))]:
        dropped += len(chunk)
        checksum = extended(checksum, chunk)
    if dropped < samples:
        raise StateError(
            f"the state is at sample {samples}, but this epoch has {dropped}: the sampler or the data set is not the "
            "one that the state was taken with"
        )
    return _Iterated(indices), checksum


def _check_same(state: LoaderState, checksum: int | None, sampler: Any) -> None:
    """Raise StateError if the indices that were drawn again differ from the indices before the state was saved."""
    was = state.made_of.get(READ)
    if None not in (was, checksum) and was != checksum:
        raise StateError(
            f"the {type(sampler).__name__} has drawn other samples again than were read before the state, so that the "
            "rest cannot be known: its order depends on what it keeps between epochs, or on random numbers that are "
            "drawn during the epoch. Give it state_dict() and load_state_dict(), or draw its order at its beginning "
            "from a generator that it holds or from the epoch of set_epoch(); or begin the epoch again"
        )


def _resume_sampler(state: LoaderState, index_sampler: Any, sampler: Any) -> Plan:
    assert state.sampler is not None
    part = stateful_part(index_sampler, sampler)
    order = None if part is not None else RankOrder.of(index_sampler, sampler)
    if order is None:
        batches = return_sampler(state, index_sampler, sampler)
    else:
        order.load_state_dict(state.sampler["sampler"])
    left = working(part, "samples_left", working(part, "batches_left"))  # a sampler of batches counts those
    if state.ended:
        if type(left) is int and left:  # dropped by `drop_last`: the next iteration would read these
            deque(iter(part), maxlen=0)
        return Plan(iter(()), sampler=order or part, position=state.position, ended_at=state.position)
    if order is not None:
        end = end_after(state, index_sampler, order.left)
        return Plan(regrouped(index_sampler, order.rest()), sampler=order, position=state.position, end=end)
    if type(left) is int and not left and state.position:  # its next iteration would be another epoch
        return Plan(iter(()), sampler=part, position=state.position, ended_at=state.position)
    inner = part if part is index_sampler else inner_sampler(index_sampler, sampler)
    if left == 0:  # at rest after the epoch before: the next iteration reads a whole one
        left = length_or_none(inner)
    if type(left) is not int and type(index_sampler) is BatchSampler and (whole := length_or_none(inner)) is not None:
        left = whole - state.samples
    if state.sampler["iterator"] is None:
        batches = iter(index_sampler)
    end = end_after(state, index_sampler, left) if type(left) is int else None
    plan = Plan(batches, sampler=part, position=state.position, end=end)
    if callable(working(part, "begin_next")):  # the iteration after this one is another epoch
        plan.prefetch_one()
    return plan


def samples_in(index: Any) -> int:
    """Return the number of indices in a batch, which may be any iterable; 1 if that is not known."""
    try:
        return operator.length_hint(index, 1)
    except Exception:
        return 1


def sampler_generators(index_sampler: Any, sampler: Any, generator: torch.Generator | None) -> list[Generator]:
    """Return the random generators in the samplers' attributes, except `generator`; empty with a `stateful_part`."""
    if stateful_part(index_sampler, sampler) is not None:
        return []
    found: list[Generator] = []
    for part in nested_samplers(index_sampler, sampler):
        # Its `__dict__`, because other access may run code of the sampler's.
        for value in working(part, "__dict__", {}).values():
            if is_own_generator(value) and not any(value is other for other in [generator, *found]):
                found.append(value)
    return found


def return_generators(
    states: Sequence[str], index_sampler: Any, sampler: Any, generator: torch.Generator | None
) -> None:
    """Restore the generators of `sampler_generators` from `states`. Raises StateError if these do not fit."""
    held = sampler_generators(index_sampler, sampler, generator)
    if len(held) < len(states):
        with preserved_rng():  # some samplers make their generator when they are first iterated
            deque(islice(iter(index_sampler), 1), maxlen=0)
        held = sampler_generators(index_sampler, sampler, generator)
    if len(states) != len(held):
        raise StateError(
            f"the state was taken with {len(states)} generators in the loader's samplers, and there are {len(held)}; "
            "build the sampler as it was built then"
        )
    for one, saved in zip(held, states):
        restore_generator(one, saved)
