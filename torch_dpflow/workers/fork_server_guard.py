"""Protection of a fork server against invalid connections and SIGINT. Importing it has effects.

Only the fork server imports this module, before all others. The fork server then drops a connection that does not speak
its protocol; without this module it would end, and take seconds to start again. It also ignores SIGINT from the start.
Python's own fork server does so only after all imports: until then Control-C, which reaches every process of a
terminal, would print a traceback.

Python's fork server has no hook between imports, but skips modules that are not found. So the list of modules contains
marks between them: names that no module has. Each mark becomes the name of the process, for `top` and for
`ForkServerPlatform`. Between the first and the last mark the kernel kills the process when its parent ends, because a
process in a hanging import cannot detect that. Otherwise the process exits when its parent has ended: Python's fork
server also waits for the end of all its processes, of which some may be stopped.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from contextlib import suppress
from multiprocessing import forkserver, reduction
from socket import socket
from types import SimpleNamespace
from typing import Any

from torch_dpflow.workers.process_control import FORK_SERVER_NAME, FORK_SERVER_UP, at_parents_end, exit_without_thread

#: The timeout of a request, seconds; requests are served one at a time.
REQUEST_S = 5.0


def receive(connection: socket, limit: int) -> list[int]:
    """Receive the descriptors of a request: at least 2, and fewer than `limit`.

    Raises ConnectionAbortedError for anything else; the server's loop then drops the connection.
    """
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


class Marks:
    """Module finder that never finds a module, but renames this process to each mark that is looked up."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name.startswith(FORK_SERVER_NAME):
            at_parents_end(signal.SIGCONT if name == FORK_SERVER_UP else signal.SIGKILL)
            with suppress(OSError), open("/proc/self/comm", "w") as file:
                file.write(name)


exit_without_thread(os.getppid())
sys.meta_path.insert(0, Marks)

_server: Any = forkserver
_server.reduction = SimpleNamespace(**{**vars(reduction), "recvfds": receive})

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which `ForkServerPlatform` has blocked for its start
