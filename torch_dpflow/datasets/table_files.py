"""The files of a table: Parquet or Arrow, one by one, in a directory, or as HuggingFace's `save_to_disk` wrote them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch_dpflow._core.checks import check_type
from torch_dpflow.datasets.files import DirectoryEntry, Files
from torch_dpflow.datasets.importers.splits import check_no_log, files_of_split, folder_of_split
from torch_dpflow.datasets.storage import ReadOptions
from torch_dpflow.datasets.storage.states import state_of_file
from torch_dpflow.datasets.storage.urls import join_url, split_name, without_login
from torch_dpflow.errors import ChecksumError, OptionError, SourceError

_PARQUET, _ARROW = (".parquet", ".pq", ".parq"), (".arrow", ".feather", ".ipc")
#: HuggingFace's list of the files of a dataset, and its mark of a directory of several.
_STATE, _SPLITS = "state.json", "dataset_dict.json"
#: Beginnings and endings of files that writers and hubs lay beside a table: marks, checksums, descriptions.
_BESIDE = ("_", "."), (".json", ".md", ".txt", ".yaml", ".yml", ".crc")


@dataclass(frozen=True)
class TableFile:
    """One file of a table, as it was when the table was opened."""

    url: str
    is_parquet: bool
    #: Bytes, and the state of the object, see `storage.states`; None: unknown.
    size: int | None
    state: str | None

    def path(self) -> str | None:
        """Return the path of a local file."""
        return self.url.removeprefix("file://") if self.url.startswith("file://") else None

    def check_unchanged(self) -> None:
        """Raise ChecksumError if a local file was written again. Storages check the state themselves."""
        path = self.path()
        if path is not None and local_state(path) != (self.size, self.state):
            raise ChecksumError(f"{path} was written again after it was opened; open the dataset again")


def are_tables(names: Sequence[str]) -> bool:
    """Return whether files are of a table, by their names."""
    if _SPLITS in names:
        return True
    begin, end = _BESIDE
    others = [name for name in names if not name.lower().endswith(_PARQUET + _ARROW)]
    return len(others) < len(names) and all(
        name.startswith(begin) or name.lower().endswith(end) or name == "LICENSE" for name in others
    )


def find_tables(
    url: Any, storage_options: Mapping[str, Any], read_options: ReadOptions, split: str | None = None
) -> list[TableFile]:
    """Return the files of a table, in order. Each directory is listed once.

    Args:
        split: which files of a directory; None: it has those of one split.

    Raises:
        OptionError: a directory has no such split.
        SourceError: a file is missing, or a directory is no table, or one of several splits.
    """
    if split is not None and not isinstance(url, str | os.PathLike):
        raise OptionError(f"split={split!r} chooses files of one directory; give the files of the split")
    urls = [url] if isinstance(url, str | os.PathLike) else url
    check_type("url", urls, Sequence, "a path, a URL, or a list of files")
    if not urls:
        raise OptionError("url=[]: give at least one file")
    listed: dict[str, tuple[Files, dict[str, DirectoryEntry]]] = {}
    found: list[TableFile] = []
    for one in map(os.fspath, urls):
        folder, name = split_name(one)
        if not name.lower().endswith(_PARQUET + _ARROW):
            found += _in_directory(Files(one, storage_options, read_options), split)
            continue
        if folder not in listed:
            files = Files(folder or ".", storage_options, read_options)
            listed[folder] = files, {entry.name: entry for entry in files.children()}
        found += _named(*listed[folder], name, split)
    return found


def _named(files: Files, entries: Mapping[str, DirectoryEntry], name: str, split: str | None) -> list[TableFile]:
    """Return the file of this name, or those of the directory of this name, as Spark writes it."""
    if name not in entries:
        raise SourceError(f"there is no {without_login(join_url(files.url, name))}; check the path")
    if entries[name].is_directory:
        return _in_directory(files.at(name), split)
    if split is not None:
        raise OptionError(f"split={split!r} chooses files of a directory, and {name} is one file; leave it out")
    return [_described(files, entries[name])]


def _in_directory(files: Files, split: str | None) -> list[TableFile]:
    entries = {entry.name: entry for entry in files.children(hidden=True)}
    shown = without_login(files.url)
    check_no_log(entries, shown)
    folders = [name for name, entry in entries.items() if entry.is_directory and not name.startswith(("_", "."))]
    folder = None if split is None else folder_of_split(folders, split)
    if folder is not None:
        return _in_directory(files.at(folder), None)
    if _SPLITS in entries:
        raise SourceError(
            f"{shown} has several datasets, {folders}; give one of them, as {shown}/{folders[0]}, or split="
        )
    if _STATE in entries:
        names = _names_in_state(files)
        missing = [name for name in names if name not in entries]
        if missing:
            raise SourceError(f"{shown}/{_STATE} names {missing}, which are not there; restore them")
    elif folders:
        raise SourceError(f"{shown} has directories, such as {folders[0]!r}; give one of them, or a list of files")
    else:
        names = [name for name in entries if name.lower().endswith(_PARQUET + _ARROW) and name[0] not in "_."]
        names = files_of_split(names, split, shown)
    endings = {name.lower().endswith(_PARQUET) for name in names}
    if len(endings) != 1:
        raise SourceError(f"{shown} has {'both Parquet and Arrow' if endings else 'no Parquet or Arrow'} files")
    return [_described(files, entries[name]) for name in names]


def _names_in_state(files: Files) -> list[str]:
    """Return the files of a directory that HuggingFace's `save_to_disk` wrote."""
    try:
        state = json.loads(files.read(_STATE))
        names = [entry["filename"] for entry in state["_data_files"]]
        if not all(isinstance(name, str) and "/" not in name for name in names):
            raise ValueError("it names files of other directories")
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{without_login(files.url)}/{_STATE} is damaged: {error!r}") from error
    return names


def _described(files: Files, entry: DirectoryEntry) -> TableFile:
    url = join_url(files.url, entry.name)
    is_parquet = entry.name.lower().endswith(_PARQUET)
    if url.startswith("file://"):
        return TableFile(url, is_parquet, *local_state(url.removeprefix("file://")))
    return TableFile(url, is_parquet, entry.size, entry.state)


def local_state(path: str) -> tuple[int, str]:
    """Return the size of a local file, and its state: another one after each write. Raises SourceError."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error}") from error
    return found.st_size, state_of_file(found)
