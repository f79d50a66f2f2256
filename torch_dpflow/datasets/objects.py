"""Objects of samples: whether they exist, their sizes, their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from torch_dpflow.datasets.spec import SampleMeta
from torch_dpflow.datasets.storage import ByteRange, ObjectReader
from torch_dpflow.datasets.storage.deadlines import call_with_deadline
from torch_dpflow.datasets.storage.failures import storage_error, with_retries
from torch_dpflow.datasets.storage.file_systems import open_file_system, path_of
from torch_dpflow.datasets.storage.urls import file_system_of, without_login
from torch_dpflow.errors import DPFlowError, ObjectMissingError

#: Samples whose bytes are in memory at a time, and entries that are requested at a time.
_TOGETHER = 32


class Objects:
    """Reads and measures many objects at a time, by URL. Names are literal: "#" and "?" may be part of them.

    Use it in a `with` statement, in the thread that made it.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        # Not fsspec, as `cat_file` of ossfs (2025.5) takes `end` as inclusive.
        self._reader = ObjectReader(options)
        self._threads = ThreadPoolExecutor(_TOGETHER, "dpflow-objects")
        self._file_systems: dict[str, Any] = {}

    def contents(self, places: Sequence[tuple[str, SampleMeta]]) -> Iterator[bytes | DPFlowError]:
        """Yield the bytes of each sample at its URL, or its error. A few of them are in memory at a time."""
        for first in range(0, len(places), _TOGETHER):
            yield from self._reader.read_each([_span(url, sample) for url, sample in places[first : first + _TOGETHER]])

    def entries(self, urls: Sequence[str]) -> Iterator[dict[str, Any] | DPFlowError]:
        """Return `entry` of each object. The requests overlap."""
        for url in urls:
            self._file_system(url)  # before the threads start, each of which would make its own
        return self._threads.map(self.entry, urls)

    def entry(self, url: str) -> dict[str, Any] | DPFlowError:
        """Return what fsspec's file system reports about an object, or its error."""
        fs = self._file_system(url)
        try:
            return with_retries(
                lambda _: self._info(fs, url),
                self._reader.options,
                is_remote=not isinstance(fs, LocalFileSystem),
            )
        except DPFlowError as error:
            return error

    def _info(self, fs: Any, url: str) -> dict[str, Any]:
        try:
            entry = call_with_deadline(fs, self._reader.options.deadline_s, lambda: fs.info(path_of(fs, url)))
        except FileNotFoundError as error:
            if isinstance(error.__cause__, Exception):  # fsspec raises this for every failure of a web server
                raise storage_error(ByteRange(url), error.__cause__) from error
            raise ObjectMissingError(f"{without_login(url)}: there is no such object") from error
        except Exception as error:
            raise storage_error(ByteRange(url), error) from error
        if entry["type"] == "directory":
            raise ObjectMissingError(f"{without_login(url)} is a directory")
        return dict(entry)

    def _file_system(self, url: str) -> Any:
        address = file_system_of(url)
        if address not in self._file_systems:
            seconds = self._reader.options.deadline_s
            self._file_systems[address] = open_file_system(address, self._options, seconds)[0]
            self._file_systems[address].invalidate_cache()  # of listings, filled by its other users
        return self._file_systems[address]

    def __enter__(self) -> Objects:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        self._reader.close()


def _span(url: str, sample: SampleMeta) -> ByteRange:
    if sample.offset is None or sample.length is None:
        return ByteRange(url, size=sample.length, revision=sample.revision)
    return ByteRange(url, sample.offset, sample.offset + sample.length, revision=sample.revision)
