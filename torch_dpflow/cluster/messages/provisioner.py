"""Bodies of the calls to a provisioner, which starts remote workers for the shards of a cluster."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from torch_dpflow.cluster.messages.coordinator import MAX_WORKERS
from torch_dpflow.errors import (
    DeniedError,
    ExpiredError,
    PlatformError,
    QuotaError,
    RejectedError,
    ThrottledError,
    UnavailableError,
)
from torch_dpflow.ipc.messages.fields import MAX_TEXT, Body, Count, Name, Seconds, Text
from torch_dpflow.ipc.messages.remote_worker import MAX_LAUNCH_SPEC_BYTES
from torch_dpflow.remote.launchers.contract import Accepted, Answerless, Ended, Outcome, Refused, Warned
from torch_dpflow.workers.platform import End, Limits

#: Most remote workers of one shard at a time: with successors and ending ones, more than it has in service.
MAX_OWNED = 4 * MAX_WORKERS
#: Maximum number of requests in one call, and events in one answer.
MAX_REQUESTS, MAX_EVENTS = 256, 256

#: Subclasses before their base classes.
_ERRORS: dict[str, type[PlatformError]] = {
    one.__name__: one
    for one in (ThrottledError, QuotaError, ExpiredError, DeniedError, RejectedError, UnavailableError)
}


class OwnedWorker(Body):
    """A remote worker of a shard."""

    name: Name
    #: Its id on the platform, if known.
    ref: Text | None


class Attach(Body):
    """To a provisioner: this shard has these workers; those of earlier incarnations are ended.

    Answered with `Attached`.
    """

    shard: Name
    incarnation: Count
    workers: Annotated[list[OwnedWorker], msgspec.Meta(max_length=MAX_OWNED)]


class Attached(Body):
    """From a provisioner: its platform."""

    limits: Limits
    #: Address at which to listen for workers.
    listen_at: Text
    #: Number of events that the shard has received: see `EventsRequest`.
    seen: Count


class StartRequest(Body, tag="start"):
    """Start this worker."""

    name: Name
    launch_spec: Annotated[bytes, msgspec.Meta(max_length=MAX_LAUNCH_SPEC_BYTES)]


class StopRequest(Body, tag="stop"):
    """End this worker by force."""

    name: Name
    why: Text


class SuspectRequest(Body, tag="suspect"):
    """Check this worker on the platform soon."""

    name: Name


Request: TypeAlias = StartRequest | StopRequest | SuspectRequest


class Requests(Body):
    """To a provisioner: requests, in order. Answered with False, and without effect, if the shard is not attached."""

    shard: Name
    incarnation: Count
    requests: Annotated[list[Request], msgspec.Meta(max_length=MAX_REQUESTS)]


class EventsRequest(Body):
    """To a provisioner: wait for new events of the shard's workers. Answered with `Events`."""

    shard: Name
    incarnation: Count
    #: Number of events received since it attached.
    seen: Count


class WorkerEvent(Body):
    """An `Outcome` of a platform."""

    name: Name
    #: Class of the outcome, or of the error of a refusal.
    kind: Name
    #: Its id on the platform, or the text of the error.
    text: Text = ""
    #: Time until the next attempt, or until it ends.
    seconds: Seconds = 0.0
    end: End | None = None


class Events(Body):
    """From a provisioner."""

    #: Whether the shard is attached; if not, it must attach again.
    known: bool
    #: For the next `EventsRequest`.
    seen: Count = 0
    events: Annotated[list[WorkerEvent], msgspec.Meta(max_length=MAX_EVENTS)] = []


class Release(Body):
    """To a provisioner: this shard ends. Its workers are ended unless they end by themselves in this time."""

    shard: Name
    incarnation: Count
    grace_s: Seconds


def event_of(outcome: Outcome) -> WorkerEvent:
    """Return an outcome as a message."""
    kind = type(outcome).__name__
    match outcome:
        case Accepted(name, ref):
            return WorkerEvent(name, kind, ref[:MAX_TEXT])
        case Answerless(name, text):
            return WorkerEvent(name, kind, text[:MAX_TEXT])
        case Warned(name, until_s):
            return WorkerEvent(name, kind, seconds=until_s)
        case Ended(name, end):
            return WorkerEvent(name, kind, end=end)
        case Refused(name, error):
            why = next((one for one, known in _ERRORS.items() if isinstance(error, known)), "UnavailableError")
            return WorkerEvent(name, why, str(error)[-MAX_TEXT:], getattr(error, "retry_after_s", 0.0))


def outcome_of(event: WorkerEvent) -> Outcome:
    """Return the outcome in a message. Raises KeyError if it is not valid."""
    match event.kind:
        case "Accepted":
            return Accepted(event.name, event.text)
        case "Answerless":
            return Answerless(event.name, event.text)
        case "Warned":
            return Warned(event.name, event.seconds)
        case "Ended":
            return Ended(event.name, event.end or End())
    if event.kind == "ThrottledError":
        return Refused(event.name, ThrottledError(event.text, event.seconds))
    return Refused(event.name, _ERRORS[event.kind](event.text))
