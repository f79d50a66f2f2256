"""What the head of a pool asks of sets that clients push."""

from __future__ import annotations

from collections.abc import Collection

from torch_dpflow.dataservice.messages.protocol import ArraySource, PreloadSet
from torch_dpflow.dataservice.server.known_set import KnownSet
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
