"""Bodies of the calls to a provisioner, and of its answers. It starts members for the shards of a cluster."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from torch_dpflow.cluster.messages.flow_spec import MAX_WORKERS
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
from torch_dpflow.ipc.messages.launch_spec import MAX_LAUNCH_SPEC_BYTES
from torch_dpflow.remote.launchers.contract import Accepted, Answerless, Ended, Outcome, Refused, Warned
from torch_dpflow.workers.platform import End, Limits

#: Most members of one shard that are not gone: successors and those that end are some more than its workers.
MAX_MEMBERS = 4 * MAX_WORKERS
#: Most requests in one call, and most pieces of news in one answer.
MAX_REQUESTS, MAX_NEWS = 256, 256

#: Each before those that it is one of.
_ERRORS: dict[str, type[PlatformError]] = {
    one.__name__: one
    for one in (ThrottledError, QuotaError, ExpiredError, DeniedError, RejectedError, UnavailableError)
}


class KeptMember(Body):
    """A member that a shard has."""

    name: Name
    #: How the platform knows it, where it has said that.
    ref: Text | None


class Attach(Body):
    """To a provisioner: this shard has these members.

    Answered with `Attached`; what an earlier incarnation had is ended.
    """

    shard: Name
    incarnation: Count
    members: Annotated[list[KeptMember], msgspec.Meta(max_length=MAX_MEMBERS)]


class Attached(Body):
    """From a provisioner: what its platform is."""

    limits: Limits
    #: Where to listen for members.
    listen_at: Text
    #: Up to where the shard has had the news: see `Asking`.
    seen: Count


class StartRequest(Body, tag="start"):
    """Start this member."""

    name: Name
    order: Annotated[bytes, msgspec.Meta(max_length=MAX_LAUNCH_SPEC_BYTES)]


class StopRequest(Body, tag="stop"):
    """End this member by force."""

    name: Name
    why: Text


class SuspectRequest(Body, tag="suspect"):
    """Ask the platform about this member soon."""

    name: Name


Request: TypeAlias = StartRequest | StopRequest | SuspectRequest


class Requests(Body):
    """To a provisioner, in order. Answered with whether it knows the shard; if not it has done nothing."""

    shard: Name
    incarnation: Count
    requests: Annotated[list[Request], msgspec.Meta(max_length=MAX_REQUESTS)]


class Asking(Body):
    """To a provisioner: what is new beyond what the shard has had. Answered with `News`, as soon as there is any."""

    shard: Name
    incarnation: Count
    #: How many pieces of news it has had since it attached.
    seen: Count


class Told(Body):
    """One piece of news: an `Outcome` of a platform."""

    name: Name
    #: The outcome's class, or that of the error of one that was refused.
    kind: Name
    #: The platform's own name of it, or the error's text.
    text: Text = ""
    #: After how long to try again, or in how long it ends.
    seconds: Seconds = 0.0
    end: End | None = None


class News(Body):
    """From a provisioner."""

    #: Whether the provisioner knows the shard; if not, it is to attach again.
    known: bool
    #: As of the shard's next `Asking`.
    seen: Count = 0
    told: Annotated[list[Told], msgspec.Meta(max_length=MAX_NEWS)] = []


class Release(Body):
    """To a provisioner: this shard ends.

    And its members are to be ended unless they do so by themselves in this time.
    """

    shard: Name
    incarnation: Count
    grace_s: Seconds


def told_of(outcome: Outcome) -> Told:
    """An outcome, to be sent."""
    kind = type(outcome).__name__
    match outcome:
        case Accepted(name, ref):
            return Told(name, kind, ref[:MAX_TEXT])
        case Answerless(name, text):
            return Told(name, kind, text[:MAX_TEXT])
        case Warned(name, until_s):
            return Told(name, kind, seconds=until_s)
        case Ended(name, end):
            return Told(name, kind, end=end)
        case Refused(name, error):
            why = next(
                (one for one, known in _ERRORS.items() if isinstance(error, known)), "UnavailableError"
            )
            return Told(name, why, str(error)[-MAX_TEXT:], getattr(error, "retry_after_s", 0.0))


def outcome_of(told: Told) -> Outcome:
    """The outcome that was sent. Raises KeyError if it is none."""
    match told.kind:
        case "Accepted":
            return Accepted(told.name, told.text)
        case "Answerless":
            return Answerless(told.name, told.text)
        case "Warned":
            return Warned(told.name, told.seconds)
        case "Ended":
            return Ended(told.name, told.end or End())
    if told.kind == "ThrottledError":
        return Refused(told.name, ThrottledError(told.text, told.seconds))
    return Refused(told.name, _ERRORS[told.kind](told.text))
