"""The files of a table: Parquet or Arrow, one by one, in a directory, or as HuggingFace's `save_to_disk` wrote them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence

from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.importers.sources import SourceFile, SourceFiles
from torch_dpflow.datasets.importers.splits import check_no_split_folders, files_of_split
from torch_dpflow.datasets.storage.urls import printable_url, split_name
from torch_dpflow.errors import OptionError, SourceError

_PARQUET, _ARROW = (".parquet", ".pq", ".parq"), (".arrow", ".feather", ".ipc")
#: Names of files of a table in a directory.
_NAMES = re.compile(rf"[^_.].*({'|'.join(map(re.escape, _PARQUET + _ARROW))})", re.IGNORECASE | re.DOTALL)
#: HuggingFace's list of the files of a dataset, and its mark of a directory of several.
_STATE, _SPLITS = "state.json", "dataset_dict.json"
#: Beginnings and endings of files that writers and hubs put next to a table: marks, checksums, descriptions.
_BESIDE = ("_", "."), (".json", ".md", ".txt", ".yaml", ".yml", ".crc", ".md5", ".sha1", ".sha256", ".sha512")


def is_parquet(file: SourceFile) -> bool:
    """Return whether a table's file is Parquet and not Arrow, by its name."""
    return _name_of(file.url).endswith(_PARQUET)


def _name_of(url: str) -> str:
    """Return the last part of a path or URL in lower case; of a web address without its query."""
    is_web = url.startswith(("http://", "https://"))
    return split_name(url.partition("?")[0] if is_web else url)[1].lower()


def are_tables(names: Sequence[str]) -> bool:
    """Return whether names are a table's: Parquet or Arrow files and files like README.md, or `dataset_dict.json`."""
    if _SPLITS in names:
        return True
    begin, end = _BESIDE
    others = [name for name in names if not name.lower().endswith(_PARQUET + _ARROW)]
    return len(others) < len(names) and all(
        name.startswith(begin) or name.lower().endswith(end) or name == "LICENSE" for name in others
    )


def find_tables(found: SourceFiles, split: str | None) -> list[SourceFile]:
    """Return the files of a table, in order.

    Args:
        split: the split of a directory to read; None if the directory has only one.

    Raises:
        OptionError: there is no such split, or a split is given for a source that is not a directory.
        SourceError: a file is not named like Parquet or Arrow; a directory is no complete table, or has several splits.
    """
    if found.is_directory:
        below = None if split is None else found.of_folder(split)
        return _in_directory(found, split) if below is None else _in_directory(below, None)
    if split is not None:
        raise OptionError(f"split={split!r} chooses files of a directory; give the directory, or the split's files")
    for file in found.files:
        if not _name_of(file.url).endswith(_PARQUET + _ARROW):
            raise SourceError(f"{file.printable} is no table by its name; give {', '.join(_PARQUET + _ARROW)} files")
    return found.files


def _in_directory(found: SourceFiles, split: str | None) -> list[SourceFile]:
    shown, by_name = printable_url(found.given), dict(zip(found.names, found.files, strict=True))
    folders = [name for name in found.folders if not name.startswith("_")]
    if _SPLITS in by_name and folders:
        raise SourceError(
            f"{shown} has several datasets, {folders}; give one of them, as {shown}/{folders[0]}, or split="
        )
    if _STATE in by_name:
        names = _names_in_state(Files(found.given, found.options, found.read_options))
        missing = [name for name in names if name not in by_name]
        if missing:
            raise SourceError(f"{shown}/{_STATE} names {missing}, which are not there; restore them")
    elif folders:
        check_no_split_folders(folders, shown)
        raise SourceError(f"{shown} has directories, such as {folders[0]!r}; give one of them, or a list of files")
    else:
        names = files_of_split(found.only(_NAMES).names, split, shown)
    endings = {name.lower().endswith(_PARQUET) for name in names}
    if len(endings) != 1:
        raise SourceError(f"{shown} has {'both Parquet and Arrow' if endings else 'no Parquet or Arrow'} files")
    return [by_name[name] for name in names]


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
