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
from torch_dpflow.remote.launchers.contract import Accepted, Answerless, Ended, Refused, Warned
from torch_dpflow.workers.platform import Limits

#: Maximum remote workers of a provisioner, also of one shard. Successors and workers that are ending count too.
MAX_OWNED = 4 * MAX_WORKERS
#: Maximum number of requests in one call, and events in one answer.
MAX_REQUESTS, MAX_EVENTS = 256, 256

#: Subclasses before their base classes.
_ERRORS: dict[str, type[PlatformError]] = {
    one.__name__: one
    for one in (ThrottledError, QuotaError, ExpiredError, DeniedError, RejectedError, UnavailableError)
}


class OwnedWorker(Body):
    """Remote worker that a shard owns."""

    name: Name
    #: Id of the worker on the platform; None: not known.
    ref: Text | None


class Attach(Body):
    """To a provisioner: attach this shard, which owns `workers`. Workers of its earlier incarnations are ended.

    Answered with `Attached`.
    """

    shard: Name
    incarnation: Count
    workers: Annotated[list[OwnedWorker], msgspec.Meta(max_length=MAX_OWNED)]


class Attached(Body):
    """Answer to `Attach`: limits of the provisioner's platform, and where the shard should listen."""

    limits: Limits
    #: Address at which the shard should listen for its workers.
    listen_at: Text
    #: Number of events that the shard has received: see `EventsRequest`.
    seen: Count


class StartRequest(Body, tag="start"):
    """Request to start this worker."""

    name: Name
    launch_spec: Annotated[bytes, msgspec.Meta(max_length=MAX_LAUNCH_SPEC_BYTES)]


class StopRequest(Body, tag="stop"):
    """Request to end this worker by force."""

    name: Name
    why: Text


class SuspectRequest(Body, tag="suspect"):
    """Request to check soon whether this worker still runs on the platform."""

    name: Name


Request: TypeAlias = StartRequest | StopRequest | SuspectRequest


class Requests(Body):
    """To a provisioner: carry out these requests, in order, to start, stop or check workers. Answered with True.

    If the shard is not attached, the call has no effect and the answer is False.
    """

    shard: Name
    incarnation: Count
    requests: Annotated[list[Request], msgspec.Meta(max_length=MAX_REQUESTS)]


class EventsRequest(Body):
    """To a provisioner: wait briefly for new events of the shard's workers. Answered with `Events`."""

    shard: Name
    incarnation: Count
    #: Number of events that the shard has received: `seen` of the latest `Events`, or before the first, of `Attached`.
    seen: Count


class RefusedStart(Body, tag="refused"):
    """Message with a platform's outcome `Refused`: a start that the platform has refused."""

    name: Name
    #: Class of the error, its text, and the time until the next attempt (seconds).
    kind: Name
    text: Text
    seconds: Seconds

    @classmethod
    def of(cls, refused: Refused) -> RefusedStart:
        error = refused.error
        kind = next((one for one, known in _ERRORS.items() if isinstance(error, known)), "UnavailableError")
        return cls(refused.name, kind, str(error)[-MAX_TEXT:], getattr(error, "retry_after_s", 0.0))

    def outcome(self) -> Refused:
        """Return the outcome that this message describes. Raises KeyError if `kind` is not a known class."""
        kind = _ERRORS[self.kind]
        return Refused(self.name, kind(self.text, self.seconds) if kind is ThrottledError else kind(self.text))


#: An `Outcome` of a platform, in the form in which it is sent.
WorkerEvent: TypeAlias = Accepted | RefusedStart | Answerless | Warned | Ended


class Events(Body):
    """Answer to `EventsRequest`: new events of the shard's workers."""

    #: Whether the shard is attached; if not, it must attach again.
    known: bool
    #: Number of events that the shard has received with this answer, for its next `EventsRequest`.
    seen: Count = 0
    events: Annotated[list[WorkerEvent], msgspec.Meta(max_length=MAX_EVENTS)] = []


class Release(Body):
    """To a provisioner: this shard ends. Its workers are ended by force if they still run after `grace_s` seconds."""

    shard: Name
    incarnation: Count
    grace_s: Seconds
