"""The contract of a platform: it starts processes, ends them, and tells how they have ended.

A process is known by its name and incarnation. Where it runs, and whether it has a number there, is the platform's
own affair. What a platform says is advisory: a process that it takes for running may be cut off, so whoever uses it
also listens for heartbeats, or for greetings. `torch_dpflow.testing.platforms` has the suite.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

#: The most that is kept of a process's last words, characters.
LAST_WORDS = 4000


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What those who use a platform may expect of its processes."""

    #: Whether its processes and the one that starts them can read each other's memory mappings.
    shares_memory: bool
    #: Whether others can connect to what its processes listen at.
    accepts_connections: bool
    #: After how long the platform ends a process, seconds; None: never.
    longest_life_s: float | None


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """A process that is to run.

    Args:
        name: who it is; no two that run have the same.
        incarnation: which of the processes that have had this name.
        target: what it runs, in its main thread: a function at the top of a module.
        arguments: of the target. They are pickled, except where the process is a fork and inherits them.
        words: a file where it leaves what it has to say when it dies, if it shares this host's files; else empty.
        directory: one that is private to those who are launched and the one that launches, which removes it; where that
            one is killed they do. Empty: there is none.
    """

    name: str
    incarnation: int
    target: Callable[..., None]
    arguments: tuple[Any, ...] = ()
    words: str = ""
    directory: str = ""


@dataclass(frozen=True, kw_only=True)
class End:
    """How a process has ended, as far as that is known; as a string: for people."""

    #: Its exit code; None where a signal has ended it, or nobody knows.
    code: int | None = None
    #: The number of the signal that has ended it, or None.
    signal: int | None = None
    #: Why it was killed through its handle; empty where it was not, or no reason was given.
    killed_for: str = ""
    #: At most `LAST_WORDS` characters.
    words: str = ""
    #: Where it ran, as "pid 17".
    place: str = ""

    def __str__(self) -> str:
        words = f"; its last words:\n{self.words}" if self.words else ""
        return f"{self.place} {self._how()}".strip() + words

    def _how(self) -> str:
        if self.killed_for:
            return f"was killed: {self.killed_for}"
        if self.signal is None:
            return "has ended, nobody knows how" if self.code is None else f"exited with code {self.code}"
        try:
            name = signal.Signals(self.signal).name
        except ValueError:
            name = f"signal {self.signal}"
        hint = " (the kernel's out-of-memory killer sends it too)" if name == "SIGKILL" else ""
        return f"was ended by {name}{hint}"


class Handle(Protocol):
    """One process that was launched."""

    #: As in its `ProcessSpec`.
    name: str
    incarnation: int
    #: Its number on this machine, for people; 0 where it has none.
    pid: int

    def kill(self, why: str = "") -> None:
        """End it at once, for a reason that `describe` is to name; does not wait. Any thread may call, again too."""

    def describe(self) -> End | None:
        """How it has ended; None while it runs. Waits at most a second, for what is still on its way."""


class Platform(Protocol):
    """Starts processes. They end with the one that starts them, however it ends.

    One thread launches and another may take: the one that waits for `news`. Everything else belongs to either.
    """

    capabilities: Capabilities
    #: A descriptor, readable while `take` has something to give.
    news: int

    def launch(self, spec: ProcessSpec) -> Handle:
        """Start this process. It may come up late, or never: that, and why, its end tells.

        Raises:
            NotPicklableError: the arguments cannot be sent to a new process.
            LaunchError: the platform refuses, for now or for good.
            DescriptorLimitError: this process has too many files open.
        """

    def take(self) -> Sequence[Handle]:
        """Those that have ended, each given once; does not wait."""

    def close(self, *, grace_s: float = 0.0) -> None:
        """Ask all that run to end, wait so long, kill the rest, and give back what is held. May be called again."""
