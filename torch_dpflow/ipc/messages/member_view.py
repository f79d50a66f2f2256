"""What is known of one worker that a platform runs: to print it, no room above has to be imported."""

from __future__ import annotations

from torch_dpflow.ipc.messages.body import Body
from torch_dpflow.ipc.messages.fields import Count, Name, Seconds, Text


class MemberView(Body):
    """What a shard knows of one of its workers that a platform runs, for people."""

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
