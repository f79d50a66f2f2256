"""Who listens at the path of an ipc address."""

from __future__ import annotations

import errno
import os
import stat
from socket import AF_UNIX, socket


def check_path(path: str, *, take_leftover: bool) -> None:
    """Raise OSError where another process listens at an ipc path: libzmq would silently replace its socket.

    A file without a listener was left by a killed process, or is about to be removed by one that closes.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "a file is there that is no socket")
    with socket(AF_UNIX) as probe:
        probe.settimeout(1.0)
        if probe.connect_ex(path) == 0 or not take_leftover:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
