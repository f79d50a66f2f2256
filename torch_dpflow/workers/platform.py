"""The contract of a platform: it starts processes, kills them and reports how they ended.

A process is identified by its name and incarnation. Where it runs, and whether it has a pid there, concerns the
platform alone. What a platform reports is advisory: a process that it reports as running may be unreachable, so its
users also expect heartbeats or greetings. `torch_dpflow.testing.platforms` has the contract suite.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch_dpflow.errors import OptionError

#: Most characters of a process's exit report that are kept.
MAX_REPORT_CHARS = 4000


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the users of a platform may expect of it.

    The fields with a default concern remote workers alone: see `remote.launchers.contract`.
    """

    #: Whether its processes and the one that starts them can read each other's memory mappings. They run on one host
    #: then, and reach each other by ipc sockets. Each worker still proves it by its probe.
    shares_memory: bool
    #: Whether others can connect to an address at which its processes listen.
    accepts_connections: bool
    #: After how many seconds the platform ends a process; None: never. Users handle that as any other end: they start
    #: another process, and a worker's unfinished tasks are requeued.
    max_lifetime_s: float | None
    #: How long it leaves a worker between telling it to end and killing it, seconds.
    grace_s: float = 0.0
    #: Workers that the account or cluster may have at once, as far as that is known; None: unknown.
    max_workers: int | None = None
    #: Starts a second, on average over 10 s, and calls of the control plane under way at once.
    starts_per_s: float = 100.0
    calls_at_once: int = 8
    #: Most bytes of an order.
    max_launch_spec_bytes: int = 8192
    #: How long a worker may take from its start to its hello, least and most, seconds; learned in between.
    start_timeout_s: tuple[float, float] = (10.0, 120.0)
    #: Whether it can say what became of a worker, name those that a dead starter has left, and end one by force.
    can_watch: bool = True
    can_list: bool = True
    can_stop: bool = True


def require_same_host(platform: Platform, user: str) -> None:
    """Raise OptionError unless the platform's processes can reach this one by an ipc socket.

    user: who needs that, for the message.
    """
    if not platform.limits.shares_memory:
        raise OptionError(
            f"platform={platform!r} runs its processes where they share no memory with this one; {user} listens on an "
            "ipc socket, so give it a platform that runs them on this host"
        )


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """A process to start.

    Args:
        name: identifies it; no two running processes have the same.
        incarnation: counts the processes that have had this name.
        target: the function that it runs in its main thread, at the top of a module.
        arguments: of the target. They are pickled unless the process is a fork, which inherits them.
            Unpickling tensors may connect back to this process, which takes the `authkey` of its
            `multiprocessing.current_process()`.
        report_file: where it writes an exit report when it fails, if it shares this host's files; else empty.
        directory: private to the launched processes and the one that launches them, which removes it; if that one
            is killed they remove it. Empty: there is none.
    """

    name: str
    incarnation: int
    target: Callable[..., None]
    arguments: tuple[Any, ...] = ()
    report_file: str = ""
    directory: str = ""


@dataclass(frozen=True, kw_only=True)
class End:
    """How a process ended, as far as that is known. `str` gives the text for people."""

    #: Its exit code; None if a signal ended it, or the code is unknown.
    code: int | None = None
    #: The number of the signal that ended it, or None.
    signal: int | None = None
    #: Why it was killed through its handle; empty if it was not, or no reason was given.
    killed_for: str = ""
    #: What it wrote to its report file, at most `MAX_REPORT_CHARS` characters.
    report: str = ""
    #: Where it ran, as "pid 17".
    place: str = ""
    #: For how long it ran, seconds, where whoever ran it has measured that: as it is billed.
    ran_s: float | None = None

    def __str__(self) -> str:
        report = f"; its exit report:\n{self.report}" if self.report else ""
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
        hint = " (the kernel's out-of-memory killer sends it too)" if name == "SIGKILL" else ""
        return f"was ended by {name}{hint}"


class Handle(Protocol):
    """One launched process."""

    #: As in its `ProcessSpec`.
    name: str
    incarnation: int
    #: Its pid on this machine, for people; 0 if it has none.
    pid: int

    def kill(self, why: str = "") -> None:
        """Kill it without waiting; `describe` names the reason. Any thread may call, repeatedly."""

    def describe(self) -> End | None:
        """How it ended; None while it runs. Waits at most a second for a status that is still in transit."""


class Platform(Protocol):
    """Starts processes. They end with the process that starts them, however that one ends.

    One thread may launch while another takes the ended ones: the thread that waits for `wakeup_fd`. All other
    methods belong to either.
    """

    limits: Limits
    #: A descriptor that is readable while `take_ended` has something to return. Not a callback: both users' threads
    #: wait for it beside their socket, so there is no other thread, no lock and nothing that a fork copies half done,
    #: and a death is handled after the messages that came before it.
    wakeup_fd: int

    def launch(self, spec: ProcessSpec) -> Handle:
        """Start this process without waiting for it. If it never comes up, its `End` says why.

        SIGINT may be blocked in it until its target unblocks it, so that Control-C prints no traceback of its start.

        Raises:
            NotPicklableError: the arguments cannot be sent to a new process.
            LaunchError: the platform refuses, for now or for good.
            DescriptorLimitError: this process has too many files open.
        """

    def take_ended(self) -> Sequence[Handle]:
        """The processes that have ended, each returned once; does not wait."""

    def close(self, *, grace_s: float = 0.0) -> None:
        """Ask all running processes to end, wait `grace_s`, kill the rest and release everything. Idempotent."""
