"""What the head of a pool asks of sets that clients push."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch_dpflow.dataservice.messages.protocol import ArraySource, PreloadSet
from torch_dpflow.dataservice.server.filling import HeldSet
from torch_dpflow.dataservice.server.holdings import Holdings
from torch_dpflow.dataservice.server.known_set import KnownSet
from torch_dpflow.dataservice.sources.arrays import array_set
from torch_dpflow.errors import UsageError


def check_pushed_set(request: PreloadSet, others: Collection[KnownSet]) -> None:
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


def share_with_base(held: HeldSet, holdings: Holdings) -> int:
    """Have a further version share memory with the one that it continues; returns how many stripes.

    Raises UsageError: that is not here, not whole, or of another form.
    """
    source = held.source
    if not isinstance(source, ArraySource) or not source.base:
        return 0
    older = holdings.get(source.base)
    its = older.source
    if (
        not isinstance(its, ArraySource)
        or (its.dtype, its.shape[1:]) != (source.dtype, source.shape[1:])
        or source.shared > min(its.shape[0], source.shape[0]) // array_set(source).per_stripe
    ):
        raise UsageError(f"{source.ref} is no further version of {its.ref}; append to what it continues")
    held.share(older, source.shared)
    return source.shared


def droppable(sets: Mapping[bytes, KnownSet]) -> bytes | None:
    """A set that was unloaded, and whose memory no further version shares."""
    bases = {one.pushed.base for one in sets.values() if one.pushed is not None}
    free = (name for name, one in sets.items() if one.is_unloaded and one.held and name not in bases)
    return next(free, None)
