"""The objects that a source names, each with its size and its state, such as an ETag or a modification time."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch_dpflow._core.checks import check_path
from torch_dpflow.datasets.files import DirectoryEntry, Files
from torch_dpflow.datasets.importers.splits import (
    check_no_log,
    check_no_log_above,
    files_of_split,
    folder_of_split,
    split_of,
)
from torch_dpflow.datasets.storage import ByteRange, ObjectReader, ReadOptions
from torch_dpflow.datasets.storage.base import check_storage_options, sha256_of, state_of_file
from torch_dpflow.datasets.storage.object_reader import warn_without_state
from torch_dpflow.datasets.storage.urls import join_url, printable_url, split_login, split_name, stored_url
from torch_dpflow.errors import DPFlowError, ObjectMissingError, OptionError, OptionTypeError, SourceError

#: A source as users give it.
Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

#: Maximum objects of one pattern or list.
MAX_FILES = 1_000_000
#: From this many named objects of one directory, one listing is cheaper than a request for each.
_WORTH_A_LISTING = 32
_BRACES = re.compile(r"\{([^{}]*)\}")
_NESTED = re.compile(r"\{[^{}]*\{[^{}]*\}[^{}]*\}")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(\d+))?", re.ASCII)
_MAGIC = re.compile(r"[*?\[]")


class SourceFile(NamedTuple):
    """One object of a source."""

    url: str
    size: int
    #: state, see `storage.base`; None if the storage reports none
    state: str | None

    @property
    def printable(self) -> str:
        """The URL without passwords and signatures, for errors and logs."""
        return printable_url(self.url)

    @property
    def local_path(self) -> str | None:
        """The path of a local file; None for an object of another storage."""
        return self.url.removeprefix("file://") if self.url.startswith("file://") else None


@dataclass(frozen=True)
class SourceFiles:
    """The objects of one source, in order, with the options to read them."""

    #: URL of the directory; for other sources a text for errors and descriptions
    given: str
    files: list[SourceFile]
    #: names of the subdirectories, if the source is one directory
    folders: list[str]
    #: fsspec's options for all objects
    options: dict[str, Any]
    #: timeouts, retries and disk cache of all reads
    read_options: ReadOptions | None
    #: whether the source is one directory
    is_directory: bool = False
    #: names of broken links, pipes, sockets and devices in the directory
    broken: Sequence[str] = ()

    def only(self, names: re.Pattern[str]) -> SourceFiles:
        """Return the objects of a directory whose names match; all objects if the source is a list, file or pattern.

        Raises SourceError if a matching name is a broken link, a pipe, a socket or a device.
        """
        if not self.is_directory:
            return self
        lost = [name for name in self.broken if names.fullmatch(name)]
        if lost:
            raise SourceError(f"{self.given}/{lost[0]} is no regular file, or a link that leads nowhere; restore it")
        return self.of([file for file, name in zip(self.files, self.names, strict=True) if names.fullmatch(name)])

    def of_split(self, split: str | None) -> SourceFiles:
        """Return the objects of one split of a directory; all objects if the source is a list, file or pattern.

        Raises:
            OptionError: there is no such split, or a split is given for a source that is not a directory.
            SourceError: there are several splits and none is chosen, or files of the split are missing or repeated.
        """
        if not self.is_directory:
            if split is not None:
                raise OptionError(
                    f"split={split!r} chooses files of a directory; name the files of the split, as a pattern"
                )
            return self
        by_name = dict(zip(self.names, self.files, strict=True))
        return self.of([by_name[name] for name in files_of_split(self.names, split, self.given)])

    def of_folder(self, split: str) -> SourceFiles | None:
        """Return the objects in the directory with the split's name, such as `train`; None if there is none.

        Raises OptionError if there are also files of this split and format next to the directory, such as
        `train-0.parquet`, or as `folder_of_split` does.
        """
        folder = folder_of_split(self.folders, split, self.names) if self.is_directory else None
        if folder is None:
            return None
        found = find_sources(f"{self.given}/{folder}", self.options, self.read_options)
        endings = {name.rpartition(".")[2] for name in found.names}
        beside = [name for name in self.names if split_of(name) == folder and name.rpartition(".")[2] in endings]
        if beside:
            raise OptionError(f"split={split!r} may be the directory {folder!r}, or {beside[0]!r}; give one of them")
        return found

    def of(self, files: Sequence[SourceFile]) -> SourceFiles:
        return replace(self, files=[*files])

    def given_urls(self) -> dict[str, str]:
        """Return the URLs to read objects at, by their URLs in metadata (`stored_url`), where the two differ.

        Raises SourceError if two objects have the same URL in metadata.
        """
        found: dict[str, str] = {}
        for file in self.files:
            name = stored_url(file.url)
            if name != file.url and found.setdefault(name, file.url) != file.url:
                raise SourceError(
                    f"{name} is the name of two objects, which differ in a signature or in private characters"
                )
        return found

    @property
    def root(self) -> str:
        """The URL of the first object's directory; the source itself if there are no objects."""
        return split_name(stored_url(self.files[0].url))[0] if self.files else self.given

    @property
    def names(self) -> list[str]:
        """The last part of each object's URL, in the order of `files`."""
        return [split_name(stored_url(file.url))[1] for file in self.files]

    def path_of(self, file: SourceFile) -> str:
        """Return an object's file name if joining it to `root` gives its `stored_url`; else that URL."""
        url = stored_url(file.url)
        name = split_name(url)[1]
        return name if join_url(self.root, name) == url else url

    def head(self, number: int = 0, length: int = 1024) -> bytes:
        file = self.files[number]
        with ObjectReader(self.options, options=self.read_options) as reader:
            return reader.read(file.url, 0, min(length, file.size))


def find_sources(
    source: Source, options: Mapping[str, Any] | None = None, read_options: ReadOptions | None = None
) -> SourceFiles:
    """Return the objects that a source names, each with its size and state.

    Args:
        source: a path or URL of a file or directory, a pattern, or a list of files and patterns. In patterns,
            `{000..146}` and `{a,b}` are expanded, and `*`, `?` and `[…]` match names. A local path that exists, or a
            `pathlib.Path`, is never a pattern.
        options: fsspec's options for the objects.
        read_options: timeouts and retries.

    Raises:
        OptionError, OptionTypeError: among others, a pattern is malformed, or the source is not a text, path or list.
        SourceError: among others, an object is missing, or a pattern matches none.
        StorageError: the storage cannot be read.
    """
    is_one = isinstance(source, str | os.PathLike)
    if not is_one and not (isinstance(source, Sequence) and source):
        raise OptionTypeError(f"source={source!r:.80}: give a path, a URL, a pattern, or a list of these")
    texts: list[str] = []
    plain: list[str] = []
    check_storage_options(options)
    login: dict[str, Any] = dict(options or {})
    for one in [source] if is_one else source:  # type: ignore[union-attr]
        if not isinstance(one, str | os.PathLike):
            raise OptionTypeError(f"source has {one!r:.80}: give paths or URLs")
        text, found = split_login(os.fspath(one))
        check_path("source", text)
        if not text:
            raise OptionError(f'source={source!r:.80} has an empty path; give "." for this directory')
        if text.startswith("pipe:"):
            raise OptionError(f"source={text!r}: commands are not run; give the URL that the command reads")
        login |= found
        is_literal = not isinstance(one, str) or _exists(text)
        expanded = [text] if is_literal else expand_braces(text)
        texts += expanded
        plain += [name for name in expanded if is_literal or not _has_magic(name) or _exists(name)]
    if len(texts) > MAX_FILES:
        raise OptionError(f"the source names {len(texts)} objects; give at most {MAX_FILES}")
    given = texts[0] if len(texts) == 1 else f"{texts[0]} … {texts[-1]}"
    if len(texts) == 1 and plain:
        folder = _directory(plain[0], login, read_options)
        if folder is not None:
            return folder
    known = _named(plain, login, read_options)
    files = [
        file for text in texts for file in ([known[text]] if text in known else _matching(text, login, read_options))
    ]
    return SourceFiles(given, files, [], login, read_options)


def expand_braces(text: str) -> list[str]:
    """Return the names to which `{000..146}` (zeros are kept) and `{a,b}` expand, in order; other braces stay.

    Raises OptionError for more than `MAX_FILES` results, braces within braces, and steps below 1.
    """
    if _NESTED.search(text):
        raise OptionError(f"{text!r} has braces within braces; write out the outer ones, as a list")
    for match in _BRACES.finditer(text):
        inner = match[1]
        bounds = _RANGE.fullmatch(inner)
        if bounds is None and "," not in inner:
            continue
        parts = inner.split(",") if bounds is None else _numbers(bounds, text)
        rest = [text[: match.start()] + part + text[match.end() :] for part in parts]
        expanded: list[str] = []
        for one in rest:
            expanded += expand_braces(one)
            _check_count(len(expanded), text)
        return expanded
    return [text]


def _numbers(bounds: re.Match[str], text: str) -> list[str]:
    first, last = int(bounds[1]), int(bounds[2])
    step = int(bounds[3] or 1)
    if step < 1:
        raise OptionError(f"{text!r} counts in steps of {step}; give 1 or more")
    _check_count(abs(last - first) // step, text)
    is_padded = any(re.match(r"-?0\d", bound) for bound in (bounds[1], bounds[2]))
    width = max(len(bounds[1]), len(bounds[2])) if is_padded else 0
    numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    return [f"{number:0{width}d}" for number in numbers]


def _check_count(count: int, text: str) -> None:
    if count > MAX_FILES:
        raise OptionError(f"{text!r} names more than {MAX_FILES} objects; give fewer")


def _has_magic(text: str) -> bool:
    # A "?" begins the query of a web address.
    return _MAGIC.search(text) is not None and not text.startswith(("http://", "https://"))


def _exists(text: str) -> bool:
    """Return whether a local path exists: names of files may contain the characters of patterns."""
    is_local = "://" not in text or text.startswith("file://")
    return is_local and os.path.lexists(_local_path(text))


def _directory(text: str, options: Mapping[str, Any], read_options: ReadOptions | None) -> SourceFiles | None:
    """Return the objects in a directory; None if `text` names an object, or nothing."""
    is_web = text.startswith(("http://", "https://"))
    is_local = "://" not in text or text.startswith("file://")
    if (is_web and not text.endswith("/")) or (is_local and not os.path.isdir(_local_path(text))):
        return None
    files = Files(_local_path(text) if is_local else text, options, read_options)
    entries = files.children(hidden=True)
    children = [entry for entry in entries if not entry.name.startswith(".")]
    if not children and not is_local and (is_web or "/" in text.partition("://")[2].rstrip("/")):
        return None  # an object, while a bucket alone is always a directory
    check_no_log(files, [entry.name for entry in entries])
    check_no_log_above(files)
    folders = [child.name for child in children if child.is_directory]
    plain = [child for child in children if not child.is_directory]
    # A directory of shards may contain other entries. Only entries of the format have to be files.
    broken = [child.name for child in plain if is_local and not os.path.isfile(f"{_local_path(text)}/{child.name}")]
    found = [_source_file(files.url, child) for child in plain if child.name not in broken]
    return SourceFiles(files.url, found, folders, files.options, read_options, is_directory=True, broken=broken)


def files_in(files: SourceFiles, folder: str) -> Iterator[tuple[str, SourceFile]]:
    """Yield (path, object) for each file in `folder`, a subdirectory of the source; nothing if it does not exist."""
    listing = Files(files.given, files.options, files.read_options)
    for child in listing.children(folder):
        if not child.is_directory:
            path = f"{folder}/{child.name}"
            yield path, _source_file(listing.url, child, path)


def _local_path(text: str) -> str:
    path = os.path.expanduser(text.removeprefix("file://"))
    # "link/.." is the directory of what the link names.
    return os.path.realpath(path) if ".." in path.split("/") else os.path.abspath(path)


def _named(texts: Sequence[str], options: Mapping[str, Any], read_options: ReadOptions | None) -> dict[str, SourceFile]:
    """Return the object of each name. Raises SourceError if one is missing."""
    found: dict[str, SourceFile] = {}
    by_folder: dict[str, list[str]] = {}
    for text in texts:
        by_folder.setdefault(split_name(text)[0], []).append(text)
    single: list[str] = []
    for folder, members in by_folder.items():
        if "://" not in folder or folder.startswith("file://"):
            found |= {text: _local_file(text) for text in members}
        elif len(members) < _WORTH_A_LISTING or folder.startswith(("http://", "https://")):
            single += members
        else:
            files = Files(folder, options, read_options)
            # A name that the listing would join otherwise is another object.
            listed = {text: name for text in members if join_url(files.url, name := split_name(text)[1]) == text}
            single += [text for text in members if text not in listed]
            present = {child.name: child for child in files.children(hidden=True) if not child.is_directory}
            for text, name in listed.items():
                if name not in present:
                    raise _missing(text)
                found[text] = _source_file(files.url, present[name])
    return found | (_measured(single, options, read_options) if single else {})


def _measured(
    texts: Sequence[str], options: Mapping[str, Any], read_options: ReadOptions | None
) -> dict[str, SourceFile]:
    with ObjectReader(options, options=read_options) as objects:
        found = {}
        for text, entry in zip(texts, objects.look_each([ByteRange(text) for text in texts]), strict=True):
            if isinstance(entry, ObjectMissingError):
                raise _missing(text, str(entry).partition(": ")[2]) from entry
            if isinstance(entry, DPFlowError):
                raise entry
            found[text] = _checked_file(text, entry.size, entry.state)
        return found


def _matching(pattern: str, options: Mapping[str, Any], read_options: ReadOptions | None) -> list[SourceFile]:
    """Return the objects whose names match a pattern, sorted.

    Raises SourceError if there are none, and OptionError for a pattern that no storage lists.
    """
    first = _MAGIC.search(pattern)
    assert first is not None
    base, _, rest = pattern[: first.start()].rpartition("/")
    parts = (rest + pattern[first.start() :]).split("/")
    if "**" in parts:
        raise OptionError(f"{printable_url(pattern)!r} has '**', which is not supported; give '*' for each level")
    if "[^" in pattern:  # a shell excludes these characters, and Python matches them
        raise OptionError(f"{printable_url(pattern)!r} has '[^'; give '[!' to exclude characters")
    if base.endswith(":/"):
        raise OptionError(f"{printable_url(pattern)!r} has a pattern in its bucket or host; give its name")
    root = Files(base or ("/" if pattern.startswith("/") else "."), options, read_options)
    found = [_source_file(root.url, child, path) for path, child in _matched(root, "", parts)]
    if not found:
        where = "" if root.children(hidden=True) else f": {printable_url(root.url)} is missing or empty"
        raise SourceError(
            f"nothing matches {printable_url(pattern)}{where}; check the pattern, and the right to list it"
        )
    # After the listing: without a connection, only the listing takes a deadline, and its error names what was given.
    check_no_log_above(root)
    return found


def _matched(files: Files, folder: str, parts: Sequence[str]) -> Iterator[tuple[str, DirectoryEntry]]:
    children = files.children(folder, all_keys=True, hidden=True)
    check_no_log(files, [child.name for child in children], folder)
    for child in children:
        if not child.name.startswith(".") and fnmatch.fnmatchcase(child.name, parts[0]):
            path = f"{folder}/{child.name}" if folder else child.name
            if len(parts) == 1 and not child.is_directory:
                yield path, child
            elif len(parts) > 1 and child.is_directory:
                yield from _matched(files, path, parts[1:])


def _source_file(root: str, child: DirectoryEntry, path: str | None = None) -> SourceFile:
    """Return the object of an entry of a directory. Raises SourceError if its size is unknown."""
    url = join_url(root, path or child.name)
    if url.startswith("file://"):
        return _local_file(url)
    return _checked_file(url, child.size, child.state)


def _local_file(path: str) -> SourceFile:
    path = _local_path(path)
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing(path) from error
    except OSError as error:  # too long a name, or links in a circle
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error
    if not os.path.isfile(path):
        raise SourceError(f"{path} is no regular file; give files, or one directory alone")
    return SourceFile(f"file://{path}", found.st_size, state_of_file(found))


def state_of_objects(files: Files, paths: Sequence[str]) -> str:
    """Return a text that changes if one of these objects is removed or added, or its size or state changes."""
    with ObjectReader(files.options) as reader:
        found = reader.look_each([ByteRange(join_url(files.url, path)) for path in paths])
    return sha256_of(repr([None if isinstance(one, DPFlowError) else tuple(one) for one in found]).encode())


def is_changed(file: SourceFile) -> bool:
    """Return whether a local file was written or removed since it was listed; False for other objects."""
    path = file.local_path
    if path is None:
        return False
    try:
        found = os.stat(path)
    except OSError:
        return True
    return (found.st_size, state_of_file(found)) != (file.size, file.state)


def _checked_file(url: str, size: int | None, state: str | None) -> SourceFile:
    if size is None:
        raise SourceError(
            f"{printable_url(url)}: the storage does not report its size, so it cannot be indexed. Listings of "
            "web servers have no sizes: give the addresses of the files, as in http://HOST/train-{000..099}.tar"
        )
    if state is None:
        warn_without_state(url)
    return SourceFile(url, size, state)


def _missing(text: str, said: str = "") -> SourceError:
    """Return the error for a missing object, with what its storage has said."""
    said = said or "check the path, and on object stores the right to list it"
    return SourceError(f"there is no {printable_url(text)}; {said}")
