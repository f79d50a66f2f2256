"""Directories and their files, on every storage that fsspec supports."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any, NamedTuple, TypeVar
from urllib.parse import unquote

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from torch_dpflow._core.checks import check_path, check_type
from torch_dpflow._core.processes import PerProcess
from torch_dpflow.datasets.storage import ByteRange, ObjectReader, ReadOptions
from torch_dpflow.datasets.storage.archives import check_member
from torch_dpflow.datasets.storage.base import check_storage_options, read_options_of, state_of_entry, state_of_file
from torch_dpflow.datasets.storage.credentials import options_to_pickle
from torch_dpflow.datasets.storage.failures import is_missing_bucket, storage_error, with_retries
from torch_dpflow.datasets.storage.file_systems import (
    call_with_deadline,
    exclusive,
    is_thread_safe,
    needs_host,
    open_file_system,
)
from torch_dpflow.datasets.storage.local import UNFINISHED, beside_name, written
from torch_dpflow.datasets.storage.object_reader import service_of
from torch_dpflow.datasets.storage.urls import (
    check_url,
    file_system_of,
    join_url,
    printable_url,
    split_chain,
    split_login,
)
from torch_dpflow.errors import (
    DPFlowError,
    ObjectMissingError,
    OptionError,
    StorageError,
    TruncatedObjectError,
)

T = TypeVar("T")

#: Options with which a put fails if the object exists, by protocol.
_EXCLUSIVE_PUT: dict[str, dict[str, Any]] = {
    "s3": {"mode": "create"},
    "oss": {"headers": {"x-oss-forbid-overwrite": "true"}},
}
#: Storages whose put shows an object with all its bytes or not at all.
_WHOLE_PUTS = frozenset({"memory", "s3", "s3a", "oss", "gs", "gcs", "abfs", "abfss", "az"})
_WEB = ("http://", "https://")
#: Parts of keys that no path has.
_NO_NAMES = frozenset({"", ".", ".."})
#: Storages whose keys are texts and not paths.
_OF_KEYS = frozenset({"s3", "s3a", "oss"})
#: How many deadlines of a read a listing may take, as it is a request for every 1,000 entries.
_LISTING_DEADLINES = 10


class DirectoryEntry(NamedTuple):
    name: str
    is_directory: bool
    #: bytes; None if the storage does not report it
    size: int | None
    #: state, see `storage.base`; None for directories, and if the storage reports none
    state: str | None = None


class Files:
    """A directory, by URL, and everything below it. Paths are relative to it, with "/" between parts.

    A file appears with all its bytes or not at all, even if the writer is killed, if `writes_whole` is true.
    Thread-safe; a pickle or a fork opens a separate connection. On remote storage `read`, `exists` and `children` have
    a deadline; writes have none.

    A failure of the storage raises a StorageError that names the file, such as AccessDeniedError; a missing file raises
    FileNotFoundError.

    Args:
        url: a URL such as "s3://bucket/datasets", or a local path.
        options: fsspec's options for the directory, such as credentials; for S3 and OSS alike `key`, `secret`, `token`,
            `endpoint`, `region` and `anon`.
        read_options: timeouts and retries of reading and listing.

    Raises:
        OptionError: `url` names no directory, its protocol is unknown, or the protocol has no such option.
        OptionTypeError: an argument is of the wrong type.
        MissingExtraError, StorageError: the protocol's package is not installed; the storage cannot be reached.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        options: Mapping[str, Any] | None = None,
        read_options: ReadOptions | None = None,
    ) -> None:
        check_type("url", url, (str, os.PathLike), "a path or URL, as text or a pathlib.Path")
        address, login = split_login(os.fspath(url))
        check_url(address)
        check_path("url", address)
        check_storage_options(options)
        #: the given options of fsspec, and the user and password of the URL
        self.options = {**(options or {}), **login}
        self.read_options = read_options_of(read_options)
        self._reader = ObjectReader(self.options, options=self.read_options)
        if not address or address.endswith("://"):
            raise OptionError(f"{address!r} names no directory; give a path, or a URL such as s3://bucket/datasets")
        self._opened = PerProcess(self._open)
        scheme, _, path = split_chain(address).inner.partition("://")
        if scheme != "file" and path.endswith("//"):
            raise OptionError(f"{printable_url(address)} ends with several slashes, which no directory does; give one")
        #: the directory's URL, absolute, without a slash at the end
        self.url: str = address
        # A vendor's client takes 28 MB, and reading needs none.
        is_needed = "://" not in address or service_of(file_system_of(address), self.options) is None
        self._is_of_keys = file_system_of(address) in _OF_KEYS
        self._is_local = is_needed and isinstance(self.filesystem, LocalFileSystem)
        inner, outer = split_chain(address)
        self.url = (inner if inner.endswith("://") else inner.rstrip("/")) + outer
        if self._is_local:
            self.url = self.filesystem.unstrip_protocol(self._opened.get()[1])

    def _open(self) -> tuple[Any, str]:
        if "://" in self.url:
            return open_file_system(self.url, self.options, self.read_options.deadline_s)
        files = fsspec.filesystem("file", **self.options)
        return files, files._strip_protocol(self.url)

    @property
    def filesystem(self) -> Any:
        """The fsspec file system; a forked child opens another one. Raises the errors of `Files`."""
        return self._opened.get()[0]

    @property
    def writes_whole(self) -> bool:
        """Whether files appear whole or not at all. False for a storage without atomic puts and without renaming."""
        if self._is_local or file_system_of(self.url) in _WHOLE_PUTS:
            return True
        return type(self.filesystem).mv is not AbstractFileSystem.mv

    def at(self, path: str) -> Files:
        """Return the directory `path` below this one."""
        return Files(self._url(path), self.options, self.read_options)

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes `start` to `stop` (None: the end) of a file. Raises ObjectMissingError if it is missing."""
        return self._reader.read(self._url(path), start, stop)

    @contextmanager
    def open(self, path: str) -> Iterator[IO[bytes]]:
        """Open a file to read it as a stream. Reading the stream raises fsspec's errors.

        Raises:
            FileNotFoundError: there is no such file.
            StorageError: `path` is a local directory, a pipe, socket or device, or cannot be opened.
        """
        with self._storage_errors(path):
            self.check_regular(path)
            full = self._full(path)
            if self._is_local and os.path.isdir(full):
                raise StorageError(f"{self._url(path)} is a directory; give a file, or write a / at the end")
            file = self.filesystem.open(full, "rb")
        with file:
            yield file

    def check_regular(self, path: str) -> None:
        """Raise StorageError for a pipe, socket or device on a local disk or in a tar archive.

        Opening a pipe on a local disk would wait for a writer.
        """
        full = self._full(path)
        if not self._is_local:
            check_member(self.filesystem, full, self._url(path))
            return
        if os.path.exists(full) and not (os.path.isfile(full) or os.path.isdir(full)):
            raise StorageError(f"{self._url(path)}: this is a pipe, socket or device; give a regular file")

    def exists(self, path: str) -> bool:
        if self.url.startswith(_WEB):
            return self._is_on_web(path)
        fs, full = self.filesystem, self._full(path)
        fs.invalidate_cache()
        with suppress(FileNotFoundError):  # there is no such bucket
            seconds = self.read_options.deadline_s
            return self._retried(path, lambda: call_with_deadline(fs, seconds, lambda: _exists(fs, full)))
        return False

    def _is_on_web(self, path: str) -> bool:
        # fsspec takes every failure for a missing file.
        try:
            self._reader.read(self._url(path), 0, 1)
        except ObjectMissingError:
            return False
        except TruncatedObjectError:
            pass  # an empty file
        return True

    def write(self, path: str, data: bytes) -> None:
        """Write a file, replacing one that exists."""
        self._write(path, data, replaces=True)

    def create(self, path: str, data: bytes) -> None:
        """Write a file that does not exist yet. Raises FileExistsError if it exists.

        On local disks with hard links, in memory, on S3 and OSS, exactly one of several simultaneous writers succeeds.
        Elsewhere several can succeed, and the file written last stays.
        """
        self._write(path, data, replaces=False)

    def _write(self, path: str, data: bytes, *, replaces: bool) -> None:
        self._check_writable(path)
        if not replaces and self.exists(path):
            raise FileExistsError(f"{self._url(path)} exists already")
        with self._storage_errors(path):
            try:
                if self._is_local:
                    with written(self._full(path), replaces=replaces, is_durable=True) as file:
                        file.write(data)
                else:
                    self._put(path, data, replaces=replaces)
            except FileNotFoundError as error:
                raise ObjectMissingError(
                    f"{self._url(path)} cannot be written: {' '.join(str(error).split())}; there is no such bucket, or "
                    "no directory can be made there"
                ) from error
            except Exception as error:
                if replaces or self._is_local or not self.exists(path):
                    raise
                raise FileExistsError(f"{self._url(path)} exists already") from error

    def ensure(self, path: str, data: bytes) -> None:
        """Write a file if it does not exist. Raises FileExistsError if it exists with different bytes."""
        try:
            self.create(path, data)
        except FileExistsError:
            if self.read(path) != data:
                raise

    def _put(self, path: str, data: bytes, *, replaces: bool) -> None:
        fs, full = self.filesystem, self._full(path)
        protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
        options = {} if replaces else _EXCLUSIVE_PUT.get(protocol, {})
        with exclusive(fs):
            if not replaces and not is_thread_safe(fs) and _exists(fs, full):
                raise FileExistsError(f"{self._url(path)} exists already")
            if needs_host(type(fs)):
                fs.makedirs(full.rpartition("/")[0], exist_ok=True)
            if file_system_of(self.url) in _WHOLE_PUTS or not self.writes_whole:
                fs.pipe_file(full, data, **options)
                return
            beside = beside_name(full)
            fs.pipe_file(beside, data)
            try:
                fs.mv(beside, full)
            except Exception:
                if not _exists(fs, full) or not _exists(fs, beside):
                    raise
                fs.rm_file(full)  # not all hosts rename onto a file that exists
                fs.mv(beside, full)

    def children(self, path: str = "", *, all_keys: bool = False, hidden: bool = False) -> list[DirectoryEntry]:
        """Return the entries of a directory, sorted by name; an empty list if there is no such directory.

        Raises ObjectMissingError if its bucket does not exist.

        Args:
            hidden: whether to return entries whose name begins with a dot.
            all_keys: whether to raise StorageError for a key of S3 or OSS that is not a path, such as "a//b". False:
                such keys are left out.
        """
        fs, full = self.filesystem, self._full(path)
        fs.invalidate_cache()
        is_checked = all_keys and self._is_of_keys
        if is_checked and not _NO_NAMES.isdisjoint(full.strip("/").split("/")):
            raise self._without_path(path)
        try:
            longest = _LISTING_DEADLINES * self.read_options.deadline_s
            entries = self._retried(path, lambda: call_with_deadline(fs, longest, lambda: fs.ls(full, detail=True)))
        except FileNotFoundError as error:
            if is_missing_bucket(error):
                raise ObjectMissingError(
                    f"{'/'.join(self.url.split('/', 3)[:3])}: the storage answered 404 NoSuchBucket; check the name of "
                    "the bucket, the endpoint and the region"
                ) from error
            return []
        found = []
        for entry in entries:
            name = entry["name"].rstrip("/").rpartition("/")[2]
            if is_checked and _has_no_path(entry, full):
                raise self._without_path(path)
            is_left_out = name in _NO_NAMES or (name.startswith(".") and not hidden)
            if not is_left_out and entry["name"].rstrip("/") != full.rstrip("/"):
                is_directory = _is_directory(fs, entry)
                state = None if is_directory else self._state(entry)
                found.append(DirectoryEntry(name, is_directory, entry.get("size"), state))
        return sorted(found)

    def _state(self, entry: Mapping[str, Any]) -> str | None:
        if not self._is_local:
            return state_of_entry(entry)
        with suppress(OSError):  # a broken link
            return state_of_file(os.stat(entry["name"]))
        return None

    def _without_path(self, path: str) -> StorageError:
        return StorageError(
            f"{self._url(path)} has keys that no path names: with an empty part ('//'), a part '.' or '..', or a '/' "
            "at the end of an object with bytes; rename these objects"
        )

    def label(self, name: str) -> str:
        """Return a listed name as readable text: web servers list names with %-escapes."""
        if not self.url.startswith(_WEB):
            return name
        try:
            return unquote(name, errors="strict")
        except UnicodeDecodeError:  # escapes of another encoding
            return name

    def real(self, path: str) -> str:
        """Return the path by which the file system finds the directory `path`. Links on a local disk are resolved."""
        full = self._full(path)
        return os.path.realpath(full) if self._is_local else full

    def remove(self, path: str) -> None:
        """Remove a file or a directory with everything in it, if it exists."""
        self._check_writable(path)
        with suppress(FileNotFoundError), self._storage_errors(path), exclusive(self.filesystem):
            self.filesystem.rm(self._full(path), recursive=True)

    def sweep(self, path: str) -> None:
        """Remove the files that killed writers left unfinished in a directory. Writers that are still running fail."""
        if self._is_local or file_system_of(self.url) not in _WHOLE_PUTS:
            for child in self.children(path, hidden=True):
                if child.name.startswith(".") and child.name.endswith(UNFINISHED):
                    self.remove(f"{path}/{child.name}" if path else child.name)

    def remove_empty(self, path: str) -> None:
        """Remove a directory on a local disk if it is empty. Does nothing on other storages."""
        if self._is_local:
            with suppress(OSError):
                os.rmdir(self._full(path))

    @contextmanager
    def undone_directories(self) -> Iterator[None]:
        """If the body of `with` fails, remove the empty local directories that it made: this one and its parents."""
        made, path = [], self._full("")
        while self._is_local and path and not os.path.isdir(path):
            made.append(path)
            path = os.path.dirname(path)
        try:
            yield
        except BaseException:
            for path in made:
                with suppress(OSError):
                    os.rmdir(path)
            raise

    def close(self) -> None:
        """Close this process's idle connections. The files can still be used."""
        self._reader.close()

    def _check_writable(self, path: str) -> None:
        if "::" in self.url and split_chain(self.url).outer:
            raise StorageError(
                f"{self._url(path)}: archives are read only; unpack it, or copy its datasets to another "
                "store (dpflow dataset copy)"
            )

    def _retried(self, path: str, call: Callable[[], T]) -> T:
        def attempt(_deadline: float) -> T:
            with self._storage_errors(path):
                return call()

        return with_retries(attempt, self.read_options, is_remote=not self._is_local)

    @contextmanager
    def _storage_errors(self, path: str) -> Iterator[None]:
        """Convert errors of libraries to a StorageError with the file's URL."""
        try:
            yield
        except (FileNotFoundError, FileExistsError, DPFlowError):
            raise
        except Exception as error:
            url = self._url(path)
            if self._is_local and not isinstance(error, PermissionError):
                raise StorageError(f"{url}: {type(error).__name__}: {error}") from error
            raise storage_error(ByteRange(url), error) from error

    def _url(self, path: str) -> str:
        return join_url(self.url, path) if path else self.url

    def _full(self, path: str) -> str:
        root = self._opened.get()[1]
        return f"{root.rstrip('/')}/{path}" if path and root else path or root

    def __getstate__(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "options": options_to_pickle(self.options),
            "read_options": self.read_options,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _exists(fs: Any, path: str) -> bool:
    """Return whether a file exists. `fs.exists` may take any exception, even Control-C, for a missing file."""
    if getattr(fs.exists, "__func__", None) is not AbstractFileSystem.exists:
        return bool(fs.exists(path))
    try:
        fs.info(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _is_directory(fs: Any, entry: Mapping[str, Any]) -> bool:
    if entry["type"] == "other" and entry.get("islink"):
        return bool(fs.isdir(entry["name"]))  # a local listing does not follow links
    return bool(entry["type"] == "directory")


def _has_no_path(entry: Mapping[str, Any], folder: str) -> bool:
    """Return whether an entry that `children` leaves out is an object with bytes, or has one below it."""
    name = entry["name"].rstrip("/")
    if name == folder.rstrip("/"):  # otherwise an empty object that represents the directory
        return bool(entry["type"] == "directory" or entry.get("size"))
    return name.rpartition("/")[2] in _NO_NAMES
