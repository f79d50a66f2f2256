"""Parts of calls: types of fields with their limits, the base of bodies, and the errors that a client recovers from.

A client recovers from these errors by refreshing its view or by waiting; they are never shown to users.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, TypeAlias

import msgspec

from torch_dpflow._core.checks import MAX_SECONDS
from torch_dpflow.errors import ErrorKind, UsageError, WorkerError

#: Longest name of a method, and longest text of an error, characters.
MAX_NAME, MAX_TEXT = 200, 32 * 1024
#: Maximum samples that one message names.
MAX_SAMPLES = 1 << 14
#: Maximum ranks of one job.
MAX_RANKS = 1024
#: Prefix of the names that are generated for jobs without one.
UNNAMED = "unnamed-"

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
SampleKeys: TypeAlias = Annotated[list[Count], msgspec.Meta(max_length=MAX_SAMPLES)]


class Body(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Arguments or result of a call, encoded as a msgpack array of the fields; unknown fields are an error."""


class WorkerRefusedError(WorkerError):
    """The shard refuses this worker process."""


class RecoverableError(UsageError):
    """The caller's view is out of date, or the caller has to wait."""

    kind: ClassVar[ErrorKind]

    def __init_subclass__(cls, *, kind: ErrorKind) -> None:
        cls.kind = kind


class StaleJobError(RecoverableError, kind=ErrorKind.STALE_JOB):
    """The job's lease has expired, or another process has its name. The job has to join again."""


class MisdirectedError(RecoverableError, kind=ErrorKind.MISDIRECTED):
    """The job has called another flow's service, which listens at its former address. The job has to locate its own."""


class UnknownFlowError(RecoverableError, kind=ErrorKind.UNKNOWN_FLOW):
    """The coordinator lacks the flow or its content. The job has to register it again."""


class StaleRoutingError(RecoverableError, kind=ErrorKind.STALE_ROUTING):
    """The job chose a shard by an old routing table. It has to fetch the current one from the router."""


class StaleShardError(RecoverableError, kind=ErrorKind.STALE_SHARD):
    """Another process has replaced the shard; its node will end this one."""


class OutOfStepError(RecoverableError, kind=ErrorKind.OUT_OF_STEP):
    """The job and its router disagree on what was drawn. The job has to send its position in the epoch."""


class OverloadedError(RecoverableError, kind=ErrorKind.OVERLOADED):
    """The job requests more than a service tracks. It has to fetch what it has requested first."""


class NameBusyError(RecoverableError, kind=ErrorKind.NAME_BUSY):
    """Another process has the job's name, at most until its lease expires. The job has to retry."""


class AwaitedRanksError(RecoverableError, kind=ErrorKind.RANKS_AWAITED):
    """Some ranks of the job have not reported what they have read of its epoch. The others have to wait."""


class AwaitedWorkersError(RecoverableError, kind=ErrorKind.WORKERS_AWAITED):
    """No worker of the flow runs yet. The job has to wait."""


class LostWorkersError(RecoverableError, kind=ErrorKind.LOST):
    """All workers of the flow are lost and none has replaced them. The job waits until its timeout."""
