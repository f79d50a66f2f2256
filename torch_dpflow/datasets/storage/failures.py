"""Storage errors and retries: which failures are transient, and how long to try again."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import gzip
import http.client
import lzma
import math
import ssl
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable
from typing import TypeVar

from torch_dpflow._core.backoff import Backoff
from torch_dpflow.datasets.storage.base import MAX_WAIT_S, WRITTEN_AGAIN, ByteRange, ReadOptions
from torch_dpflow.datasets.storage.credentials import left_out_hint
from torch_dpflow.datasets.storage.http_connection import MalformedResponseError
from torch_dpflow.errors import (
    AccessDeniedError,
    ChecksumError,
    ObjectMissingError,
    StorageError,
    StorageTimeoutError,
    StorageUnavailableError,
    TruncatedObjectError,
)
from torch_dpflow.log import DATASETS

#: Characters of another library's message, which may quote a server's response.
_MAX_TEXT = 300
#: Errors for these statuses, and advice.
_BY_STATUS: dict[int, tuple[type[StorageError], str]] = {
    401: (AccessDeniedError, "check the credentials, their rights, and this machine's clock"),
    403: (AccessDeniedError, "check the credentials, their rights, and this machine's clock"),
    404: (ObjectMissingError, "check the address, and of an object store the bucket, the endpoint and the region"),
    408: (StorageTimeoutError, "the storage waited too long for the request"),
    412: (ChecksumError, WRITTEN_AGAIN),
    416: (TruncatedObjectError, "the object ends before the range begins"),
    **dict.fromkeys(
        # 425: too early; 520 to 524: of Cloudflare, about the server behind it; 529: overloaded, at several vendors.
        (425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529),
        (StorageUnavailableError, "the storage is overloaded or broken"),
    ),
}
#: Attempts of a read whose object does not have the expected length.
_MAX_WRONG_LENGTH = 5
#: Classes of vendors for failed connections that are not OSErrors.
_CONNECTIONS = frozenset(
    {
        ("botocore", "ConnectionError"),
        ("botocore", "HTTPClientError"),
        ("oss2", "RequestError"),
        ("aiohttp", "ClientConnectionError"),
        ("aiohttp", "ClientPayloadError"),
        ("azure", "ServiceRequestError"),
        ("azure", "ServiceResponseError"),
    }
)
_DAMAGES = (gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError, tarfile.TarError, zipfile.BadZipFile)
#: The OSError of bz2 for damaged content.
_BZ2_DAMAGE = "Invalid data stream"
_TIMEOUTS = (TimeoutError, asyncio.TimeoutError, concurrent.futures.TimeoutError)


def storage_error(span: ByteRange, error: Exception) -> StorageError:
    """Return the StorageError for `error`, which a library raised while `span` was read."""
    if isinstance(error, StorageError):
        return error
    text = f"{span}: {_text_of(error)}"
    status = _http_status(error)
    known = error_of_status(status, text)
    if known is not None:
        return known
    if 400 <= status < 500:  # the request is wrong, and stays so
        return StorageError(f"{text}{left_out_hint()}")
    if isinstance(error, _DAMAGES) or (type(error) is OSError and error.args == (_BZ2_DAMAGE,)):
        return StorageError(
            f"{text}; the archive is damaged or cut, or compressed otherwise than its name says: test it, as by "
            "gzip -t or tar -t, and restore it"
        )
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return ObjectMissingError(f"{text}; there is no such object")
    if isinstance(error, PermissionError):
        return AccessDeniedError(f"{text}; look at the credentials and at the rights of their owner{left_out_hint()}")
    if type(error).__name__ == "ProfileNotFound":  # of botocore, which need not be installed
        return AccessDeniedError(
            f"{text}; name one of ~/.aws/config by AWS_PROFILE or the option profile{left_out_hint()}"
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return StorageError(
            f"{text}; the server's certificate is not trusted here: give the option verify, a file with the "
            "certificate of its authority"
        )
    if isinstance(error, _TIMEOUTS):
        return StorageTimeoutError(f"{text}; the storage did not answer in time")
    if isinstance(error, http.client.IncompleteRead):
        return StorageUnavailableError(f"{text}; the connection ended before the object did")
    if isinstance(error, MalformedResponseError):
        return StorageUnavailableError(f"{text}; the response breaks HTTP: a server or a proxy on the way is at fault")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return StorageError(f"{text}; close files, or raise the limit of open ones (ulimit -n)")
    is_connection = isinstance(error, ConnectionError | OSError | http.client.HTTPException)
    if is_connection or _is_connection_of_vendor(error):
        return StorageUnavailableError(f"{text}; the connection failed")
    return StorageError(f"{text}{left_out_hint()}")


def error_of_status(status: int, text: str) -> StorageError | None:
    """Return the error for an HTTP status, with `text` and advice as its message; None for a status without advice."""
    known = _BY_STATUS.get(status)
    if known is None:
        return None
    return known[0](f"{text}; {known[1]}{left_out_hint() if known[0] is AccessDeniedError else ''}")


def is_transient(error: StorageError) -> bool:
    """Return whether the error comes from a network or server, which may recover, and not from the object."""
    return isinstance(error, StorageUnavailableError | StorageTimeoutError)


def max_attempts(error: StorageError) -> float:
    """Return the maximum attempts of a read that failed with `error`: infinity if transient, 1 for most other errors.

    TruncatedObjectError and ChecksumError (a wrong length, or an object that differs from the expected one) get 5: the
    response may have been cut, or one of several servers may have another copy of the object.
    """
    if is_transient(error):
        return math.inf
    return _MAX_WRONG_LENGTH if isinstance(error, TruncatedObjectError | ChecksumError) else 1


def _is_connection_of_vendor(error: Exception) -> bool:
    """Return whether a vendor's client, which need not be installed, lost its connection or found no server."""
    names = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__}
    return not names.isdisjoint(_CONNECTIONS) and type(error).__name__ != "SSLError"


def is_missing_bucket(error: BaseException | None) -> bool:
    """Return whether a client of S3 or OSS raised `error` because the bucket does not exist."""
    while error is not None:
        if type(error).__name__ == "NoSuchBucket":  # of botocore and of oss2, which need not be installed
            return True
        error = error.__cause__ or error.__context__
    return False


def _http_status(error: BaseException | None) -> int:
    """Return the HTTP status in the chain of a vendor client's errors; 0 if there is none."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):  # botocore
            return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        status = getattr(error, "status", None)  # oss2, aiohttp
        if isinstance(status, int):
            return status
        error = error.__cause__ or error.__context__
    return 0


def _text_of(error: Exception) -> str:
    text = " ".join(str(error).split())[:_MAX_TEXT]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


T = TypeVar("T")

#: Seconds before the deadline within which no further attempt is made.
_MIN_LEFT_S = 0.01
#: Seconds before the deadline in which one last attempt is made if the server requests a wait beyond it.
_LAST_S = 1.0
#: Seconds of failures after which a read is logged.
_REPORT_AFTER_S = 5.0
#: Seconds between two logs of a process, as all reads fail while a server is down.
_REPORT_AGAIN_S = 30.0


def with_retries(
    attempt: Callable[[float], T],
    options: ReadOptions,
    *,
    is_remote: bool = True,
    deadline: float = math.inf,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Call `attempt` until it succeeds, as often as `max_attempts` and `options.attempts` allow; return its result.

    Attempts end at `deadline`, or `options.deadline_s` seconds after the call if that is earlier. `attempt` gets this
    time of `clock` as its argument. Pauses have exponential back-off and full jitter, and are shorter near the end. If
    `is_remote` is false, there is one attempt, with `deadline`.

    Raises the last attempt's StorageError. If its cause allows retries, its message has the number of attempts; after a
    timeout, also the latest error that is not a timeout.
    """
    if not is_remote:
        return attempt(deadline)
    begun = clock()
    deadline = min(deadline, begun + options.deadline_s)
    backoff: Backoff | None = None
    cause = ""
    while True:
        try:
            return attempt(deadline)
        except StorageError as failure:
            error = failure
            allowed = max_attempts(error)
            if allowed == 1:
                raise
            if options.attempts is not None:
                allowed = min(allowed, options.attempts)
            backoff = backoff or Backoff(min(options.backoff_s, MAX_WAIT_S), options.longest_backoff_s)
            pause, now = backoff.pause_s(), clock()
            left = deadline - now
            if backoff.failures >= allowed or left <= max(options.backoff_s, _MIN_LEFT_S, _last_s(error, left)):
                count = f"{backoff.failures}" if allowed == math.inf else f"{backoff.failures} of {allowed}"
                earlier = f"; an earlier attempt: {cause}" if cause and isinstance(error, StorageTimeoutError) else ""
                raise type(error)(f"{error} (attempt {count}, {now - begun:.1f} s){earlier}") from error
            if not isinstance(error, StorageTimeoutError):
                cause = str(error)
            if now - begun >= _REPORT_AFTER_S:
                _report(error, backoff.failures, left)
        sleep(min(_pause_after(error, pause, left), MAX_WAIT_S))


def _pause_after(error: StorageError, pause_s: float, left_s: float) -> float:
    """Return the seconds to wait: the server's Retry-After and a pause, cut to leave time for a last attempt."""
    asked_s = error.retry_after_s if isinstance(error, StorageUnavailableError) else 0.0
    if asked_s == 0.0:
        return min(pause_s, left_s / 2)
    return min(asked_s + pause_s, left_s - min(left_s, _LAST_S) / 2)


def _last_s(error: StorageError, left_s: float) -> float:
    """Return the seconds before the deadline in which nothing is retried: the wait that the server requests."""
    return _LAST_S if isinstance(error, StorageUnavailableError) and error.retry_after_s >= left_s else 0.0


_reported_at = -math.inf


def _report(error: StorageError, failures: int, left_s: float) -> None:
    """Log why a read takes long. Two threads may log at once, which does no harm."""
    global _reported_at
    if time.monotonic() - _reported_at >= _REPORT_AGAIN_S:
        _reported_at = time.monotonic()
        DATASETS.warning(
            "%s (attempt %d); trying again for up to %.0f s (ReadOptions.deadline_s)", error, failures, left_s
        )
