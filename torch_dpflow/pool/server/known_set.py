"""What the head of a pool knows of one set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from torch_dpflow.errors import UsageError
from torch_dpflow.pool.messages.protocol import ArraySource, PoolRefusal, PreloadSet, SetInfo
from torch_dpflow.pool.messages.server_messages import ALL_FAILED, SetPart, SetState
from torch_dpflow.pool.planning.residents import ALL, cut_that_fits
from torch_dpflow.pool.planning.sets import FileSet
from torch_dpflow.pool.planning.stripe_table import StripeTable
from torch_dpflow.pool.server.filling import HeldSet
from torch_dpflow.pool.sources.set_names import samples_in

#: What the index of a region has for each stripe and each record.
_INDEX_BYTES = 16
#: How long a refusal is kept for whoever has asked, and asks again a few times a second: seconds.
_REFUSAL_S = 2.0


@dataclass(eq=False)
class KnownSet:
    """A set from when it is first asked for."""

    request: PreloadSet
    is_explicit: bool
    #: Whether somebody wants all of it or nothing.
    whole: bool
    #: None while its metadata is read.
    held: HeldSet | None = None
    #: Of what members hold, if they do.
    cut: int = ALL
    #: What members hold of it, by their names, that have said so meanwhile.
    returned: dict[str, list[int]] = field(default_factory=dict)
    #: Why it is not held, for whoever asks next; and since when.
    refusal: PoolRefusal | None = None
    refused_at: float = 0.0
    #: Samples that readers have got from memory, and from storage.
    hits: int = 0
    misses: int = 0
    #: Whether it was unloaded, and stays for a further version that shares its memory.
    is_unloaded: bool = False
    #: The older version whose memory this one shares; empty: none.
    base: bytes = b""

    def __post_init__(self) -> None:
        if self.pushed is not None:
            self.base = self.pushed.base

    @property
    def pushed(self) -> ArraySource | None:
        """What opens it, where clients push it."""
        source = self.request.source
        return source if isinstance(source, ArraySource) and source.is_pushed else None

    def take_back(self, server: str, report: SetPart) -> bool:
        """A member has come back with a part of it; whether that is of the part that is held."""
        cut = self.held.cut if self.held is not None else self.cut if self.returned else report.cut
        if report.cut == cut and self.held is None:
            self.cut = cut
            self.returned.setdefault(server, []).extend(report.stripes)
        return report.cut == cut

    def info(self) -> SetInfo:
        """What is known without asking anybody."""
        return SetInfo(
            identity=self.request.identity,
            ref=self.request.source.ref,
            url="not opened yet" if self.held is None else self.held.url,
            is_explicit=self.is_explicit,
            hits=self.hits,
            misses=self.misses,
            pushed=self.pushed,
        )

    def progress(self, held: HeldSet, table: StripeTable, states: Mapping[str, SetState]) -> SetInfo:
        """How far it is over all of its servers, as people and clients are told.

        states: what servers have said last, of their copies too; without those that have not heard of all of their
            stripes yet.
        """
        records, samples = held.records, partial(samples_in, held.source)
        placed = {name: held.placed_in(stripes) for name, stripes in table.owned().items()}
        told = {name: states[name] for name in placed if name in states}
        failed = [placed[name] if one.failed == ALL_FAILED else one.failed for name, one in told.items()]
        loaded = [one.loaded - held.placed_in(table.copies.get(name, ())) for name, one in told.items()]
        return msgspec.structs.replace(
            self.info(),
            records=samples(records.records),
            placed=samples(sum(placed.values())),
            loaded=samples(sum(max(0, one) for one in loaded)),
            failed=samples(sum(failed)),
            reserved_bytes=table.placed_bytes,
            readers=table.readers,
            is_placed=table.is_settled
            and len(told) == len(placed)
            and all(one.is_placed for one in told.values()),
            error=next((one.error for one in told.values() if one.error), ""),
        )

    def is_forgotten(self, now: float) -> bool:
        """Whether it was refused, and whoever asks now asks anew."""
        return self.refusal is not None and now - self.refused_at > _REFUSAL_S

    def order(self, stripes: list[int]) -> SetPart:
        """What has a server hold these."""
        request = self.request
        return SetPart(
            source=request.source,
            identity=request.identity,
            is_explicit=self.is_explicit,
            cut=ALL if self.held is None else self.held.cut,
            stripes=stripes,
        )


def check_pushed_set(request: PreloadSet, others: Iterable[KnownSet]) -> None:
    """Raises UsageError: a set that nobody has pushed is asked for, or another has its name."""
    source = request.source
    if not isinstance(source, ArraySource) or not source.is_pushed:
        return
    if not request.is_explicit:
        raise UsageError(
            f"{source.ref} is not in this pool: its server was lost, or it was unloaded; push it again"
        )
    pushed = [one.pushed for one in others if not one.is_unloaded]
    if any(one is not None and one.ref == source.ref for one in pushed):
        raise UsageError(
            f"{source.ref} is in the pool with another content; push or append under another version, or unload it"
        )


def cut_in(records: FileSet, rooms: list[int]) -> int:
    """The cut with as many records as have room in servers that have so many bytes each."""
    room = sum(rooms) - _index_bytes(records.stripes, records.records)
    return cut_that_fits(records, room, max(rooms) - _index_bytes(1, len(records.records_of(0))))


def stripe_bytes(records: FileSet) -> list[int]:
    """What each stripe takes in a region."""
    return [
        records.stripe_bytes(stripe) + _index_bytes(1, len(records.records_of(stripe)))
        for stripe in range(records.stripes)
    ]


def _index_bytes(stripes: int, records: int) -> int:
    """What the index of so many takes in regions."""
    return _INDEX_BYTES * (stripes + records)
