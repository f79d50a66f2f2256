"""Indexes of `open_dataset`: one immutable file of rows for each object, and one that joins those of a source.

::

    <directory>/parts/<settings>/<object>      the samples of one object, by its URL, size, state, and the settings
    <directory>/packs/<settings>/<object>/     samples that were copied out of a compressed object
    <directory>/joined/<source>                all parts of a source in order, which readers map
    <directory>/stored/<version>               rows of a stored dataset that were read, by `rows`

A file is written under another name and renamed, or put whole, and never changes. Its name says what is in it, so
processes that build the same index write equal files, and none has to wait: each scans the objects that no other one
has scanned yet, beginning somewhere else. A build that was killed leaves the parts of the objects that it has scanned.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from torch_dpflow._core.decoding import json_decoder
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.rows import Rows, index_directory, map_file, written
from torch_dpflow.datasets.spec import DatasetRef
from torch_dpflow.datasets.storage import ByteRange, ObjectReader
from torch_dpflow.errors import (
    ChecksumError,
    DamagedStoreError,
    DPFlowError,
    ObjectMissingError,
    TruncatedObjectError,
)

#: Begin of a joined file: kind, its bytes, where the tables begin, parts, bytes of the description, CRC-32 of tables.
HEAD = struct.Struct("<8sQQQII")
KIND = b"DPFIDX3\n"
#: Bytes that are copied at a time.
_PIECE = 64 << 20


class Description(msgspec.Struct, frozen=True):
    """What an index says of all samples."""

    importer: str
    root: str
    info: dict[str, Any]


@dataclass(frozen=True)
class Index:
    """Samples of objects where they are. It has no metadata of samples. Thread-safe and picklable."""

    files: Files
    name: str
    importer: str
    root: str
    info: dict[str, Any]
    count: int

    @property
    def ref(self) -> DatasetRef:
        """The name in messages. Its version changes with every object."""
        return DatasetRef(f"index/{self.importer}", self.name)

    @property
    def url(self) -> str:
        return self.files.url

    @property
    def options(self) -> dict[str, Any]:
        """fsspec's options for the directory."""
        return self.files.options

    def __len__(self) -> int:
        return self.count

    @classmethod
    def open(cls, files: Files, name: str) -> Index:
        """Open the index of this name. Raises DamagedStoreError if there is none, or if it is damaged."""
        firsts, _, description = _tables(_mapped(files, name), name)
        return cls(files, name, description.importer, description.root, description.info, firsts[-1])

    def open_rows(self, reader: ObjectReader | None = None, given_urls: Mapping[str, str] | None = None) -> Rows:
        """Map the rows, without `reader`. Raises DamagedStoreError if they are not there."""
        data = _mapped(self.files, self.name)
        firsts, bases, _ = _tables(data, self.name)
        return Rows(data, firsts, bases, self.root, given_urls or {}, self._damaged)

    def lost(self, span: ByteRange, error: DPFlowError) -> DPFlowError:
        """Return the error of a sample that cannot be read. If it is a damaged copy in a pack, remove its part too.

        The pack stays, as other samples in it may be whole. The next opening writes it again.
        """
        packs = f"{self.url}/packs/"
        is_damage = isinstance(error, ChecksumError | ObjectMissingError | TruncatedObjectError)
        if not is_damage or not span.url.startswith(packs):
            return error
        with suppress(OSError, DPFlowError):
            self.files.remove(f"parts/{span.url.removeprefix(packs).rpartition('/')[0]}")
        return self._damaged([0])[0]

    def _damaged(self, parts: Sequence[int]) -> dict[int, DPFlowError]:
        """Remove the index, so that the next opening builds it again."""
        with suppress(OSError):
            os.unlink(joined_path(self.files, self.name))
        if local_path(self.files) is None:
            with suppress(OSError, DPFlowError):
                self.files.remove(f"joined/{self.name}")
        return dict.fromkeys(parts, _damaged(self.name))


def local_path(files: Files) -> str | None:
    """Return the path of a directory on a local disk or a mount."""
    return files.url.removeprefix("file://") if files.url.startswith("file://") else None


def joined_path(files: Files, name: str) -> str:
    """Return the path of a joined file on this host, which is a copy if the directory of indexes is elsewhere."""
    return f"{local_path(files) or f'{index_directory(is_local=True)}/copies'}/joined/{name}"


def _mapped(files: Files, name: str) -> mmap.mmap:
    """Map a joined file, or a copy of it on a local disk."""
    path = joined_path(files, name)
    try:
        if local_path(files) is None and not os.path.exists(path):
            size = HEAD.unpack(files.read(f"joined/{name}", 0, HEAD.size))[1]
            with written(path) as file:
                for start in range(0, size, _PIECE):
                    file.write(files.read(f"joined/{name}", start, min(start + _PIECE, size)))
        return map_file(path)
    except (FileNotFoundError, struct.error) as error:
        raise DamagedStoreError(
            f"there is no index {files.url}/joined/{name}; open the data again, or give index_dir= a directory that "
            "all hosts reach"
        ) from error


def _tables(data: mmap.mmap, name: str) -> tuple[Sequence[int], Sequence[int], Description]:
    """Return first samples and places of the parts of a joined file, and its description. Raises DamagedStoreError."""
    try:
        kind, size, at, parts, described, crc = HEAD.unpack_from(data)
        if (kind, size) == (KIND, len(data)) and zlib.crc32(data[at:]) == crc:
            view = memoryview(data)
            middle, stop = at + 8 * (parts + 1), at + 8 * (2 * parts + 1)
            description = json_decoder(Description).decode(data[size - described :])
            return view[at:middle].cast("q"), view[middle:stop].cast("q"), description
    except (struct.error, msgspec.MsgspecError, TypeError):
        pass
    raise _damaged(name)


def _damaged(name: str) -> DamagedStoreError:
    return DamagedStoreError(f"the index {name} is damaged; open the data again, which builds it again")
