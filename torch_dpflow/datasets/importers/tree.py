"""Lists trees of files on any storage."""

from __future__ import annotations

from typing import NamedTuple

from torch_dpflow.datasets.files import Files
from torch_dpflow.errors import SourceError


class FoundFile(NamedTuple):
    """A file of a tree."""

    #: Relative to the root that was listed.
    path: str
    #: bytes; None where the storage does not say
    size: int | None


def check_folder(files: Files) -> None:
    """Raise SourceError unless there is such a folder; on object stores one that is empty does not exist."""
    if not files.exists(""):
        raise SourceError(
            f"there is no folder {files.url}; check the source's path, and on object stores the right to list it"
        )


def files_below(files: Files, folder: str) -> list[FoundFile]:
    """All files below `folder` but hidden ones, sorted by directory and then by name, as torchvision does."""
    found: list[tuple[str, FoundFile]] = []
    pending = [folder]
    while pending:
        directory = pending.pop()
        for child in files.children(directory):
            path = f"{directory}/{child.name}"
            if child.is_directory:
                pending.append(path)
            else:
                found.append((directory, FoundFile(path, child.size)))
    return [file for _, file in sorted(found)]
