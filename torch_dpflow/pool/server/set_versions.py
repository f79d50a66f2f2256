"""Versions of a set that share the memory of what they have in common."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from torch_dpflow.errors import UsageError
from torch_dpflow.pool.messages.protocol import ArraySource, PreloadSet
from torch_dpflow.pool.planning.keeper_machine import KeeperMachine
from torch_dpflow.pool.server.filling import HeldSet
from torch_dpflow.pool.server.holdings import Holdings
from torch_dpflow.pool.server.known_set import KnownSet, stripe_bytes
from torch_dpflow.pool.sources.arrays import array_set
from torch_dpflow.pool.sources.set_names import OpenedSource


class SharedStripes(NamedTuple):
    """The first stripes of a version, as many as a further one has too."""

    older: HeldSet
    stripes: int

    @property
    def base(self) -> bytes:
        """The older version's name."""
        return self.older.records.identity


def find_base(
    known: KnownSet, opened: OpenedSource, holdings: Holdings, keeper: KeeperMachine
) -> SharedStripes | None:
    """What a set shares with an older version; one that does fits as a whole, or is wanted so.

    Stored datasets do where the pool has one server: elsewhere each version's stripes have owners of their own.

    Raises UsageError: the older version of a pushed array is not here, or of another form.
    """
    if known.pushed is not None:
        return _pushed_base(known.request, holdings)
    if known.returned or len(keeper.servers()) > 1:
        return None
    base = _stored_base(opened, holdings)
    if base is None or known.whole:
        return base
    rest = sum(stripe_bytes(opened.records)[base.stripes :])
    return base if rest <= sum(keeper.rooms(base.base)) else None


def _pushed_base(request: PreloadSet, holdings: Holdings) -> SharedStripes | None:
    source = request.source
    if not isinstance(source, ArraySource) or not source.base:
        return None
    older = holdings.get(source.base)
    its = older.source
    if (
        not isinstance(its, ArraySource)
        or (its.dtype, its.shape[1:]) != (source.dtype, source.shape[1:])
        or source.shared > min(its.shape[0], source.shape[0]) // array_set(source).per_stripe
    ):
        raise UsageError(f"{source.ref} is no further version of {its.ref}; append to what it continues")
    return SharedStripes(older, source.shared)


def _stored_base(opened: OpenedSource, holdings: Holdings) -> SharedStripes | None:
    """The version of a stored dataset that has the most of another's first stripes in memory."""
    found = [SharedStripes(one, _common(opened, one)) for one in holdings.all() if not one.is_part]
    best = max(found, key=lambda one: one.stripes, default=None)
    return best if best is not None and best.stripes else None


def _common(opened: OpenedSource, older: HeldSet) -> int:
    if opened.records.per_stripe != older.records.per_stripe:
        return 0
    equal = itertools.takewhile(lambda parts: parts[0] == parts[1], zip(opened.parts, older.parts))
    return min(older.leading, sum(1 for _ in equal))


def droppable(sets: Mapping[bytes, KnownSet]) -> bytes | None:
    """A set that was unloaded, and whose memory no further version shares."""
    bases = {one.base for one in sets.values()}
    free = (name for name, one in sets.items() if one.is_unloaded and one.held and name not in bases)
    return next(free, None)
