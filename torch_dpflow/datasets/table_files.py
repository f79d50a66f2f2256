"""The files of a table: Parquet or Arrow, one by one, in a directory, or as HuggingFace's `save_to_disk` wrote them."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch_dpflow._core.checks import check_type
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.importers.sources import SourceFile, local_name, named_files, source_file
from torch_dpflow.datasets.importers.splits import (
    check_no_log,
    check_no_log_above,
    check_no_split_folders,
    files_of_split,
    folder_of_split,
)
from torch_dpflow.datasets.storage import ReadOptions
from torch_dpflow.datasets.storage.urls import printable_url, split_name
from torch_dpflow.errors import OptionError, SourceError

_PARQUET, _ARROW = (".parquet", ".pq", ".parq"), (".arrow", ".feather", ".ipc")
#: HuggingFace's list of the files of a dataset, and its mark of a directory of several.
_STATE, _SPLITS = "state.json", "dataset_dict.json"
#: Beginnings and endings of files that writers and hubs put next to a table: marks, checksums, descriptions.
_BESIDE = ("_", "."), (".json", ".md", ".txt", ".yaml", ".yml", ".crc", ".md5", ".sha1", ".sha256", ".sha512")


def is_parquet(file: SourceFile) -> bool:
    """Return whether a file is Parquet, by its name; else it is Arrow."""
    return _name_of(file.url).endswith(_PARQUET)


def _name_of(url: str) -> str:
    """Return the last part of a path or URL in lower case; of a web address without its query."""
    is_web = url.startswith(("http://", "https://"))
    return split_name(url.partition("?")[0] if is_web else url)[1].lower()


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
) -> list[SourceFile]:
    """Return the files of a table, in order. Each directory is listed once.

    Args:
        split: the split whose files of a directory are read; None: the directory has only one.

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
    texts = [local_name(os.fspath(one)) for one in urls]
    folders = {text for text in texts if not _name_of(text).endswith(_PARQUET + _ARROW) or _is_directory(text)}
    try:
        named = named_files([text for text in texts if text not in folders], storage_options, read_options)
    except SourceError:
        # Spark gives a directory the name of a file. An object store shows it by what is below it.
        may_be_directory = len(texts) == 1 and not texts[0].startswith(("file://", "http://", "https://"))
        if not may_be_directory or not Files(texts[0], storage_options, read_options).children():
            raise
        named, folders = {}, {*texts}
    if split is not None and not folders:
        raise OptionError(f"split={split!r} chooses files of a directory, and {texts[0]} is one file; leave it out")
    found: list[SourceFile] = []
    for text in texts:
        if text in folders:
            found += _in_directory(Files(text, storage_options, read_options), split)
        else:
            found.append(named[text])
    return found


def _is_directory(text: str) -> bool:
    return text.startswith("file://") and os.path.isdir(text.removeprefix("file://"))


def _in_directory(files: Files, split: str | None) -> list[SourceFile]:
    entries = {entry.name: entry for entry in files.children(hidden=True)}
    shown = printable_url(files.url)
    check_no_log(files, entries)
    check_no_log_above(files)
    folders = [name for name, entry in entries.items() if entry.is_directory and not name.startswith(("_", "."))]
    folder = None if split is None else folder_of_split(folders, split, [*{*entries} - {*folders}])
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
        check_no_split_folders(folders, shown)
        raise SourceError(f"{shown} has directories, such as {folders[0]!r}; give one of them, or a list of files")
    else:
        names = [name for name in entries if name.lower().endswith(_PARQUET + _ARROW) and name[0] not in "_."]
        names = files_of_split(names, split, shown)
    endings = {name.lower().endswith(_PARQUET) for name in names}
    if len(endings) != 1:
        raise SourceError(f"{shown} has {'both Parquet and Arrow' if endings else 'no Parquet or Arrow'} files")
    return [source_file(files.url, entries[name]) for name in names]


def _names_in_state(files: Files) -> list[str]:
    """Return the files of a directory that HuggingFace's `save_to_disk` wrote."""
    try:
        state = json.loads(files.read(_STATE))
        names = [entry["filename"] for entry in state["_data_files"]]
        if not all(isinstance(name, str) and "/" not in name for name in names):
            raise ValueError("it names files of other directories")
        if len({*names}) < len(names):
            raise ValueError(f"it names {Counter(names).most_common(1)[0][0]!r} twice; name each file once")
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{printable_url(files.url)}/{_STATE} is damaged: {error!r}") from error
    return names
