"""Faults on request: what may go wrong between a client and OSS."""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass

from tests.support.oss_server.messages import OSSError, Request


class Fault(enum.Enum):
    """What the server does instead of answering properly."""

    #: the connection is reset before a byte of the answer
    RESET = "reset"
    #: the connection is reset in the middle of the body
    RESET_IN_BODY = "reset-in-body"
    #: nothing is answered, and the connection stays open
    HANG = "hang"
    #: the answer comes byte by byte, ten bytes a second
    TRICKLE = "trickle"
    #: the connection ends in order, but half of the body is missing
    TRUNCATE = "truncate"
    #: the body has one bit turned over
    CORRUPT = "corrupt"
    #: an answer that is no HTTP
    GARBAGE = "garbage"
    #: 403 AccessDenied
    FORBIDDEN = "forbidden"
    #: 503 with the code that OSS uses to slow clients down
    OVERLOADED = "overloaded"
    #: 500 InternalError
    BROKEN = "broken"

    def error(self) -> OSSError | None:
        """The answer that this fault consists of, if it is one of the protocol."""
        return {
            Fault.FORBIDDEN: OSSError(403, "AccessDenied", "You have no right to access this object."),
            Fault.OVERLOADED: OSSError(503, "DownloadTrafficRateLimitExceeded", "Please slow down."),
            Fault.BROKEN: OSSError(500, "InternalError", "We encountered an internal error."),
        }.get(self)


@dataclass(kw_only=True)
class _Planned:
    fault: Fault
    key: str | None
    #: None: for ever
    left: int | None


class FaultPlan:
    """Which requests fail, and how. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._planned: list[_Planned] = []

    def add(self, fault: Fault, *, key: str | None = None, times: int | None = None) -> None:
        """Let requests fail: those of one object or all, the next `times` or all."""
        with self._lock:
            self._planned.append(_Planned(fault=fault, key=key, left=times))

    def clear(self) -> None:
        with self._lock:
            self._planned.clear()

    def take(self, request: Request) -> Fault | None:
        """The fault that this request meets, which is then used up."""
        with self._lock:
            for planned in self._planned:
                if planned.key in (None, request.key) and planned.left != 0:
                    if planned.left is not None:
                        planned.left -= 1
                    return planned.fault
        return None
