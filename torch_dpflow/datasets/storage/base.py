"""The contract of a storage, byte ranges, and the limits of reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from torch_dpflow._core.checks import check_fields, check_int, check_seconds
from torch_dpflow.datasets.storage.urls import without_login
from torch_dpflow.errors import ChecksumError, OptionError, TruncatedObjectError

#: A strong ETag, or an HTTP date.
REVISION_PATTERN = '^("[!#-~]+"|[A-Z][a-z]{2}, [0-9]{2} [A-Z][a-z]{2} [0-9]{4} [0-9]{2}:[0-9]{2}:[0-9]{2} GMT)$'


@dataclass(frozen=True, slots=True)
class ByteRange:
    """The bytes `start` to `stop` (excluded; None: the end) of the object at `url`.

    Raises OptionError for a negative start or a stop before it.
    """

    url: str
    start: int = 0
    stop: int | None = None
    #: Bytes of the whole object if known; an object of another size is an error.
    size: int | None = None
    #: The expected state of the object, see `revision_of`. Another one is an error where S3 or OSS is read directly.
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.start < 0 or (self.stop is not None and self.stop < self.start):
            raise OptionError(
                f"{without_login(self.url)}: bytes {self.start} to {self.stop} are no range; "
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

    def __str__(self) -> str:
        url = without_login(self.url)
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

        Raises:
            StorageError: a subclass if the cause is known; the message names the object.
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
    #: Ranges of one object with at most so many bytes between them are read as one.
    merge_gap: int = 64 * 1024
    #: Bytes above which an object or range is refused, so that no storage can fill the memory.
    longest: int = 1 << 30

    def __post_init__(self) -> None:
        check_fields(self, check_seconds, "timeout_s", "deadline_s", maximum=math.inf)
        check_fields(self, check_seconds, "backoff_s", "longest_backoff_s", zero=True, maximum=math.inf)
        check_fields(self, check_int, "merge_gap", minimum=0)
        check_fields(self, check_int, "concurrency", "longest", minimum=1)
        check_fields(self, check_int, "attempts", minimum=1, optional=True)
