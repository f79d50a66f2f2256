"""Takes a member's order from where its platform has left it, so that nobody finds its key there later."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from torch_dpflow.errors import UsageError
from torch_dpflow.platforms.subprocesses import ORDER_VARIABLE


def take_order(arguments: Sequence[str]) -> bytes:
    """The order in the file that the argument names, or else in the environment, from where it is erased.

    Raises:
        UsageError: there is none.
    """
    if arguments:
        return Path(arguments[0]).read_bytes()
    order = os.environ.get(ORDER_VARIABLE)
    if order is None:
        raise UsageError(
            f"a member is started by a platform, with its order in {ORDER_VARIABLE} or in a file that it is given"
        )
    _erase(ORDER_VARIABLE)
    del os.environ[ORDER_VARIABLE]
    return order.encode()


def _erase(name: str) -> None:
    """Overwrite a variable where the process began with it: /proc/PID/environ and `ps` read it from there."""
    library = ctypes.CDLL(None)
    library.getenv.restype = ctypes.c_void_p
    address = library.getenv(name.encode())
    if address:
        ctypes.memset(address, 0, len(os.environb[name.encode()]))
