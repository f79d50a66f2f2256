"""The contract of launchers, which start remote workers through a platform's control plane.

A worker has a name, which is never reused, and a launch spec: bytes that contain what it does and where it connects.
The worker opens all connections. The process to which it connects decides by heartbeats whether the worker lives. The
platform's reports only shorten the wait, and explain how a worker ended.

A platform's module implements `Launcher`, with blocking calls and no state machine; `ThreadedPlatform` makes a
`RemotePlatform` of it. `tests/contracts/launchers.py` has the contract suite.

`RemotePlatform` is for remote workers what `workers.platform.Platform` is for processes of this host. The start of a
remote worker takes seconds, and can be rejected, or succeed without an answer. Its outcome is therefore an event.
"""

from __future__ import annotations

import importlib.util
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch_dpflow._core.checks import check_number, is_loopback
from torch_dpflow.errors import MissingExtraError, OptionError, PlatformError
from torch_dpflow.ipc.messages.fields import Body
from torch_dpflow.workers.platform import End, Limits

#: A platform's id of a worker. It is text, so that another process can take over the worker.
Ref: TypeAlias = str


@dataclass(frozen=True)
class Finding:
    """Result of one check of a platform: whether it is good, and a text for display."""

    good: bool
    text: str


@dataclass(frozen=True, kw_only=True)
class Fate:
    """State of a worker, as its platform reports it."""

    #: How it has ended; None while it lives.
    end: End | None = None
    #: In how many seconds the platform will end it; None: not announced.
    until_s: float | None = None


class Launcher(Protocol):
    """Client of a platform's control plane: starts, ends and lists workers. Thread-safe.

    Every call has a timeout. Errors are subclasses of `PlatformError`, and contain no part of a launch spec. The call
    after a DeniedError looks the credentials up again.
    """

    limits: Limits

    def check(self) -> Sequence[Finding]:
        """Check the platform, such as its credentials, quota and image, and return the findings; change nothing."""

    def start(self, name: str, launch_spec: bytes, *, deadline_s: float) -> Ref:
        """Start one worker, and return its ref. The launcher and its library must not retry.

        If the platform detects that the name was started before, return the ref from the first start.

        deadline_s: time limit in seconds. Raises AnswerLostError if the worker may have been started, another
            PlatformError if it was not.
        """

    def look(self, workers: Mapping[str, Ref | None]) -> Mapping[str, Fate]:
        """Return the states of these workers by name. Workers that the platform does not have are left out.

        workers: the ref of each worker by its name; if a ref is None, the name identifies the worker.
        """

    def stop(self, name: str, ref: Ref | None) -> None:
        """End a worker by force, identified by `ref`, or by its name if that is None. An ended worker is no error."""

    def list(self, prefix: str) -> Mapping[str, Ref]:
        """Return the refs, by name, of live workers whose names begin with `prefix`; none if they cannot be listed."""

    def close(self) -> None:
        """Release connections and threads; ends no worker. Idempotent."""


class Accepted(Body, tag="accepted"):
    """Outcome: the platform has accepted the start of this worker."""

    name: str
    ref: Ref


@dataclass(frozen=True)
class Refused:
    """Outcome: this worker was not started, and will not be."""

    name: str
    error: PlatformError


class Answerless(Body, tag="answerless"):
    """Outcome: it is unknown whether this worker was started; `Accepted` or `Refused` may still follow."""

    name: str
    text: str


class Warned(Body, tag="warned"):
    """Outcome: the platform will end this worker in `until_s` seconds."""

    name: str
    until_s: float


class Ended(Body, tag="ended"):
    """Outcome: this worker has ended, or will never be started."""

    name: str
    end: End


Outcome: TypeAlias = Accepted | Refused | Answerless | Warned | Ended


class RemotePlatform(Protocol):
    """Platform that starts and ends remote workers. Thread-safe; only `close` blocks."""

    limits: Limits
    #: Descriptor that is readable while `take` has something to return.
    wakeup_fd: int

    def start(self, name: str, launch_spec: bytes) -> None:
        """Request the start of this worker. Raises OptionError, for example if the launch spec is too long."""

    def stop(self, name: str, why: str = "") -> None:
        """Request the end of this worker by force, even if its start is not finished.

        No outcome follows for a worker that this object has neither started nor adopted.
        """

    def suspect(self, name: str) -> None:
        """Query the platform soon about this worker, because it may have ended; its `Ended` then follows sooner."""

    def take(self) -> Sequence[Outcome]:
        """Return the outcomes since the last call, in order. `Refused` or `Ended` is the last one of a worker."""

    def close(self, *, grace_s: float = 0.0) -> None:
        """End all workers that this object has started or adopted, by force after `grace_s` seconds. Idempotent."""


class AdoptingPlatform(RemotePlatform, Protocol):
    """Platform that can take over the workers of a process that has died."""

    def adopt(self, name: str, ref: Ref | None) -> None:
        """Treat a worker that another process started like one that this object started; no `Accepted` follows.

        If the worker is known already, nothing changes.
        """


class PlatformSource(Protocol):
    """Source of a fleet's workers: opens the platform that runs them."""

    @property
    def name(self) -> str:
        """Name of the platform, as in `platform="ray"`, for messages."""

    def open(self) -> RemotePlatform:
        """Connect to the platform. Raises the errors of `PlatformSpec.open`."""

    def listen_at(self) -> str:
        """Return the default address at which to listen for the platform's workers: `tcp://HOST:0`.

        Raises OptionError if there is no default. Can raise the errors of `open` too.
        """

    def check_listen(self, address: str) -> None:
        """Raise OptionError for an address that workers certainly cannot reach, such as 127.0.0.1 of another host."""


class PlatformSpec(PlatformSource, Protocol):
    """Settings that users give as `platform=`: a small frozen dataclass, picklable and without a connection.

    All fields have defaults, so that users can give just the platform's name: see `registry`.
    """

    @property
    def sends_code(self) -> bool:
        """Whether the user's own modules must be sent to workers; False if the platform provides them."""

    def check_installed(self) -> None:
        """Raise MissingExtraError if the platform's library is not installed. Imports nothing."""

    def check_workers(self, workers: int) -> None:
        """Raise OptionError if the settings allow fewer workers, or lack a setting that workers require."""

    def launcher(self) -> Launcher:
        """Return the platform's launcher. Raises the errors of `open`."""

    def open(self, *, outlived: bool = False) -> AdoptingPlatform:
        """Connect to the platform. Its workers run `torch_dpflow.remote.worker.run` with their launch spec.

        outlived: whether workers outlive this process if it is killed; otherwise they may end with it.

        Raises:
            MissingExtraError: the platform's library is not installed.
            OptionError: a setting is invalid, or there is no such platform to connect to.
            PlatformError: the platform cannot be reached, or rejects a call.
        """


class NodePlatform(PlatformSpec, Protocol):
    """Settings of a platform that can also run nodes of a cluster, which run shards of flows with their workers."""

    @property
    def workers_each(self) -> int:
        """Number of workers for which a node has processors."""

    def check_nodes(self) -> str:
        """Check that the platform can run nodes; return the IP address at which they reach this host.

        Raises:
            MissingExtraError: the platform's library is not installed.
            OptionError: the platform can never run a node with these settings.
            PlatformError: the platform cannot be reached, or rejects a call.
        """

    def open_nodes(self, module: str) -> RemotePlatform:
        """Connect to the platform. Its nodes run `module.run` with their launch spec, and end with this process.

        Raises the errors of `PlatformSpec.open`.
        """


#: The name of a worker, never reused, as incarnations only rise: the 8 hexadecimal digits of its cluster and the 10 of
#: its fleet, its place in the fleet, and which of the fleet's workers it is. A DNS label, so that it can be that of a
#: pod, an actor or a task.
_NAME = re.compile(r"dpf-([0-9a-f]{8})-[0-9a-f]{10}-(?:0|[1-9][0-9]{0,5})-(?:0|[1-9][0-9]{0,17})", re.ASCII)


def cluster_of(name: str) -> str | None:
    """Return the 8 hexadecimal digits of the cluster in a worker's name; None if this is no worker's name."""
    match = _NAME.fullmatch(name)
    return None if match is None else match[1]


def prefix_of(cluster: str, group: str = "") -> str:
    """Return the prefix of workers' names, of a cluster or one of its fleets. group: the fleet's digits, or empty."""
    return f"dpf-{cluster}-{group}-" if group else f"dpf-{cluster}-"


def require(library: str, needs: str, extra: str) -> None:
    """Raise MissingExtraError if `library` is not installed. Imports nothing. needs: beginning of the error's text."""
    if importlib.util.find_spec(library) is None:
        raise MissingExtraError(f"{needs}; install it with: pip install 'torch_dpflow[{extra}]'")


def check_tcp(address: str, *, loopback: bool = True, advice: str = "") -> None:
    """Raise OptionError if an address is not tcp, or is loopback without `loopback`. advice: text for the latter."""
    if not address.startswith("tcp://"):
        raise OptionError(f"listen={address!r}: workers connect over tcp, as at tcp://10.0.0.5:7700")
    if not loopback and is_loopback(address):
        raise OptionError(f"listen={address!r}: {advice}")


def seconds_of(text: Any) -> float:
    """Return the seconds in a Retry-After header, 0 to 3600; 0 if it is not a number, but a date for example."""
    try:
        return min(max(0.0, float(text)), 3600.0)
    except (TypeError, ValueError):
        return 0.0


def line_of(text: object) -> str:
    return " ".join(str(text).split())[:600]


#: Period over which the rate of calls is averaged, in seconds.
PERIOD_S = 10.0


class RateLimit:
    """Rate limit: at most `per_s * PERIOD_S` calls in any period of `PERIOD_S` seconds, possibly all at once.

    per_s: average number of calls per second, above 0. Below one call per `PERIOD_S`, the period is `1 / per_s`.
    """

    def __init__(self, per_s: float) -> None:
        check_number("per_s", per_s, exclusive=True)
        self.period_s = max(PERIOD_S, 1.0 / per_s)
        self._latest: deque[float] = deque(maxlen=max(1, int(per_s * self.period_s)))

    def wait_s(self, now: float) -> float:
        """Return the seconds until the next call is allowed; 0 if it is allowed now."""
        if len(self._latest) < (self._latest.maxlen or 1):
            return 0.0
        return max(0.0, self.period_s - (now - self._latest[0]))

    def note(self, now: float) -> None:
        self._latest.append(now)
