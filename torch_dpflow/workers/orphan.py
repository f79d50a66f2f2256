"""Ends a process when another one ends, even by SIGKILL."""

import ctypes
import os
import select
import shutil
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
#: How often to look up a pid where the kernel has no pidfds, seconds.
POLL_S = 1.0


def exit_with(pid: int, directory: str = "", *, by_kernel: bool = False) -> None:
    """Make this process exit when process `pid` of this host does, after removing `directory`, if any.

    A thread waits for the end of `pid`, so a worker that hangs in user code exits too.

    by_kernel: the kernel kills this process as well, even if user code never releases the interpreter's lock;
        `directory` is then left to the next sweep. Only for the parent's `pid`, and a process that the parent's main
        thread has started: the kernel takes the end of the starting thread for the end of the parent.
    """
    if by_kernel and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch, args=(pid, directory), name="dpflow-orphan", daemon=True).start()


def _watch(pid: int, directory: str) -> None:
    _wait_for_end(pid)
    if directory:
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
