"""Retries transient failures with exponential back-off and full jitter, until one deadline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

from torch_dpflow._core.backoff import Backoff
from torch_dpflow.datasets.storage.base import ByteRange, Storage
from torch_dpflow.datasets.storage.failures import max_attempts
from torch_dpflow.datasets.storage.options import ReadOptions
from torch_dpflow.errors import StorageError
from torch_dpflow.log import DATASETS

T = TypeVar("T")

#: Seconds before the deadline in which no further attempt is worth it.
_MIN_LEFT_S = 0.01
#: Seconds of failures after which a read is reported.
_REPORT_AFTER_S = 5.0
#: Seconds between two reports of a process: when a server is away, all reads fail.
_REPORT_AGAIN_S = 30.0


def fetch_with_retries(
    storage: Storage,
    span: ByteRange,
    options: ReadOptions,
    *,
    deadline: float = math.inf,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> bytes:
    """Read `span`, as `with_retries` does."""
    return with_retries(
        lambda deadline: storage.fetch(span, deadline),
        options,
        is_remote=storage.is_remote,
        deadline=deadline,
        sleep=sleep,
        clock=clock,
    )


def with_retries(
    attempt: Callable[[float], T],
    options: ReadOptions,
    *,
    is_remote: bool = True,
    deadline: float = math.inf,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Call `attempt` with the deadline; retry transient failures until then, or until `options.attempts` are used up.

    The last pauses are shortened, so that the attempts reach to the deadline. Without `is_remote` one has to do.

    Raises the last attempt's StorageError, with the number of attempts in its message.
    """
    begun = clock()
    deadline = min(deadline, begun + options.deadline_s)
    backoff: Backoff | None = None
    while True:
        try:
            return attempt(deadline)
        except StorageError as error:
            allowed = max_attempts(error) if is_remote else 1
            if allowed == 1:
                raise
            if options.attempts is not None:
                allowed = min(allowed, options.attempts)
            backoff = backoff or Backoff(options.backoff_s, options.longest_backoff_s)
            pause, now = backoff.pause_s(), clock()
            left = deadline - now
            if backoff.failures >= allowed or left <= max(options.backoff_s, _MIN_LEFT_S):
                count = f"{backoff.failures}" if allowed == math.inf else f"{backoff.failures} of {allowed}"
                raise type(error)(f"{error} (attempt {count}, {now - begun:.1f} s)") from error
            if now - begun >= _REPORT_AFTER_S:
                _report(error, backoff.failures, left)
        sleep(min(pause, left / 2))


_reported_at = -math.inf


def _report(error: StorageError, failures: int, left_s: float) -> None:
    """Log why a read takes long. Threads may report twice at once, which does no harm."""
    global _reported_at
    if time.monotonic() - _reported_at >= _REPORT_AGAIN_S:
        _reported_at = time.monotonic()
        DATASETS.warning(
            "%s (attempt %d); trying again for up to %.0f s (ReadOptions.deadline_s)", error, failures, left_s
        )
