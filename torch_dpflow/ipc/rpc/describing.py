"""How an error is sent to the caller: as its kind and a text."""

from __future__ import annotations

import traceback

from torch_dpflow.errors import ErrorKind, MessageError, PeerLostError, StateError, UsageError
from torch_dpflow.ipc.messages.errors import RecoverableError
from torch_dpflow.ipc.messages.fields import MAX_TEXT


def kind_of(error: BaseException) -> ErrorKind:
    """The kind of an error."""
    if isinstance(error, RecoverableError):
        return error.kind
    if isinstance(error, UsageError) and not isinstance(
        error, StateError
    ):  # which a service's own store raises
        return ErrorKind.USAGE
    if isinstance(error, MessageError):
        return ErrorKind.MALFORMED
    return ErrorKind.LOST if isinstance(error, PeerLostError) else ErrorKind.INTERNAL


def describe(error: BaseException) -> tuple[ErrorKind, str]:
    """An error's kind, and the end of its text, or of an unforeseen error's traceback, that fits into a header."""
    kind = kind_of(error)
    is_foreseen = kind is not ErrorKind.INTERNAL or isinstance(error, StateError)
    text = str(error) if is_foreseen else "".join(traceback.format_exception(error))
    return kind, text[-MAX_TEXT:]
