"""The contract of a storage, byte ranges, checksums, and the limits of reads."""

from __future__ import annotations

import hashlib
import math
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import msgspec

from torch_dpflow._core.checks import check_fields, check_int, check_path, check_seconds, check_type, parse_bytes
from torch_dpflow.datasets.storage.states import ObjectState
from torch_dpflow.datasets.storage.urls import printable_url
from torch_dpflow.errors import ChecksumError, OptionError, TruncatedObjectError

ChecksumAlgorithm = Literal["crc32", "sha256"]
CHECKSUM_PATTERN = "^(crc32:[0-9a-f]{8}|sha256:[0-9a-f]{64})$"
#: Longest single wait, seconds: systems refuse infinity, and sockets more milliseconds than 31 bits have.
MAX_WAIT_S = 1e6
#: What is wrong with an object that has another state than expected, and what to do.
WRITTEN_AGAIN = (
    "the object was written again after the dataset was opened or imported; open or import it again, restore the "
    "object, or read with check=False if its bytes are the same"
)


def sha256_of(data: bytes | memoryview) -> str:
    """Return the SHA-256 as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def _crc32_of(data: bytes | memoryview) -> str:
    return f"{zlib.crc32(data):08x}"


_ALGORITHMS: dict[str, Callable[[bytes | memoryview], str]] = {"crc32": _crc32_of, "sha256": sha256_of}
assert _ALGORITHMS.keys() == set(get_args(ChecksumAlgorithm))


def checksum_of(data: bytes | memoryview, algorithm: ChecksumAlgorithm) -> str:
    """Return `algorithm:hexadecimal digest`. "crc32" detects accidents cheaply, "sha256" forgeries too."""
    return f"{algorithm}:{_ALGORITHMS[algorithm](data)}"


def matches(data: bytes | memoryview, checksum: str) -> bool:
    """Whether the bytes have this checksum, which names its algorithm."""
    algorithm, _, digest = checksum.partition(":")
    return _ALGORITHMS[algorithm](data) == digest


class ByteRange(msgspec.Struct, frozen=True):
    """The bytes `start` to `stop` (excluded; None: the end) of the object at `url`.

    Raises OptionError for a negative start or a stop before it.
    """

    url: str
    start: int = 0
    stop: int | None = None
    #: Bytes of the whole object if known; an object of another size is an error.
    size: int | None = None
    #: The expected state of the object, see `states`; another one is an error. None: not checked.
    state: str | None = None
    #: Checksum of the range, if known. A disk cache keeps only ranges that have it, or a state.
    checksum: str | None = None

    def __post_init__(self) -> None:
        if self.start < 0 or (self.stop is not None and self.stop < self.start):
            raise OptionError(
                f"{printable_url(self.url)}: bytes {self.start} to {self.stop} are no range; "
                "give 0 <= start <= stop, and stop=None for the rest of the object"
            )

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.stop is None

    @property
    def length(self) -> int | None:
        """Bytes of the range; None if they depend on the size of the object."""
        return None if self.stop is None else self.stop - self.start

    def check_size(self, found: int | None) -> None:
        """Compare the size of the whole object that the storage reports (None: unknown) with `size`.

        Raises:
            TruncatedObjectError: it has fewer bytes.
            ChecksumError: it has more.
        """
        if self.size is None or found is None or found == self.size:
            return
        kind = TruncatedObjectError if found < self.size else ChecksumError
        raise kind(
            f"{self}: the object has {found} bytes, its dataset says {self.size}; it was replaced or cut short: "
            "restore it, or publish a new version"
        )

    def replaced(self, found: str | None) -> ChecksumError:
        """Return the error for an object whose state is not the expected one."""
        return ChecksumError(f"{self}: {WRITTEN_AGAIN} (its state was {self.state}, and is {found or 'not reported'})")

    def __str__(self) -> str:
        url = printable_url(self.url)
        if self.is_whole:
            return url
        return f"{url} (bytes {self.start} to {'the end' if self.stop is None else self.stop})"


class Storage(Protocol):
    """One kind of storage, which reads a range of an object in one attempt.

    Every method may be called from any thread. An instance belongs to the process that made it, as sockets and locks
    do not survive a fork.
    """

    #: Whether reads have a network latency, so that overlapping them always pays.
    is_remote: bool

    def fetch(self, span: ByteRange, deadline: float) -> bytes:
        """Return exactly the bytes of `span`, before `deadline` (`time.monotonic()`).

        An object that has another size or state than `span` is an error, if the storage reports them.

        Raises:
            StorageError: a subclass if the cause is known; the message names the object.
        """

    def look(self, span: ByteRange, deadline: float) -> ObjectState:
        """Return size and state of the object of `span`, whose range is ignored, without reading it.

        Raises:
            StorageError: as `fetch` does, also for a size or a state that is not that of `span`.
        """

    def node(self, url: str) -> str:
        """Identify the machine or mount that serves `url`. Requests to different nodes share no queue."""

    def close(self) -> None:
        """Close idle connections. The storage can still be used, with new ones."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Limits of every read. Raises OptionError or OptionTypeError for a value that is not allowed."""

    #: Seconds without a byte from the storage after which an attempt fails; inside a body up to twice as many.
    timeout_s: float = 20.0
    #: Seconds for one read with all attempts and pauses; also how long a batch of reads may go without any success.
    deadline_s: float = 120.0
    #: Maximum attempts of a read that fails transiently (resets, timeouts, overload, truncation). None: no limit but
    #: `deadline_s`.
    attempts: int | None = None
    #: Longest pause before the second attempt, seconds; doubles with each further one.
    backoff_s: float = 0.2
    #: Longest pause of all, seconds.
    longest_backoff_s: float = 10.0
    #: Reads that overlap in one process.
    concurrency: int = 16
    #: Ranges of one object with at most this many bytes between them are read as one.
    merge_gap: int = 64 * 1024
    #: Bytes above which an object or range is refused, so that no storage can fill the memory.
    longest: int = 1 << 30
    #: Directory on a local disk in which samples of other storages are kept; None: `DPFLOW_CACHE_DIR`, else no cache.
    cache_dir: str | os.PathLike[str] | None = None
    #: Maximum bytes of that directory, also as text such as "500GiB"; None: until a tenth of its disk is free.
    cache_bytes: int | str | None = None

    def __post_init__(self) -> None:
        check_fields(self, check_seconds, "timeout_s", "deadline_s", maximum=math.inf)
        check_fields(self, check_seconds, "backoff_s", "longest_backoff_s", zero=True, maximum=math.inf)
        check_fields(self, check_int, "merge_gap", minimum=0)
        check_fields(self, check_int, "concurrency", "longest", minimum=1)
        check_fields(self, check_int, "attempts", minimum=1, optional=True)
        if isinstance(self.cache_bytes, str):
            object.__setattr__(self, "cache_bytes", parse_bytes("cache_bytes", self.cache_bytes))
        check_fields(self, check_int, "cache_bytes", minimum=1, optional=True)
        if self.cache_dir is not None:
            object.__setattr__(self, "cache_dir", check_directory("cache_dir", self.cache_dir))


def check_directory(name: str, value: object) -> str:
    """Return a local directory as an absolute path. Raises OptionError, OptionTypeError."""
    allowed = "the path of a directory on a local disk"
    check_type(name, value, (str, os.PathLike), allowed)
    path: object = os.fspath(value)  # type: ignore[call-overload]
    check_type(name, path, str, allowed)
    assert isinstance(path, str)
    check_path(name, path)
    if not path or "://" in path:
        raise OptionError(f"{name}={path!r}: give {allowed}")
    return os.path.abspath(os.path.expanduser(path))
