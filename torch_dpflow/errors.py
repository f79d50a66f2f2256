"""The exceptions of torch_dpflow, by cause.

::

    DPFlowError
    ├── UsageError                 the call is wrong
    │   ├── OptionError            (ValueError)  a value out of range
    │   ├── OptionTypeError        (TypeError)   a value of the wrong type
    │   ├── StateError             (ValueError)  a state_dict that does not fit
    │   ├── LifetimeError          (RuntimeError)  used in a process that it does not belong to
    │   ├── NotPicklableError      (PicklingError, TypeError, AttributeError)  cannot be sent to a worker
    │   ├── MissingExtraError      (ImportError)  an optional dependency is not installed
    │   └── UnsupportedTorchError  (ImportError)  torch lacks a private name that the package needs
    ├── DatasetError               a dataset store, or a dataset in it
    │   ├── DatasetNotFoundError   (LookupError)  no such store, dataset, version or variant
    │   ├── DamagedStoreError      (ValueError)  a file of the store is missing, truncated or altered
    │   ├── NewerFormatError       (ValueError)  a later release wrote the store
    │   ├── PublishedError         (FileExistsError)  a published version would have to change
    │   └── SourceError            (ValueError)  the source of an import has another layout
    ├── StageError                 (RuntimeError)  a stage of a flow failed on a sample
    ├── WorkerError                (RuntimeError)  a worker or the code that it runs
    │   ├── WorkerStartError       workers end before they load anything
    │   ├── LaunchError            (OSError)  the platform refuses to start a process
    │   └── PoisonTaskError        a batch that ended every worker it was assigned to
    ├── LoaderTimeoutError         (RuntimeError, TimeoutError)  no batch within `timeout`
    ├── DescriptorLimitError       (RuntimeError, OSError)  too many open files
    ├── StorageError               (OSError)  a storage, an object in it, or the network
    │   ├── ObjectMissingError     (FileNotFoundError)  no such object, bucket or file
    │   ├── AccessDeniedError      (PermissionError)  the storage refuses these credentials or this request
    │   ├── TruncatedObjectError   (EOFError)  fewer bytes than requested
    │   ├── ChecksumError          (ValueError)  bytes that the dataset does not describe
    │   ├── StorageUnavailableError (ConnectionError)  refused, reset or overloaded, after all retries
    │   └── StorageTimeoutError    (TimeoutError)  no answer in time
    ├── PoolFullError              (MemoryError)  the pool has no capacity for a dataset
    ├── PlatformError              a platform's control plane failed a request
    │   ├── ThrottledError         too many calls: retry later
    │   ├── QuotaError             the account or cluster has no capacity for another worker
    │   ├── DeniedError            (PermissionError)  wrong or expired credentials, or a missing right
    │   │   └── ExpiredError       expired credentials
    │   ├── RejectedError          (ValueError)  no such image, function or parameter: do not retry
    │   ├── UnavailableError       (ConnectionError)  no connection, or the platform is broken
    │   └── AnswerLostError        (TimeoutError)  no answer in time; the request may have been executed
    └── TransportError             a peer or the network
        ├── MessageError           (ValueError)  malformed or unknown bytes
        ├── PeerLostError          (ConnectionError)  the peer is gone
        ├── SegmentLostError       (ConnectionError)  shared memory whose writer is gone
        ├── DeadlineError          (TimeoutError)  no answer in time
        └── RemoteCallError        (RuntimeError)  the peer answered with an error

A class also derives from Python's classes in brackets, so `except RuntimeError`, written for torch's loader, keeps
working. Messages show what was given, what is allowed and what to do. All errors can be pickled.
"""

import enum
import pickle


class DPFlowError(Exception):
    """Base class of every error that torch_dpflow raises itself."""


class UsageError(DPFlowError):
    """The call is wrong; nothing has been started."""


class OptionError(UsageError, ValueError):
    """An argument's value is not allowed."""


class OptionTypeError(UsageError, TypeError):
    """An argument is of the wrong type."""


class StateError(UsageError, ValueError):
    """A state_dict does not fit the object that should load it."""


class LifetimeError(UsageError, RuntimeError):
    """An object is used in a process that it does not belong to."""


class NotPicklableError(UsageError, pickle.PicklingError, TypeError, AttributeError):
    """An object cannot be pickled, so it cannot be sent to a worker."""


class MissingExtraError(UsageError, ImportError):
    """A dependency that only some users need is not installed; the message has the pip command."""


class UnsupportedTorchError(UsageError, ImportError):
    """The installed torch lacks a private name that the package uses; the message has its version."""


class DatasetError(DPFlowError):
    """A dataset store cannot serve a request, or its files differ from its description."""


class DatasetNotFoundError(DatasetError, LookupError):
    """There is no such store, dataset, version or variant."""


class DamagedStoreError(DatasetError, ValueError):
    """A file of a dataset store is missing, truncated or altered, or contradicts another."""


class NewerFormatError(DatasetError, ValueError):
    """A later release of the library wrote this file."""


class PublishedError(DatasetError, FileExistsError):
    """A published version of a dataset would have to change; publish a new version instead."""


class SourceError(DatasetError, ValueError):
    """The source of an import does not have the layout that its importer requires."""


class StageError(DPFlowError, RuntimeError):
    """A stage of a flow failed on a sample; the message names both. The function's error is the cause."""

    def __init__(self, text: str, stage: str = "") -> None:
        super().__init__(text, stage)
        #: The stage's name.
        self.stage = stage

    def __str__(self) -> str:
        return str(self.args[0])


class WorkerError(DPFlowError, RuntimeError):
    """A worker failed, or the code that it runs ended it."""


class WorkerStartError(WorkerError):
    """Workers end repeatedly without delivering a batch, and no batch is the cause: usually they cannot start."""


class LaunchError(WorkerError, OSError):
    """A platform refuses to start a process."""


class PoisonTaskError(WorkerError):
    """One batch ended every worker that it was assigned to."""


class LoaderTimeoutError(DPFlowError, RuntimeError, TimeoutError):
    """No batch arrived within the loader's `timeout`."""


class DescriptorLimitError(DPFlowError, RuntimeError, OSError):
    """The process has too many files open; the message names the limit, the need and how to raise it."""


class StorageError(DPFlowError, OSError):
    """A storage failed a request; the message names the object."""


class ObjectMissingError(StorageError, FileNotFoundError):
    """There is no such object, bucket or file."""


class AccessDeniedError(StorageError, PermissionError):
    """The storage refused the credentials or the request, or requires credentials and got none."""


class TruncatedObjectError(StorageError, EOFError):
    """An object has fewer bytes than were requested or announced."""


class ChecksumError(StorageError, ValueError):
    """An object's bytes are not those that its dataset describes."""


class StorageUnavailableError(StorageError, ConnectionError):
    """The storage refused or reset the connection, or reported that it is overloaded."""

    #: Seconds that the server requested to wait; 0 if it requested no wait.
    retry_after_s: float = 0.0


class StorageTimeoutError(StorageError, TimeoutError):
    """The storage did not answer in time."""


class PoolFullError(DPFlowError, MemoryError):
    """The pool has no capacity for a dataset; nothing was read."""


class PlatformError(DPFlowError):
    """The control plane of a platform failed a request; the message names the worker."""


class ThrottledError(PlatformError):
    """The platform accepts no more calls for now."""

    def __init__(self, text: str, retry_after_s: float = 0.0) -> None:
        super().__init__(text, retry_after_s)
        #: How long to wait before the next call, seconds; 0 if the platform gives no time.
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return str(self.args[0])


class QuotaError(PlatformError):
    """The account or cluster has its maximum number of workers."""


class DeniedError(PlatformError, PermissionError):
    """The platform rejects the credentials, or they lack a permission: other credentials are needed."""


class ExpiredError(DeniedError):
    """The credentials have expired. The library looks them up again until they are renewed."""


class RejectedError(PlatformError, ValueError):
    """The platform cannot start this: it has no such image or function, or a parameter is wrong."""


class UnavailableError(PlatformError, ConnectionError):
    """The control plane is unreachable or broken; the request was not executed."""


class AnswerLostError(PlatformError, TimeoutError):
    """The control plane did not answer in time; the request may have been executed."""


class TransportError(DPFlowError):
    """A message could not be sent or received."""


class MessageError(TransportError, ValueError):
    """Bytes from a peer are malformed, unknown or above a limit."""


class PeerLostError(TransportError, ConnectionError):
    """The peer is gone."""


class SegmentLostError(TransportError, ConnectionError):
    """Shared memory can no longer be opened because the process that wrote it is gone."""


class DeadlineError(TransportError, TimeoutError):
    """No answer within the deadline."""


class ErrorKind(enum.IntEnum):
    """Reason of a call's error. The caller's reaction depends on this alone."""

    #: The service failed, though the call may be right; the text has its traceback.
    INTERNAL = 0
    #: The call is wrong: its caller has to fix it.
    USAGE = 1
    #: The call or its answer is malformed or above a limit.
    MALFORMED = 2
    #: A process that the service needs is gone.
    LOST = 3
    #: The service has too much to do, or has just started: retry.
    OVERLOADED = 5
    #: The caller's view is out of date: see `torch_dpflow.ipc.messages.fields`.
    STALE_JOB = 6
    STALE_ROUTING = 7
    STALE_SHARD = 8
    OUT_OF_STEP = 9
    MISDIRECTED = 10
    UNKNOWN_FLOW = 11
    #: Wait and retry.
    NAME_BUSY = 12
    RANKS_AWAITED = 13
    WORKERS_AWAITED = 14


class RemoteCallError(TransportError, RuntimeError):
    """The peer answered a call with an error."""

    def __init__(self, text: str, kind: ErrorKind = ErrorKind.INTERNAL) -> None:
        super().__init__(text, kind)
        #: The peer's error message, and the kind of its error.
        self.text = text
        self.kind = kind

    def __str__(self) -> str:
        if self.kind is ErrorKind.INTERNAL:
            return f"a service failed during a call, which is the service's fault and not the call's: {self.text}"
        return self.text
