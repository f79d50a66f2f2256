"""Plans a batch of reads: merges neighbouring ranges and alternates between storage nodes. Pure.

The patent on prefetch caches keeps one list of reads for each storage node, in the order in which they are
needed, and requests several samples of a node at once. Here one request reads from one object, and
requests alternate between the nodes' lists, so that all nodes work at once and none gets a burst.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch_dpflow.datasets.storage.base import ByteRange

#: Most bytes of a merged range: a lost connection must not cost much.
LONGEST_MERGED = 8 << 20
#: The same for local files, where a read costs some microseconds, as does the copy that cuts 64 KiB out of another.
#: With it a pack's samples of 100 kB in random batches of 64 take 30 µs each, before 40.
LONGEST_MERGED_LOCALLY = 64 << 10
#: Bytes between ranges of a local file that are worth reading for one read less.
LOCAL_MERGE_GAP = 4 << 10


@dataclass(frozen=True)
class Read:
    """One request, and the wanted ranges that it covers."""

    span: ByteRange
    #: positions of the wanted ranges
    answers: list[int] = field(default_factory=list)

    def cut(self, wanted: ByteRange, data: bytes) -> bytes:
        """The part of this read's `data` that is `wanted`."""
        if wanted == self.span or wanted.stop is None:
            return data
        begin = wanted.start - self.span.start
        return data[begin : begin + wanted.stop - wanted.start]


def plan_reads(
    wanted: Sequence[ByteRange],
    *,
    node: Callable[[str], str],
    merge_gap: int,
    longest: int = LONGEST_MERGED,
) -> list[Read]:
    """The requests for all of `wanted`, in the order in which they should be started.

    Ranges of one object which are at most `merge_gap` bytes apart are merged into a request of up to `longest` bytes;
    overlapping ones always are.
    """
    by_object: dict[str, list[int]] = defaultdict(list)
    for position, span in enumerate(wanted):
        by_object[span.url].append(position)
    by_node: dict[str, deque[Read]] = defaultdict(deque)
    for url, positions in by_object.items():
        by_node[node(url)].extend(_reads_of_object(wanted, positions, merge_gap, longest))
    return _alternated(list(by_node.values()))


def _reads_of_object(
    wanted: Sequence[ByteRange], positions: list[int], merge_gap: int, longest: int
) -> list[Read]:
    if len(positions) == 1:
        return [Read(wanted[positions[0]], positions)]
    to_the_end = [position for position in positions if wanted[position].stop is None]
    bounded = [position for position in positions if wanted[position].stop is not None]
    return _equal_as_one(wanted, to_the_end) + _close_as_one(wanted, bounded, merge_gap, longest)


def _equal_as_one(wanted: Sequence[ByteRange], positions: list[int]) -> list[Read]:
    reads: dict[ByteRange, Read] = {}
    for position in positions:
        reads.setdefault(wanted[position], Read(wanted[position])).answers.append(position)
    return list(reads.values())


def _close_as_one(
    wanted: Sequence[ByteRange], positions: list[int], merge_gap: int, longest: int
) -> list[Read]:
    reads: list[Read] = []
    for position in sorted(positions, key=lambda position: wanted[position].start):
        span = wanted[position]
        merged = _joined(reads[-1].span, span, merge_gap, longest) if reads else None
        if merged is None:
            reads.append(Read(span, [position]))
        else:
            reads[-1] = Read(merged, [*reads[-1].answers, position])
    return reads


def _joined(one: ByteRange, other: ByteRange, merge_gap: int, longest: int) -> ByteRange | None:
    """Both ranges as one, if they are close; `other` does not begin before `one`."""
    assert one.stop is not None
    assert other.stop is not None
    stop = max(one.stop, other.stop)
    if other.start > one.stop + merge_gap or (stop - one.start > longest and other.start >= one.stop):
        return None
    return ByteRange(one.url, one.start, stop, one.size, one.revision)


def _alternated(lists: list[deque[Read]]) -> list[Read]:
    reads: list[Read] = []
    while lists:
        reads.extend(waiting.popleft() for waiting in lists)
        lists = [waiting for waiting in lists if waiting]
    return reads
