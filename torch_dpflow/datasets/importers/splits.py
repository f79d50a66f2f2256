"""Splits of a directory, by names of files and subdirectories. Also refuses tables whose log lists the valid files."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain

from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.storage.urls import printable_url, split_chain, split_name
from torch_dpflow.errors import OptionError, SourceError, StorageError

#: Words in names that mean a split, as for HuggingFace's hub, and what they mean.
_WORDS = {
    **dict.fromkeys(("train", "training", "trn"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "tst", "eval", "evaluation"), "test"),
    "trainval": "trainval",
}
#: Endings of such a word: "trainset", "TestSplit".
_ENDINGS = ("set", "split", "data")
_CAMEL = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
#: A file of several: `train-00000-of-00002.parquet`, `train.tfrecord-00000-of-00002`.
_OF = re.compile(r"(.+?)(?:\.tfrecords?|\.tfrec)?[-_.](\d+)[-_]of[-_](\d+)(?!\d).*", re.DOTALL)
#: Files that HuggingFace's `map` and `filter` write into a dataset's directory.
_CACHE = re.compile(r"cache-[0-9a-f]{8,}.*", re.DOTALL)
#: Directories of tables some of whose files are not part of the table: Delta, Hudi, streams of Spark.
_LOGS = {
    "_delta_log": "a Delta table",
    ".hoodie": "a Hudi table",
    ".hoodie_partition_metadata": "a Hudi table",
    "_spark_metadata": "a table of a Spark stream",
}
#: Levels above a directory whose names show no partition, such as "2026/11", where a log is looked for.
_LEVELS = 3
#: Requests that overlap.
_LOOKS = 8
_MAX_NAMES = 5


def check_no_log(files: Files, names: Collection[str], folder: str = "") -> None:
    """Raise SourceError if a directory is a table whose log lists the valid files, such as a Delta or Iceberg table.

    Args:
        files: the directory, or one above it.
        names: the entries of the directory, hidden ones too.
        folder: the path of the directory below `files`.
    """
    kind = next((_LOGS[name] for name in names if name in _LOGS), None)
    if kind is None and "data" in names and "metadata" in names:
        below = files.children(f"{folder}/metadata" if folder else "metadata")
        kind = "an Iceberg table" if any(".metadata.json" in entry.name for entry in below) else None
    if kind is not None:
        where = printable_url(files.at(folder).url if folder else files.url)
        raise SourceError(
            f"{where} is {kind}, some of whose files may be of other versions; write the wanted one as "
            "Parquet, or give a list of its files"
        )


def check_no_log_above(files: Files) -> None:
    """Raise SourceError if a directory up to a few levels above `files` is a table with a log: see `check_no_log`.

    Directories that cannot be read are not checked.
    """
    given = {files.url}
    if files.url.startswith("file://"):  # a link may lead into a table
        given.add(f"file://{os.path.realpath(files.url[7:])}")
    # An Iceberg table's files are in `data`, and not in other directories there.
    wanted = [
        (Files(url, files.options, files.read_options), (*_LOGS, "data", "metadata") if child == "data" else (*_LOGS,))
        for url, child in chain.from_iterable(map(_above, sorted(given)))
    ]
    with ThreadPoolExecutor(_LOOKS) as pool:
        for (above, _), names in zip(wanted, pool.map(lambda one: _present(*one), wanted), strict=True):
            check_no_log(above, names)


def _present(files: Files, names: Collection[str]) -> Collection[str]:
    """Return the names that a directory has. Only web servers, which may answer any name, list it: it may be large."""
    with suppress(StorageError, OSError):
        if files.url.startswith(("http://", "https://")):
            return {*names} & {entry.name for entry in files.children(hidden=True)}
        return [name for name in names if files.exists(name)]
    return ()


def _above(url: str) -> Iterator[tuple[str, str]]:
    """Yield the directories above a directory, and the name below each, nearest first, up to the bucket's root."""
    left = _LEVELS
    while "/" in split_chain(url).inner.partition("://")[2].strip("/"):
        url, name = split_name(url)
        if "=" not in name and name != "data":
            left -= 1
        if left < 0:
            return
        yield url, name


def splits_among(folders: Iterable[str]) -> list[str]:
    """Return the directories whose names have equal words except the split's, such as "train2017" and "val2017"."""
    by_rest: dict[tuple[str, ...], dict[str, str | None]] = {}
    for folder in folders:
        words = _words(folder)
        if label := _word(folder):
            rest = tuple(word for word in words if _meaning(word) is None and word not in _ENDINGS)
            by_rest.setdefault(rest, {})[folder] = label
    return sorted(name for named in by_rest.values() if len({*named.values()}) > 1 for name in named)


def check_no_split_folders(folders: Iterable[str], where: str) -> None:
    """Raise SourceError if directories are named after different splits. `where` names their directory in errors."""
    splits = splits_among(folders)
    if splits:
        shown = ", ".join(map(repr, splits[:_MAX_NAMES])) + (", …" if len(splits) > _MAX_NAMES else "")
        raise SourceError(f"{where} has the splits {shown}, which are directories; give split=, or one of them")


def folder_of_split(folders: Sequence[str], split: str, files: Iterable[str] = ()) -> str | None:
    """Return the directory whose name fits a split's name best; None if there is none, or if only files fit best.

    Args:
        folders: the directories in one directory.
        split: see `files_of_split`.
        files: the files in that directory. If only a file has the split's exact name, only files fit best.

    Raises:
        OptionError: several splits fit equally well, and at least one of them is a directory.
    """
    labels = dict.fromkeys([*folders, *(label for file in files if (label := split_of(file)))])
    found = _named([*labels], split)
    if len(found) > 1 and not {*found}.isdisjoint(folders):
        raise OptionError(
            f"split={split!r} may be {' or '.join(map(repr, found[:_MAX_NAMES]))}; give one of these names"
        )
    return found[0] if len(found) == 1 and found[0] in folders else None


def files_of_split(paths: Sequence[str], split: str | None, where: str) -> list[str]:
    """Return the files of one split, in their order.

    Args:
        paths: names of files, or their paths below the directory.
        split: the split's name in the files, such as "train", or a synonym of exactly one of their splits, such as
            "val" for "validation"; None: all files, which must be of one split.
        where: names the directory in errors.

    Raises:
        OptionError: there is no such split, or `split` fits several.
        SourceError: there are several splits and none is chosen; or a split was written twice, or lacks a file.
    """
    by_split: dict[str | None, list[str]] = {}
    for path in paths:
        by_split.setdefault(split_of(path), []).append(path)
    if split is None:
        if len(by_split) > 1:
            raise SourceError(f"{where} has {_shown(by_split)}; give split=, or a list or pattern of files")
        chosen = list(paths)
    else:
        labels = _named([label for label in by_split if label is not None], split)
        if len(labels) != 1:
            raise OptionError(f"split={split!r} names {len(labels)} splits of {where}, which has {_shown(by_split)}")
        chosen = by_split[labels[0]]
    _check_written_once(chosen, where)
    return chosen


def split_of(path: str) -> str | None:
    """Return the name of a file's split, such as "train" or "beans-train"; None if its path names none."""
    folder, _, name = path.rpartition("/")
    match = _OF.fullmatch(name)
    stem = match[1] if match else name
    if _CACHE.fullmatch(name):
        return stem.partition(".")[0]
    own = _word(stem)
    if match and (own or not _word(folder)):
        return own if own == stem.lower() else stem
    return own or _word(folder)


def _words(text: str) -> list[str]:
    """Return the words of a name in lower case; a word in camel case is several, unless it means a split as a whole."""
    words: list[str] = []
    for word in re.findall("[A-Za-z]+", text):
        words += [word] if _meaning(word) else _CAMEL.findall(word)
    return [word.lower() for word in words]


def _meaning(word: str) -> str | None:
    """Return the split that a word means, such as "train" for "trainset"; None if it means none."""
    word = word.lower()
    stems = [word, *(word.removesuffix(ending) for ending in _ENDINGS)]
    return next((_WORDS[stem] for stem in stems if stem in _WORDS), None)


def _word(text: str) -> str | None:
    """Return the words of a name that mean a split, "+" between several words; None if the name has no such word."""
    return "+".join(dict.fromkeys(word for word in _words(text) if _meaning(word))) or None


def _meanings(text: str) -> list[str]:
    """Return the splits that the words of a name mean."""
    return [*dict.fromkeys(meaning for word in _words(text) if (meaning := _meaning(word)))]


def _named(labels: Sequence[str], split: str) -> list[str]:
    """Return the labels equal to a split's name; else, if it is one word, labels with the word; else with a synonym.

    Other names only match exactly: a slice, such as "train[:80%]", or "train-clean-360" is not all of another split.
    """
    exact = [label for label in labels if label == split]
    if exact or _meaning(split) is None:
        return exact
    word, meanings = _word(split), _meanings(split)
    return [label for label in labels if _word(label) == word] or [
        label for label in labels if _meanings(label) == meanings
    ]


def _shown(by_split: dict[str | None, list[str]]) -> str:
    named = sorted(f"{label!r} ({len(names)} files)" for label, names in by_split.items() if label is not None)
    rest = [f"files of no split, such as {by_split[None][0]!r}"] if None in by_split else []
    more = [f"{len(named) - _MAX_NAMES} more"] if len(named) > _MAX_NAMES else []
    return f"the splits {', '.join(named[:_MAX_NAMES] + more)}" + "".join(f", and {one}" for one in rest)


def _check_written_once(paths: Sequence[str], where: str) -> None:
    """Raise SourceError if one split was written twice, or lacks a file, by the totals in the files' names."""
    totals: dict[str, int] = {}
    seen: dict[str, set[int]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        match = _OF.fullmatch(name)
        if match:
            written, number, total = f"{folder}/{match[1]}", int(match[2]), int(match[3])
            numbers = seen.setdefault(written, set())
            if totals.setdefault(written, total) != total or number in numbers:
                raise SourceError(
                    f"{where} has files of two writes of {match[1]!r}: {path!r} repeats a number, or is of another "
                    "total than the others; remove the files of the earlier write, or give a list of files"
                )
            numbers.add(number)
    for written, numbers in seen.items():
        if len(numbers) < totals[written]:
            raise SourceError(
                f"{where} has {len(numbers)} of the {totals[written]} files of {written.removeprefix('/')!r}, by their "
                "names; copy the missing ones, or give a list or pattern of files"
            )
