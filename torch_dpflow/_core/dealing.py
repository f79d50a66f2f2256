"""Division of an epoch's order among ranks, and of its remainder when the number of ranks changes within the epoch.

A *place* is an index into the order. Places are *dealt* to ranks as in DistributedSampler: of N ranks, rank r gets the
places r, r + N, r + 2N, and so on. N ranks that have each read p places have together read the first p * N. So the
remaining places are one range, or a few ranges after several changes of the number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from torch_dpflow._core.checks import MAX_INT64, check_int
from torch_dpflow.errors import StateError, UsageError

T = TypeVar("T")

#: Items that are read at once: many, which is cheap, but not all, which takes memory.
_CHUNK = 4096
#: First numbers in a description.
_SHOWN = 3
#: Maximum number of ranks, also in a state.
MAX_RANKS = 2**20
#: Places of an order, in the sequence in which they are dealt.
Places: TypeAlias = tuple[range, ...]


def all_places(length: int) -> Places:
    """Return all places of an epoch of `length` samples."""
    return (range(length),)


def count(places: Places) -> int:
    return sum(map(len, places))


def share(length: int, replicas: int, *, drop_last: bool) -> int:
    """Return the number of places per rank: `length` / `replicas`, rounded down if `drop_last`, else up."""
    return length // replicas if drop_last else -(-length // replicas)


def cut(places: Places, start: int, stop: int, step: int = 1) -> Places:
    """Return `places[start:stop:step]`, where `places` counts as one sequence of numbers."""
    found: list[range] = []
    passed = 0
    for part in places:
        first = start - passed if start > passed else (start - passed) % step
        piece = part[first : max(0, stop - passed) : step]
        if len(piece):
            found.append(piece)
        passed += len(part)
    return tuple(found)


def left_of(places: Places, positions: Sequence[int], *, drop_last: bool) -> Places:
    """Return the places that no rank has read: first those that slower ranks have yet to read, then all later ones.

    With `drop_last`, the later ones are left out once the furthest rank has read its whole share.

    Args:
        places: the places that were dealt to the ranks.
        positions: the number of places that each rank has read, including repeated places.
    """
    replicas, length = len(positions), count(places)
    furthest = max(positions)
    holes = [
        hole
        for rank, position in enumerate(positions)
        if position < furthest
        for hole in cut(places, rank + position * replicas, min(length, furthest * replicas), replicas)
    ]
    if furthest and furthest >= share(length, replicas, drop_last=drop_last):
        return tuple(holes)
    return (*holes, *cut(places, furthest * replicas, length))


def numbers(places: Places) -> NDArray[np.int64]:
    """Return the places as an array."""
    return np.concatenate([np.arange(p.start, p.stop, p.step) for p in places] or [np.empty(0, np.int64)])


def taken(order: Any, places: Places) -> NDArray[np.signedinteger[Any]]:
    """Return the sample numbers at these places of an order. order: an array or `Permutation`."""
    parts = [order[part.start : part.stop : part.step] for part in places]
    return parts[0] if len(parts) == 1 else np.concatenate(parts or [order[:0]])


def row_of(indices: Any) -> NDArray[Any]:
    """Return indices as an array. For a range of millions of numbers this is faster than `numpy.asarray`."""
    if isinstance(indices, range):
        return np.arange(indices.start, indices.stop, indices.step)
    return np.asarray(indices)


def describe_numbers(numbers: NDArray[np.integer[Any]]) -> str:
    """Describe sample numbers as text: their count, the first ones, and a digest of all in their order."""
    digest = hashlib.sha256(np.ascontiguousarray(numbers, "<i8").data).hexdigest()[:12]
    shown = [*map(str, numbers[:_SHOWN].tolist()), *["..."] * (len(numbers) > _SHOWN)]
    return f"{len(numbers)} samples [{', '.join(shown)}] with digest {digest}"


class RankPart:
    """Sequence of the places of one rank: every `replicas`-th of `places`, starting at index `rank`.

    Slices of it are `Places`. If `places` do not divide evenly among the ranks, the first places are repeated at the
    end, as in DistributedSampler; with `drop_last` the last places are dropped.
    """

    def __init__(self, places: Places, rank: int, replicas: int, *, drop_last: bool) -> None:
        self._places, self._rank, self._replicas = places, rank, replicas
        self._dealt = count(places)
        self._length = share(self._dealt, replicas, drop_last=drop_last)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, numbers: slice) -> Places:
        start, stop, _ = numbers.indices(self._length)
        first, end = (self._rank + number * self._replicas for number in (start, stop))
        found = cut(self._places, first, min(self._dealt, end), self._replicas)
        last = end - self._replicas
        if start < stop and last >= self._dealt:  # only a rank's last place can fill up
            found += cut(self._places, last % self._dealt, last % self._dealt + 1)
        return found

    def items(self, read: Callable[[Places], list[T]], start: int) -> Iterator[T]:
        """Yield the items of this rank, starting at index `start`. read: function that returns the items at places."""
        for first in range(start, len(self), _CHUNK):
            yield from read(self[first : first + _CHUNK])


def as_lists(places: Places) -> list[list[int]]:
    """Return places as lists [start, stop, step], for a state."""
    return [[p.start, p.stop, p.step] for p in places]


def from_lists(lists: Any, length: int) -> Places:
    """Return places from a result of `as_lists`. Raises StateError if they are malformed, repeated or >= `length`."""
    try:
        places = tuple(range(start, stop, step) for start, stop, step in lists)
        if any(p and not (p.step > 0 <= p.start and p[-1] < length) for p in places):
            raise ValueError(f"a place is not below {length}, or its steps go backwards")
        if len(places) > 1 and count(places) > len(_distinct(places, length)):
            raise ValueError("a place is there twice")
    except (TypeError, ValueError, OverflowError) as error:
        raise StateError(f"the state is damaged: places={lists!r:.80}: {error}") from error
    return tuple(p for p in places if p)


def _distinct(places: Places, length: int) -> NDArray[np.int64]:
    if count(places) > length:
        return np.empty(0, np.int64)
    return np.unique(numbers(places))


@dataclass(frozen=True)
class RankPosition:
    """Position of one rank in an epoch, and the places of the epoch that are dealt to the ranks."""

    #: Number of the epoch's samples that the rank has read; when places are dealt again, the highest such number.
    position: int
    #: The position when `places` were dealt: 0 at the beginning of the epoch.
    dealt_at: int
    #: The places that were dealt to all ranks at `dealt_at`.
    places: Places

    @classmethod
    def beginning(cls, length: int) -> RankPosition:
        return cls(0, 0, all_places(length))

    def end(self, replicas: int, *, drop_last: bool) -> int:
        return self.dealt_at + share(count(self.places), replicas, drop_last=drop_last)

    def as_dict(self, rank: int, replicas: int) -> dict[str, Any]:
        """Return the position as plain data for a state. rank, replicas: this rank, and the number of ranks."""
        dealt_at, places = self.dealt_at, as_lists(self.places)
        return {
            "num_replicas": replicas,
            "rank": rank,
            "position": self.position,
            "dealt_at": dealt_at,
            "places": places,
        }

    @classmethod
    def restored(
        cls,
        state: dict[str, Any] | Sequence[dict[str, Any]],
        length: int,
        replicas: int,
        *,
        drop_last: bool,
    ) -> RankPosition:
        """Return the position from which each of `replicas` ranks continues an epoch.

        The remaining places are dealt again if the number of ranks has changed, or some ranks are ahead of others.

        Args:
            state: a result of `as_dict` of any rank, if all ranks have read the same number of samples; else a list of
                the results of all ranks of one run, in any order.
            length: number of samples in the epoch.

        Raises StateError: a state is damaged, or the list is not of one state of each rank of one run.
        """
        states = [state] if isinstance(state, dict) else state
        found = [cls._of(one, length, drop_last=drop_last) for one in states]
        first, before = found[0], int(states[0]["num_replicas"])
        if not isinstance(state, dict):
            _check_ranks(states)
            found = [one for _, one in sorted(zip([one["rank"] for one in states], found), key=lambda pair: pair[0])]
            if any((one.dealt_at, one.places) != (first.dealt_at, first.places) for one in found):
                raise StateError(
                    "the states are of ranks that did not begin or resume the epoch together; give the states that "
                    "all ranks of one run have saved"
                )
        positions = [one.position for one in found] if len(found) > 1 else [first.position] * before
        if before == replicas and len(set(positions)) == 1:
            return first
        left = left_of(first.places, [position - first.dealt_at for position in positions], drop_last=drop_last)
        return cls(max(positions), max(positions), left)

    @classmethod
    def _of(cls, state: dict[str, Any], length: int, *, drop_last: bool) -> RankPosition:
        places = from_lists(state.get("places"), length)
        try:
            replicas = check_int("num_replicas", state.get("num_replicas"), minimum=1, maximum=MAX_RANKS)
            check_int("rank", state.get("rank"), minimum=0, maximum=replicas - 1)
            dealt_at = check_int("dealt_at", state.get("dealt_at"), minimum=0, maximum=MAX_INT64)
            end = cls(0, dealt_at, places).end(replicas, drop_last=drop_last)
            position = check_int("position", state.get("position"), minimum=dealt_at, maximum=end)
        except UsageError as error:
            raise StateError(f"the state is damaged: {error}") from error
        if not dealt_at and places != tuple(part for part in all_places(length) if part):
            raise StateError(
                f"the state is damaged: places={state['places']!r:.80} are not the whole epoch, and dealt_at=0"
            )
        return cls(position, dealt_at, places)


def _check_ranks(states: Sequence[dict[str, Any]]) -> None:
    ranks, sizes = sorted(state["rank"] for state in states), sorted({state["num_replicas"] for state in states})
    if sizes != [len(states)] or ranks != list(range(len(states))):
        raise StateError(
            f"{len(states)} states of ranks {ranks} of {sizes}: give one state of each rank of one run; or, "
            "if all ranks have read the same number of samples, the state of one rank, not in a list"
        )
