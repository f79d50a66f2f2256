"""Workers as forks of a process that has imported torch, for platforms that call a function.

A crash of user code therefore does not end the platform's instance. The worker's memory and connections are released
before the call is answered.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn

from torch_dpflow._core.processes import stat_fields
from torch_dpflow.workers.platform import MAX_REPORT_CHARS, End
from torch_dpflow.workers.process_control import at_parents_end, exit_with, oom_kills

#: How often to poll if the kernel does not report the end, in seconds.
POLL_S = 0.1


def age_s() -> float:
    """Return the age of this process in seconds; 0 if the kernel does not report it."""
    try:
        started = int(stat_fields("self")[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, LookupError):
        return 0.0


class Fork:
    """Worker in a forked child of this process. This process must have only one thread.

    Args:
        run: called in the child with the launch spec; returns the exit code.
        env: variables of the child, in addition to those of this process.
        close: descriptors that the child closes.
    """

    def __init__(
        self,
        run: Callable[[bytes], Any],
        launch_spec: bytes,
        *,
        env: Mapping[str, str] | None = None,
        close: Collection[int] = (),
    ) -> None:
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self._begun, self._oom_kills = time.monotonic(), oom_kills()
        self.pid = os.fork()
        if self.pid == 0:
            _become(run, launch_spec, dict(env or {}), theirs, [*close, ours], parent)
        os.close(theirs)
        self._errors: int | None = ours
        self._report = bytearray()
        self._end: End | None = None
        self._pidfd: int | None = None
        with suppress(OSError):  # an old kernel, or a sandbox that forbids the call
            self._pidfd = os.pidfd_open(self.pid)

    @property
    def descriptors(self) -> list[int]:
        """Descriptors to wait for: one is readable when `poll` has work. Pass them as `close` to other forks."""
        return [] if self._end is not None else [fd for fd in (self._errors, self._pidfd) if fd is not None]

    @property
    def timeout_s(self) -> float | None:
        """Seconds after which to call `poll` even if nothing is readable; None: never."""
        return POLL_S if self._pidfd is None else None

    def poll(self) -> End | None:
        """Return how the worker has ended, or None while it runs. Does not wait.

        When it has ended, the processes in its process group are killed. Each call copies the worker's new output on
        standard error to that of this process; its last part is the report of the `End`.
        """
        if self._end is not None:
            return self._end
        done = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if done is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)  # what it has started, which may have connections too
        self._forward()
        if done is None:
            return None
        os.waitid(os.P_PID, self.pid, os.WEXITED)
        for descriptor in self.descriptors:
            os.close(descriptor)
        exited = done.si_code == os.CLD_EXITED
        self._end = End(
            code=done.si_status if exited else None,
            signal=None if exited else done.si_status,
            is_short_of_memory=not exited and oom_kills() > self._oom_kills,
            report=bytes(self._report).decode(errors="replace").strip(),
            place=f"pid {self.pid}",
            ran_s=time.monotonic() - self._begun,
        )
        return self._end

    def wait(self) -> End:
        while (end := self.poll()) is None:
            select.select(self.descriptors, (), (), self.timeout_s)
        return end

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send the worker a signal, if it runs."""
        if self._end is None:
            os.kill(self.pid, number)

    def _forward(self) -> None:
        """Copy the output that the worker has written so far."""
        with suppress(BlockingIOError):
            while self._errors is not None:
                chunk = os.read(self._errors, 65536)
                if not chunk:
                    os.close(self._errors)
                    self._errors = None
                self._report += chunk
                del self._report[:-MAX_REPORT_CHARS]
                sys.stderr.write(chunk.decode(errors="replace"))
                sys.stderr.flush()


def _become(
    run: Callable[[bytes], Any],
    launch_spec: bytes,
    env: dict[str, str],
    errors: int,
    close: Collection[int],
    parent: int,
) -> NoReturn:
    """Run the worker in the child; never returns."""
    code = 1
    try:
        os.setsid()
        os.dup2(errors, 2)
        for descriptor in (*close, errors):
            os.close(descriptor)
        # Not the parent's replacement, which may write elsewhere.
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        at_parents_end(signal.SIGKILL)
        exit_with(parent)
        os.environ.update(env)
        # The user's script has its names there, and this process's are of no use to it.
        sys.modules["__main__"] = ModuleType("__main__")
        code = run(launch_spec) or 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if code and not isinstance(leaving.code, int):
            print(leaving.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
