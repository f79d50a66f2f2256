"""Splits in one directory, found by the names of its files, so that test data is never read with training data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch_dpflow.errors import OptionError, SourceError

#: Words in names that mean a split, as for HuggingFace's hub.
_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
#: A file of several: `train-00000-of-00002.parquet`, `train.tfrecord-00000-of-00002`.
_OF = re.compile(r"(.+?)(?:\.tfrecords?|\.tfrec)?[-_.](\d+)[-_]of[-_](\d+)(?!\d).*", re.DOTALL)
#: Files that HuggingFace's `map` and `filter` write into a dataset's directory.
_CACHE = re.compile(r"cache-[0-9a-f]{8,}.*", re.DOTALL)
#: Directories of tables some of whose files are not part of the table: Delta, Hudi, streams of Spark.
_LOGS = {"_delta_log": "Delta table", ".hoodie": "Hudi table", "_spark_metadata": "table of a Spark stream"}
_MAX_NAMES = 5


def check_no_log(names: Iterable[str], where: str) -> None:
    """Raise SourceError if a directory's entries show that a log decides which of its files belong to the table."""
    for name in names:
        if name in _LOGS:
            raise SourceError(
                f"{where} is a {_LOGS[name]}, some of whose files may be of other versions; write the wanted one as "
                "Parquet, or give a list of its files"
            )


def are_splits(folders: Sequence[str]) -> bool:
    """Return whether several directories are named after different splits."""
    return len({_WORDS.get(folder.lower()) for folder in folders} - {None}) == len(folders) > 1


def folder_of_split(folders: Sequence[str], split: str) -> str | None:
    """Return the directory with a split's name; None if there is none."""
    found = _named(folders, split)
    return found[0] if len(found) == 1 else None


def files_of_split(paths: Sequence[str], split: str | None, where: str) -> list[str]:
    """Return the files of one split, in their order.

    Args:
        paths: names of files, or their paths below the directory.
        split: "train", "validation", "test", or another name that the files have; None: all, if they are of one split.
        where: names the directory in errors.

    Raises:
        OptionError: there is no such split, or it is not unique.
        SourceError: there are several splits and none is chosen; or a split was written twice.
    """
    by_split: dict[str | None, list[str]] = {}
    for path in paths:
        by_split.setdefault(_split_of(path), []).append(path)
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


def _split_of(path: str) -> str | None:
    """Return the name of a file's split, such as "train" or "beans-train"; None if its path names none."""
    folder, _, name = path.rpartition("/")
    match = _OF.fullmatch(name)
    stem = match[1] if match else name
    if _CACHE.fullmatch(name):
        return stem.partition(".")[0]
    own = _word(stem)
    if match and (own or not _word(folder)):
        return own if stem.lower() in _WORDS else stem
    return own or _word(folder)


def _word(text: str) -> str | None:
    """Return the split that the words of a name mean, "+" between several; None if it has no such word."""
    found = dict.fromkeys(_WORDS[word] for word in re.split(r"[^a-z]+", text.lower()) if word in _WORDS)
    return "+".join(found) or None


def _named(labels: Sequence[str], split: str) -> list[str]:
    """Return the labels that are equal to a split's name; if there are none, the labels with the same meaning."""
    meaning = _word(split)
    return [label for label in labels if label == split] or [
        label for label in labels if meaning is not None and _word(label) == meaning
    ]


def _shown(by_split: dict[str | None, list[str]]) -> str:
    named = sorted(f"{label!r} ({len(names)} files)" for label, names in by_split.items() if label is not None)
    rest = [f"files of no split, such as {by_split[None][0]!r}"] if None in by_split else []
    more = [f"{len(named) - _MAX_NAMES} more"] if len(named) > _MAX_NAMES else []
    return f"the splits {', '.join(named[:_MAX_NAMES] + more)}" + "".join(f", and {one}" for one in rest)


def _check_written_once(paths: Sequence[str], where: str) -> None:
    """Raise SourceError if files are of two writes of one split: of other totals, or with one number twice."""
    totals: dict[str, int] = {}
    seen: set[tuple[str, int]] = set()
    for path in paths:
        folder, _, name = path.rpartition("/")
        match = _OF.fullmatch(name)
        if match:
            written, number, total = f"{folder}/{match[1]}", int(match[2]), int(match[3])
            if totals.setdefault(written, total) != total or (written, number) in seen:
                raise SourceError(
                    f"{where} has files of two writes of {match[1]!r}: {path!r} repeats a number, or is of another "
                    "total than the others; remove the files of the earlier write, or give a list of files"
                )
            seen.add((written, number))
