"""How long and how often to try, and how much to read at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_dpflow.errors import OptionError, OptionTypeError
from torch_dpflow.options import check_whole_number


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
        for name in ("timeout_s", "deadline_s", "backoff_s", "longest_backoff_s"):
            self._check_seconds(name, getattr(self, name), above_0=name in ("timeout_s", "deadline_s"))
        check_whole_number("merge_gap", self.merge_gap, minimum=0)
        for name in ("attempts", "concurrency", "longest"):
            check_whole_number(name, getattr(self, name), minimum=1)

    @staticmethod
    def _check_seconds(name: str, value: Any, *, above_0: bool) -> None:
        allowed = "seconds above 0" if above_0 else "seconds, 0 or more"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise OptionTypeError(f"{name}={value!r} is of type {type(value).__name__}; give {allowed}")
        if not (value > 0 or (value == 0 and not above_0)):
            raise OptionError(f"{name}={value!r}: give {allowed}")
