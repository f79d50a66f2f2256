"""What services answer a job or a shard with that is out of date; it mends that and goes on, and no user sees it."""

from __future__ import annotations

from typing import ClassVar

from torch_dpflow.errors import ErrorKind, UsageError


class Refusal(UsageError):
    """What the caller goes by is out of date, or is to be waited for."""

    kind: ClassVar[ErrorKind]


class StaleJobError(Refusal):
    """The job was taken for dead, or another has taken its name; it has to join anew."""

    kind = ErrorKind.STALE_JOB


class MisdirectedError(Refusal):
    """The job has called a service of another flow, which listens now where its own did; it has to look for that."""

    kind = ErrorKind.MISDIRECTED


class UnknownFlowError(Refusal):
    """The coordinator does not know the flow, or not what it loads; the job has to register it anew."""

    kind = ErrorKind.UNKNOWN_FLOW


class StaleRoutingError(Refusal):
    """The job has chosen a shard by a table that is out of date; it has to ask the router for another."""

    kind = ErrorKind.STALE_ROUTING


class StaleShardError(Refusal):
    """Another process has taken the shard's place; its node will end this one."""

    kind = ErrorKind.STALE_SHARD


class OutOfStepError(Refusal):
    """The job and its router disagree on what it has drawn; it has to start its epoch anew."""

    kind = ErrorKind.OUT_OF_STEP


class OverloadedError(Refusal):
    """The job asks for more at once than a service keeps book of; it has to take what is there first."""

    kind = ErrorKind.OVERLOADED


class NameBusyError(Refusal):
    """Another process has the job's name and may be dead; the job has to ask again."""

    kind = ErrorKind.NAME_BUSY


class AwaitedRanksError(Refusal):
    """Ranks of the job have not said yet what they have of its epoch; the others have to wait for them."""

    kind = ErrorKind.RANKS_AWAITED
