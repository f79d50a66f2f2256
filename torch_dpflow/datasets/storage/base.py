"""The contract of a storage, byte ranges, states of objects, checksums, and the limits of reads.

An object's state changes when the object is written again, so that readers notice it (`is_settled` names exceptions).
A state is one line of text, or None if the storage reports nothing that changes:

===================  ===================================================================================
object               state
===================  ===================================================================================
local file           times of the last change of content and of attributes, ns, and number of the inode
S3, OSS, web server  its strong ETag, else its weak ETag, its modification time as an HTTP date, or both
any other            the same if fsspec reports them, else one of `_FIELDS`, as in "mtime=1700000000.0"
===================  ===================================================================================
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import re
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import formatdate, parsedate_to_datetime
from typing import Any, Literal, NamedTuple, Protocol, get_args

import msgspec

from torch_dpflow._core.checks import check_fields, check_int, check_path, check_seconds, check_type, parse_bytes
from torch_dpflow.datasets.storage.urls import printable_url
from torch_dpflow.errors import ChecksumError, OptionError, OptionTypeError, TruncatedObjectError

ChecksumAlgorithm = Literal["crc32", "sha256"]
CHECKSUM_PATTERN = "^(crc32:[0-9a-f]{8}|sha256:[0-9a-f]{64})$"
#: Longest single wait, seconds. Systems refuse infinity, and sockets refuse more than 2**31 ms.
MAX_WAIT_S = 1e6
#: Text of errors for an object whose state is not the expected one: what is wrong, and what to do.
WRITTEN_AGAIN = (
    "the object was written again after the dataset was opened or imported; open or import it again, restore the "
    "object, or read with check=False if its bytes are the same"
)


def sha256_of(data: bytes | memoryview) -> str:
    """Return the SHA-256 of `data` as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def _crc32_of(data: bytes | memoryview) -> str:
    return f"{zlib.crc32(data):08x}"


_ALGORITHMS: dict[str, Callable[[bytes | memoryview], str]] = {"crc32": _crc32_of, "sha256": sha256_of}
assert _ALGORITHMS.keys() == set(get_args(ChecksumAlgorithm))


def checksum_of(data: bytes | memoryview, algorithm: ChecksumAlgorithm) -> str:
    """Return the checksum of `data`, as "crc32:0a1b2c3d". "crc32" detects damage cheaply, "sha256" also forgeries."""
    return f"{algorithm}:{_ALGORITHMS[algorithm](data)}"


def matches(data: bytes | memoryview, checksum: str) -> bool:
    """Return whether the checksum of `data` is `checksum`, a result of `checksum_of`."""
    algorithm, _, digest = checksum.partition(":")
    return _ALGORITHMS[algorithm](data) == digest


class ByteRange(msgspec.Struct, frozen=True):
    """The bytes `start` to `stop` (excluded; None: the end) of the object at `url`.

    Raises OptionError for a negative start or a stop before it.
    """

    url: str
    start: int = 0
    stop: int | None = None
    #: Expected bytes of the whole object. Reads that notice a different size fail. None: unknown.
    size: int | None = None
    #: The expected state of the object; a different state is an error. None: not checked.
    state: str | None = None
    #: Checksum of the range, if known. A disk cache stores only ranges with a checksum or a settled state.
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
        """Length of the range, bytes; None if it depends on the size of the object."""
        return None if self.stop is None else self.stop - self.start

    def check_size(self, found: int | None) -> None:
        """Compare `found`, the reported size of the whole object, with `size`. Does nothing if either is None.

        Raises:
            TruncatedObjectError: the object has fewer bytes.
            ChecksumError: the object has more bytes.
        """
        if self.size is None or found is None or found == self.size:
            return
        kind = TruncatedObjectError if found < self.size else ChecksumError
        raise kind(
            f"{self}: the object has {found} bytes, its dataset says {self.size}; it was replaced or cut short: "
            "restore it, open it again if it is read in place, or publish a new version"
        )

    def replaced(self, found: str | None) -> ChecksumError:
        """Return the error for an object whose state is `found` (None: not reported) instead of `state`."""
        return ChecksumError(f"{self}: {WRITTEN_AGAIN} (its state was {self.state}, and is {found or 'not reported'})")

    def __str__(self) -> str:
        url = printable_url(self.url)
        if self.is_whole:
            return url
        return f"{url} (bytes {self.start} to {'the end' if self.stop is None else self.stop})"


class Storage(Protocol):
    """Interface of one kind of storage. `fetch` and `look` make one attempt, which the caller repeats if it fails.

    Any thread can call any method. An instance belongs to the process that made it, because sockets and locks do not
    survive a fork.
    """

    #: Whether reads have the latency of a network, so that reading in several threads always pays.
    is_remote: bool

    def fetch(self, span: ByteRange, deadline: float) -> bytes:
        """Return exactly the bytes of `span`, before `deadline`, a time of `time.monotonic()`.

        Raises:
            StorageError: the bytes cannot be read, or the storage reports a size or state that differs from the one
                that `span` expects. For a known cause a subclass is raised. The message names the object.
        """

    def look(self, span: ByteRange, deadline: float) -> ObjectState:
        """Return size and state of the object of `span`, reading at most one byte. The range of `span` is ignored.

        Raises:
            StorageError: for the same causes as in `fetch`.
        """

    def node(self, url: str) -> str:
        """Return the name of the machine or mount that serves `url`. Different nodes serve requests independently."""

    def close(self) -> None:
        """Close idle connections. The storage can still be used, and then opens new connections."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Limits, retries and cache of reads. Raises OptionError or OptionTypeError for a value that is not allowed."""

    #: Seconds without a byte from S3, OSS or a web server until an attempt fails; within a body up to twice this time.
    timeout_s: float = 20.0
    #: Maximum seconds of one remote read, with all its attempts and pauses. A batch of reads fails if none of its reads
    #: has succeeded for this time.
    deadline_s: float = 120.0
    #: Maximum attempts of a remote read that fails by resets, timeouts or overload. None: no limit but `deadline_s`. If
    #: an object is changed or cut short, at most 5 attempts are made.
    attempts: int | None = None
    #: Maximum pause before the second attempt, seconds; the maximum doubles with each further attempt.
    backoff_s: float = 0.2
    #: Upper limit of the doubled maximum pause, seconds.
    longest_backoff_s: float = 10.0
    #: Maximum number of reads of one batch that run at the same time.
    concurrency: int = 16
    #: Ranges of one object with at most this many bytes between them (4 KiB in a local file) can be read as one.
    merge_gap: int = 64 * 1024
    #: Maximum bytes of an object or range; a longer one is refused, so that no storage can fill the memory.
    longest: int = 1 << 30
    #: Directory on a local disk that caches samples of remote storages; None: `DPFLOW_CACHE_DIR`, else no cache.
    cache_dir: str | os.PathLike[str] | None = None
    #: Maximum bytes of that directory, or a text such as "500GiB"; None: a tenth of its disk stays free.
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


def read_options_of(given: object) -> ReadOptions:
    """Return the given options, or the default ones for None. Raises OptionTypeError for any other type."""
    if given is None:
        return ReadOptions()
    check_type("read_options", given, ReadOptions, "a ReadOptions, or None")
    assert isinstance(given, ReadOptions)
    return given


def check_storage_options(options: object) -> None:
    """Raise OptionTypeError if `options` is neither None nor a mapping whose keys are texts."""
    if options is not None:
        allowed = "a dict of fsspec's options, or None"
        check_type("storage_options", options, Mapping, allowed)
        if not all(isinstance(name, str) for name in options):  # type: ignore[attr-defined]
            raise OptionTypeError(f"storage_options={options!r:.80} has keys that are no strings; give {allowed}")


def check_directory(name: str, value: object) -> str:
    """Return the local directory `value` as an absolute path. `name` names its option in errors.

    Raises OptionError, OptionTypeError: `value` is not a local path.
    """
    allowed = "the path of a directory on a local disk"
    path = check_path(name, value, allowed)
    if not path or "://" in path:
        raise OptionError(f"{name}={path!r}: give {allowed}")
    return os.path.abspath(os.path.expanduser(path))


_TAG = '"[!#-~]*"'
_DATE = "[A-Z][a-z]{2}, [0-9]{2} [A-Z][a-z]{2} [0-9]{4} [0-9]{2}:[0-9]{2}:[0-9]{2} GMT"
#: ETags that all objects of a server have.
_EMPTY = frozenset({"", '""', 'W/""'})
#: The states of HTTP: tag and date.
_OF_HTTP = re.compile(f"({_TAG}|W/{_TAG})? ?({_DATE})?")
_LOCAL = "[0-9]+ [0-9]+ [0-9]+"
STATE_PATTERN = f"^({_TAG}|W/{_TAG}|W/{_TAG} {_DATE}|{_DATE}|{_LOCAL}|[A-Za-z_]+=[ -~]{{1,200}})$"
#: Fields of fsspec's file systems that change with each write, the best one first. FTP and the HuggingFace Hub have
#: some too, but list a directory for them.
_FIELDS = ("CRC", "generation", "updated", "modificationTime", "mtime", "created")
#: Age of a modification time, seconds, that allows for clocks that differ.
_SETTLED_S = 60.0


class ObjectState(NamedTuple):
    """Size and state of an object, as its storage reports them."""

    #: bytes; None if it is not reported
    size: int | None
    #: None if nothing is reported that changes with each write
    state: str | None


def state_of_file(found: os.stat_result) -> str:
    """Return the state of a local file whose `os.stat` is `found`: mtime and ctime, ns, and inode (0 on FUSE)."""
    inode = found.st_ino if _has_lasting_inodes(found.st_dev) else 0
    return f"{found.st_mtime_ns} {found.st_ctime_ns} {inode}"


def is_state_of_file(state: str, found: os.stat_result) -> bool:
    """Return whether `state` is that of a local file whose `os.stat` is `found`. Its inode 0 fits every file."""
    written, changed, inode = _numbers(state)
    return written == found.st_mtime_ns and changed == found.st_ctime_ns and inode in (found.st_ino, 0)


@functools.lru_cache(maxsize=4096)
def _numbers(state: str) -> tuple[int, int, int]:
    """Return (modification time, attribute-change time, inode or 0) in the state of a local file; times in ns.

    Cached, because all reads of a file compare the same state.
    """
    if not is_local(state):
        return -1, -1, -1
    written, changed, inode = map(int, state.split())
    return written, changed, inode


@functools.lru_cache(maxsize=1024)
def _has_lasting_inodes(device: int) -> bool:
    with suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        number = f"{os.major(device)}:{os.minor(device)}"
        for line in mounts:
            mount, _, kind = line.partition(" - ")
            if mount.split()[2] == number:
                return not kind.startswith("fuse")
    return True


def state_of_entry(entry: Mapping[str, Any]) -> str | None:
    """Return the state of an object from its entry in a listing of fsspec; None if the entry contains no state."""
    tag = entry.get("ETag") or entry.get("etag")
    changed = entry.get("LastModified") or entry.get("last_modified") or entry.get("Last-Modified")
    if isinstance(changed, datetime):
        changed = changed.timestamp()
    if isinstance(changed, int | float):
        changed = formatdate(changed, usegmt=True)
    found = _of_http(tag if isinstance(tag, str) else None, changed if isinstance(changed, str) else None)
    if found is not None:
        return found
    name = next((name for name in _FIELDS if entry.get(name) is not None), None)
    return None if name is None else f"{name}={_text(entry[name])}"


def is_state_of_entry(state: str, entry: Mapping[str, Any]) -> bool:
    """Return whether an object is in this `state`, given its entry in a listing of fsspec.

    If `state` is a modification time alone, the entry's ETag is not compared.
    """
    name, equals, value = state.partition("=")
    if equals and name in _FIELDS:
        return _text(entry.get(name)) == value
    tag, date = _parts(state)
    without = {name: field for name, field in entry.items() if name.lower() != "etag"}
    return state == state_of_entry(entry) or (tag == "" and date != "" and state == state_of_entry(without))


def _text(value: Any) -> str:
    """Return a field as text. A time may be a number in a listing, and a datetime elsewhere."""
    return str(value.timestamp() if isinstance(value, datetime) else value)


def state_of_fields(fields: Mapping[str, str]) -> str | None:
    """Return an object's state from a response's headers (names in lower case); None if they contain no state."""
    return _of_http(fields.get("etag"), fields.get("last-modified"))


def is_state_of_fields(state: str, fields: Mapping[str, str]) -> bool:
    """Return whether a response with these headers (names in lower case) is from an object in this `state`."""
    found = fields.get("etag")
    if found == state:
        return True
    tag, date = _parts(state)
    return (
        bool(tag or date)
        and (not tag or tag == (None if found is None else _quoted(found)))
        and (not date or date == _date(fields.get("last-modified")))
    )


@functools.lru_cache(maxsize=4096)
def conditions(state: str) -> dict[str, str]:
    """Return headers with which a server refuses the request if the object is not in this `state`.

    A weak ETag is left out, because servers would refuse every request with it.
    """
    tag, date = _parts(state)
    return {
        **({"if-match": tag} if tag[:1] == '"' else {}),
        **({"if-unmodified-since": date} if date else {}),
    }


def is_local(state: str) -> bool:
    """Return whether `state` is that of a local file."""
    return re.fullmatch(_LOCAL, state) is not None


def is_tag(state: str) -> bool:
    """Return whether `state` is a strong ETag.

    A strong ETag and the object's size together identify the content at a URL, whichever server answers.
    """
    return _parts(state)[0][:1] == '"'


def is_settled(state: str) -> bool:
    """Return whether every later write to the object is sure to change its `state`.

    True for a strong ETag, and for an HTTP date more than a minute ago. A date has whole seconds, so a second write in
    the same second would not change it.
    """
    tag, date = _parts(state)
    return tag[:1] == '"' or (bool(date) and time.time() - parsedate_to_datetime(date).timestamp() > _SETTLED_S)


def _of_http(tag: str | None, date: str | None) -> str | None:
    tag = "" if tag is None or tag in _EMPTY else _quoted(tag)
    date = _date(date)
    if re.fullmatch(_TAG, tag):
        return tag
    weak = tag if re.fullmatch(f"W/{_TAG}", tag) else ""
    return f"{weak} {date}".strip() or None


def _date(text: str | None) -> str:
    """Return a modification time as an HTTP date; "" for other text. Two obsolete forms are read (RFC 9110, 5.6.7)."""
    if text is None or re.fullmatch(_DATE, text):
        return text or ""
    try:
        found = parsedate_to_datetime(text)
        return formatdate((found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp(), usegmt=True)
    except (ValueError, OverflowError):
        return ""


@functools.lru_cache(maxsize=4096)
def _parts(state: str) -> tuple[str, str]:
    """Return ETag and date of a state, or "" in place of a missing one."""
    match = _OF_HTTP.fullmatch(state)
    return ("", "") if match is None else (match[1] or "", match[2] or "")


def _quoted(tag: str) -> str:
    """Return an ETag in quotes, which some servers leave out."""
    return tag if tag.startswith("W/") else '"' + tag.strip('"') + '"'
