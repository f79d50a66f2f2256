"""Datasets in HDF5 files on any storage, by h5py (extra `hdf5`)."""

from __future__ import annotations

from typing import Any

from torch_dpflow.datasets.storage import ReadOptions
from torch_dpflow.datasets.storage.file_systems import open_file_system, path_of
from torch_dpflow.datasets.storage.urls import file_system_of, without_login
from torch_dpflow.errors import MissingExtraError, OptionError, StorageError

#: Maximum names of datasets in an error.
_MAX_NAMES = 20


#: Offsets at which an HDF5 file may begin, after a user block, as in MATLAB's files.
_STARTS = (0, *(512 << power for power in range(5)))
_SIGNATURE = b"\x89HDF\r\n\x1a\n"


def is_hdf5(head: bytes) -> bool:
    """Return whether a file that begins with `head` is an HDF5 file."""
    return any(head.startswith(_SIGNATURE, start) for start in _STARTS)


class HDF5Dataset:
    """An opened dataset of an HDF5 file. Not thread-safe.

    All of its rows are in the file. For a virtual dataset, link or external storage that leads to other files, HDF5
    would return fill values if it does not find them, and changes of those files would not be detected.

    Raises MissingExtraError, OptionError, StorageError.
    """

    def __init__(self, url: str, options: dict[str, Any], path: str) -> None:
        try:
            import h5py
        except ImportError as error:
            raise MissingExtraError(
                f"{without_login(url)} is an HDF5 file; pip install 'torch_dpflow[hdf5]'"
            ) from error
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
            self._check_stored(h5py, self._data, frozenset())
            self.dtype, self.shape = self._data.dtype, self._data.shape
        except OSError as error:
            self.close()
            raise StorageError(f"{self._name}: {error}") from error
        except BaseException:
            self.close()
            raise

    def rows(self, first: int, stop: int) -> bytes:
        """Return the bytes of rows. Raises StorageError."""
        try:
            return bytes(self._data[first:stop].tobytes())
        except OSError as error:
            raise StorageError(f"{self._name}, rows {first} to {stop}: {error}") from error

    def close(self) -> None:
        """Close the file."""
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

    def _check_stored(self, h5py: Any, data: Any, above: frozenset[str]) -> None:
        """Raise OptionError unless this file has all rows of a dataset.

        above: names of the virtual datasets of which it is a source.
        """
        if data.file != self._file:  # by a soft link to an external one
            raise self._elsewhere(data.file.filename)
        if data.external:
            raise self._elsewhere(data.external[0][0])
        for one in data.virtual_sources() if data.is_virtual else ():
            if one.file_name != ".":
                raise self._elsewhere(one.file_name)
            source = self._file.get(one.dset_name)
            if not isinstance(source, h5py.Dataset) or source.name in above or not _has_all(h5py, one, source):
                raise OptionError(
                    f"{self._name} is a virtual dataset, and its source {one.dset_name!r} is missing or too small; "
                    "write the file anew"
                )
            self._check_stored(h5py, source, above | {data.name})

    def _elsewhere(self, file: str) -> OptionError:
        return OptionError(
            f"{self._name} has its rows in another file, {file!r}; give that file, or copy the rows into one: "
            "new.create_dataset(name, data=old[name][:])"
        )

    def _names(self, kind: type) -> list[str]:
        found: list[str] = []
        self._file.visititems(lambda name, one: found.append(name) if isinstance(one, kind) else None)
        return sorted(found)[:_MAX_NAMES]


def _has_all(h5py: Any, mapped: Any, source: Any) -> bool:
    """Return whether the source of a virtual dataset has all mapped elements."""
    space = mapped.src_space
    if space.get_select_type() == h5py.h5s.SEL_ALL:
        return bool(mapped.vspace.get_select_npoints() == source.size)
    try:
        end = space.get_select_bounds()[1]
    except (ValueError, RuntimeError):  # unlimited: the source's size is that of the virtual dataset
        return True
    return len(end) == len(source.shape) and all(last < size for last, size in zip(end, source.shape))
