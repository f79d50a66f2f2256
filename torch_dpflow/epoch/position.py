"""Where one iteration of a loader is: what has been delivered, and the state from which the rest can be had."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from torch_dpflow.epoch.own_state import Unsaved, opened
from torch_dpflow.epoch.plan import Plan, generator_state, length_or_none, replay, stateful_part
from torch_dpflow.epoch.rng import RngState, capture_rng, following_rng, restore_generator, standing_at
from torch_dpflow.epoch.state import LoaderState, OpeningStep, StreamState
from torch_dpflow.epoch.streams import ended
from torch_dpflow.errors import StateError
from torch_dpflow.log import LOADER
from torch_dpflow.torch_private import DatasetKind

if TYPE_CHECKING:
    pass

#: How torch begins an epoch without workers, with new ones and with those that it kept.
OPENING_ALONE: tuple[OpeningStep, ...] = ("order", "seed")
OPENING_WORKERS: tuple[OpeningStep, ...] = ("order", "seed", "order")
OPENING_AGAIN: tuple[OpeningStep, ...] = ("order",)


class Makeup:
    """What a loader is made of, as far as an epoch that is resumed must find it again.

    Lengths are asked for when a state is: torch asks for none while it iterates, and asking may fail or be dear.
    """

    def __init__(self, loader: Any) -> None:
        self.kind: Literal["map", "iterable"] = (
            "iterable" if loader._dataset_kind == DatasetKind.Iterable else "map"
        )
        self._dataset = loader.dataset
        self._batch_size = loader.batch_size
        self._index_sampler = loader._index_sampler
        self._sampler = type(loader.sampler).__name__

    def length(self) -> int | None:
        """Batches of a whole epoch, None where the sampler does not say."""
        return None if self.kind == "iterable" else length_or_none(self._index_sampler)

    def parts(self) -> dict[str, int | str | None]:
        """What must be the same, with its names for people."""
        if self.kind == "iterable":
            return {"batch_size": self._batch_size}
        return {
            "dataset's length": length_or_none(self._dataset),
            "batch_size": self._batch_size,
            "sampler": self._sampler,
        }


class EpochOrigin:
    """What the order of an epoch is drawn from, noted before it is."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.rng: RngState = capture_rng()
        self.generator = generator_state(generator)


class Progress:
    """One iteration's position.

    Args:
        makeup: what the loader is made of.
        epoch: its number.
        base_seed: what its seeds derive from.
        keeps_seed: the next iteration has the same base seed.
        opening: how it began.
        origin: what its order is drawn from.
        began: see `LoaderState`.
        plan: its index batches.
        generator: the loader's.
        streams: where each worker's own stream is; empty where batches belong to nobody.
    """

    def __init__(
        self,
        *,
        makeup: Makeup,
        epoch: int,
        base_seed: int,
        keeps_seed: bool,
        opening: Sequence[OpeningStep],
        origin: EpochOrigin,
        began: dict[str, str],
        plan: Plan,
        generator: torch.Generator | None,
        streams: Sequence[StreamState] = (),
    ) -> None:
        self.epoch = epoch
        self.base_seed = base_seed
        self.plan = plan
        self.streams = list(streams)
        #: Workers that owe the batches in flight, in order; whoever assigns keeps it up to date.
        self.due: list[int] = []
        self.next_worker = 0
        #: Asks the dataset where it is, if it keeps a state and is read in this process.
        self.ask_dataset: Callable[[], Any] | None = None
        #: Waits until every worker has said where its stream begins.
        self.await_streams: weakref.WeakMethod[Callable[[], None]] | None = None
        #: The process's generators at the first draw, if they had been used since the opening.
        self.draw_rng: RngState | None = None
        #: What a data pipe's shuffling follows.
        self.shared_seed: int | None = None
        #: The dataset was brought to where it was at the end of the epoch before.
        self.brought_back = False
        self.finished = False
        self.position = 0
        self._samples = 0
        self._ahead: dict[int, int] = {}
        self._makeup = makeup
        self._keeps_seed = keeps_seed
        self._opening = list(opening)
        self._origin = origin
        self._began = began
        self._generator = generator

    @classmethod
    def resumed(
        cls,
        state: LoaderState,
        *,
        index_sampler: Any,
        sampler: Any,
        generator: torch.Generator | None,
        keeps_seed: bool,
        makeup: Makeup,
    ) -> Progress:
        """Go on from a state in mid-epoch. The process's generators stay as they are.

        Raises:
            StateError: the state does not fit; the loader's generator is as it was.
        """
        _check_order(state, sampler, generator)
        before = generator_state(generator)
        try:
            with following_rng(standing_at(state.plan_rng or {}, state.began)):
                plan = replay(state, index_sampler, sampler, generator)
            if generator is not None and state.sampler is not None and state.generator is not None:
                restore_generator(generator, state.generator)
        except StateError:
            if generator is not None and before is not None:
                restore_generator(generator, before)
            raise
        assert state.base_seed is not None
        assert state.plan_rng is not None
        origin = EpochOrigin(None)
        origin.rng, origin.generator = state.plan_rng, state.plan_generator
        progress = cls(
            makeup=makeup,
            epoch=state.epoch,
            base_seed=state.base_seed,
            keeps_seed=keeps_seed,
            opening=state.opening,
            origin=origin,
            began=state.began,
            plan=plan,
            generator=generator,
            streams=[replace(stream) for stream in state.streams],
        )
        progress.draw_rng = state.draw_rng
        progress.position, progress._samples = state.position, state.samples
        progress._ahead = dict.fromkeys(state.ahead, 0)
        progress.due, progress.next_worker = list(state.due), state.next_worker
        return progress

    def was_delivered(self, position: int) -> bool:
        """Whether the batch of this position is through already."""
        return position < self.position or position in self._ahead

    def passed(self, position: int, samples: int) -> None:
        """The batch of this position, of so many samples, was delivered or given up. To be told again does no harm.

        Nothing is called in here, so that Control-C, which comes at calls, finds it done or not begun.
        """
        if position >= self.position:
            self._ahead[position] = samples
        while (due := self.position) in self._ahead:
            self._samples += self._ahead[due]
            self.position = due + 1
            del self._ahead[due]

    def finish(self) -> None:
        """There are no more batches."""
        self.finished = True
        if self.brought_back and not self.position:
            LOADER.warning(
                "the dataset was given back its own state, which was taken at the end of an epoch, and gives nothing "
                "more; have it begin another epoch in its own way, as by set_epoch()"
            )

    def state(self) -> LoaderState:
        """From what the rest of this iteration, or the next, can be had. No side effect.

        Raises:
            StateError: the dataset or the sampler keeps a state of its own, and could not say.
        """
        if self.await_streams is not None and (wait := self.await_streams()) is not None:
            wait()
        if self.finished:
            return self._state_of_next()
        length = self._makeup.length()
        sampler = self.plan.sampler_state(self.position, self._samples, length)
        return LoaderState(
            kind=self._makeup.kind,
            epoch=self.epoch,
            fresh=False,
            position=self.position,
            samples=self._samples,
            ahead=sorted(self._ahead),
            base_seed=self.base_seed,
            shared_seed=self.shared_seed,
            opening=self._opening,
            plan_rng=self._origin.rng,
            began=self._began,
            draw_rng=self.draw_rng,
            plan_generator=self._origin.generator,
            generator=generator_state(self._generator),
            sampler=sampler,
            ended=self.plan.ended_at == self.position,
            length=length,
            made_of=self._makeup.parts(),
            streams=self._streams_now(),
            due=list(self.due),
            next_worker=self.next_worker,
        )

    def _streams_now(self) -> list[StreamState]:
        if self.ask_dataset is None:
            return [replace(stream, dataset=opened(stream.dataset)) for stream in self.streams]
        kept = self.ask_dataset()
        (stream,) = self.streams
        if isinstance(kept, Unsaved) and not stream.delivered:
            kept = None  # at its beginning nothing has to be said
        return [replace(stream, dataset=opened(kept))]

    def _state_of_next(self) -> LoaderState:
        return LoaderState(
            kind=self._makeup.kind,
            epoch=self.epoch + 1,
            base_seed=self.base_seed if self._keeps_seed else None,
            opening=self._opening,
            plan_rng=self._origin.rng,
            began=self._began,
            draw_rng=self.draw_rng,
            generator=generator_state(self._generator),
            sampler=self.plan.sampler_at_rest(),
            dataset=self._dataset_of_next(),
            length=self._makeup.length(),
            made_of=self._makeup.parts(),
            streams=[replace(stream, dataset=opened(stream.dataset)) for stream in self.streams_of_next()],
        )

    def _dataset_of_next(self) -> Any:
        if self.ask_dataset is None:
            return None
        kept = opened(self.ask_dataset())
        return ended(kept) if self._makeup.kind == "iterable" else kept

    def streams_of_next(self) -> list[StreamState]:
        """Where the workers' own streams begin in the next iteration, if the workers are kept for it."""
        if not self._keeps_seed:
            return []
        # Of an iterable dataset that was left in the middle, the worker will say where its next iteration begins.
        said = [stream.ended or self._makeup.kind == "map" for stream in self.streams]
        return [
            StreamState(rng=stream.rng, dataset=stream.dataset if known else None)
            for stream, known in zip(self.streams, said, strict=True)
        ]


def new_plan(batches: Any, index_sampler: Any, sampler: Any) -> Plan:
    """The plan of an epoch that begins with these index batches."""
    return Plan(batches, sampler=stateful_part(index_sampler, sampler))


def _check_order(state: LoaderState, sampler: Any, generator: torch.Generator | None) -> None:
    """Raise StateError unless the order of the state's epoch can be drawn again from these."""
    if state.shared is not None:
        raise StateError(
            "the state was taken in an epoch whose order the router of a shared flow decided, and this loader's "
            f"order is that of its {type(sampler).__name__}; resume with the sampler and the job=JobOptions(...) "
            "that it was taken with, or begin the epoch afresh"
        )
    if (generator is None) != (state.plan_generator is None):
        raise StateError(
            f"the state was taken {'with' if generator is None else 'without'} a `generator`, and this loader "
            f"has {'none' if generator is None else 'one'}; build the loader as it was built then"
        )
