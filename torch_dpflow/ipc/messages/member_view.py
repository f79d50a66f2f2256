"""State of one remote worker, for display. It is here so that printing it imports no package above."""

from __future__ import annotations

from torch_dpflow.ipc.messages.body import Body
from torch_dpflow.ipc.messages.fields import Count, Name, Seconds, Text


class MemberView(Body):
    """State of a remote worker as its shard reports it."""

    name: Name
    #: Its place among the workers of the shard.
    number: Count
    #: As of `MemberState`.
    state: Name
    #: How long ago it was asked for, seconds.
    age_s: Seconds
    #: Its host and process; empty before it has called.
    where: Text
    #: How many samples the shard has had of it.
    samples: Count = 0
