"""Imported first by a fork server, and by nothing else; importing it has effects.

With it the fork server drops a connection that does not speak its protocol. Python's own would end, and start again for
seconds, in which no process starts. It also ignores SIGINT from here on. Python's own does so only after all imports,
and Control-C, which reaches every process of a terminal, would print a traceback until then.
"""

from __future__ import annotations

import errno
import os
import signal
from multiprocessing import forkserver, reduction
from socket import socket
from types import SimpleNamespace
from typing import Any

#: The timeout of a request, seconds; requests are served one at a time.
REQUEST_S = 5.0


def receive(connection: socket, limit: int) -> list[int]:
    """Return the descriptors of a request. Raises the error that the fork server's loop treats as a lost connection."""
    connection.settimeout(REQUEST_S)
    try:
        found: list[int] = reduction.recvfds(connection, limit)
    except (OSError, EOFError, RuntimeError, AssertionError) as error:
        raise ConnectionAbortedError(errno.ECONNABORTED, "no request for a process") from error
    if 2 <= len(found) < limit:
        return found
    for descriptor in found:
        os.close(descriptor)
    raise ConnectionAbortedError(errno.ECONNABORTED, "no request for a process")


_server: Any = forkserver
_server.reduction = SimpleNamespace(**{**vars(reduction), "recvfds": receive})

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which `ForkServerPlatform` has blocked for its start
