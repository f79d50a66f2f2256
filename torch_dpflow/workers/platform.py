"""The contract of a platform: it starts processes, kills them and reports how they ended.

A process is identified by its name and incarnation. A platform's reports are advisory: a process that is reported as
running may be unreachable, so callers also require heartbeats or handshakes. The contract suite is
`tests/contracts/platforms.py`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

#: Number of failed starts in a row, beyond the number of workers, after which no more workers are started. With a
#: platform, starts continue after `RETRY_S` seconds.
FALSE_STARTS, RETRY_S = 2, 30.0
#: Maximum characters of a process's exit report.
MAX_REPORT_CHARS = 4000


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The properties and limits of a platform of remote workers: see `remote.launchers.contract`."""

    #: Seconds after which the platform ends a process; None: never. Callers handle this end like any other.
    max_lifetime_s: float | None = None
    #: The time between the request to end and the kill of a worker, seconds.
    grace_s: float = 0.0
    #: Maximum workers of the account or cluster at once; None: unknown.
    max_workers: int | None = None
    #: Maximum starts per second, on average over 10 s, and maximum concurrent calls of the platform's API.
    starts_per_s: float = 100.0
    calls_at_once: int = 8
    #: Lower and upper limit of the timeout from a worker's start to its handshake, seconds; adapted in between.
    start_timeout_s: tuple[float, float] = (10.0, 120.0)
    #: Whether the platform can list the workers of a dead starter, and whether it can kill a worker.
    can_list: bool = True
    can_stop: bool = True


@dataclass(frozen=True, kw_only=True)
class Imports:
    """Installed modules that a group of processes needs, and that may be imported once for all of them.

    A platform that starts each process from scratch ignores this; its processes import the modules themselves.
    """

    #: Name of the group. A process that has imported the group's modules forks only processes of this group.
    group: str
    modules: tuple[str, ...]
    #: The user's top-level modules. If the import of `modules` looks for one of these, each process imports separately.
    own: tuple[str, ...] = ()
    #: Current directory and `sys.argv[0]` during the imports; empty: unchanged.
    directory: str = ""
    script: str = ""


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """A process to start.

    Args:
        name: name that no other running process has.
        incarnation: counts the processes that have had this name.
        target: the function that the process runs in its main thread; defined at the top of a module.
        arguments: the target's arguments. They are pickled unless the process is a fork, which inherits them.
            Unpickling tensors can connect back to this process, and requires that both processes have the same
            `multiprocessing.current_process().authkey`.
        report_file: path of its exit report; empty if the process does not share this host's files.
        directory: a directory that the launching process removes at its end. If that process is killed, the launched
            processes remove it. Empty: none.
        imports: modules that may be imported once for a group of processes; None: unknown.
    """

    name: str
    incarnation: int
    target: Callable[..., None]
    arguments: tuple[Any, ...] = ()
    report_file: str = ""
    directory: str = ""
    imports: Imports | None = None


@dataclass(frozen=True, kw_only=True)
class End:
    """Record of how a process ended, as far as known; the same for all platforms.

    `str` returns the text for messages; its first line is complete without the exit report.
    """

    #: Its exit code; None if a signal ended it, or the code is unknown.
    code: int | None = None
    #: The number of the signal that ended it, or None.
    signal: int | None = None
    #: If a signal ended it: whether the kernel killed processes of this host or container for lack of memory meanwhile.
    is_short_of_memory: bool = False
    #: The reason given to `Handle.kill`, or empty.
    killed_for: str = ""
    #: The content of its report file, at most `MAX_REPORT_CHARS` characters.
    report: str = ""
    #: The place where it ran, such as "pid 17".
    place: str = ""
    #: Its billed duration, seconds, if the platform measures that.
    ran_s: float | None = None

    def __str__(self) -> str:
        report = f"\nits exit report:\n{self.report}" if self.report else ""
        return f"{self.place} {self._how()}".strip() + report

    def _how(self) -> str:
        if self.killed_for:
            return f"was killed: {self.killed_for}"
        if self.signal is None:
            return "has ended, exit code unknown" if self.code is None else f"exited with code {self.code}"
        try:
            name = signal.Signals(self.signal).name
        except ValueError:
            name = f"signal {self.signal}"
        hint = ""
        if self.is_short_of_memory:
            hint = ": memory ran out, and the kernel killed processes; use fewer workers or smaller batches"
        elif name == "SIGKILL":
            hint = " (the kernel's out-of-memory killer sends it too)"
        return f"was ended by {name}{hint}"


def shortened(text: str, limit: int) -> str:
    """Return the beginning and the end of a text, at most `limit` characters.

    Stacks of a fatal signal begin with the latest call, and tracebacks end with it.
    """
    mark = "\n[...]\n"
    half = (limit - len(mark)) // 2
    return text if len(text) <= limit else f"{text[:half]}{mark}{text[-half:]}"


class Handle(Protocol):
    """Handle of one launched process: kills it, and reports how it ended."""

    #: As in its `ProcessSpec`.
    name: str
    incarnation: int
    #: Its pid on this machine, for messages; 0 if it has none.
    pid: int

    def kill(self, why: str = "") -> None:
        """Kill the process without waiting; `why` becomes part of `describe()`. Idempotent; any thread may call."""

    def describe(self) -> End | None:
        """Return how the process ended; None while it runs. Waits at most a second for an exit status in transit."""


class Platform(Protocol):
    """Platform of this host, whose processes end with the process that starts them, even if the starter is killed.

    The processes can read each other's memory mappings, and other processes can connect to an address at which they
    listen. One thread may launch while another, which waits for `wakeup_fd`, calls `take_ended`.
    """

    #: A descriptor that is readable while `take_ended` has something to return; users wait for it and their socket
    #: together. A callback would need a thread and a lock, which a fork could copy, and could report a death before
    #: earlier messages are handled.
    wakeup_fd: int

    def launch(self, spec: ProcessSpec) -> Handle:
        """Start this process without waiting for it. Its `End` has the reason if it never runs.

        SIGINT may be blocked in it until its target unblocks it, so that Control-C prints no traceback of its start.

        Raises:
            NotPicklableError: the arguments cannot be sent to a new process.
            LaunchError: the platform refuses.
            DescriptorLimitError: this process has too many files open.
        """

    def interrupt(self) -> None:
        """End a launch that waits, with LaunchError. Any thread and any signal handler may call.

        Do not launch afterwards: a platform whose launches can wait refuses later launches, others do not.
        """

    def take_ended(self) -> Sequence[Handle]:
        """Return the processes that have ended, each once; does not wait."""

    def close(self, *, grace_s: float = 0.0) -> None:
        """Terminate all running processes, kill them after `grace_s`, and release everything. Idempotent."""
