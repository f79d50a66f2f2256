"""The position at which a resumed epoch ends, which another number of ranks or another batch size changes."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler

from torch_dpflow._core.dealing import RankPosition
from torch_dpflow._core.ranks import Ranks
from torch_dpflow.epoch.state import LoaderState


def end_of(state: LoaderState, index_sampler: Any, ranks: Ranks | None) -> int | None:
    """Return the position at which the epoch of a state in mid-epoch ends, with these ranks; None if unknown.

    Raises StateError: the sampler's state is damaged, or lacks ranks.
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
    """Return the position at the end of a resumed epoch of which so many samples are left; None if unknown."""
    if left is None:
        return None
    if type(index_sampler) is not BatchSampler:
        return state.position + left
    size = index_sampler.batch_size
    return int(state.position + (left // size if index_sampler.drop_last else -(-left // size)))


def length_or_none(sized: Any) -> int | None:
    """Return the length of an object; None if `len` raises any error."""
    try:
        return len(sized)
    except Exception:
        return None
