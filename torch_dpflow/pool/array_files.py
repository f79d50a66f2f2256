"""Arrays in files: `.npy` files and datasets of HDF5 files on any storage, whose rows are records."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np

from torch_dpflow._core.checks import check_name
from torch_dpflow.datasets.objects import Objects
from torch_dpflow.datasets.storage import ByteRange, ObjectReader, ReadOptions
from torch_dpflow.datasets.storage.urls import without_login
from torch_dpflow.errors import ChecksumError, DPFlowError, OptionError, StorageError, TruncatedObjectError
from torch_dpflow.pool.hdf5_files import HDF5Dataset, is_hdf5
from torch_dpflow.pool.messages import ArraySource
from torch_dpflow.pool.planning.layout import ArrayLayout, identity

#: First bytes of a file to read; a `.npy` header has at most 10,000 bytes.
_HEAD_BYTES = 16 << 10
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def open_array(url: str | os.PathLike[str], *, path: str = "", **storage_options: Any) -> ArraySource:
    """Open an array in a file, whose first dimension counts records; reads only its header.

    Args:
        url: a `.npy` file in C order, or an HDF5 file (extra `hdf5`), on any storage of `DatasetStore`.
        path: of the dataset in an HDF5 file.
        storage_options: fsspec's options.

    Raises:
        OptionError, OptionTypeError: it is not such an array.
        StorageError: the file cannot be read.
        MissingExtraError: the extra is not installed.
    """
    place = _place_of(url)
    check_name("url", place)
    check_name("path", path)
    size, stamp = _stamp(place, storage_options)
    with ObjectReader(storage_options) as reader:
        head = reader.read(place, 0, min(size, _HEAD_BYTES))
    name, start = without_login(place), None
    if not head.startswith(np.lib.format.MAGIC_PREFIX) and is_hdf5(head):
        with closing(HDF5Dataset(place, storage_options, path)) as data:
            dtype, shape = data.dtype, data.shape
    elif path:
        raise OptionError(f"{name} is no HDF5 file; leave out path={path!r}")
    else:
        shape, dtype, start = _npy_header(name, head)
    found = ArraySource(
        ref=array_ref(place, path),
        url=place,
        options=storage_options,
        path=path,
        dtype=dtype.str,
        shape=[*shape],
        start=start,
        stamp=stamp,
    )
    rows = array_layout(found)
    if start is not None and (ends := start + rows.records * rows.record_bytes) > size:
        raise TruncatedObjectError(f"{name} has {size:,} bytes of {ends:,}; restore it from a copy")
    return found


def array_ref(url: str | os.PathLike[str], path: str = "") -> str:
    """Return the display name of an array in a file; `path` of the dataset in an HDF5 file."""
    name = without_login(_place_of(url))
    return f"{name}:{path}" if path else name


def array_identity(source: ArraySource) -> bytes:
    """Return an array's identity: its location, size, time of change or ETag, dtype and shape."""
    where = [source.url or source.ref, source.path]
    facts = {"where": where, "stamp": source.stamp, "dtype": source.dtype, "shape": source.shape}
    return identity("array", facts)


def array_layout(source: ArraySource) -> ArrayLayout:
    """Return the layout of its rows. Raises OptionError or OptionTypeError if it cannot be cached."""
    if not source.shape:
        raise OptionError(f"{source.ref} is a single number (0-d), and has no records; give it a first dimension")
    return ArrayLayout(array_identity(source), source.shape[0], source.dtype, source.shape[1:])


class ArrayReader:
    """Reads rows of an array in a file. Thread-safe.

    Detects a file that is replaced meanwhile: no row of another version is ever returned.
    """

    def __init__(self, source: ArraySource, read_options: ReadOptions | None = None) -> None:
        self._source, self._rows = source, array_layout(source)
        self._objects = ObjectReader(source.options, options=read_options)
        self._lock = threading.Lock()
        self._hdf5: HDF5Dataset | None = None

    def read_each(self, blocks: Sequence[int]) -> list[tuple[bytes, dict[str, Any]] | DPFlowError]:
        """Return each block of rows, as readers of datasets return samples, or its error."""
        rows, count = self._rows.per_block, self._rows.records
        read = self.read_rows([(one * rows, min((one + 1) * rows, count)) for one in blocks])
        return [one if isinstance(one, DPFlowError) else (one, {}) for one in read]

    def read_rows(self, spans: Sequence[tuple[int, int]]) -> list[bytes | DPFlowError]:
        """Return the bytes of the rows from each first to each last one (excluded), or the error."""
        source, size = self._source, self._rows.record_bytes
        try:
            found: Sequence[bytes | DPFlowError]
            if source.start is None:
                found = [self._read_hdf5(first, stop) for first, stop in spans]
            else:
                base = source.start
                found = self._objects.read_each(
                    [ByteRange(source.url, base + first * size, base + stop * size) for first, stop in spans]
                )
            # After reading, as the file may be replaced until then.
            if _stamp(source.url, source.options)[1] != source.stamp:
                raise ChecksumError(f"{source.ref} was replaced since it was opened; open it again")
        except DPFlowError as error:
            return [error] * len(spans)
        return [*found]

    def close(self) -> None:
        """Close the file."""
        self._objects.close()
        with self._lock:
            opened, self._hdf5 = self._hdf5, None
            if opened is not None:
                opened.close()

    def _read_hdf5(self, first: int, stop: int) -> bytes:
        with self._lock:
            if self._hdf5 is None:
                self._hdf5 = HDF5Dataset(self._source.url, self._source.options, self._source.path)
            return self._hdf5.rows(first, stop)


def _place_of(url: str | os.PathLike[str]) -> str:
    """Return a URL unchanged, and a path as an absolute one."""
    place = os.fspath(url)
    return place if "://" in place else os.path.abspath(place)


def _npy_header(name: str, head: bytes) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Return shape, dtype, and where the data begins."""
    content = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(content)
        shape, is_fortran, dtype = _HEADERS[version](content)
    except (ValueError, KeyError) as error:
        raise OptionError(
            f"{name} is neither a .npy file of numbers or bytes (numpy.save) nor an HDF5 file: {error}"
        ) from error
    if is_fortran:
        raise OptionError(
            f"{name} is in Fortran order, so its records do not lie together; save it anew: "
            "numpy.save(new, numpy.ascontiguousarray(old))"
        )
    return shape, dtype, content.tell()


def _stamp(url: str, options: dict[str, Any]) -> tuple[int, str]:
    """Return the size of a file, and its ETag or time of change. Raises StorageError."""
    with Objects(options) as objects:
        entry = objects.entry(url)
    if isinstance(entry, DPFlowError):
        raise entry
    size = entry.get("size")
    tag = next((entry[key] for key in ("ETag", "etag", "mtime", "LastModified", "created") if entry.get(key)), None)
    if size is None or tag is None:
        raise StorageError(
            f"{without_login(url)}: the storage reports no ETag and no modification time; copy it to one that does"
        )
    return int(size), f"{size} {tag}"
