"""States given to a loader: checks that they fit the loader, and joining of all ranks' states."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np

from torch_dpflow._core.dealing import RankPosition
from torch_dpflow.epoch.checksum import READ
from torch_dpflow.epoch.progress import COUNTED, EPOCH, RANK, SIZES, LoaderShape, epoch_setter
from torch_dpflow.epoch.rank_order import end_of
from torch_dpflow.epoch.shards import ShardedIterableDataset, is_of_shards, merged_shards
from torch_dpflow.epoch.state import LoaderState, StreamState
from torch_dpflow.errors import StateError


def read_states(given: Any, rank: int, workers: int, dataset: Any) -> LoaderState:
    """Return the state with which this rank resumes.

    given: a state dict, or a list of the state dicts of all ranks, which are joined. For an iterable dataset without
        shards, the state of this rank is taken from the list.
    workers, dataset: those of the loader that resumes.

    Raises StateError: among others, a state is damaged, or the states are of different epochs, or not of all ranks.
    """
    if not isinstance(given, list | tuple):
        return _as_read_by(LoaderState.from_dict(given), workers, dataset)
    states = [LoaderState.from_dict(one) for one in given]
    if not states:
        raise StateError("no state is given; give the state of one rank, or a list of the states of all ranks")
    if any(state.shared is not None for state in states):
        return join_flow_states(states, rank)
    if len(states) == 1:
        return _as_read_by(_of_all_ranks(states[0]), workers, dataset)
    if all(state.kind == "iterable" for state in states):
        return _joined_streams(states, rank, workers)
    return _joined(states, rank)


def _as_read_by(state: LoaderState, workers: int, dataset: Any) -> LoaderState:
    if len(state.streams) == max(1, workers) and not _is_of_other_ranks(state, dataset):
        return state
    return _with_shards_moved(state, state.streams, workers) or state


def _of_all_ranks(state: LoaderState) -> LoaderState:
    """Return the state, which was given alone. Raises StateError if other ranks have read parts of its epoch."""
    replicas = state.made_of.get("num_replicas")
    if isinstance(replicas, int) and replicas > 1 and not state.fresh and (state.position or state.ahead):
        raise StateError(
            f"a list has the states of all ranks, and one state of {replicas} ranks is given; give all {replicas}. If "
            "all ranks had read the same number of batches, give the state of one rank itself, not in a list"
        )
    return state


def _joined_streams(states: Sequence[LoaderState], rank: int, workers: int) -> LoaderState:
    """Return this rank's state of an iterable dataset; for a dataset with shards, joined from those of all ranks."""
    begun = [state for state in states if not state.fresh] or list(states)
    own = next((state for state in states if _rank_of(state) == rank), None)
    streams = [stream for state in begun for stream in state.streams]
    moved = _with_shards_moved(begun[rank % len(begun)], streams, workers, ranks=len(states))
    if moved is not None:
        _check_alike(states)
        return moved
    if own is None or len({_rank_of(state) for state in states}) < len(states):
        raise StateError(
            f"{len(states)} states of an iterable dataset are given, of the ranks {[_rank_of(one) for one in states]}, "
            f"and this is rank {rank}: each rank continues its own state, so give each the state that it has saved; "
            "only a ShardedIterableDataset is continued by other ranks"
        )
    return own


def _is_of_other_ranks(state: LoaderState, dataset: Any) -> bool:
    """Return whether the state's run had a different number of ranks, so that workers need all shards' positions."""
    if not isinstance(dataset, ShardedIterableDataset):
        return False
    kept = [stream.dataset["dataset"] for stream in state.streams if stream.dataset is not None]
    return any(is_of_shards(one) and one["num_replicas"] != dataset.num_replicas for one in kept)


def _with_shards_moved(
    state: LoaderState, streams: Sequence[StreamState], workers: int, ranks: int = 1
) -> LoaderState | None:
    """Return a state in which every worker's stream has the positions of all shards; None without shards.

    Args:
        streams: the streams of all workers of all ranks whose states are given.
        ranks: the number of ranks whose states are given.
    """
    kept = [one for one in (state.dataset, *(stream.dataset for stream in streams)) if one is not None]
    if state.kind != "iterable" or not kept or any(one["iterator"] is not None for one in kept):
        return None
    own = [one["dataset"] for one in kept]
    if not all(map(is_of_shards, own)):
        return None
    if state.fresh:  # the next epoch reads all shards
        return replace(state, dataset=None, streams=[], due=[], next_worker=0)
    shards = merged_shards(own)
    if ranks == shards["num_replicas"]:  # a rank that has read nothing has no state
        shards["ranks"] = list(range(ranks))
    merged = {"dataset": shards, "iterator": None, "ended": False}
    moved = [StreamState(dataset=deepcopy(merged)) for _ in range(max(1, workers))]
    return replace(state, streams=moved, due=[], next_worker=0)


def _joined(states: Sequence[LoaderState], rank: int) -> LoaderState:
    _check_alike(states)
    begun = [state for state in states if not state.fresh] or list(states)
    own = next((one for one in begun if _rank_of(one) == rank), begun[rank % len(begun)])
    if own.fresh:
        return own
    if any(state.ahead for state in states):
        raise StateError(
            "the states have batches that were delivered out of order (in_order=False), and each rank has its own; "
            "load the state of each rank into that rank, with the same number of ranks"
        )
    if not any(state.position for state in states):
        return own
    kept = _with_unread([None if one.fresh or one.sampler is None else one.sampler["sampler"] for one in states])
    if not all(isinstance(one, dict) and "num_replicas" in one for one in kept):
        raise StateError(
            f"the states of {len(states)} ranks are given, and their {own.made_of.get('sampler')} does not say what "
            f"each rank has read; {_RANKED}"
        )
    kept.sort(key=lambda one: str(one.get("rank")).zfill(20))
    furthest = max(states, key=lambda state: state.samples)
    return replace(
        own,
        sampler={"sampler": kept, "iterator": None},
        position=furthest.position,
        samples=furthest.samples,
        ended=all(state.ended for state in states),
    )


def _rank_of(state: LoaderState) -> Any:
    return state.made_of.get(RANK)


def _with_unread(kept: list[Any]) -> list[Any]:
    """Replace None by a position at the epoch's start, for ranks that have read nothing of an epoch others have begun.

    The missing rank numbers are assigned in any order, because all these ranks begin at the same place.
    """
    begun = next((one for one in kept if isinstance(one, dict) and {"rank", "length"} <= one.keys()), None)
    if begun is None:
        return kept
    unread = {**begun, "position": 0, "dealt_at": 0, "places": [[0, begun["length"], 1]]}
    named = [one.get("rank") for one in kept if isinstance(one, dict)]
    missing = iter([rank for rank in range(len(kept)) if rank not in named])
    return [{**unread, "rank": next(missing, None)} if one is None else one for one in kept]


def with_seed_of(state: LoaderState, rank: int) -> LoaderState:
    """Return `state`, with a base seed that is derived for this rank if another rank has saved the state.

    The seed stays for a flow, and for an iterable dataset, whose delivered samples may have to be read again.
    """
    is_own = state.shared is not None or state.kind == "iterable" or state.made_of.get(RANK) in (None, rank)
    if state.base_seed is None or is_own:
        return state
    drawn = np.random.SeedSequence([state.base_seed % (1 << 64), rank]).generate_state(1, np.uint64)[0]
    return replace(state, base_seed=int(drawn) >> 1, made_of=state.made_of | {RANK: rank, READ: None})


def as_own(state: LoaderState, loader: Any) -> LoaderState:
    """Convert a loaded state that was not used yet to a state of this rank, to be joined with other ranks' states.

    Raises StateError: this rank's position does not follow from the state.
    """
    if state.fresh:
        return state
    shape = LoaderShape(loader)
    if state.shared is not None:
        from torch_dpflow.loader.flow_job import settled_state  # here, as private loaders need no cluster

        shared = settled_state(loader, state.shared)
        return replace(state, shared=shared, made_of=shape.parts(), length=shape.length())
    own: Any = None if state.sampler is None else state.sampler["sampler"]
    states: list[Any] = own if isinstance(own, list) else [own]
    ranks = shape.ranks()
    if ranks is None or not all(isinstance(one, dict) and "places" in one for one in states):
        return state
    first = next((one for one in states if one["rank"] == ranks.rank), states[0])
    at = RankPosition.restored(own, first["length"], ranks.num_replicas, drop_last=first["drop_last"])
    settled = {**first, **at.as_dict(ranks.rank, ranks.num_replicas)}
    return replace(state, sampler={"sampler": settled, "iterator": None}, made_of=shape.parts(), length=shape.length())


def _check_alike(states: Sequence[LoaderState]) -> None:
    """Raise StateError unless the states are of one epoch of one run."""
    compared: dict[str, list[Any]] = {
        "epoch": _epochs_of(states),
        "epoch's length": [state.length for state in states],
        "loaders": [state.made_of | {RANK: None, EPOCH: None, READ: None} for state in states],
    }
    for name, values in compared.items():
        if any(value != values[0] for value in values):
            raise StateError(
                f"the states differ in the {name}: {values!r:.300}; give the states that all ranks of one run have "
                "saved in the same epoch"
            )


def set_counted_epoch(loader: Any, state: LoaderState) -> None:
    """Set the next epoch of a sampler that counts iterations, if `state` is between epochs and has no sampler state."""
    sampler, counted = epoch_setter(loader._index_sampler, loader.sampler), state.made_of.get(COUNTED)
    if state.fresh and state.sampler is None and sampler is not None and type(counted) is int:
        sampler.set_epoch(counted)


def begin_saved_epoch(loader: Any, *, is_over: bool) -> None:
    """Set the sampler to the pending state's epoch, for trainers that call `set_epoch` only after `iter`.

    is_over: whether the trainer continues with the next epoch. The state is then dropped, and that epoch is set.
    """
    state: LoaderState | None = loader._runtime.pending
    if state is None or state.fresh:
        return
    own: Any = None if state.sampler is None else state.sampler["sampler"]
    own = own[0] if isinstance(own, list) else own
    epoch = own.get("epoch") if isinstance(own, dict) else state.made_of.get(EPOCH)
    sampler = epoch_setter(loader._index_sampler, loader.sampler) if type(epoch) is int else None
    if sampler is not None:
        sampler.set_epoch(epoch)
    if is_over:
        iter(loader)
        if sampler is not None and type(epoch) is int:
            sampler.set_epoch(epoch + 1)


def _epochs_of(states: Sequence[LoaderState]) -> list[Any]:
    """Return the epoch of each state: the sampler's epoch if all states have it, else the number of begun iterations.

    The latter can differ between ranks: one that fetched a batch before the epoch has begun one iteration more.
    """
    named = [state.sampler["sampler"] if state.sampler is not None and not state.fresh else None for state in states]
    if all(isinstance(one, dict) and type(one.get("epoch")) is int for one in named):
        return [one["epoch"] for one in named if one is not None]
    return [state.epoch for state in states]


_RANKED = (
    "use torch's DistributedSampler itself, or a DynaGCSSampler, or resume with the same number of ranks, each with "
    "its own state"
)


def check_fits(loader: Any, state: LoaderState) -> None:
    """Raise StateError if `state` was taken with other lengths, samplers or workers, so that it cannot be continued."""
    shape = LoaderShape(loader)
    kind, length, mine = shape.kind, shape.length(), shape.parts()
    if loader.flow is None and state.shared is not None and not state.fresh:
        raise StateError(
            "the state was taken in the middle of an epoch of a shared flow, whose order the flow's router "
            "decides, and this loader has no flow; give it the flow=... and address=... that the state was taken "
            "with, or begin a new epoch"
        )
    if state.kind != kind:
        raise StateError(f"the state is of a loader over a dataset of kind {state.kind!r}, this one's is {kind!r}")
    resized = [name for name in SIZES if state.made_of.get(name) != mine.get(name)]
    if not resized and None not in (state.length, length) and state.length != length:
        raise StateError(
            f"the state is of a loader whose epoch has {state.length} batches, this one's has {length}; "
            "resume with the dataset, batch_size, drop_last and sampler that it was taken with"
        )
    for name, was in state.made_of.items():
        must_equal = name == "dataset's length" if state.fresh else name not in SIZES or kind == "iterable"
        if (
            must_equal
            and name not in (RANK, EPOCH, COUNTED)
            and None not in (was, mine.get(name))
            and was != mine[name]
            and (resized or not state.fresh)
        ):
            raise StateError(
                f"the state is of a loader whose {name} is {was}, this one's is {mine[name]}; resume with the "
                "dataset and the arguments that it was taken with, or begin a new epoch" + _of_devices(was, mine[name])
            )
    if not state.fresh and state.shared is None and kind == "map":
        _check_size(state, mine, resized, shape.rank())
    if not state.fresh and state.shared is not None:
        from torch_dpflow.cluster.client.epoch_cursor import check_resumable  # here, as private loaders need no cluster

        check_resumable(state.shared, int(mine.get("num_replicas") or 1))
    _check_workers(loader, state)


def _of_devices(*samplers: Any) -> str:
    """Return advice if a framework uses different samplers for one device and for several; otherwise empty text."""
    is_shuffled = {*samplers} in ({"RandomSampler", "DistributedSampler"}, {"SequentialSampler", "DistributedSampler"})
    text = ". Lightning and others read by one on one device and by the other on several: change the number of devices"
    return f"{text} between epochs, or give the loader a sampler with ranks" if is_shuffled else ""


#: Result of `end_of_epoch` if the number of batches cannot be known.
UNKNOWN = -1


def end_of_epoch(loader: Any, state: LoaderState) -> int | None:
    """Return the number of batches in the epoch that `state` resumes in this loader; None for the usual `len(loader)`.

    Returns `UNKNOWN` if the flow's router sets the order, and the number of ranks or the batch size has changed.

    Raises StateError: the states do not cover all ranks; or the script has read a different `len(loader)` before, and
    may count batches up to it.
    """
    if state.fresh or state.kind == "iterable":
        return None
    shape = LoaderShape(loader)
    mine, length = shape.parts(), shape.length()
    end = UNKNOWN if any(state.made_of.get(name) != mine.get(name) for name in SIZES) else None
    if state.shared is None:
        end = end_of(state, loader._index_sampler, shape.ranks())
    if end is None or end == length:
        return None
    if loader._runtime.is_measured and length is not None:
        raise StateError(
            f"the epoch of the state ends {'elsewhere' if end < 0 else f'after {end} batches'} with these ranks and "
            f"this batch size, and len() of this loader was read before: {length}. A program that counts batches up to "
            "that, as Lightning's Trainer does, would drop the rest. Load the state before len() is read; "
            "len(loader.batch_sampler) is that of a whole epoch"
        )
    return end


def _check_size(state: LoaderState, mine: dict[str, Any], resized: list[str], rank: int) -> None:
    """Raise StateError if the remaining epoch cannot be divided among the present ranks and batches."""
    own = None if state.sampler is None else state.sampler["sampler"]
    of_ranks = isinstance(own, list) or (isinstance(own, dict) and "num_replicas" in own)
    if state.ahead and (resized or state.made_of.get(RANK) not in (None, rank)):
        raise StateError(
            "the state has batches that were delivered out of order (in_order=False), so that the samples before it "
            "are not its rank's first ones; resume it in the same rank, with the same batch_size and number of ranks"
        )
    if not state.position:
        return
    if "num_replicas" in resized and not of_ranks:
        raise StateError(
            f"the state was taken with num_replicas={state.made_of.get('num_replicas')}, and this loader's sampler has "
            f"{mine.get('num_replicas')}; the order of a {mine.get('sampler')} cannot be divided again: {_RANKED}"
        )
    if "batch_size" in resized and None in (state.made_of.get("batch_size"), mine.get("batch_size")):
        raise StateError(
            f"the state is of a loader whose batch_size is {state.made_of.get('batch_size')}, this one's is "
            f"{mine.get('batch_size')}: samples are counted in batches of a batch_size only; resume as it was taken"
        )
    if resized and mine.get("batch sampler") != "BatchSampler" and mine.get("batch_size") is None and not of_ranks:
        raise StateError(
            f"batches of a {mine.get('batch sampler')} cannot be divided again; resume with the batch_sampler that the "
            "state was taken with, or give the loader a sampler and a batch_size"
        )


def _check_workers(loader: Any, state: LoaderState) -> None:
    workers = max(1, loader.num_workers)
    keep = any(stream.dataset is not None for stream in state.streams)
    if (keep or (state.kind == "iterable" and not state.fresh)) and len(state.streams) != workers:
        raise StateError(
            f"the state is of a loader with {len(state.streams)} workers, this one has {loader.num_workers}; each "
            "worker reads a share of an iterable dataset, or keeps the state of its own copy of the dataset, so "
            "resume with the same number, or begin a new epoch; a ShardedIterableDataset resumes with any number"
        )


def join_flow_states(states: Sequence[LoaderState], rank: int) -> LoaderState:
    """Return the state with which this rank resumes, whatever the number of ranks is now.

    All states are of one epoch, whose order the flow's router sets. At least one state has `shared`; ranks whose state
    is fresh have read nothing of the epoch. This rank resumes with the seeds of its own state, or else of any state.

    Args:
        states: one state of each rank of the saved run, in any order.
        rank: the rank of this process.

    Raises StateError: among others, the states are not of one epoch, or not of all ranks.
    """
    begun = [state for state in states if not state.fresh]
    routed = begun or [state for state in states if state.shared is not None]
    if not routed:
        raise StateError("the states have no position in a flow; give those of ranks that read one")
    ranks = [_routed_rank(state) for state in begun]
    replicas = {count for _, count in ranks}
    if begun and (replicas != {len(states)} or len(set(ranks)) < len(begun)):
        raise StateError(
            f"{len(states)} states are given, of [rank, ranks] {[list(one) for one in sorted(ranks)]}; give one state "
            "of every rank that there was"
        )
    _check_epochs(states, routed)
    own = next((state for state, one in zip(begun, ranks) if one[0] == rank), routed[0])
    if not begun:
        return own
    shared: dict[str, Any] = own.shared or {}
    parts = [state.shared for state in begun]
    joined = {"seed": shared.get("seed"), "epoch": shared.get("epoch"), "replicas": len(states), "ranks": parts}
    return replace(own, shared=joined)


def _routed_rank(state: LoaderState) -> tuple[int, int]:
    """Return (rank, number of ranks) of a state in mid-epoch. Raises StateError if the state has no rank."""
    shared = state.shared
    if shared is None:
        raise StateError(
            "one of the states was taken in an epoch whose order the flow's router decided, and another one was not; "
            "give the states that the ranks of one job saved together"
        )
    rank = shared.get("rank", [])
    if rank is None:
        return 0, 1
    if not (isinstance(rank, list | tuple) and len(rank) == 2 and all(type(one) is int for one in rank)):
        raise StateError(
            f"one of the states is not that of one rank ({rank!r:.80}); give states that ranks saved, not joined ones"
        )
    return rank[0], rank[1]


def _check_epochs(states: Sequence[LoaderState], routed: Sequence[LoaderState]) -> None:
    """Raise StateError unless all states are of one epoch. A state before any epoch counts iterations only."""
    for name in ("seed", "epoch"):
        values = {repr((state.shared or {}).get(name)) for state in states if state.shared is not None}
        if len(values) > 1:
            raise StateError(
                f"the states are of several {name}s, {', '.join(sorted(values))}: what a rank read of an epoch that it "
                "has left is not in its state; give states that all ranks saved in the same epoch"
            )
    iterations = {state.epoch for state in states if state.shared is None} - {state.epoch for state in routed}
    if iterations:
        raise StateError(
            f"some states are of iteration {sorted(iterations)}, others of {sorted({one.epoch for one in routed})}; "
            "give states that all ranks saved in the same epoch"
        )
