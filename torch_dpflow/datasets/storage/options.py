"""Timeouts, retries and sizes of reads."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_dpflow._core.checks import check_fields, check_int, check_seconds


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Limits of every read. Raises OptionError or OptionTypeError for a value that is not allowed."""

    #: Seconds without a byte from the storage after which an attempt fails; in the middle of a body up to twice
    #: as many.
    timeout_s: float = 20.0
    #: Seconds that one read may take, with all attempts and pauses; and that a batch of reads may continue without
    #: any of them succeeding.
    deadline_s: float = 120.0
    #: Most attempts of a read whose failures are transient: resets, timeouts, overload, truncation. None: as many as
    #: `deadline_s` has time for.
    attempts: int | None = None
    #: Seconds of the longest pause before the second attempt; doubles with each further one.
    backoff_s: float = 0.2
    #: Seconds of the longest pause.
    longest_backoff_s: float = 10.0
    #: Reads that overlap in one process.
    concurrency: int = 16
    #: Ranges of one object with at most so many bytes between them are read as one.
    merge_gap: int = 64 * 1024
    #: A longer object or range is refused, so that no storage can fill our memory; bytes.
    longest: int = 1 << 30

    def __post_init__(self) -> None:
        check_fields(self, check_seconds, "timeout_s", "deadline_s", maximum=math.inf)
        check_fields(self, check_seconds, "backoff_s", "longest_backoff_s", zero=True, maximum=math.inf)
        check_fields(self, check_int, "merge_gap", minimum=0)
        check_fields(self, check_int, "concurrency", "longest", minimum=1)
        check_fields(self, check_int, "attempts", minimum=1, optional=True)
