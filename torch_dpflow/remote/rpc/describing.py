"""What the other side of a call is told of an error."""

from __future__ import annotations

import traceback

from torch_dpflow.errors import ErrorKind, MessageError, PeerLostError, StateError, UsageError
from torch_dpflow.remote.wire.errors import Refusal
from torch_dpflow.remote.wire.fields import MAX_TEXT


def kind_of(error: BaseException) -> ErrorKind:
    """Why a call that ends with this error does."""
    if isinstance(error, Refusal):
        return error.kind
    if isinstance(error, UsageError) and not isinstance(error, StateError):  # of a service's own store
        return ErrorKind.USAGE
    if isinstance(error, MessageError):
        return ErrorKind.MALFORMED
    return ErrorKind.LOST if isinstance(error, PeerLostError) else ErrorKind.INTERNAL


def describe(error: BaseException) -> tuple[ErrorKind, str]:
    """An error's kind, and its text as long as a header takes it; of an internal one the end of its traceback."""
    kind = kind_of(error)
    text = "".join(traceback.format_exception(error)) if kind is ErrorKind.INTERNAL else str(error)
    return kind, text[-MAX_TEXT:]
