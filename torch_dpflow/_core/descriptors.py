"""Number of file descriptors that this process can still open, and an error if there are too few.

libzmq aborts the process if it cannot get a descriptor for a connection or a thread's wake-up. So code that needs
descriptors checks first.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
import sys
from contextlib import suppress

from torch_dpflow.errors import DescriptorLimitError

#: A listener accepts no connection while fewer descriptors are left: several peers may connect between two checks.
SPARE = 16
_OWN = "/proc/self/fd"


def available() -> int | None:
    """Return the number of descriptors that this process can still open; None if it is unknown, as without /proc."""
    limit = soft_limit()
    try:
        # The limit is one of descriptor numbers: after it was lowered, descriptors above it do not count.
        return limit - sum(int(number) < limit for number in os.listdir(_OWN)) + 1  # the listing's own
    except OSError as error:
        return 0 if is_exhausted(error) else None


def require(count: int, what: str) -> None:
    """Raise DescriptorLimitError if fewer than `count` more descriptors can be opened, even after garbage collection.

    what: noun for the error, such as "a pool".
    """
    left = available()
    if left is not None and left < count:
        gc.collect()
        left = available()
    if left is not None and left < count:
        raise exhausted(f"{what} needs {count} more, of which {left} are left")


def has_spare(count: int) -> bool:
    """Return whether `count` more descriptors can be opened; True if it is unknown."""
    # Trying the highest number would make the kernel grow its table to that length: 12 to 30 ms if there are threads.
    with suppress(OSError):  # without /proc
        taken = os.stat(_OWN).st_size  # how many are open, on Linux from 6.2; 0 before
        if 0 < taken <= soft_limit() - count:
            return True
    left = available()
    return left is None or left >= count


def exhausted(what: str) -> DescriptorLimitError:
    """Return a DescriptorLimitError that explains the limit. what: the effect, such as "no process can be started"."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    advice = (
        f"Raise it by `ulimit -n` in the shell that starts this process, up to the hard limit of {shown}"
        if hard == resource.RLIM_INFINITY or soft < hard
        else "The hard limit is the same: raise that one first (limits.conf, LimitNOFILE= of a unit, --ulimit nofile= "
        "of a container)"
    )
    return DescriptorLimitError(
        f"too many open files: {what}. The limit of process {os.getpid()} is {soft} (`ulimit -n`). {advice}; or have "
        "fewer files, sockets and workers open"
    )


def is_exhausted(error: BaseException) -> bool:
    """Return whether an error was caused by a lack of descriptors."""
    if isinstance(error, OSError):
        return isinstance(error, DescriptorLimitError) or error.errno in (errno.EMFILE, errno.ENFILE)
    # torch raises a RuntimeError with the system's text.
    return isinstance(error, RuntimeError) and os.strerror(errno.EMFILE) in str(error)


def soft_limit() -> int:
    """Return the number of descriptors that this process may have open; `sys.maxsize` without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def raise_limit(wanted: int) -> None:
    """Raise the descriptor limit of this process and its later children to `wanted`, at most to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
