"""Reading rows of arrays in files on any storage: `.npy` files, and datasets in HDF5 files (by h5py)."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np

from torch_dpflow._core.checks import check_name, check_path, check_type
from torch_dpflow._core.lazy import imported
from torch_dpflow.datasets.storage import ByteRange, ObjectReader, ReadOptions
from torch_dpflow.datasets.storage.base import is_tag
from torch_dpflow.datasets.storage.file_systems import open_file_system, path_of, servers_of
from torch_dpflow.datasets.storage.urls import file_system_of, without_login
from torch_dpflow.errors import (
    ChecksumError,
    DPFlowError,
    OptionError,
    StorageError,
    TruncatedObjectError,
)
from torch_dpflow.pool.messages import ArraySource
from torch_dpflow.pool.planning.layout import ArrayLayout, identity

#: Maximum names of datasets in an error.
_MAX_NAMES = 20


_SIGNATURE = b"\x89HDF\r\n\x1a\n"
#: The smallest user block, which may precede an HDF5 file, as in MATLAB's. Others have twice its size, and so on.
_USER_BLOCK = 512


def _is_hdf5(reader: ObjectReader, url: str, head: bytes, size: int) -> bool:
    """Return whether a file of `size` bytes that begins with `head` is an HDF5 file."""
    starts = [0]
    while (start := max(_USER_BLOCK, 2 * starts[-1])) + len(_SIGNATURE) <= size:
        starts.append(start)
    if any(head.startswith(_SIGNATURE, start) for start in starts):
        return True
    beyond = [ByteRange(url, start, start + len(_SIGNATURE)) for start in starts if start >= len(head)]
    return _SIGNATURE in reader.read_many(beyond)


class HDF5Dataset:
    """Reader of the rows of one dataset of an HDF5 file. Not thread-safe.

    All rows must be in this file. Virtual datasets, and links and external storage that refer to other files, are
    refused: HDF5 would return fill values for a missing file, and changes of these files would not be detected.

    options: fsspec's options for the file's storage.
    path: path of the dataset in the file.

    Raises:
        MissingExtraError: h5py, or the package for the storage, is not installed.
        OptionError: there is no such storage or dataset; the dataset is empty, or its rows are not all in the file.
        StorageError: the file cannot be read.
    """

    def __init__(self, url: str, options: dict[str, Any], path: str) -> None:
        h5py = imported("h5py", f"{without_login(url)} is an HDF5 file", "hdf5")
        self._name = f"{without_login(url)}:{path}"
        self._file: Any = None
        self._content: Any = None
        try:
            fs = open_file_system(file_system_of(url), options, ReadOptions().deadline_s)[0]
            self._content = fs.open(path_of(fs, url), "rb")
            self._file = h5py.File(self._content, "r")
            self._check_links(path, h5py.ExternalLink)
            self._data: Any = self._file.get(path) if path else None
            if not isinstance(self._data, h5py.Dataset):
                raise OptionError(f"{self._name} is no dataset; give path=, one of {self._names(h5py.Dataset)}")
            if self._data.shape is None or self._data.attrs.get("MATLAB_empty"):
                raise OptionError(f"{self._name} is empty; give a dataset with records")
            self._check_stored(self._data)
            self.dtype, self.shape = self._data.dtype, self._data.shape
        except OSError as error:
            self.close()
            raise StorageError(f"{self._name}: {error}") from error
        except BaseException:
            self.close()
            raise

    def rows(self, first: int, stop: int) -> bytes:
        """Return the bytes of rows `first` to `stop` - 1, joined. Raises StorageError if they cannot be read."""
        try:
            return bytes(self._data[first:stop].tobytes())
        except OSError as error:
            raise StorageError(f"{self._name}, rows {first} to {stop}: {error}") from error

    def close(self) -> None:
        for one in (self._file, self._content):
            if one is not None:
                one.close()

    def _check_links(self, path: str, external: type) -> None:
        """Raise OptionError if a part of the path is a link to another file."""
        group = self._file
        for part in [part for part in path.split("/") if part not in ("", ".")]:
            link = group.get(part, getlink=True) if hasattr(group, "keys") else None
            if isinstance(link, external):
                raise self._elsewhere(link.filename)  # type: ignore[attr-defined]
            group = group.get(part) if link is not None else None

    def _check_stored(self, data: Any) -> None:
        """Raise OptionError unless this file has all rows of a dataset."""
        if data.file != self._file:  # by a soft link to an external one
            raise self._elsewhere(data.file.filename)
        if data.external:
            raise self._elsewhere(data.external[0][0])
        if data.is_virtual:
            raise OptionError(
                f"{self._name} is a virtual dataset, whose rows may be missing or in other files; write its rows into "
                "one: new.create_dataset(name, data=old[name][:])"
            )

    def _elsewhere(self, file: str) -> OptionError:
        return OptionError(
            f"{self._name} has its rows in another file, {file!r}; give that file, or copy the rows into one: "
            "new.create_dataset(name, data=old[name][:])"
        )

    def _names(self, kind: type) -> list[str]:
        found: list[str] = []
        self._file.visititems(lambda name, one: found.append(name) if isinstance(one, kind) else None)
        return sorted(found)[:_MAX_NAMES]


#: First bytes of a file to read; a `.npy` header has at most 10,000 bytes.
_HEAD_BYTES = 16 << 10
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def open_array(url: str | os.PathLike[str], *, path: str = "", **storage_options: Any) -> ArraySource:
    """Return the description of an array in a file, read from the file's header. The first dimension counts rows.

    Args:
        url: a `.npy` file in C order, or an HDF5 file (extra `hdf5`), on any storage of `DatasetStore`.
        path: path of the dataset in an HDF5 file; empty for a `.npy` file.
        storage_options: fsspec's options for the storage.

    Raises:
        OptionError, OptionTypeError: an argument is wrong, the file has neither format, or the array cannot be cached.
        StorageError: the file cannot be read or is truncated, or its storage reports no ETag and no modification time.
        MissingExtraError: the extra, or the package for the storage, is not installed.
    """
    place = _place_of(url)
    check_name("url", place)
    check_type("path", path, str, "the path of a dataset in an HDF5 file")
    check_name("path", path)
    size, stamp = _stamp(place, storage_options)
    with ObjectReader(storage_options) as reader:
        head = reader.read(place, 0, min(size, _HEAD_BYTES))
        is_npy = head.startswith(np.lib.format.MAGIC_PREFIX)
        is_hdf5 = not is_npy and _is_hdf5(reader, place, head, size)
    name, start = without_login(place), None
    if is_hdf5:
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
    """Return the display name of an array in a file. path: path of the dataset in an HDF5 file."""
    name = without_login(_place_of(url))
    return f"{name}:{path}" if path else name


def array_identity(source: ArraySource) -> bytes:
    """Return an array's identity: a digest of its location (of a pushed array, its name), `stamp`, dtype and shape."""
    servers = [] if is_tag(source.stamp.partition(" ")[2]) else servers_of(source.options)
    where = [source.url or source.ref, source.path, *servers]
    facts = {"where": where, "stamp": source.stamp, "dtype": source.dtype, "shape": source.shape}
    return identity("array", facts)


def array_layout(source: ArraySource) -> ArrayLayout:
    """Return the layout of an array's rows. Raises OptionError or OptionTypeError if the array cannot be cached."""
    if not source.shape:
        raise OptionError(f"{source.ref} is a single number (0-d), and has no records; give it a first dimension")
    return ArrayLayout(array_identity(source), source.shape[0], source.dtype, source.shape[1:])


class ArrayReader:
    """Reader of the rows of an array in a file. Thread-safe.

    If the file was replaced since `open_array`, errors are returned in place of rows.
    """

    def __init__(self, source: ArraySource, read_options: ReadOptions | None = None) -> None:
        self._source, self._rows = source, array_layout(source)
        self._objects = ObjectReader(source.options, options=read_options)
        self._lock = threading.Lock()
        self._hdf5: HDF5Dataset | None = None

    def read_each(self, blocks: Sequence[int]) -> list[tuple[bytes, dict[str, Any]] | DPFlowError]:
        """Return (bytes, {}) or an error for each of these blocks, which have up to `ArrayLayout.per_block` rows."""
        rows, count = self._rows.per_block, self._rows.records
        read = self.read_rows([(one * rows, min((one + 1) * rows, count)) for one in blocks])
        return [one if isinstance(one, DPFlowError) else (one, {}) for one in read]

    def read_rows(self, spans: Sequence[tuple[int, int]]) -> list[bytes | DPFlowError]:
        """Return the bytes of rows `first` to `stop` - 1 for each span (first, stop), or an error in their place."""
        source, size = self._source, self._rows.record_bytes
        try:
            if source.start is not None:
                base, (length, _, state) = source.start, source.stamp.partition(" ")
                known = int(length) if length.isdecimal() else 0, state  # another process may send any text
                ranges = [(base + first * size, base + stop * size) for first, stop in spans]
                return self._objects.read_each([ByteRange(source.url, *one, *known) for one in ranges])
            found = [self._read_hdf5(first, stop) for first, stop in spans]
            # After reading, as the file may be replaced until then.
            if _stamp(source.url, source.options)[1] != source.stamp:
                raise ChecksumError(f"{source.ref} was replaced since it was opened; open it again")
        except DPFlowError as error:
            return [error] * len(spans)
        return [*found]

    def close(self) -> None:
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
    """Return a URL unchanged, or a path as an absolute path."""
    place = check_path("url", url)
    return place if "://" in place else os.path.abspath(place)


def _npy_header(name: str, head: bytes) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Return shape, dtype, and where the data begins."""
    content = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(content)
    except ValueError as error:
        raise OptionError(
            f"{name} is neither a .npy file of numbers or bytes (numpy.save) nor an HDF5 file: {error}"
        ) from error
    if version not in _HEADERS:  # numpy has no public function for version 3, whose headers are in UTF-8
        raise OptionError(
            f"{name} has version {version[0]}.{version[1]} of the .npy format, as for fields whose names are not "
            "Latin-1; save an array of numbers or bytes, such as one for each field"
        )
    try:
        shape, is_fortran, dtype = _HEADERS[version](content)
    except ValueError as error:
        raise OptionError(
            f"{name} has a .npy header that is damaged, or longer than {_HEAD_BYTES:,} bytes: {error}; restore the "
            "file, or save an array of numbers or bytes"
        ) from error
    if is_fortran:
        raise OptionError(
            f"{name} is in Fortran order, so its records are not contiguous; save it again: "
            "numpy.save(new, numpy.ascontiguousarray(old))"
        )
    return shape, dtype, content.tell()


def _stamp(url: str, options: dict[str, Any]) -> tuple[int, str]:
    """Return the size of a file, and a text that contains size and state. Raises StorageError."""
    with ObjectReader(options) as objects:
        (found,) = objects.look_each([ByteRange(url)])
    if isinstance(found, DPFlowError):
        raise found
    if found.size is None or found.state is None:
        raise StorageError(
            f"{without_login(url)}: the storage reports no ETag and no modification time; copy it to one that does"
        )
    return found.size, f"{found.size} {found.state}"
