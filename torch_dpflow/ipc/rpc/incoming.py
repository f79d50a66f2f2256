"""What a method's handler gets and returns."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch_dpflow.ipc.messages.payload_table import Frame


class Result(NamedTuple):
    """A method's answer: a small body that msgpack can encode, and bulk data."""

    body: Any = None
    frames: Sequence[Frame] = ()


class Later(enum.Enum):
    """Returned by a handler that answers later, by `IncomingCall.answer` or `fail`."""

    LATER = enum.auto()


LATER = Later.LATER
#: How a call ends: with a result, or with an error for the caller.
Outcome: TypeAlias = "Result | Exception"


class IncomingCall:
    """One call of a client. The frames are writable and belong to the handler."""

    __slots__ = ("_finish", "body", "client", "frames", "method", "patience_s")

    def __init__(
        self,
        client: bytes,
        method: str,
        body: Any,
        frames: list[memoryview],
        patience_s: float,
        finish: Callable[[Outcome], None],
    ) -> None:
        #: Who calls, by the identity of its connection.
        self.client = client
        self.method = method
        self.body = body
        self.frames = frames
        #: How long the client said that it would wait, seconds.
        self.patience_s = patience_s
        self._finish = finish

    def answer(self, body: Any = None, frames: Sequence[Frame] = ()) -> None:
        """Answer the call; the first answer or failure counts. Any thread may call.

        `frames` must not change afterwards.
        """
        self._finish(Result(body, frames))

    def fail(self, error: Exception) -> None:
        """Answer the call with an error: the client gets its kind and its text."""
        self._finish(error)


#: Serves one method. The client gets what it raises as RemoteCallError, and the server goes on. It runs in the server's
#: thread, so it must not block; a handler that needs long returns LATER.
Handler: TypeAlias = Callable[[IncomingCall], "Result | Later | None"]
