"""State of a pool's leader: its followers, and each dataset. Not thread-safe."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from torch_dpflow.errors import PeerLostError, UsageError
from torch_dpflow.log import SERVICE
from torch_dpflow.pool.array_files import array_layout
from torch_dpflow.pool.messages import (
    ALL_FAILED,
    ArraySource,
    CachedDataset,
    DatasetPart,
    DatasetState,
    DropDataset,
    FollowerHeartbeat,
    Instructions,
    PoolRefusal,
    PreloadDataset,
    ServerInfo,
)
from torch_dpflow.pool.planning.allocator import AllocatedDataset, StripeAllocator
from torch_dpflow.pool.planning.layout import ALL, SampleLayout, cut_that_fits
from torch_dpflow.pool.server.held_dataset import HeldDataset
from torch_dpflow.pool.server.holdings import Holdings
from torch_dpflow.pool.sources import OpenedSource, samples_in

#: Maximum servers of a pool.
MAX_SERVERS = 100
#: File in the leader's directory while it has followers: the next leader waits for them.
_FILE = "followers"


@dataclass(eq=False)
class FollowerRecord:
    """Leader's record of one follower: unsent instructions, and reported states of its datasets."""

    info: ServerInfo
    generation: int
    #: Instructions that were not sent yet.
    instructions: list[DatasetPart | DropDataset] = field(default_factory=list)
    #: The last reported state of each dataset, if it reflects all instructions for the dataset.
    states: dict[bytes, DatasetState] = field(default_factory=dict)

    def instruct(self, instruction: DatasetPart | DropDataset) -> None:
        self.instructions.append(instruction)
        self.states.pop(instruction.identity, None)

    def take(self, heartbeat: FollowerHeartbeat) -> Iterator[DatasetState]:
        """Record and yield the states in a heartbeat, except for datasets with instructions that were not sent yet."""
        waiting = {one.identity for one in self.instructions}
        for state in heartbeat.states:
            if state.identity not in waiting:
                self.states[state.identity] = state
                yield state

    def next_instructions(self) -> Instructions:
        instructions, self.instructions = self.instructions, []
        return Instructions(instructions)


class Followers(dict[str, FollowerRecord]):
    """All followers of a pool, by name. directory: directory of the leader's socket."""

    def __init__(self, directory: str) -> None:
        self._file = Path(directory, _FILE)
        #: Whether an earlier leader at this address had followers.
        self.had_some = self._file.exists()

    def add(self, info: ServerInfo, generation: int) -> None:
        """Add a follower. Raises UsageError if the pool has `MAX_SERVERS` servers."""
        if len(self) >= MAX_SERVERS - 1 and info.name not in self:
            raise UsageError(f"the pool has {MAX_SERVERS} servers; have it join another one")
        self[info.name] = FollowerRecord(info, generation)
        self._write()
        SERVICE.info("server %s has joined the pool", info.name)

    def living(self, name: str, generation: int) -> FollowerRecord:
        """Return the follower with this name and generation. Raises PeerLostError if it was removed or replaced."""
        follower = self.get(name)
        if follower is None or follower.generation != generation:
            raise PeerLostError(f"server {name} was removed from the pool after its lease expired; it may join again")
        return follower

    def forget(self, lives: Callable[[str, int], bool]) -> None:
        """Remove followers without a lease. lives: returns whether a server's name and generation have a lease."""
        for name, follower in list(self.items()):
            if not lives(name, follower.generation):
                SERVICE.warning("server %s of the pool is lost", name)
                del self[name]
                self._write()

    def infos(self, leader: ServerInfo, rooms: Mapping[str, tuple[int, int]]) -> dict[str, ServerInfo]:
        """Return descriptions of the leader and followers, by name. rooms: total and free bytes of each live server."""
        infos = {leader.name: leader, **{name: follower.info for name, follower in self.items()}}
        return {
            name: msgspec.structs.replace(info, free=rooms[name][1]) for name, info in infos.items() if name in rooms
        }

    def _write(self) -> None:
        if self:
            self._file.write_text("".join(f"{name}\n" for name in self))
        else:
            self._file.unlink(missing_ok=True)


#: Bytes of a segment's index for each stripe and each record.
_INDEX_BYTES = 16
#: How long a refusal is kept for clients that repeat their request, seconds.
_REFUSAL_S = 2.0


@dataclass(eq=False)
class KnownDataset:
    """Leader's record of a dataset that a client has requested, or that a follower reported when it joined."""

    request: PreloadDataset
    is_explicit: bool
    #: Whether a client refuses a partly cached dataset.
    whole: bool
    #: None while its metadata is read.
    held: HeldDataset | None = None
    #: The `cut` (see `layout.resident`) of the stripes in `returned`.
    cut: int = ALL
    #: Stripes that returning followers reported before its metadata was read, by follower.
    returned: dict[str, list[int]] = field(default_factory=dict)
    #: Why the dataset could not be cached, to answer the next request; and when that was found, seconds.
    refusal: PoolRefusal | None = None
    refused_at: float = 0.0
    #: Numbers of samples that readers got from memory, and from storage.
    hits: int = 0
    misses: int = 0
    #: Whether it was unloaded, and stays for a further version that shares its memory.
    is_unloaded: bool = False
    #: Older version whose memory this one shares; empty if none.
    base: bytes = b""

    def __post_init__(self) -> None:
        if self.pushed is not None:
            self.base = self.pushed.base

    @property
    def pushed(self) -> ArraySource | None:
        """Description of the array if clients push it; None for any other dataset."""
        source = self.request.source
        return source if isinstance(source, ArraySource) and source.is_pushed else None

    def take_back(self, server: str, report: DatasetPart) -> bool:
        """Accept the stripes that a server reports; return False if it must drop them, because their `cut` differs."""
        cut = self.held.cut if self.held is not None else self.cut if self.returned else report.cut
        if report.cut == cut and self.held is None:
            self.cut = cut
            self.returned.setdefault(server, []).extend(report.stripes)
        return report.cut == cut

    def info(self) -> CachedDataset:
        """Return the dataset's state without its progress: all counts but `hits` and `misses` are 0."""
        return CachedDataset(
            identity=self.request.identity,
            ref=self.request.source.ref,
            url="not opened yet" if self.held is None else self.held.url,
            is_explicit=self.is_explicit,
            hits=self.hits,
            misses=self.misses,
            pushed=self.pushed,
        )

    def progress(
        self, held: HeldDataset, allocated: AllocatedDataset, states: Mapping[str, DatasetState]
    ) -> CachedDataset:
        """Return the dataset's state with its progress on all servers together.

        states: last reported state of each server that has applied all instructions. A state also counts copies, which
            are subtracted here.
        """
        records, samples = held.records, partial(samples_in, held.source)
        owned = allocated.owned()
        placed = {name: held.placed_in(stripes) for name, stripes in owned.items()}
        reported = {name: states[name] for name in placed if name in states}
        failed = [placed[name] if one.failed == ALL_FAILED else one.failed for name, one in reported.items()]
        copies = {name: allocated.held[name].difference(owned[name]) for name in reported}
        loaded = [one.loaded - held.placed_in(copies[name]) for name, one in reported.items()]
        return msgspec.structs.replace(
            self.info(),
            records=samples(records.records),
            placed=samples(sum(placed.values())),
            loaded=samples(sum(max(0, one) for one in loaded)),
            failed=samples(sum(failed)),
            reserved_bytes=allocated.placed_bytes,
            readers=sum(allocated.readers.values()),
            is_placed=allocated.returns_until is None
            and len(reported) == len(placed)
            and all(one.is_placed for one in reported.values()),
            error=next((one.error for one in reported.values() if one.error), ""),
        )

    def is_forgotten(self, now: float) -> bool:
        """Return whether the dataset was refused so long ago that the next request may try again."""
        return self.refusal is not None and now - self.refused_at > _REFUSAL_S

    def instruction(self, stripes: list[int]) -> DatasetPart:
        request = self.request
        return DatasetPart(
            source=request.source,
            identity=request.identity,
            is_explicit=self.is_explicit,
            cut=ALL if self.held is None else self.held.cut,
            stripes=stripes,
        )


def check_pushed_dataset(request: PreloadDataset, others: Iterable[KnownDataset]) -> None:
    """Raise UsageError if a request for an unknown pushed array is not a push, or another array has its name."""
    source = request.source
    if not isinstance(source, ArraySource) or not source.is_pushed:
        return
    if not request.is_explicit:
        raise UsageError(f"{source.ref} is not in this pool: its server was lost, or it was unloaded; push it again")
    pushed = [one.pushed for one in others if not one.is_unloaded]
    if any(one is not None and one.ref == source.ref for one in pushed):
        raise UsageError(
            f"{source.ref} is in the pool with another content; push or append under another version, or unload it"
        )


def cut_in(records: SampleLayout, rooms: list[int]) -> int:
    """Return the highest `cut` of `layout.resident` whose kept records fit into servers with these free bytes."""
    room = sum(rooms) - _index_bytes(records.stripes, records.records)
    return cut_that_fits(records, room, max(rooms) - _index_bytes(1, len(records.records_of(0))))


def stripe_bytes(records: SampleLayout) -> list[int]:
    return [
        records.stripe_bytes(stripe) + _index_bytes(1, len(records.records_of(stripe)))
        for stripe in range(records.stripes)
    ]


def _index_bytes(stripes: int, records: int) -> int:
    return _INDEX_BYTES * (stripes + records)


class SharedStripes(NamedTuple):
    """The first `stripes` stripes of an older version, whose memory a later version shares."""

    older: HeldDataset
    stripes: int

    @property
    def base(self) -> bytes:
        """Identity of the older version."""
        return self.older.records.identity


def find_base(
    known: KnownDataset, opened: OpenedSource, holdings: Holdings, allocator: StripeAllocator
) -> SharedStripes | None:
    """Return the stripes that a dataset shares with an older version; None if it shares none.

    A pushed array shares the stripes that its source names. A stored dataset shares equal stripes only in a pool of one
    server, because otherwise each version's stripes have separate owners. If the client accepts a partly cached
    dataset, the dataset shares stripes only if all its other stripes fit.

    Raises UsageError if a pushed array's older version is not held here, or the array is no later version of it.
    """
    if known.pushed is not None:
        return _pushed_base(known.request, holdings)
    if known.returned or len(allocator.servers()) > 1:
        return None
    base = _stored_base(opened, holdings)
    if base is None or known.whole:
        return base
    rest = sum(stripe_bytes(opened.records)[base.stripes :])
    return base if rest <= sum(allocator.rooms(base.base)) else None


def _pushed_base(request: PreloadDataset, holdings: Holdings) -> SharedStripes | None:
    source = request.source
    if not isinstance(source, ArraySource) or not source.base:
        return None
    older = holdings.get(source.base)
    its = older.source
    if (
        not isinstance(its, ArraySource)
        or (its.dtype, its.shape[1:]) != (source.dtype, source.shape[1:])
        or source.shared > min(its.shape[0], source.shape[0]) // array_layout(source).per_stripe
    ):
        raise UsageError(f"{source.ref} is no further version of {its.ref}; append to what it continues")
    return SharedStripes(older, source.shared)


def _stored_base(opened: OpenedSource, holdings: Holdings) -> SharedStripes | None:
    """Return the version with the most of the dataset's first stripes in memory."""
    found = [SharedStripes(one, _common(opened, one)) for one in holdings.all() if not one.is_part]
    best = max(found, key=lambda one: one.stripes, default=None)
    return best if best is not None and best.stripes else None


def _common(opened: OpenedSource, older: HeldDataset) -> int:
    if opened.records.per_stripe != older.records.per_stripe:
        return 0
    equal = itertools.takewhile(lambda parts: parts[0] == parts[1], zip(opened.parts, older.parts))
    return min(older.leading, sum(1 for _ in equal))


def droppable(datasets: Mapping[bytes, KnownDataset]) -> bytes | None:
    """Return the identity of an unloaded dataset whose memory no other version shares; None if there is none."""
    bases = {one.base for one in datasets.values()}
    free = (name for name, one in datasets.items() if one.is_unloaded and one.held and name not in bases)
    return next(free, None)
