"""The position of one iteration of a loader, and the state to resume it from."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.utils.data import BatchSampler

from torch_dpflow._core.checks import length_or_none, working
from torch_dpflow._core.ranks import Ranks, named_ranks, nested_samplers, process_ranks, ranks_of
from torch_dpflow._core.torch_private import DatasetKind
from torch_dpflow.epoch.checksum import READ
from torch_dpflow.epoch.index_order import is_drawn_at_start
from torch_dpflow.epoch.own_state import Unsaved, ended, opened
from torch_dpflow.epoch.part import drawing_of, part_of_dataset, part_of_sampler
from torch_dpflow.epoch.plan import (
    TAKEN,
    Plan,
    PlannedBatch,
    replay,
    sampler_generators,
)
from torch_dpflow.epoch.rank_order import inner_sampler
from torch_dpflow.epoch.rng import (
    RngState,
    capture_rng,
    encode_generator,
    generator_state,
    preserved_rng_except,
    restore_generator,
    unchanged_generators,
)
from torch_dpflow.epoch.state import LoaderState, OpeningStep, StreamState, held_ahead
from torch_dpflow.errors import StateError
from torch_dpflow.log import LOADER

#: The steps by which torch begins an epoch: without workers, with new workers, and again with persistent workers.
OPENING_ALONE: tuple[OpeningStep, ...] = ("order", "seed")
OPENING_WORKERS: tuple[OpeningStep, ...] = ("order", "seed", "order")
OPENING_AGAIN: tuple[OpeningStep, ...] = ("order",)


class LoaderShape:
    """Properties of a loader that its states contain, to be compared with those of the loader that resumes.

    Lengths are computed only when they are needed, because a user's `__len__` may fail or be slow. The indices of a
    `Subset` are read for the first state.
    """

    def __init__(self, loader: Any) -> None:
        self.kind: Literal["map", "iterable"] = "iterable" if loader._dataset_kind == DatasetKind.Iterable else "map"
        self._dataset = loader.dataset
        self._batch_size = loader.batch_size
        self._index_sampler = loader._index_sampler
        self._sampler = inner_sampler(loader._index_sampler, loader.sampler)
        self._indices: dict[str, str | None] | None = None
        #: The sampler's epoch at the beginning of the iteration; None if the sampler has no `set_epoch`.
        self._epoch = epoch_of(self._sampler, self._index_sampler)
        self._counted: int | None = None

    def note_end(self) -> None:
        """Record the sampler's epoch if it changed in this iteration, as with accelerate's SeedableRandomSampler."""
        now = epoch_of(self._sampler, self._index_sampler)
        self._counted = None if now == self._epoch else now

    def generators(self, generator: torch.Generator | None) -> list[str]:
        """Return the encoded states of the samplers' random generators, except the loader's `generator`."""
        return [*map(encode_generator, sampler_generators(self._index_sampler, self._sampler, generator))]

    def length(self) -> int | None:
        """Return the number of batches in an epoch; None for an iterable dataset, or if the sampler has no length."""
        return None if self.kind == "iterable" else length_or_none(self._index_sampler)

    def ends_at(self, position: int, end: int | None) -> bool:
        """Return whether the epoch is known to end at this position.

        end: the position at the end of a resumed epoch; None for a whole epoch, or if unknown.
        """
        # The length of a user's sampler may be wrong.
        return is_drawn_at_start(self._index_sampler) and position == (self.length() if end is None else end)

    def ranks(self) -> Ranks | None:
        """Return the ranks that a map-style dataset's sampler defines; None if it defines none.

        For an iterable dataset: the ranks that it defines, else those of torch.distributed; None for a single rank.
        """
        if self.kind == "map":
            return ranks_of(self._sampler, self._index_sampler, dataset=self._dataset)
        every = named_ranks(self._dataset) or process_ranks()
        return every if every.num_replicas > 1 else None

    def rank(self) -> int:
        """Return this loader's rank; 0 if it has none."""
        ranks = self.ranks()
        return 0 if ranks is None else ranks.rank

    def parts(self) -> dict[str, int | str | bool | None]:
        """Return the properties for a state, by their names in errors; unknown ones are None."""
        ranks = self.ranks()
        rank = None if ranks is None else ranks.rank
        if self.kind == "iterable":
            return {"batch_size": self._batch_size, RANK: rank}
        is_batched = type(self._index_sampler) is BatchSampler
        replicas = None if ranks is None else ranks.num_replicas
        return {
            "dataset's length": length_or_none(self._dataset),
            "batch_size": self._index_sampler.batch_size if is_batched else self._batch_size,
            "drop_last": bool(self._index_sampler.drop_last) if is_batched else None,
            "sampler": type(self._sampler).__name__,
            "sampler's length": length_or_none(self._sampler) if is_batched and replicas is None else None,
            "batch sampler": type(self._index_sampler).__name__,
            "num_replicas": replicas,
            RANK: rank,
            EPOCH: self._epoch,
            COUNTED: self._counted,
            **self._parts_read(),
        }

    def _parts_read(self) -> dict[str, str | None]:
        if self._indices is None:
            self._indices = {
                "part of the dataset": part_of_dataset(self._dataset),
                "sampler's part": part_of_sampler(self._index_sampler),
                "sampler's drawing": drawing_of(self._index_sampler),
            }
        return self._indices


#: Key in `parts`: the rank that saved the state. Each rank draws different random numbers.
RANK = "rank"
#: Key in `parts`: the epoch of a sampler that has `set_epoch`. Its order may depend on the epoch.
EPOCH = "sampler's epoch"
#: Key in `parts`: the next epoch of a sampler that counts its iterations itself.
COUNTED = "sampler's next epoch"
#: Keys in `parts` whose values may change between a state in mid-epoch and the map-style loader that resumes it.
SIZES = ("batch_size", "num_replicas")


def epoch_of(*samplers: Any) -> int | None:
    """Return the epoch of the sampler that `epoch_setter` finds; None if there is none."""
    part = epoch_setter(*samplers)
    return None if part is None else int(part.epoch)


def epoch_setter(*samplers: Any) -> Any:
    """Return the first of these or nested samplers with `set_epoch` and an int `epoch`; None if there is none."""
    for part in nested_samplers(*samplers):
        if callable(working(part, "set_epoch")) and type(working(part, "epoch")) is int:
            return part
    return None


def before_order(loader: Any) -> LoaderState:
    """Return a state that has the generators of process, loader and samplers. Call it before an epoch is drawn."""
    held = sampler_generators(loader._index_sampler, loader.sampler, loader.generator)
    return LoaderState(
        fresh=False,
        plan_rng=capture_rng(),
        plan_generator=generator_state(loader.generator),
        plan_sampler_generators=[*map(encode_generator, held)],
    )


class EpochProgress:
    """Record of the batches that one iteration has delivered, from which its state is made.

    Args:
        shape: properties of the loader, to save in states.
        at: state from which the iteration begins: generators and seeds of the epoch, and where it is resumed.
        plan: the epoch's batches of indices, starting at the first batch that is not delivered.
        generator: the loader's generator.
        keeps_seed: whether the next iteration has the same base seed, as with persistent workers.
        streams: the position of each worker's own stream; empty if batches are not bound to workers.
    """

    def __init__(
        self,
        shape: LoaderShape,
        at: LoaderState,
        plan: Plan,
        *,
        generator: torch.Generator | None,
        keeps_seed: bool,
        streams: Sequence[StreamState] = (),
    ) -> None:
        assert at.base_seed is not None
        self.epoch = at.epoch
        self.base_seed = at.base_seed
        self.plan = plan
        self.streams = [replace(stream) for stream in streams]
        #: The batch to return at the next call of `next`. It is delivered once its outcome is `TAKEN`.
        self.head: PlannedBatch | None = None
        #: The workers of the batches in flight, in order; and the worker of the batch after these.
        self.due = list(at.due)
        self.next_worker = at.next_worker
        #: Function that returns the dataset's own state, if the dataset has one and is read in this process.
        self.dataset_state: Callable[[], Any] | None = None
        #: The dataset's own state before `head` was loaded; recorded only if a trainer reads ahead.
        self.before_head: Any = None
        #: Function that waits until every worker has reported the beginning of its stream.
        self.await_streams: weakref.WeakMethod[Callable[[], None]] | None = None
        #: The process's generators at the first draw of indices, if they were used since the opening steps.
        self.draw_rng: RngState | None = at.draw_rng
        #: For a resumed iterable dataset: the process's generators after the opening steps, and the names of the
        #: generators that are not restored after delivered samples were read again.
        self.opened_rng: RngState | None = None
        self.unchanged: set[str] = set()
        #: The seed of a data pipe's shuffling.
        self.shared_seed: int | None = None
        #: Whether the dataset was restored to its state at the end of the epoch before.
        self.is_restored = False
        self.finished = False
        #: The first position that is not delivered.
        self.position = at.position
        self._samples = at.samples
        #: By position, the samples of batches delivered ahead of `position`.
        self._ahead = dict(zip(at.ahead, at.ahead_samples))
        self._shape = shape
        self._at = replace(at, kind=shape.kind, sampler=None, streams=[])
        self._keeps_seed = keeps_seed
        self._generator = generator

    @classmethod
    def resumed(
        cls,
        state: LoaderState,
        *,
        shape: LoaderShape,
        index_sampler: Any,
        sampler: Any,
        generator: torch.Generator | None,
        keeps_seed: bool,
    ) -> EpochProgress:
        """Return the progress of an iteration that continues `state`, which was taken in mid-epoch.

        The process's generators stay as they are. A generator that is as it was at the beginning of the saved epoch or
        run, for example after a restart with the same seed, is advanced as in the saved run instead.

        Raises StateError: the state does not fit. The generators of the loader and its samplers then stay unchanged.
        """
        _check_order(state, index_sampler, sampler, generator)
        held = sampler_generators(index_sampler, sampler, generator)
        before = [(one, encode_generator(one)) for one in ([] if generator is None else [generator]) + held]
        unchanged, now = unchanged_generators(state.plan_rng or {}, state.began), capture_rng()
        opened_rng: RngState | None = None

        def on_opened() -> None:
            nonlocal opened_rng
            opened_rng = capture_rng() if state.kind == "iterable" else None
            # Without workers the first batch draws the order. If none was requested before the state was saved, and
            # the script has restored the generators of that time, they draw it now.
            if not (state.position or state.ahead) and tuple(state.opening) == OPENING_ALONE:
                unchanged.update(name for name, at in capture_rng().items() if at == now[name])

        try:
            with preserved_rng_except(unchanged):
                plan = replay(state, index_sampler, sampler, generator, on_opened)
            if generator is not None and state.sampler is not None and state.generator is not None:
                restore_generator(generator, state.generator)
        except StateError:
            for one, was in before:
                restore_generator(one, was)
            raise
        progress = cls(shape, state, plan, generator=generator, keeps_seed=keeps_seed, streams=state.streams)
        progress.opened_rng, progress.unchanged = opened_rng, unchanged
        return progress

    def was_delivered(self, position: int) -> bool:
        return position < self.position or position in self._ahead

    def passed(self, position: int, samples: int) -> None:
        """Count the batch at this position as delivered or skipped. Idempotent, also after an interrupted call."""
        # Python handles signals only at calls and backward jumps: before the loop or between two of its turns.
        if position >= self.position:
            self._ahead[position] = samples
        while (due := self.position) in self._ahead:
            self._samples += self._ahead[due]
            self.position = due + 1
            del self._ahead[due]

    def note_taken(self) -> None:
        """Count `head` as delivered if its outcome is `TAKEN`. A call that Control-C interrupts can be repeated."""
        head = self.head
        if head is None or head.outcome is not TAKEN:
            return
        for position in head.dropped:
            self.passed(position, 0)
        self.passed(head.position, head.samples)
        if head.stream is not None and head.worker is not None:
            self.streams[head.worker] = head.stream
        if head.workers_after is not None:
            self.due, self.next_worker = head.workers_after
        self.head = None

    def finish(self) -> None:
        self.finished = True
        self._shape.note_end()
        if self.is_restored and not self.position:
            LOADER.warning(
                "the dataset's own state, which was taken at the end of an epoch, was restored, and the dataset yields "
                "nothing more; let it begin another epoch, as by set_epoch()"
            )

    def state(self, held: int = 0) -> LoaderState:
        """Return the state to resume this iteration, or to begin the next one if this one is over.

        held: 1 if a trainer has fetched a batch and not used it yet: it does not count as delivered. Else 0.

        Raises StateError: the `state_dict` of the dataset or sampler failed, `held` is above 1, or the dataset's state
        before the held batch was not recorded.
        """
        if held > 1 or (held and self.dataset_state is not None and self.before_head is None):
            raise held_ahead(held)
        if not held:  # else the head is left out
            self.note_taken()
        if self.await_streams is not None and (wait := self.await_streams()) is not None:
            wait()
        if self.finished:
            return self._state_of_next()
        length = self._shape.length()
        sampler = self.plan.sampler_state(self.position, self._samples, length)
        return replace(
            self._at,
            position=self.position,
            samples=self._samples,
            ahead=sorted(self._ahead),
            ahead_samples=[self._ahead[position] for position in sorted(self._ahead)],
            shared_seed=self.shared_seed,
            draw_rng=self.draw_rng,
            generator=generator_state(self._generator),
            sampler_generators=self._shape.generators(self._generator),
            sampler=sampler,
            ended=self.plan.ended_at == self.position or self._shape.ends_at(self.position, self.plan.end),
            length=length,
            made_of=self._shape.parts() | {READ: self.plan.checksum(self.position)},
            streams=self._streams_now(held),
            due=list(self.due),
            next_worker=self.next_worker,
        )

    def _streams_now(self, held: int) -> list[StreamState]:
        if self.dataset_state is None:
            return [replace(stream, dataset=opened(stream.dataset)) for stream in self.streams]
        kept = self.before_head if held else self.dataset_state()
        (stream,) = self.streams
        if isinstance(kept, Unsaved) and not stream.delivered:
            kept = None  # at its beginning the dataset needs no state
        return [replace(stream, dataset=opened(kept))]

    def _state_of_next(self) -> LoaderState:
        return LoaderState(
            kind=self._shape.kind,
            epoch=self.epoch + 1,
            base_seed=self.base_seed if self._keeps_seed else None,
            opening=self._at.opening,
            plan_rng=self._at.plan_rng,
            began=self._at.began,
            draw_rng=self.draw_rng,
            generator=generator_state(self._generator),
            sampler_generators=self._shape.generators(self._generator),
            sampler=self.plan.sampler_at_rest(),
            dataset=self._dataset_of_next(),
            length=self._shape.length(),
            made_of=self._shape.parts(),
            streams=[replace(stream, dataset=opened(stream.dataset)) for stream in self.streams_of_next()],
        )

    def _dataset_of_next(self) -> Any:
        if self.dataset_state is None:
            return None
        kept = opened(self.dataset_state())
        return ended(kept) if self._shape.kind == "iterable" else kept

    def streams_of_next(self) -> list[StreamState]:
        """Return the position at which each worker's stream begins the next iteration; empty if workers will be new."""
        self.note_taken()
        if not self._keeps_seed:
            return []
        # If an iterable dataset was left in mid-epoch, only its worker knows where its next iteration begins.
        is_map = self._shape.kind == "map"
        return [
            StreamState(rng=stream.rng, dataset=stream.dataset if stream.ended or is_map else None)
            for stream in self.streams
        ]


def _check_order(state: LoaderState, index_sampler: Any, sampler: Any, generator: torch.Generator | None) -> None:
    """Raise StateError unless the order of the state's epoch can be drawn again."""
    if state.shared is not None:
        raise StateError(
            "the state was taken in an epoch whose order the router of a shared flow decided, and this loader's "
            f"order is that of its {type(sampler).__name__}; resume with the sampler and the job=JobOptions(...) "
            "that it was taken with, or begin the epoch again"
        )
    was, now = state.made_of.get(EPOCH), epoch_of(inner_sampler(index_sampler, sampler), index_sampler)
    if state.sampler is None and state.position and None not in (was, now) and was != now:
        raise StateError(
            f"the state was taken in epoch {was} of the loader's sampler, which is at epoch {now}; call "
            f"set_epoch({was}) before the iteration. A wrapper that counts epochs itself, as Fabric's, sets epoch 0: "
            "iterate the loader itself"
        )
    if (generator is None) != (state.plan_generator is None):
        raise StateError(
            f"the state was taken {'with' if generator is None else 'without'} a `generator`, and this loader "
            f"has {'none' if generator is None else 'one'}; build the loader as it was built then"
        )
