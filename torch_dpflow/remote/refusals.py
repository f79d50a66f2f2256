"""What services answer a job or a shard with that is out of date; it mends that and goes on, and no user sees it."""

from __future__ import annotations

from torch_dpflow.errors import UsageError


class StaleJobError(UsageError):
    """The job was taken for dead, or another has taken its name; it has to join anew."""


class MisdirectedError(UsageError):
    """The job has called a service of another flow, which listens now where its own did; it has to look for that."""


class UnknownFlowError(UsageError):
    """The coordinator does not know the flow, or not what it loads; the job has to register it anew."""


class StaleRoutingError(UsageError):
    """The job has chosen a shard by a table that is out of date; it has to ask the router for another."""


class StaleShardError(UsageError):
    """Another process has taken the shard's place; its node will end this one."""


class OutOfStepError(UsageError):
    """The job and its router disagree on what it has drawn; it has to start its epoch anew."""


class OverloadedError(UsageError):
    """The job asks for more at once than a service keeps book of; it has to take what is there first."""


class NameBusyError(UsageError):
    """Another process has the job's name and may be dead; the job has to ask again."""


class AwaitedRanksError(UsageError):
    """Ranks of the job have not said yet what they have of its epoch; the others have to wait for them."""
