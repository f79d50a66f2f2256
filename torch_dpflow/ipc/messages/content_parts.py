"""Comparison of a job's content (pickled dataset and code) with its flow's, by digests of the parts."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, TypeAlias

import msgspec

#: Maximum parts of a content, beyond which small parts are joined; maximum characters of a part's path and text.
MAX_PARTS, MAX_PATH, MAX_SHOWN = 512, 300, 80
#: Maximum number of patterns of parts to ignore.
MAX_IGNORED = 64
#: Maximum differences that a message names.
_MAX_NAMED = 6
#: Name of the script's module in the paths of parts.
SCRIPT_PART = "__main__"
#: `PartDigest.text` of a random generator, whose state changes with each number that is drawn.
RANDOM_STATE = "state of a generator"


class PartDigest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Digest of one part, such as the variable `train.args.lr`."""

    #: Digest of the part with everything inside it; 16 hexadecimal digits.
    digest: Annotated[str, msgspec.Meta(max_length=64)]
    #: Digest of the part without the inner parts that have a separate `PartDigest`; empty if no inner part has one.
    own: Annotated[str, msgspec.Meta(max_length=64)] = ""
    #: For messages: the value, if it is short, or its kind.
    text: Annotated[str, msgspec.Meta(max_length=MAX_SHOWN)] = ""
    #: Whether another content may lack this part, because it is derived from other parts when it is first read.
    optional: bool = False


PartName: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATH)]
Pattern: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATH)]
ContentParts: TypeAlias = Annotated[dict[PartName, PartDigest], msgspec.Meta(max_length=MAX_PARTS)]


def differences(
    here: Mapping[str, PartDigest], there: Mapping[str, PartDigest], ignore: Sequence[str]
) -> dict[str, str]:
    """Return the differing parts by path, each with a description such as "0.1 here, 0.01 in the flow".

    Left out are parts inside a listed part, and parts that one side has joined to the part that contains them.

    here, there: digests of this job's content, and of the flow's content, by path of the part.
    ignore: patterns of the paths of parts to leave out; see `is_ignored`.
    """
    found: dict[str, str] = {}
    unexplained: list[str] = []
    paths = sorted({*here, *there})
    ignored = {path for path in paths if is_ignored(path, ignore)}
    for path in paths:
        if path in ignored or any(above in found for above in above_of(path)):
            continue
        mine, other = here.get(path), there.get(path)
        if mine is None or other is None:
            if _counts_alone(path, here, there):
                found[path] = "not in the flow" if other is None else "only in the flow"
        elif mine.digest != other.digest:
            if mine.own and mine.own == other.own:
                unexplained.append(path)
            else:
                found[path] = _texts(mine.text, other.text)
    for path in unexplained:  # by the parts below, unless these do not count
        if not any(path in above_of(below) for below in (*found, *ignored)):
            found[path] = "other content"
    return found


def is_ignored(path: str, ignore: Iterable[str]) -> bool:
    """Return whether a pattern matches the path of this part, or of a part that contains it.

    `*` and `?` are wildcards, as in shell patterns.
    """
    patterns = [*ignore]
    return bool(patterns) and any(
        one == pattern or fnmatch.fnmatchcase(one, pattern.replace("[", "[[]"))  # as in config['lr']
        for one in (path, *above_of(path))
        for pattern in patterns
    )


def describe_differences(found: Mapping[str, str], script: str) -> str:
    """Return the differences as text for an error. script: the name of the user's script."""
    named = [f"{shown(path, script)}: {text}" for path, text in found.items()]
    if len(named) > _MAX_NAMED:
        named[_MAX_NAMED:] = [f"{len(named) - _MAX_NAMED} more"]
    return "; ".join(named)


def ignoring(found: Iterable[str], script: str) -> str:
    """Return source code for an error: `JobOptions(ignore=[...])` with these parts. script: the user's script."""
    return f"JobOptions(ignore={[shown(path, script) for path in [*found][:MAX_IGNORED]]})"


def shown(path: str, script: str) -> str:
    """Return the path of a part for display, with the name `script` in place of a leading "__main__"."""
    return f"{script}{path[len(SCRIPT_PART) :]}" if path.startswith(f"{SCRIPT_PART}.") else path


def _counts_alone(path: str, here: Mapping[str, PartDigest], there: Mapping[str, PartDigest]) -> bool:
    """Return whether to list a part that only one side has; False if the entry of an outer part shows it."""
    part = here.get(path) or there[path]
    if part.optional:
        return False
    for above in above_of(path):
        if above in here and above in there:
            # Joined on one side: the digest above decides.
            return bool(here[above].own and there[above].own)
        if above in here or above in there:
            return False  # the part above is missing too, and is listed
    return True


def above_of(path: str) -> Iterator[str]:
    """Yield the possible paths of the parts that contain this part, the innermost first."""
    for at in range(len(path) - 1, 0, -1):
        if path[at] in ".[(":
            yield path[:at]


def _texts(here: str, there: str) -> str:
    return f"{here} here, {there} in the flow" if here != there else f"other {here or 'content'}"
