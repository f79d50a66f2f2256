"""Datasets in HDF5 files on any storage, by h5py (extra `hdf5`)."""

from __future__ import annotations

from typing import Any

from torch_dpflow.datasets.storage import ReadOptions
from torch_dpflow.datasets.storage.file_systems import open_file_system, path_of
from torch_dpflow.datasets.storage.urls import file_system_of, without_login
from torch_dpflow.errors import MissingExtraError, OptionError, StorageError

#: Most names of datasets in an error.
_MOST_NAMES = 20


class HDF5Dataset:
    """A dataset in an HDF5 file, opened; not thread-safe. Raises MissingExtraError, OptionError, StorageError."""

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
            self._data: Any = self._file.get(path) if path else None
            if not isinstance(self._data, h5py.Dataset):
                raise OptionError(
                    f"{self._name} is no dataset; give path=, one of {self._names(h5py.Dataset)}"
                )
            self.dtype, self.shape = self._data.dtype, self._data.shape
        except OSError as error:
            self.close()
            raise StorageError(f"{self._name}: {error}") from error
        except BaseException:
            self.close()
            raise

    def rows(self, first: int, stop: int) -> bytes:
        """The bytes of these rows. Raises StorageError."""
        try:
            return bytes(self._data[first:stop].tobytes())
        except OSError as error:
            raise StorageError(f"{self._name}, rows {first} to {stop}: {error}") from error

    def close(self) -> None:
        """Close the file."""
        for one in (self._file, self._content):
            if one is not None:
                one.close()

    def _names(self, kind: type) -> list[str]:
        found: list[str] = []
        self._file.visititems(lambda name, one: found.append(name) if isinstance(one, kind) else None)
        return sorted(found)[:_MOST_NAMES]
