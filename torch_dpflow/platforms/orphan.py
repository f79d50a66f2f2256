"""A process ends with the one that has started it, even when that one is killed and can tell nobody."""

import ctypes
import os
import select
import shutil
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
#: Where the kernel offers no descriptor of a process, how often its id is looked up; seconds.
POLL_S = 1.0


def end_with(pid: int, directory: str, *, by_kernel: bool = False) -> None:
    """From now on this process exits when process `pid` does, and removes `directory`, if any, on its way out.

    A thread waits for it, so a worker that hangs in user code goes too. Call it once.

    by_kernel: also where that code never lets go of the interpreter's lock; what is in `directory` is left to the
        next sweep then. Only if the thread that started this process lives as long as its process does: the kernel
        takes that thread's end for the parent's.
    """
    if by_kernel and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch, args=(pid, directory), name="dpflow-orphan", daemon=True).start()


def _watch(pid: int, directory: str) -> None:
    wait_for_end(pid)
    if directory:
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


def wait_for_end(pid: int) -> None:
    """Wait until a process of this host and of the same namespace has ended."""
    if hasattr(os, "pidfd_open"):
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        except OSError:
            pass  # an old kernel, or a sandbox that forbids the call: both are supported
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
