"""Placement of stripes on servers (weighted rendezvous hashing with capacities), and of records in memory. Pure.

Each server has a score for each stripe, which depends on its name, the dataset's identity and its weight only; the
highest score with capacity left wins. So all processes with the same list of servers agree without communication. A
server added to n others takes 1/(n+1) of the stripes, and nothing else moves; only the stripes of a lost server move.
The patent's `mod N` moves nearly all stripes, as do ranges of equal length, and a hash ring needs many points per
server.

If a dataset does not fit, a hash of each record's number decides once which records stay in memory. So every batch of
every order finds the same share of its records there, and nothing is ever replaced. For a random order, a share c that
stays in memory serves c of the reads; least-recently-used replacement serves c + (1-c) ln(1-c), which is 0.15 N less at
c = 0.5.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_dpflow.errors import OptionError
from torch_dpflow.pool.planning.layout import ALIGNMENT, SampleLayout

#: Owner of a stripe for which no server had capacity.
UNPLACED = -1


def place(
    identity: bytes,
    stripe_bytes: Sequence[int] | npt.NDArray[np.integer[Any]],
    servers: Mapping[str, int],
    room: Mapping[str, int] | None = None,
    stripes: npt.NDArray[np.integer[Any]] | None = None,
) -> npt.NDArray[np.int32]:
    """Return the owner of each stripe: an index in `sorted(servers)`, or `UNPLACED`.

    Stripes are spread in proportion to the weights, up to chance: about 1 / sqrt(stripes of one server). A stripe that
    does not fit on one server goes to the next in its order. If not all fit, chance decides which are left out, so that
    every part of the dataset has its share in memory.

    Args:
        stripe_bytes: size of each stripe.
        servers: weight of each server, its bytes, by name.
        room: bytes left on each server; its weight by default.
        stripes: numbers of the stripes, for a part of a dataset; from 0 by default.

    Raises OptionError if a server has no weight.
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


def _with_room(scores: npt.NDArray[np.float64], sizes: npt.NDArray[np.int64], room: list[int]) -> npt.NDArray[np.int32]:
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
    """Return -weight / ln(u), u uniform by hash.

    A server has the highest score with probability weight / sum of weights.
    """
    seed = int.from_bytes(hashlib.blake2b(server.encode(), key=identity, digest_size=8).digest(), "little")
    uniform = (mixed(stripes.astype(np.uint64) + np.uint64(seed)) >> np.uint64(11)).astype(float)
    scores: npt.NDArray[np.float64] = -weight / np.log((uniform + 0.5) / 2.0**53)
    return scores


def mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply SplitMix64's finaliser (Steele, Lea and Flood 2014): a bijection whose results look independent."""
    numbers = numbers * np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = numbers ^ (numbers >> np.uint64(31))
    return mixed


Flags = npt.NDArray[np.bool_]
#: Cut under which every record stays in memory.
ALL = 1 << 63


def resident(identity: bytes, records: int, cut: int) -> Flags:
    """Return whether each record stays in memory; depends on the identity and the cut only."""
    stays: Flags = _record_scores(identity, records) < np.uint64(cut)
    return stays


def cut_that_fits(records: SampleLayout, room: int, largest: int) -> int:
    """Return the cut that keeps as many records as fit into `room` bytes; `ALL` if all fit.

    largest: maximum bytes of a stripe, which has to fit on one server.
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
    """Return the cut that keeps as many records of these sizes as fit."""
    if int(sizes.sum()) <= room:
        return ALL
    by_score = np.argsort(scores)
    fit = int(np.searchsorted(np.cumsum(sizes[by_score], dtype=np.int64), room, side="right"))
    return int(scores[by_score[fit]])


def resident_layout(records: SampleLayout, cut: int) -> SampleLayout:
    """Return the layout with 0 bytes for records that do not stay in memory."""
    if cut == ALL:
        return records
    lengths = np.where(resident(records.identity, records.records, cut), records.lengths, 0)
    return SampleLayout(records.identity, lengths, records.per_stripe)


def _record_scores(identity: bytes, records: int) -> npt.NDArray[np.uint64]:
    seed = np.uint64(int.from_bytes(identity[:8], "little"))
    scores: npt.NDArray[np.uint64] = mixed(np.arange(records, dtype=np.uint64) + seed) >> np.uint64(1)
    return scores
