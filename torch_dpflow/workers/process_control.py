"""Settings of loading processes in the operating system: when they end, their scheduling, the memory they keep.

Imports the standard library only, because processes without torch use it too.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import select
import shutil
import signal
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

#: Opened before processes are forked: if another thread of the parent opens a library meanwhile, a fork that opens one
#: may be killed by the dynamic linker.
LIBC = ctypes.CDLL(None)
#: Process names of a fork server: prefix of the number of the module that it imports; and after all imports.
FORK_SERVER_NAME, FORK_SERVER_UP = "dpflow-fork-", "dpflow-fork-up"
_PR_SET_PDEATHSIG = 1
#: How long a process whose parent has ended waits for the end of its owner, which the kernel reports later, seconds.
OWNER_S = 1.0
#: How often to look up a pid where the kernel has no pidfds, seconds.
POLL_S = 1.0


def exit_with(pid: int, directory: str = "") -> None:
    """Make this process exit when process `pid` of this host does, after removing `directory`, if any.

    A thread waits for the end of `pid`, so a worker that hangs in user code exits too.
    """
    threading.Thread(target=_watch, args=(pid, directory), name="dpflow-orphan", daemon=True).start()


def at_parents_end(number: int) -> None:
    """Make the kernel send this process the signal `number` when its parent, or the thread that started it there, ends.

    SIGKILL ends this process even if it is stopped, or never releases the interpreter's lock. Use SIGKILL only if the
    main thread of the parent has started this process, because the kernel does not distinguish the ends of thread and
    process. SIGCONT is for all other processes: a stopped process continues, so that the thread of `exit_with` or the
    handler of `exit_without_thread` can end it.
    """
    if sys.platform == "linux":
        LIBC.prctl(_PR_SET_PDEATHSIG, number)


def exit_without_thread(owner: int) -> None:
    """Make this process exit when its parent and process `owner` have ended, also if it is stopped at that moment.

    Main thread only. Starts no thread, because fork servers call this. In forked children the handler does nothing.
    """
    own, parent = os.getpid(), os.getppid()

    def look(*_: object) -> None:
        if os.getpid() == own and os.getppid() != parent and _has_ended(owner, OWNER_S):
            os._exit(1)

    signal.signal(signal.SIGCONT, look)
    at_parents_end(signal.SIGCONT)


def _watch(pid: int, directory: str) -> None:
    _has_ended(pid, None)
    if directory:
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


def _has_ended(pid: int, timeout_s: float | None) -> bool:
    """Wait until a process has ended, at most for `timeout_s` seconds; return whether it has."""
    if hasattr(os, "pidfd_open"):
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        except OSError:
            pass  # an old kernel, or a sandbox that forbids the call
        else:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            ended = bool(poller.poll(None if timeout_s is None else 1000 * timeout_s))
            os.close(descriptor)
            return ended
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while is_alive := _is_alive(pid):
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    return not is_alive


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


#: struct sigevent of 64-bit Linux: value, signal, SIGEV_SIGNAL; struct itimerspec: interval and value, each in seconds
#: and nanoseconds.
_SIGEVENT, _ITIMERSPEC = struct.Struct("qii48x"), struct.Struct("qqqq")


class KillTimer:
    """Timer of the kernel that kills this process, also if it is stopped or never releases the interpreter's lock.

    Forked children do not have it. There is none if the C library has no `timer_create`.
    """

    def __init__(self) -> None:
        self._timer = ctypes.c_void_p()
        create = getattr(LIBC, "timer_create", None)
        event = _SIGEVENT.pack(0, signal.SIGKILL, 0)
        self._exists = create is not None and create(time.CLOCK_MONOTONIC, event, ctypes.byref(self._timer)) == 0

    def set(self, seconds: float) -> None:
        """Kill this process after `seconds`, rounded up, unless this is called again before."""
        if self._exists:
            LIBC.timer_settime(self._timer, 0, _ITIMERSPEC.pack(0, 0, math.ceil(seconds), 0), None)


def oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes of this control group, or else of the host, the kernel has killed for lack of memory.

    Returns 0 if the kernel does not count them. root: replaces "/" in tests.
    """
    groups = dict[str, str]()
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        groups = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    mounted, vmstat = root / "sys/fs/cgroup", root / "proc/vmstat"
    own = [(mounted, "memory.events", groups.get("")), (mounted / "memory", "memory.oom_control", groups.get("memory"))]
    for file in (*(top / group.strip("/") / name for top, name, group in own if group is not None), vmstat):
        with suppress(OSError, ValueError, StopIteration):
            return int(next(line.split()[1] for line in file.read_text().splitlines() if line.startswith("oom_kill ")))
    return 0


#: The time slice of a loading process, seconds: the longest that Linux allows.
SLICE_S = 0.1

#: The number of `sched_setattr`, for which neither Python nor most C libraries have a function.
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
#: struct sched_attr, first version: size, policy, flags, nice, priority, runtime (here: the slice), deadline, period.
_ATTRIBUTES = struct.Struct("<IIQiIQQQ")


def use_sched_batch() -> bool:
    """Give this thread, and threads that it starts, SCHED_BATCH and long time slices; return whether that succeeded.

    This thread's processor share is unchanged. With more decoders than cores, long slices cause fewer cache misses, and
    processes that wait for results preempt the decoders. Four decoders on two cores then take 5% less processor time
    per image, or 2 to 3% less while shard and jobs run too.

    Linux has custom slices since 6.12; before, SCHED_BATCH only keeps these threads from preempting others when they
    wake. A scheduling policy that the user has chosen stays. Nothing changes on another system, or in a sandbox that
    forbids the call.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return False
    try:
        chosen = os.sched_getscheduler(0) != os.SCHED_OTHER
    except OSError:  # a C library or a sandbox without the call
        return False
    if chosen:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_BATCH, 0, nice, 0, int(SLICE_S * 1e9), 0, 0)
    failed: int = LIBC.syscall(number, 0, ctypes.create_string_buffer(attributes, len(attributes)), 0)
    return not failed


#: Bytes of freed memory that stay at the top of a heap; and the size from which blocks are mapped separately, and
#: unmapped when freed: the largest that glibc allows.
KEPT, MAPPED = 64 << 20, 32 << 20
#: glibc's numbers of these parameters of `mallopt`.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next samples, unless the environment sets its thresholds.

    By default glibc returns memory to the system about as soon as a sample is freed, and each page of the next sample
    is a fault: a copy of a record of 110 kB then takes 71 µs, and 9 µs in memory that was kept.
    """
    own = os.environ.keys() & {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}
    if sys.platform != "linux" or own or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(LIBC, "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, KEPT)
        mallopt(_MMAP_THRESHOLD, MAPPED)
