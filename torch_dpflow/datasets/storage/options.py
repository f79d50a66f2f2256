"""How long and how often to try, and how much to read at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_dpflow.checks import check_fields, check_int, check_seconds


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Limits of every read. Raises OptionError or OptionTypeError for a value that is not allowed."""

    #: Seconds without a byte from the storage after which an attempt is given up; in the middle of a body up to twice
    #: as many.
    timeout_s: float = 20.0
    #: Seconds that one read may take, all its attempts and the pauses between them together; and that a batch
    #: of reads goes on without any of them bringing its bytes.
    deadline_s: float = 120.0
    #: How often a read is tried in all where the failure may pass: resets, timeouts, overload, truncation.
    attempts: int = 5
    #: Seconds of the longest pause before the second attempt; doubles with each further one.
    backoff_s: float = 0.2
    #: Seconds that no pause exceeds.
    longest_backoff_s: float = 10.0
    #: Reads that overlap in one process.
    concurrency: int = 16
    #: Ranges of one object that are no further apart than this are read as one; bytes.
    merge_gap: int = 64 * 1024
    #: An object or range that is longer is refused, so that no storage can fill our memory; bytes.
    longest: int = 1 << 30

    def __post_init__(self) -> None:
        check_fields(self, check_seconds, "timeout_s", "deadline_s", maximum=math.inf)
        check_fields(self, check_seconds, "backoff_s", "longest_backoff_s", zero=True, maximum=math.inf)
        check_fields(self, check_int, "merge_gap", minimum=0)
        check_fields(self, check_int, "attempts", "concurrency", "longest", minimum=1)
