"""Passes of a sampler: one iteration over an epoch, alone or in a group, and where it stands."""

from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from torch_dpflow.errors import StateError, UsageError
from torch_dpflow.lookahead import Lookahead
from torch_dpflow.samplers.group import SamplingGroup
from torch_dpflow.samplers.indices import CompactArray, IndexArray
from torch_dpflow.samplers.ranks import GlobalBatches, RankShares, rank_slice

#: Indices that become Python integers at once: enough to make that cheap, few enough to keep memory low.
_CHUNK = 4096
_NOTHING: IndexArray = np.empty(0, np.int64)


class Pass(ABC):
    """One rank's way through one epoch; `position` counts what it has yielded, from the epoch's beginning."""

    def __init__(self, epoch: int, position: int) -> None:
        self.epoch = epoch
        self.position = position
        self._began_at = position

    @property
    def begun(self) -> bool:
        """Whether it has yielded anything."""
        return self.position > self._began_at

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """What is left, from `position` on."""

    @abstractmethod
    def shared_state(self, consumed: int) -> dict[str, Any] | None:
        """What it takes besides the position to go on after `consumed` samples; None: nothing."""

    @abstractmethod
    def lookahead(self) -> Lookahead:
        """What is known of the samples that it has not yielded yet."""


class PrivatePass(Pass):
    """A pass over a fixed order; it can start anywhere at no cost."""

    def __init__(self, epoch: int, position: int, part: CompactArray) -> None:
        super().__init__(epoch, position)
        self._part = part

    def __iter__(self) -> Iterator[int]:
        for start in range(self.position, len(self._part), _CHUNK):
            for index in self._part[start : start + _CHUNK].tolist():
                self.position += 1
                yield index

    def shared_state(self, consumed: int) -> None:
        """Nothing: the order can be drawn again."""

    def lookahead(self) -> Lookahead:
        """All of it."""
        return Lookahead.of_order(self._part, epoch=self.epoch, position=self.position)


class SharedPass(Pass):
    """A pass over what a group draws, one global batch after another.

    Every rank has the group at hand and draws all of a global batch; it yields its own slice.
    """

    def __init__(
        self,
        epoch: int,
        *,
        group: SamplingGroup,
        job: str,
        shares: RankShares,
        rank: int,
        batch_size: int,
        state: dict[str, Any] | None = None,
        position: int = 0,
    ) -> None:
        super().__init__(epoch, position)
        self._group, self._job = group, job
        self._rank, self._replicas, self._length = rank, shares.replicas, shares.per_rank
        resumed = _ResumedPass.of(state, group.size, rank)
        group.start_epoch(job, epoch, done=resumed.done)
        self._batches = GlobalBatches(
            group, job, shares, batch_size, position=resumed.drawn, head=resumed.head
        )
        self._done = resumed.done
        #: Where this rank's record begins, and what it was given since, in order.
        self._recorded_from = position
        self._record: list[IndexArray] = [resumed.pending]
        #: What all ranks were given since.
        self._drawn: list[IndexArray] = []
        #: Why it was ended; None while it was not.
        self._ended: str | None = None

    def end(self, why: str) -> None:
        """End this pass; whoever goes on iterating gets a UsageError that says `why`."""
        self._ended = why

    def __iter__(self) -> Iterator[int]:
        part = self._record[0]
        while True:
            for index in part.tolist():
                self.position += 1
                yield index
            if self._ended is not None:
                raise UsageError(self._ended)
            batch = self._batches.draw()
            if not len(batch):
                return
            part = rank_slice(batch, self._rank, self._replicas)
            self._drawn.append(batch)
            self._record.append(part)

    def shared_state(self, consumed: int) -> dict[str, Any] | None:
        """What the job has drawn, and what of it this rank has not consumed."""
        if consumed < self._recorded_from:
            raise StateError(
                f"consumed={consumed} is before sample {self._recorded_from}, at which this pass was resumed"
            )
        record = np.concatenate(self._record)
        drawn = np.concatenate([self._done, *self._drawn])
        if not len(drawn):
            return None
        return {
            "rank": self._rank,
            "drawn": self._batches.position,
            "done": _encode(drawn, self._group.size),
            "head": self._batches.head.tolist(),
            "pending": record[consumed - self._recorded_from :].tolist(),
        }

    def lookahead(self) -> Lookahead:
        """What was drawn but not yielded, then what the group tells; of one rank of several, where it is.

        Which rank gets what of a global batch is not known before it is drawn.
        """
        if self._replicas > 1:
            return Lookahead(epoch=self.epoch, length=self._length, position=self.position)
        told = self._group.lookahead(self._job)
        pending = np.concatenate(self._record)[self.position - self._recorded_from :]
        return replace(
            told, position=told.position - len(pending), certain=np.concatenate([pending, told.certain])
        )


class _ResumedPass:
    """A shared pass's state, checked: what was drawn, the epoch's first samples, what is to be yielded."""

    def __init__(self, drawn: int, done: IndexArray, head: IndexArray, pending: IndexArray) -> None:
        self.drawn, self.done, self.head, self.pending = drawn, done, head, pending

    @classmethod
    def of(cls, state: dict[str, Any] | None, size: int, rank: int) -> "_ResumedPass":
        if state is None:
            return cls(0, _NOTHING, _NOTHING, _NOTHING)
        try:
            if state["rank"] != rank:
                raise StateError(
                    f"the state is that of rank {state['rank']} in the middle of an epoch, this is rank "
                    f"{rank}; save and load the sampler's state on every rank"
                )
            head, pending = (np.array(state[key], np.int64) for key in ("head", "pending"))
            return cls(int(state["drawn"]), _decode(state["done"], size), head, pending)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"the sampler's state is damaged: {error!r}") from error


def _encode(samples: IndexArray, size: int) -> str:
    """A set of samples as text: one bit for each that there could be."""
    mask = np.zeros(size, np.bool_)
    mask[samples] = True
    return b64encode(np.packbits(mask).tobytes()).decode("ascii")


def _decode(text: str, size: int) -> IndexArray:
    bits = np.frombuffer(b64decode(text, validate=True), np.uint8)
    if len(bits) != -(-size // 8):
        raise StateError(f"the state is of a group of about {8 * len(bits)} samples, this one has {size}")
    return np.flatnonzero(np.unpackbits(bits, count=size))
