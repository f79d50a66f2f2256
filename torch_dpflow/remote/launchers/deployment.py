"""Steps of `dpflow deploy` that platforms share: compare existing with wanted settings, and report changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch_dpflow.errors import DeniedError

_T = TypeVar("_T")


def existing(read: Callable[[], _T], *, dry_run: bool) -> tuple[_T | None, list[str]]:
    """Return (result of `read`, []), or (None, [line with the reason]) if `read` raises DeniedError in a dry run."""
    try:
        return read(), []
    except DeniedError as error:
        if not dry_run:
            raise
        return None, [f"the existing state is unknown: {error}"]


def changes(
    place: str, there: Mapping[str, Any] | None, wanted: Mapping[str, Any], unknown: Sequence[str], *, dry_run: bool
) -> Iterator[str]:
    """Yield lines of text on how a function changes, or would change in a dry run. Changes nothing.

    place: name of the function. there: its present settings; None if it does not exist. wanted: its new settings.
    unknown: lines from `existing`, which are yielded first.
    """
    yield from unknown
    done = "created, or changed where it differs" if unknown else "created" if there is None else "changed"
    yield f"{place} {'would be ' if dry_run else ''}{done}:"
    yield from [*_differences(there or {}, wanted)] or ["  nothing differs"]


def removal(
    place: str, read: Callable[[], object | None], delete: Callable[[], None], *, dry_run: bool
) -> Iterator[str]:
    """Call `delete`, except in a dry run, if the result of `read` is not None; yield each step as a line of text."""
    there, unknown = existing(read, dry_run=dry_run)
    yield from unknown
    if there is None and not unknown:
        yield f"there is no {place}"
        return
    if not dry_run:
        delete()
    yield f"{place} {'would be ' if dry_run else ''}removed"


def _differences(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    for key, value in wanted.items():
        old = there.get(key)
        if isinstance(value, dict) and isinstance(old, Mapping):  # platforms add fields
            old = {name: old.get(name) for name in value}
        if old != value and (old or not isinstance(value, dict) or any(value.values())):
            yield f"  {key}: {value}" if old is None else f"  {key}: {old} -> {value}"
