"""The contract of an importer: it yields the samples of a source one by one, starting at any position."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch_dpflow._core.checks import as_integer
from torch_dpflow.datasets.storage.base import CHECKSUM_PATTERN, STATE_PATTERN, matches
from torch_dpflow.datasets.storage.urls import printable_url, without_login
from torch_dpflow.errors import SourceError

#: The largest signed integer of 64 bits.
_LARGEST = 2**63 - 1
#: Compression and the program that decompresses it, by the first bytes of a file.
_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
    b"\xfd7zXZ": ("xz", "unxz"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\x04\x22\x4d\x18": ("lz4", "unlz4"),
}


def check_not_compressed(head: bytes, name: str) -> None:
    """Raise SourceError if `head`, the first bytes of a file, shows that it is compressed. name: the file in errors."""
    for magic, (compression, program) in _COMPRESSED.items():
        if head.startswith(magic):
            raise SourceError(
                f"{name} is compressed with {compression}, and its samples cannot be read one by one; unpack it with "
                f"{program}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One sample of an importer. Either `path` says where its bytes are, or `data` contains them.

    Raises SourceError, which names the field, for invalid values. `meta` is checked only when the item is stored.
    """

    #: Annotations: values that JSON can hold, and numpy scalars and arrays.
    meta: Mapping[str, Any] = field(default_factory=dict)
    #: A path relative to the importer's root, a URL, or an absolute path below a local root. An absolute `os.PathLike`
    #: names a local file. Stored as text.
    path: str | os.PathLike[str] | None = None
    data: bytes | None = None
    #: Where the sample begins in the object, bytes; None: the sample is the whole object.
    offset: int | None = None
    #: Length of the sample, bytes; None: unknown.
    length: int | None = None
    #: "crc32:" or "sha256:" and hexadecimal digits. `data` is compared with it at once.
    checksum: str | None = None
    #: State of the object: its ETag in quotes, the time of its last change as an HTTP date, or another state that
    #: `storage.base` describes. Used if there is no checksum.
    revision: str | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.data is None):
            raise SourceError("an Item needs either `path` or `data`")
        if isinstance(self.path, os.PathLike):
            object.__setattr__(self, "path", local_url(self.path) if os.path.isabs(self.path) else str(self.path))
        if self.path is not None:
            _check_path(self.path)
        if self.data is not None and not isinstance(self.data, bytes):
            raise SourceError(f"data={self.data!r:.80}: give bytes")
        for name in ("offset", "length"):
            object.__setattr__(self, name, _bytes_count(name, getattr(self, name)))
        if self.offset is not None and self.length is None:
            raise SourceError(f"offset={self.offset} without a length; give `length` too, in bytes")
        object.__setattr__(self, "checksum", _checksum(self.checksum))
        revision: Any = self.revision
        if revision is not None and not (isinstance(revision, str) and re.fullmatch(STATE_PATTERN, revision)):
            raise SourceError(
                f"revision={revision!r:.80}: give an ETag in quotes, a time as 'Mon, 03 Oct 2016 22:32:00 GMT', or None"
            )
        if self.data is not None:
            self._check_data(self.data)

    def _check_data(self, data: bytes) -> None:
        if self.offset is not None or self.length not in (None, len(data)):
            raise SourceError(
                f"offset={self.offset}, length={self.length} of data of {len(data)} bytes; leave both out, as all of "
                "the data is the sample"
            )
        if self.checksum is not None and not matches(data, self.checksum):
            raise SourceError(f"checksum={self.checksum!r} is not that of the data; the source is damaged")


def local_url(path: os.PathLike[str]) -> str:
    """Return the URL of a path object, which always names a file of this machine."""
    return f"file://{os.path.abspath(path)}"


def _check_path(path: Any) -> None:
    if not isinstance(path, str) or not path:
        raise SourceError(f"path={path!r:.80}: give a path or a URL, as text that is not empty")
    if without_login(path) != path:
        raise SourceError(f"path={printable_url(path)!r} was given with a user or a password; give those as options")
    if not path.isascii():
        try:
            path.encode()
        except UnicodeEncodeError as error:
            raise SourceError(f"path={path!r} is no text in UTF-8; rename the file") from error


def _bytes_count(name: str, value: Any) -> int | None:
    """Convert `value`, an integer of Python or numpy, to an int. Floats are refused, because they may be rounded."""
    if value is None:
        return None
    try:
        count = as_integer(value)
    except TypeError:
        count = -1
    if not 0 <= count <= _LARGEST:
        raise SourceError(f"{name}={value!r:.80}: give a whole number of bytes from 0, as an integer, or None")
    return count


def _checksum(value: Any) -> str | None:
    if value is None:
        return None
    lowered = value.lower() if isinstance(value, str) else ""
    if not re.fullmatch(CHECKSUM_PATTERN, lowered):
        raise SourceError(f"checksum={value!r:.80}: give 'crc32:' and 8 hexadecimal digits, 'sha256:' and 64, or None")
    return lowered


class Importer(Protocol):
    """Interface of readers of one source's samples, in a fixed order, so that a killed import can be continued."""

    #: The URL of the directory that paths are relative to; None: all items have data.
    root: str | None
    #: fsspec's options for `root`. Never stored.
    options: dict[str, Any]

    @property
    def source(self) -> Mapping[str, Any]:
        """Description of the source as JSON values. Only an import with an equal description is continued."""

    def extend(self, info: Mapping[str, Any]) -> None:
        """Prepare to append to a variant whose samples have this `info`. Called before `items`."""

    def items(self, start: int = 0) -> Iterator[Item]:
        """Yield the samples, starting at number `start`. Memory should not grow with their number.

        Raises:
            SourceError: the source does not have the expected layout.
        """

    def total(self) -> int | None:
        """Return the number of samples for a progress bar; None while it is not known."""

    def info(self) -> Mapping[str, Any]:
        """Return information for all samples, such as the names of classes. Complete after the last item."""


class BaseImporter:
    """Base of importers, see `Importer`. By default the total is unknown, `info` is empty, `extend` does nothing."""

    def extend(self, info: Mapping[str, Any]) -> None: ...

    def total(self) -> int | None:
        return None

    def info(self) -> Mapping[str, Any]:
        return {}
