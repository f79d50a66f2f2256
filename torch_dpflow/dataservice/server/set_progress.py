"""How far a set is over all of its servers, as people and clients are told."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import msgspec

from torch_dpflow.dataservice.messages.protocol import MOST_BYTES, SetInfo, SetList
from torch_dpflow.dataservice.messages.server_messages import ALL_FAILED, SetState
from torch_dpflow.dataservice.server.filling import HeldSet
from torch_dpflow.dataservice.sources.set_names import samples_in


def with_progress(
    info: SetInfo,
    held: HeldSet,
    owned: Mapping[str, Sequence[int]],
    states: Mapping[str, SetState],
    copies: Mapping[str, Sequence[int]],
) -> SetInfo:
    """What is known of a set, with counts over its servers.

    info: `is_placed` where it is decided who has which stripe.
    owned: the stripes of each server that has some.
    states: what servers have said last, of their copies too; without those that have not heard of all of their stripes
        yet.
    copies: stripes that servers hold beside these.
    """
    records, samples = held.records, partial(samples_in, held.source)
    placed = {name: held.placed_in(stripes) for name, stripes in owned.items()}
    copied = {name: held.placed_in(copies.get(name, ())) for name in owned}
    told = [(count, states[name]) for name, count in placed.items() if name in states]
    loaded = sum(max(0, states[name].loaded - copied[name]) for name in owned if name in states)
    return msgspec.structs.replace(
        info,
        records=samples(records.records),
        placed=samples(sum(placed.values())),
        loaded=samples(loaded),
        failed=samples(sum(count if state.failed == ALL_FAILED else state.failed for count, state in told)),
        is_placed=info.is_placed and len(told) == len(placed) and all(state.is_placed for _, state in told),
        error=next((state.error for _, state in told if state.error), ""),
    )


def set_list(sets: Sequence[SetInfo], first: int, rooms: Iterable[tuple[int, int]]) -> SetList:
    """The sets from this number on, as many as one message has room for.

    rooms: the bytes of each server, and those that are free.
    """
    ends = itertools.accumulate(len(msgspec.msgpack.encode(one)) for one in sets[first:])
    count = max(1, sum(end <= MOST_BYTES // 2 for end in ends))
    capacity, free = (sum(of) for of in zip(*rooms))
    return SetList([*sets[first : first + count]], free, capacity, len(sets))
