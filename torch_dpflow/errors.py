"""The exceptions of torch_dpflow, by cause.

::

    DPFlowError
    ├── UsageError                 the call is wrong
    │   ├── OptionError            (ValueError)  a value out of range
    │   ├── OptionTypeError        (TypeError)   a value of the wrong type
    │   ├── StateError             (ValueError)  a state_dict that is damaged or does not fit
    │   ├── LifetimeError          (RuntimeError)  an object or module that this process cannot use
    │   ├── NotPicklableError      (PicklingError, TypeError, AttributeError)  cannot be sent to a worker
    │   ├── MissingExtraError      (ImportError)  an optional dependency is not installed
    │   └── UnsupportedTorchError  (ImportError)  torch lacks a private name that the package needs
    ├── DatasetError               a dataset store, or a dataset in it
    │   ├── DatasetNotFoundError   (LookupError)  no such store, dataset, version or variant
    │   ├── DamagedStoreError      (ValueError)  a file of the store is missing, truncated or altered
    │   ├── NewerFormatError       (ValueError)  a later release wrote the store
    │   ├── PublishedError         (FileExistsError)  a published version would have to change
    │   └── SourceError            (ValueError)  the source of an import does not fit its importer
    ├── StageError                 (RuntimeError)  a stage of a flow failed on a sample
    ├── WorkerError                (RuntimeError)  a worker or the code that it runs
    │   ├── WorkerStartError       workers do not start, or end before they load anything
    │   ├── LaunchError            (OSError)  the platform refuses to start a process
    │   └── PoisonTaskError        a batch or sample whose loading ended several workers
    ├── LoaderTimeoutError         (RuntimeError, TimeoutError)  no batch within `timeout`
    ├── DescriptorLimitError       (RuntimeError, OSError)  too many open files
    ├── StorageError               (OSError)  a storage, an object in it, or the network
    │   ├── ObjectMissingError     (FileNotFoundError)  no such object, bucket or file
    │   ├── AccessDeniedError      (PermissionError)  the storage refuses these credentials or this request
    │   ├── TruncatedObjectError   (EOFError)  fewer bytes than requested
    │   ├── ChecksumError          (ValueError)  the object was changed after the dataset described it
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
        ├── PeerLostError          (ConnectionError)  the connection is closed, or the peer does not answer
        ├── SegmentLostError       (ConnectionError)  shared memory that cannot be opened
        ├── DeadlineError          (TimeoutError)  no answer in time
        └── RemoteCallError        (RuntimeError)  the peer answered with an error

A class also derives from Python's classes in brackets, so `except RuntimeError`, written for torch's loader, keeps
working. Messages show what was given, what is allowed and what to do. All errors can be pickled.
"""

import enum
import pickle


class DPFlowError(Exception):
    """Base class of the errors that torch_dpflow defines."""


class UsageError(DPFlowError):
    """The call is wrong: its caller has to change it."""


class OptionError(UsageError, ValueError):
    """An argument's value is not allowed."""


class OptionTypeError(UsageError, TypeError):
    """An argument is of the wrong type."""


class StateError(UsageError, ValueError):
    """A state_dict is damaged, does not fit the object that should load it, or could not be taken."""


class LifetimeError(UsageError, RuntimeError):
    """An object or module cannot be used in this process, such as an iterator after a fork."""


class NotPicklableError(UsageError, pickle.PicklingError, TypeError, AttributeError):
    """An object cannot be pickled, so it cannot be sent to a worker, or returned by one."""


class MissingExtraError(UsageError, ImportError):
    """A dependency that only some users need is not installed; the message says what to install."""


class UnsupportedTorchError(UsageError, ImportError):
    """The installed torch lacks a private name that the package uses; the message has torch's version."""


class DatasetError(DPFlowError):
    """Base class of errors of a dataset store, of a dataset in it, or of an import."""


class DatasetNotFoundError(DatasetError, LookupError):
    """There is no such store, dataset, version or variant."""


class DamagedStoreError(DatasetError, ValueError):
    """A file of a dataset store is missing, truncated or altered, or contradicts another."""


class NewerFormatError(DatasetError, ValueError):
    """A later release of the library wrote a file of the dataset store."""


class PublishedError(DatasetError, FileExistsError):
    """A published version of a dataset would have to change; publish a new version instead."""


class SourceError(DatasetError, ValueError):
    """The source of an import does not have the layout that its importer requires."""


class StageError(DPFlowError, RuntimeError):
    """A stage of a flow failed on a sample; the message names both, and the function's error."""

    def __init__(self, text: str, stage: str = "") -> None:
        super().__init__(text, stage)
        #: The stage's name.
        self.stage = stage

    def __str__(self) -> str:
        return str(self.args[0])


class WorkerError(DPFlowError, RuntimeError):
    """A worker failed, or the code that it runs ended it."""


class WorkerStartError(WorkerError):
    """Workers cannot be started, or they end repeatedly without delivering a batch in between."""


class LaunchError(WorkerError, OSError):
    """A platform refuses to start a process."""


class PoisonTaskError(WorkerError):
    """Several workers, one after the other, ended while they loaded the same batch, sample or item."""


class LoaderTimeoutError(DPFlowError, RuntimeError, TimeoutError):
    """No batch arrived within the loader's `timeout`."""


class DescriptorLimitError(DPFlowError, RuntimeError, OSError):
    """The process has too many files open; the message names the limit, and how to raise it."""


class StorageError(DPFlowError, OSError):
    """A storage failed a request, or an object or file cannot be read or written."""


class ObjectMissingError(StorageError, FileNotFoundError):
    """There is no such object, bucket or file."""


class AccessDeniedError(StorageError, PermissionError):
    """The storage refused the credentials or the request, or requires credentials and got none."""


class TruncatedObjectError(StorageError, EOFError):
    """An object has fewer bytes than were requested, or than the storage announced."""


class ChecksumError(StorageError, ValueError):
    """An object was changed: its checksum, size, ETag or modification time differs from the one that is recorded."""


class StorageUnavailableError(StorageError, ConnectionError):
    """The storage cannot be reached, ended the connection, is overloaded, or sent an invalid response."""

    #: Seconds that the server requested to wait; 0 if it requested no wait.
    retry_after_s: float = 0.0


class StorageTimeoutError(StorageError, TimeoutError):
    """The storage did not answer in time."""


class PoolFullError(DPFlowError, MemoryError):
    """The pool lacks memory for a dataset, or has reached another limit, such as its number of datasets."""


class PlatformError(DPFlowError):
    """The control plane of a platform failed a request, or its answer was lost."""


class ThrottledError(PlatformError):
    """The platform accepts no more calls for now."""

    def __init__(self, text: str, retry_after_s: float = 0.0) -> None:
        super().__init__(text, retry_after_s)
        #: How long to wait before the next call, seconds; 0 if the platform gives no time.
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return str(self.args[0])


class QuotaError(PlatformError):
    """No further worker can run: the account, the cluster or this process has its maximum number."""


class DeniedError(PlatformError, PermissionError):
    """There are no credentials, the platform rejects them, or they lack a permission."""


class ExpiredError(DeniedError):
    """The credentials have expired: renew them."""


class RejectedError(PlatformError, ValueError):
    """The platform rejects a request that would fail again, for example for an image that does not exist."""


class UnavailableError(PlatformError, ConnectionError):
    """The control plane cannot be reached, or reports a failure of its service."""


class AnswerLostError(PlatformError, TimeoutError):
    """The answer of the control plane did not arrive; the request may have been executed."""


class TransportError(DPFlowError):
    """Base class of errors of connections to other processes, and of their messages and shared memory."""


class MessageError(TransportError, ValueError):
    """Bytes from a peer are malformed, unknown or above a limit."""


class PeerLostError(TransportError, ConnectionError):
    """A connection is closed, or the process at its other end has ended or does not answer."""


class SegmentLostError(TransportError, ConnectionError):
    """Shared memory cannot be opened: its process has ended, or runs in another container or under another user."""


class DeadlineError(TransportError, TimeoutError):
    """A call was not answered within its deadline."""


class ErrorKind(enum.IntEnum):
    """Cause of a failed call to a service, by which the caller decides how to react."""

    #: The service failed, though the call may be right.
    INTERNAL = 0
    #: The call is wrong: its caller has to fix it.
    USAGE = 1
    #: The call or its answer is malformed or above a limit.
    MALFORMED = 2
    #: A process that the service needs has ended, or does not answer.
    LOST = 3
    #: The service has too much to do, or has just started: retry.
    OVERLOADED = 5
    #: The caller's information is out of date: see `torch_dpflow.ipc.messages.fields`.
    STALE_JOB = 6
    STALE_ROUTING = 7
    STALE_SHARD = 8
    OUT_OF_STEP = 9
    MISDIRECTED = 10
    UNKNOWN_FLOW = 11
    #: The caller has to wait and retry; see the same module.
    NAME_BUSY = 12
    RANKS_AWAITED = 13
    WORKERS_AWAITED = 14


class RemoteCallError(TransportError, RuntimeError):
    """The peer answered a call with an error."""

    def __init__(self, text: str, kind: ErrorKind = ErrorKind.INTERNAL) -> None:
        super().__init__(text, kind)
        #: The error message that the peer sent, and the cause.
        self.text = text
        self.kind = kind

    def __str__(self) -> str:
        if self.kind is ErrorKind.INTERNAL:
            return f"a service failed during a call, which is the service's fault and not the call's: {self.text}"
        return self.text
