"""The position of one rank in the order of torch's DistributedSampler, and where a resumed epoch ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DistributedSampler

from torch_dpflow._core.checks import length_or_none
from torch_dpflow._core.dealing import RankPart, RankPosition, taken
from torch_dpflow._core.permutation import torch_order
from torch_dpflow._core.ranks import Ranks
from torch_dpflow.epoch.state import LoaderState
from torch_dpflow.errors import StateError


def regrouped(index_sampler: Any, indices: Iterable[Any]) -> Iterator[Any]:
    """Return an iterator over `indices`, grouped into batches in the same way as by a loader's `_index_sampler`."""
    if type(index_sampler) is BatchSampler:
        return iter(BatchSampler(indices, index_sampler.batch_size, index_sampler.drop_last))
    return iter(indices)


def inner_sampler(index_sampler: Any, sampler: Any) -> Any:
    """Return the sampler inside torch's BatchSampler; with any other index sampler, `sampler`."""
    return index_sampler.sampler if type(index_sampler) is BatchSampler else sampler


class RankOrder:
    """Wrapper that adds `state_dict` and `load_state_dict` to torch's DistributedSampler.

    Args:
        sampler: a DistributedSampler with torch's `__iter__`.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._epoch = 0
        #: Where the running epoch began, or was resumed; None before the first draw.
        self._at: RankPosition | None = None

    @classmethod
    def of(cls, index_sampler: Any, sampler: Any) -> RankOrder | None:
        """Wrap a loader's DistributedSampler; return None without one, or if its order or batches are not torch's."""
        inner = inner_sampler(index_sampler, sampler)
        is_own = type(index_sampler) is BatchSampler or index_sampler is sampler
        is_torchs = isinstance(inner, DistributedSampler) and type(inner).__iter__ is DistributedSampler.__iter__
        return cls(inner) if is_own and is_torchs else None

    @property
    def left(self) -> int:
        """Number of samples that this rank had to read when its epoch was begun or resumed."""
        assert self._at is not None
        return self._at.end(self._sampler.num_replicas, drop_last=self._sampler.drop_last) - self._at.position

    def begun(self, index_sampler: Any) -> Iterator[Any]:
        """Yield the batches of a whole epoch. The sampler's epoch is read when the first batch is drawn."""
        self._epoch, self._at = self._sampler.epoch, RankPosition.beginning(len(self._sampler.dataset))
        yield from regrouped(index_sampler, self.rest())

    def state_dict(self, consumed: int | None = None) -> dict[str, Any] | None:
        """Return the position after `consumed` samples, by default where reading began; None before the first draw."""
        if self._at is None:
            return None
        at = self._at if consumed is None else replace(self._at, position=consumed)
        return self._identity() | {"epoch": self._epoch} | at.as_dict(self._sampler.rank, self._sampler.num_replicas)

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Restore a position from one rank's state or a list of all ranks'. Raises StateError if one does not fit."""
        states = state if isinstance(state, list) else [state]
        for one in states:
            self._check(one)
        length, replicas = len(self._sampler.dataset), self._sampler.num_replicas
        self._at = RankPosition.restored(state, length, replicas, drop_last=self._sampler.drop_last)
        self._epoch = self._sampler.epoch

    def rest(self) -> Iterator[int]:
        """Yield the indices of this rank from where its epoch was begun or resumed to the end."""
        assert self._at is not None
        sampler, at = self._sampler, self._at
        length = len(sampler.dataset)
        order: Any = torch_order(length, sampler.seed + self._epoch) if sampler.shuffle else np.arange(length)
        part = RankPart(at.places, sampler.rank, sampler.num_replicas, drop_last=sampler.drop_last)
        return part.items(lambda places: taken(order, places).tolist(), at.position - at.dealt_at)

    def _identity(self) -> dict[str, Any]:
        sampler = self._sampler
        return {
            "of": "DistributedSampler",
            "length": len(sampler.dataset),
            "drop_last": bool(sampler.drop_last),
            "shuffle": bool(sampler.shuffle),
            "seed": sampler.seed,
        }

    def _check(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise StateError(f"the state is damaged: that of its DistributedSampler is {state!r:.80}")
        for name, own in self._identity().items():
            if state.get(name) != own:
                raise StateError(
                    f"the state was taken with a DistributedSampler of {name}={state.get(name)!r}, this one has "
                    f"{own!r}; make the sampler as it was made then, but for num_replicas and rank"
                )
        if state.get("epoch") != self._sampler.epoch:
            raise StateError(
                f"the state was taken in epoch {state.get('epoch')!r} of a DistributedSampler, and this one is at "
                f"epoch {self._sampler.epoch}; call set_epoch({state.get('epoch')!r}) before the iteration"
            )


def end_of(state: LoaderState, index_sampler: Any, ranks: Ranks | None) -> int | None:
    """Return the position after the last batch of the state's epoch if `ranks` continue it; None if unknown.

    Raises StateError: the sampler's state is damaged, or a list of all ranks' states lacks some.
    """
    if state.ended:
        return state.position
    own: Any = None if state.sampler is None else state.sampler["sampler"]
    states: list[Any] = own if isinstance(own, list) else [own]
    if ranks is not None and all(isinstance(one, dict) and "places" in one for one in states):
        length, drop_last = states[0]["length"], states[0]["drop_last"]
        at = RankPosition.restored(own, length, ranks.num_replicas, drop_last=drop_last)
        return end_after(state, index_sampler, at.end(ranks.num_replicas, drop_last=drop_last) - at.position)
    if type(index_sampler) is not BatchSampler:
        return None
    whole = length_or_none(index_sampler.sampler)
    return None if whole is None else end_after(state, index_sampler, whole - state.samples)


def end_after(state: LoaderState, index_sampler: Any, left: int | None) -> int | None:
    """Return the position after the last batch of a resumed epoch with `left` samples left; None if `left` is None.

    With a batch sampler that is not torch's, `left` is a number of batches.
    """
    if left is None:
        return None
    if type(index_sampler) is not BatchSampler:
        return state.position + left
    size = index_sampler.batch_size
    return int(state.position + (left // size if index_sampler.drop_last else -(-left // size)))
