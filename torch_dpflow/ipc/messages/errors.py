"""Errors that a client recovers from by refreshing its view, or by waiting; never shown to users."""

from __future__ import annotations

from typing import ClassVar

from torch_dpflow.errors import ErrorKind, UsageError


class RecoverableError(UsageError):
    """The caller's view is out of date, or it has to wait."""

    kind: ClassVar[ErrorKind]

    def __init_subclass__(cls, *, kind: ErrorKind) -> None:
        cls.kind = kind


class StaleJobError(RecoverableError, kind=ErrorKind.STALE_JOB):
    """The job's lease has expired, or another process has its name; it has to join again."""


class MisdirectedError(RecoverableError, kind=ErrorKind.MISDIRECTED):
    """The job has called another flow's service, which listens at the address of its own; it has to locate that."""


class UnknownFlowError(RecoverableError, kind=ErrorKind.UNKNOWN_FLOW):
    """The coordinator does not know the flow, or has not its content; the job has to register it again."""


class StaleRoutingError(RecoverableError, kind=ErrorKind.STALE_ROUTING):
    """The job has chosen a shard by an old routing table; it has to get the present one from the router."""


class StaleShardError(RecoverableError, kind=ErrorKind.STALE_SHARD):
    """Another process has replaced the shard; its node will end this one."""


class OutOfStepError(RecoverableError, kind=ErrorKind.OUT_OF_STEP):
    """The job and its router disagree on what it has drawn; it has to send the router its position in the epoch."""


class OverloadedError(RecoverableError, kind=ErrorKind.OVERLOADED):
    """The job requests more at once than a service keeps track of; it has to fetch what it has requested first."""


class NameBusyError(RecoverableError, kind=ErrorKind.NAME_BUSY):
    """Another process has the job's name, perhaps until its lease expires; the job has to try again."""


class AwaitedRanksError(RecoverableError, kind=ErrorKind.RANKS_AWAITED):
    """Ranks of the job have not reported what they have read of its epoch; the others have to wait for them."""


class AwaitedWorkersError(RecoverableError, kind=ErrorKind.WORKERS_AWAITED):
    """No worker of the flow runs yet; the job has to wait until some do."""


class LostWorkersError(RecoverableError, kind=ErrorKind.LOST):
    """All workers of the flow have been lost, and none has come in their place; the job waits for its timeout."""
