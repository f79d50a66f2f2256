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

#: Maximum remote workers of one shard at a time. Successors and workers that are ending count too.
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
    """To a provisioner: this shard has these workers. Workers of the shard's earlier incarnations are ended.

    Answered with `Attached`.
    """

    shard: Name
    incarnation: Count
    workers: Annotated[list[OwnedWorker], msgspec.Meta(max_length=MAX_OWNED)]


class Attached(Body):
    """From a provisioner: its platform. The answer to `Attach`."""

    limits: Limits
    #: Address at which to listen for workers.
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
    """Request to check this worker on the platform soon."""

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


class RefusedStart(Body, tag="refused"):
    """Outcome `Refused` of a platform, as a message."""

    name: Name
    #: Class of the error, its text, and the time until the next attempt.
    kind: Name
    text: Text
    seconds: Seconds

    @classmethod
    def of(cls, refused: Refused) -> RefusedStart:
        error = refused.error
        kind = next((one for one, known in _ERRORS.items() if isinstance(error, known)), "UnavailableError")
        return cls(refused.name, kind, str(error)[-MAX_TEXT:], getattr(error, "retry_after_s", 0.0))

    def outcome(self) -> Refused:
        """Return the outcome in the message. Raises KeyError if it is not valid."""
        kind = _ERRORS[self.kind]
        return Refused(self.name, kind(self.text, self.seconds) if kind is ThrottledError else kind(self.text))


#: Each `Outcome` of a platform, as it is sent.
WorkerEvent: TypeAlias = Accepted | RefusedStart | Answerless | Warned | Ended


class Events(Body):
    """From a provisioner: new events of a shard's workers. The answer to `EventsRequest`."""

    #: Whether the shard is attached; if not, it must attach again.
    known: bool
    #: For the next `EventsRequest`.
    seen: Count = 0
    events: Annotated[list[WorkerEvent], msgspec.Meta(max_length=MAX_EVENTS)] = []


class Release(Body):
    """To a provisioner: this shard ends. Its workers are ended by force if they have not exited after this time."""

    shard: Name
    incarnation: Count
    grace_s: Seconds
