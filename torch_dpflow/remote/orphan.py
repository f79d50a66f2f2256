"""A worker ends with the process that it works for, even when that one is killed and can tell nobody."""

import os
import select
import shutil
import threading
import time

#: Where the kernel offers no descriptor of a process, how often its id is looked up; seconds.
POLL_S = 1.0


def end_with(pid: int, directory: str) -> None:
    """From now on this process exits when process `pid` does, and removes `directory` on its way out.

    A thread waits for it, so a worker that hangs in user code goes too. Call it once.
    """
    threading.Thread(target=_watch, args=(pid, directory), name="dpflow-orphan", daemon=True).start()


def _watch(pid: int, directory: str) -> None:
    _wait_for_end(pid)
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


def _wait_for_end(pid: int) -> None:
    if hasattr(os, "pidfd_open"):
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        except OSError:
            pass  # an old kernel, or a sandbox that forbids the call
        else:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            poller.poll()
            return
    while _is_alive(pid):
        time.sleep(POLL_S)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
