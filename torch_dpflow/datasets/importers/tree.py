"""Lists trees of files on any storage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch_dpflow.datasets.files import Files
from torch_dpflow.errors import OptionError, SourceError


class FoundFile(NamedTuple):
    """A file of a tree."""

    #: Relative to the listed root.
    path: str
    #: bytes; None if the storage does not report it
    size: int | None
    #: see `Item`
    revision: str | None = None


def check_folder(files: Files) -> None:
    """Raise SourceError unless the folder exists; on object stores an empty one does not."""
    if not files.exists(""):
        raise SourceError(
            f"there is no folder {files.url}; check the source's path, and on object stores the right to list it"
        )


def files_below(files: Files, folder: str) -> list[FoundFile]:
    """All files below `folder` but hidden ones, sorted by directory and then by name, as torchvision does.

    Links to directories are followed, except those to a directory that contains them.
    """
    found: list[tuple[str, FoundFile]] = []
    pending = [(folder, frozenset({files.real(folder)}))]
    while pending:
        directory, above = pending.pop()
        for child in files.children(directory, all_keys=True):
            path = f"{directory}/{child.name}"
            if not child.is_directory:
                found.append((directory, FoundFile(path, child.size, child.revision)))
            elif (real := files.real(path)) not in above:
                pending.append((path, above | {real}))
    found.sort(key=lambda one: (files.label(one[0]), files.label(one[1].path)))
    return [file for _, file in found]


def check_links(files: Files, found: Iterable[FoundFile]) -> None:
    """Raise SourceError for a broken link: ignoring it would hide that its file is lost.

    Raises StorageError for a pipe, socket or device.
    """
    for file in found:
        if not file.size:
            files.check_regular(file.path)
        if not file.size and not files.exists(file.path):
            raise SourceError(
                f"{files.url}/{file.path} is a link that leads nowhere; restore the file that it names, or remove it"
            )


def endings_of(endings: Sequence[str]) -> tuple[str, ...]:
    """Endings of files in lower case, each with its dot. Raises OptionError if one is empty."""
    found = tuple(f".{ending.strip().lower().removeprefix('.')}" for ending in endings)
    if not found or "." in found:
        raise OptionError(f"endings={endings!r}: give endings such as .jpg,.png")
    return found
