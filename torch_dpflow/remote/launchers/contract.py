"""The contract of workers: processes that a platform starts through its control plane, wherever they run.

A worker has a name, which is never used again, and a launch spec: bytes that say what it is to do and whom to call. It
connects out. Whether it lives is for those to say whom it calls; what the platform says shortens the waiting and
explains ends.

`Launcher` is what a platform's module implements, with blocking calls and no state machine of its own; `calls.Calls`
makes a `RemotePlatform` of it. `torch_dpflow.testing.launchers` has the contract suite.

Beside `workers.platform.Platform`, with which it shares `Limits`, `End`, `wakeup_fd` and `close`, since starts differ.
A process of this host is started by a function with what a fork inherits, in the calling thread, which gets the error.
A worker is started by bytes; its start takes seconds, and may be refused or have happened unknown to us, so what became
of it is news.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch_dpflow._core.checks import check_number
from torch_dpflow.errors import OptionError, PlatformError
from torch_dpflow.workers.platform import End, Limits

#: How the platform knows a worker, as its id there. Text, so that whoever comes after its starter can use it.
Ref: TypeAlias = str


@dataclass(frozen=True)
class Finding:
    """Something that a check of a platform has found, for people."""

    good: bool
    text: str


@dataclass(frozen=True, kw_only=True)
class Fate:
    """What a platform says of a worker that it knows."""

    #: How it has ended; None while it lives.
    end: End | None = None
    #: In how many seconds the platform will end it, where it has announced that.
    until_s: float | None = None


class Launcher(Protocol):
    """A platform's control plane. Any thread may call; several do at once.

    Every call ends in some time of its own. Errors are those of `PlatformError`, and quote nothing of a launch spec.
    After a DeniedError credentials are looked up again.
    """

    limits: Limits

    def check(self) -> Sequence[Finding]:
        """Look at credentials, quota, image and the way to the control plane, without any effect."""

    def start(self, name: str, launch_spec: bytes, *, deadline_s: float) -> Ref:
        """Ask for one worker, once: neither this nor its library tries again.

        Where the platform can tell, a second start under a name is the first one's worker.

        Raises:
            PlatformError: AnswerLostError if the worker may have been started, any other if it has not.
        """

    def look(self, workers: Mapping[str, Ref | None]) -> Mapping[str, Fate]:
        """What became of these; those that the platform does not know are left out. None: go by the name."""

    def stop(self, name: str, ref: Ref | None) -> None:
        """End a worker by force, by its name without a ref. That it is not there, or has ended, is no error."""

    def list(self, prefix: str) -> Mapping[str, Ref]:
        """The workers that the platform has under such names, whoever started them."""

    def close(self) -> None:
        """Release connections and threads; ends no worker. Idempotent."""


@dataclass(frozen=True)
class Accepted:
    """The platform starts this worker."""

    name: str
    ref: Ref


@dataclass(frozen=True)
class Refused:
    """This worker was not started, and will not be."""

    name: str
    error: PlatformError


@dataclass(frozen=True)
class Answerless:
    """Nobody knows whether this worker was started; `Accepted` or `Refused` may still follow."""

    name: str
    text: str


@dataclass(frozen=True)
class Warned:
    """The platform will end this worker in so many seconds."""

    name: str
    until_s: float


@dataclass(frozen=True)
class Ended:
    """This worker has ended, or will never be started."""

    name: str
    end: End


Outcome: TypeAlias = Accepted | Refused | Answerless | Warned | Ended


class RemotePlatform(Protocol):
    """Starts and ends workers. Nothing but `close` waits; any thread may call."""

    limits: Limits
    #: A descriptor that is readable while `take` has something to return.
    wakeup_fd: int

    def start(self, name: str, launch_spec: bytes) -> None:
        """Have this worker started. Raises OptionError if the name is taken or the launch spec too long."""

    def stop(self, name: str, why: str = "") -> None:
        """Have this worker ended by force, whatever its start has come to. Of others' workers nothing is told."""

    def suspect(self, name: str) -> None:
        """Ask the platform about this worker soon: it has not come, is silent, or has said that it leaves."""

    def take(self) -> Sequence[Outcome]:
        """What has happened since the last call, in order. `Refused` or `Ended` is the last of a name."""

    def close(self, *, grace_s: float = 0.0) -> None:
        """End all workers that it has started, after `grace_s` in which they may end themselves. Idempotent."""


class AdoptingPlatform(RemotePlatform, Protocol):
    """A platform that can go on for a process that has died."""

    def adopt(self, name: str, ref: Ref | None) -> None:
        """Treat a worker that another process has started as one of its own, but for `Accepted`; None: go by its name.

        Nothing happens where it is known.
        """


class PlatformSource(Protocol):
    """Where the workers of one fleet come from."""

    @property
    def name(self) -> str:
        """As in `platform="ray"`; for messages."""

    def open(self) -> RemotePlatform:
        """Connect to it. Raises as `PlatformSpec.open`."""

    def listen_at(self) -> str:
        """Where to listen for its workers unless the user says: `tcp://HOST:0`. Called while the platform is open."""

    def check_listen(self, address: str) -> None:
        """Raise OptionError for an address which its workers cannot reach, as 127.0.0.1 from another host."""


class PlatformSpec(PlatformSource, Protocol):
    """What users give as `platform=`: a small frozen dataclass of settings, which pickles. It holds no connection.

    Its fields have defaults, so that its name alone gives one: see `registry`.
    """

    @property
    def sends_code(self) -> bool:
        """Whether workers need the user's own modules sent to them; not where the platform has a way of its own."""

    def check_installed(self) -> None:
        """Raise MissingExtraError if its library is not installed; imports and connects nothing."""

    def check_workers(self, workers: int) -> None:
        """Raise OptionError where there may not be so many workers, as one that is billed says by its `max_workers`."""

    def launcher(self) -> Launcher:
        """Its control plane, for what is no loader's affair. Raises as `open`."""

    def open(self, *, outlived: bool = False) -> AdoptingPlatform:
        """Connect to the platform, whose workers run `torch_dpflow.remote.worker.run` with their launch spec.

        outlived: workers are to live on where this process is killed; else they may end with it.
        Raises:
            MissingExtraError: its library is not installed.
            OptionError: a setting is not possible, or there is no such platform to connect to.
            PlatformError: it cannot be reached, or refuses.
        """


_NAME = re.compile(r"dpf-([0-9a-f]{8})-([0-9a-f]{10})-(0|[1-9][0-9]{0,5})-(0|[1-9][0-9]{0,17})", re.ASCII)


@dataclass(frozen=True)
class WorkerName:
    """Names one worker for ever; `str` gives the text, `parse` reads it. Not to be reused, so incarnations only rise.

    Args:
        cluster: whose it is: 8 digits, hexadecimal.
        group: its fleet in the cluster: 10 digits, hexadecimal.
        number: its place in the fleet, below a million.
        incarnation: counts the fleet's workers.

    Raises:
        OptionError: one of them is something else.
    """

    cluster: str
    group: str
    number: int
    incarnation: int

    def __post_init__(self) -> None:
        _match(str(self))

    def __str__(self) -> str:
        return f"{prefix_of(self.cluster, self.group)}{self.number}-{self.incarnation}"

    @classmethod
    def parse(cls, text: str) -> WorkerName:
        """Read a name. Raises OptionError if it is none."""
        cluster, group, number, incarnation = _match(text).groups()
        return cls(cluster, group, int(number), int(incarnation))

    @staticmethod
    def is_one(text: str) -> bool:
        """Whether a text is a name."""
        return _NAME.fullmatch(text) is not None


def prefix_of(cluster: str, group: str = "") -> str:
    """What the names of all workers of a cluster, or of one of its fleets, begin with."""
    return f"dpf-{cluster}-{group}-" if group else f"dpf-{cluster}-"


def _match(text: str) -> re.Match[str]:
    match = _NAME.fullmatch(text)
    if match is None:
        raise OptionError(
            f"{text!r:.120} is no name of a worker; give dpf-CLUSTER-GROUP-NUMBER-INCARNATION, where CLUSTER has 8 and "
            "GROUP 10 hexadecimal digits, NUMBER at most 6 digits and INCARNATION at most 18"
        )
    return match


#: The time over which a rate is an average, seconds.
PERIOD_S = 10.0


class RateLimit:
    """At most so many in any `PERIOD_S`, which may come all at once: control planes count so.

    A bucket of that size which is filled at that rate would let twice as many through. Time is an argument.

    Args:
        per_s: a second, on average, above 0. Below one in a period, one in as much time as it takes.
    """

    def __init__(self, per_s: float) -> None:
        check_number("per_s", per_s, exclusive=True)
        self.period_s = max(PERIOD_S, 1.0 / per_s)
        self._latest: deque[float] = deque(maxlen=max(1, int(per_s * self.period_s)))

    def wait_s(self, now: float) -> float:
        """How long until the next is allowed, seconds; 0 if it is now."""
        if len(self._latest) < (self._latest.maxlen or 1):
            return 0.0
        return max(0.0, self.period_s - (now - self._latest[0]))

    def note(self, now: float) -> None:
        """One is done now."""
        self._latest.append(now)
