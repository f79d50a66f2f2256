"""The exceptions of torch_dpflow, split by who is to blame.

::

    DPFlowError
    ├── UsageError                 the caller: fix the call
    │   ├── OptionError            (ValueError)  a value out of range
    │   ├── OptionTypeError        (TypeError)   a value of the wrong type
    │   ├── StateError             (ValueError)  a state_dict that does not fit
    │   └── NotPicklableError      (PicklingError, TypeError, AttributeError)  cannot travel to a worker
    ├── WorkerError                (RuntimeError)  a worker or the code that it runs
    │   ├── WorkerStartError       workers end before they load anything
    │   └── PoisonTaskError        a batch that took down every worker it was given to
    ├── LoaderTimeoutError         (RuntimeError, TimeoutError)  no batch within `timeout`
    └── TransportError             a peer or the network
        ├── MessageError           (ValueError)  malformed or unknown bytes
        ├── PeerLostError          (ConnectionError)  the other side is gone
        ├── SegmentLostError       (ConnectionError)  shared memory whose writer is gone
        ├── DeadlineError          (TimeoutError)  no answer in time
        └── RemoteCallError        (RuntimeError)  the other side answered with an error

Each also derives from what torch or Python raises there, so `except RuntimeError` written for torch's loader
keeps working. Every message shows what was given, what is allowed and what to do. All of them pickle.
"""

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
    """A state_dict does not fit the object that is to load it."""


class NotPicklableError(UsageError, pickle.PicklingError, TypeError, AttributeError):
    """An object cannot be pickled, so it cannot travel to a worker."""


class WorkerError(DPFlowError, RuntimeError):
    """A worker failed, or the code that it runs took it down."""


class WorkerStartError(WorkerError):
    """Workers end again and again before they have loaded anything."""


class PoisonTaskError(WorkerError):
    """One batch took down every worker that it was given to."""


class LoaderTimeoutError(DPFlowError, RuntimeError, TimeoutError):
    """No batch came within the loader's `timeout`."""


class TransportError(DPFlowError):
    """A message did not make its way."""


class MessageError(TransportError, ValueError):
    """Bytes from a peer are malformed, unknown or above a limit."""


class PeerLostError(TransportError, ConnectionError):
    """The peer went away."""


class SegmentLostError(TransportError, ConnectionError):
    """Shared memory can no longer be opened because the process that wrote it is gone."""


class DeadlineError(TransportError, TimeoutError):
    """No answer within the deadline."""


class RemoteCallError(TransportError, RuntimeError):
    """The peer answered a call with an error."""

    def __init__(self, text: str, kind: str = "") -> None:
        super().__init__(text, kind)
        #: The type name of the error on the other side.
        self.kind = kind

    def __str__(self) -> str:
        text, kind = self.args
        return f"{kind}: {text}" if kind else str(text)
