"""Which server holds which stripe: weighted rendezvous with room. Pure.

Every server has a score for each stripe, by its name, the set's identity and its weight alone; the highest one with
room gets it. So all who know the servers agree without asking; a server that is added to n others takes 1/(n+1) of
the stripes and nothing else moves; one that is lost has only its own ones moved. The patent's `mod N` moves nearly
all, ranges of equal length too, and a ring of hashes needs many points a server to be as even.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_dpflow.errors import OptionError
from torch_dpflow.pool.planning.layout import ALIGNMENT, SampleLayout

#: The owner of a stripe for which no server had room.
UNPLACED = -1


def place(
    identity: bytes,
    stripe_bytes: Sequence[int] | npt.NDArray[np.integer[Any]],
    servers: Mapping[str, int],
    room: Mapping[str, int] | None = None,
    stripes: npt.NDArray[np.integer[Any]] | None = None,
) -> npt.NDArray[np.int32]:
    """The owner of each stripe: its place in `sorted(servers)`, or `UNPLACED`.

    Each server holds stripes in proportion to its weight, with the deviation of chance, about 1 / sqrt(stripes of
    one); what a server has no room for goes to the next in its order. Where there is not room for all, which of them
    get none is chance too, so that every part of the set has its share in memory.

    Args:
        stripe_bytes: the size of each stripe.
        servers: the weight of each server, its bytes, by its name.
        room: the bytes that each server has left; its weight, if not given.
        stripes: the numbers of the stripes, for a part of a set; from 0, if not given.

    Raises:
        OptionError: a server has no weight.
    """
    names = sorted(servers)
    for name in names:
        if servers[name] < 1:
            raise OptionError(f"server {name!r} has {servers[name]} bytes; leave out servers without room")
    sizes = np.asarray(stripe_bytes, dtype=np.int64)
    numbers = np.arange(len(sizes)) if stripes is None else np.asarray(stripes)
    if not names or not len(sizes):
        return np.full(len(sizes), UNPLACED, dtype=np.int32)
    left = [(servers if room is None else room)[name] for name in names]
    scores = np.stack([_scores(identity, name, servers[name], numbers) for name in names])
    owners: npt.NDArray[np.int32] = scores.argmax(axis=0).astype(np.int32)
    loads = np.bincount(owners, weights=sizes, minlength=len(names))
    if all(load <= most for load, most in zip(loads, left)):
        return owners
    return _with_room(scores, sizes, left)


def _with_room(
    scores: npt.NDArray[np.float64], sizes: npt.NDArray[np.int64], room: list[int]
) -> npt.NDArray[np.int32]:
    owners = np.full(len(sizes), UNPLACED, dtype=np.int32)
    preferences = np.argsort(-scores, axis=0)
    for stripe in np.argsort(-scores.max(axis=0)).tolist():
        for server in preferences[:, stripe].tolist():
            if room[server] >= sizes[stripe]:
                room[server] -= int(sizes[stripe])
                owners[stripe] = server
                break
    return owners


def _scores(
    identity: bytes, server: str, weight: int, stripes: npt.NDArray[np.integer[Any]]
) -> npt.NDArray[np.float64]:
    """-weight / ln(u), with u uniform by hash: the highest of several is each one's with its share of the weights."""
    seed = int.from_bytes(hashlib.blake2b(server.encode(), key=identity, digest_size=8).digest(), "little")
    uniform = (mixed(stripes.astype(np.uint64) + np.uint64(seed)) >> np.uint64(11)).astype(float)
    scores: npt.NDArray[np.float64] = -weight / np.log((uniform + 0.5) / 2.0**53)
    return scores


def mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014): a bijection whose results look independent."""
    numbers = numbers * np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = numbers ^ (numbers >> np.uint64(31))
    return mixed


Flags = npt.NDArray[np.bool_]
#: The cut under which every record is resident.
ALL = 1 << 63


def resident(identity: bytes, records: int, cut: int) -> Flags:
    """Whether each record of a set stays in memory: the same for all who know its identity and the cut."""
    stays: Flags = _record_scores(identity, records) < np.uint64(cut)
    return stays


def cut_that_fits(records: SampleLayout, room: int, largest: int) -> int:
    """The cut with as many records as fit into `room` bytes; `ALL` where all do.

    largest: most bytes of a stripe, which has to fit into one server.
    """
    sizes = -(-records.lengths.astype(np.int64) // ALIGNMENT) * ALIGNMENT
    scores = _record_scores(records.identity, len(sizes))
    cut = _cut(sizes, scores, room)
    stripes = np.add.reduceat(sizes, np.arange(0, len(sizes), records.per_stripe))
    for stripe in np.flatnonzero(stripes > largest).tolist():
        own = slice(stripe * records.per_stripe, (stripe + 1) * records.per_stripe)
        cut = min(cut, _cut(sizes[own], scores[own], largest))
    return cut


def _cut(sizes: npt.NDArray[np.int64], scores: npt.NDArray[np.uint64], room: int) -> int:
    """The one under which as many of these fit as can."""
    if int(sizes.sum()) <= room:
        return ALL
    by_score = np.argsort(scores)
    fit = int(np.searchsorted(np.cumsum(sizes[by_score], dtype=np.int64), room, side="right"))
    return int(scores[by_score[fit]])


def resident_layout(records: SampleLayout, cut: int) -> SampleLayout:
    """The set with no bytes for those that do not stay."""
    if cut == ALL:
        return records
    lengths = np.where(resident(records.identity, records.records, cut), records.lengths, 0)
    return SampleLayout(records.identity, lengths, records.per_stripe)


def _record_scores(identity: bytes, records: int) -> npt.NDArray[np.uint64]:
    seed = np.uint64(int.from_bytes(identity[:8], "little"))
    scores: npt.NDArray[np.uint64] = mixed(np.arange(records, dtype=np.uint64) + seed) >> np.uint64(1)
    return scores
