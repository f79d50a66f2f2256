"""Parts of calls: types of fields with limits, the base class of bodies, and errors after which a call is repeated.

Clients handle these errors: they wait, join again or refresh their routing table, and repeat the call.
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
#: Prefix of the names that are generated for jobs without a name.
UNNAMED = "unnamed-"

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
SampleKeys: TypeAlias = Annotated[list[Count], msgspec.Meta(max_length=MAX_SAMPLES)]


class Body(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base class of headers, arguments and results: a msgpack array of fields. Unknown fields are an error."""


class WorkerRefusedError(WorkerError):
    """The shard refuses this worker process."""


class RecoverableError(UsageError):
    """Base class of errors that the caller handles as each class describes, in most cases by repeating the call."""

    kind: ClassVar[ErrorKind]

    def __init_subclass__(cls, *, kind: ErrorKind) -> None:
        cls.kind = kind


class StaleJobError(RecoverableError, kind=ErrorKind.STALE_JOB):
    """The job's lease has expired, or another process has its name. The job has to join again."""


class MisdirectedError(RecoverableError, kind=ErrorKind.MISDIRECTED):
    """The job has called a service of another flow, at an address where its own service was before.

    The job has to locate its service again.
    """


class UnknownFlowError(RecoverableError, kind=ErrorKind.UNKNOWN_FLOW):
    """The coordinator lacks the flow or its content. The job has to register it again."""


class StaleRoutingError(RecoverableError, kind=ErrorKind.STALE_ROUTING):
    """The job chose a shard by an old routing table. The job has to fetch the current table from the router."""


class StaleShardError(RecoverableError, kind=ErrorKind.STALE_SHARD):
    """Another process has replaced this shard, which its node will end."""


class OutOfStepError(RecoverableError, kind=ErrorKind.OUT_OF_STEP):
    """The job and its router disagree on the samples drawn so far. The job has to send its position in the epoch."""


class OverloadedError(RecoverableError, kind=ErrorKind.OVERLOADED):
    """The service cannot take the call now, for example because a limit is reached or something is still starting.

    The caller has to retry.
    """


class NameBusyError(RecoverableError, kind=ErrorKind.NAME_BUSY):
    """Another process has the job's name, at most until its lease expires. The job has to retry."""


class AwaitedRanksError(RecoverableError, kind=ErrorKind.RANKS_AWAITED):
    """Some ranks of the job have not reported which samples of the epoch they have read.

    The other ranks have to wait.
    """


class AwaitedWorkersError(RecoverableError, kind=ErrorKind.WORKERS_AWAITED):
    """No worker of the shard can load now, and workers are expected. The job has to wait."""


class LostWorkersError(RecoverableError, kind=ErrorKind.LOST):
    """All workers of the shard are lost, and none is replaced yet. The job waits up to its `reconnect_timeout_s`."""
