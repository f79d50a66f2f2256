"""Errors that a client recovers from by refreshing its view, or by waiting; never shown to users."""

from __future__ import annotations

from typing import ClassVar

from torch_dpflow.errors import ErrorKind, UsageError


class RecoverableError(UsageError):
    """The caller's view is out of date, or it has to wait."""

    kind: ClassVar[ErrorKind]


class StaleJobError(RecoverableError):
    """The job's lease has expired, or another process has its name; it has to join again."""

    kind = ErrorKind.STALE_JOB


class MisdirectedError(RecoverableError):
    """The job has called another flow's service, which listens at the address of its own; it has to locate that."""

    kind = ErrorKind.MISDIRECTED


class UnknownFlowError(RecoverableError):
    """The coordinator does not know the flow, or has not its content; the job has to register it again."""

    kind = ErrorKind.UNKNOWN_FLOW


class StaleRoutingError(RecoverableError):
    """The job has chosen a shard by an old routing table; it has to get the present one from the router."""

    kind = ErrorKind.STALE_ROUTING


class StaleShardError(RecoverableError):
    """Another process has replaced the shard; its node will end this one."""

    kind = ErrorKind.STALE_SHARD


class OutOfStepError(RecoverableError):
    """The job and its router disagree on what it has drawn; it has to tell the router where it is in its epoch."""

    kind = ErrorKind.OUT_OF_STEP


class OverloadedError(RecoverableError):
    """The job requests more at once than a service keeps track of; it has to fetch what it has requested first."""

    kind = ErrorKind.OVERLOADED


class NameBusyError(RecoverableError):
    """Another process has the job's name, perhaps until its lease expires; the job has to try again."""

    kind = ErrorKind.NAME_BUSY


class AwaitedRanksError(RecoverableError):
    """Ranks of the job have not reported what they have read of its epoch; the others have to wait for them."""

    kind = ErrorKind.RANKS_AWAITED
