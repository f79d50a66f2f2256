"""Calls as the code that serves them sees them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch_dpflow.remote.wire.parcel_table import Frame


class Result(NamedTuple):
    """What a method answers: anything small that msgpack can carry, and bulk."""

    body: Any = None
    frames: Sequence[Frame] = ()


class Later(enum.Enum):
    """What a method returns whose call is answered by `IncomingCall.answer` or `fail`, at any time."""

    LATER = enum.auto()


LATER = Later.LATER
#: How a call ends: with a result, or with the error that it is answered with.
Outcome: TypeAlias = "Result | Exception"


class IncomingCall:
    """One call of a client. The frames are writable and belong to the method."""

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
        """Answer the call; the first answer or failure counts. Any thread may.

        `frames` must not change any more.
        """
        self._finish(Result(body, frames))

    def fail(self, error: Exception) -> None:
        """Answer the call with an error: the client gets its kind and its text."""
        self._finish(error)


#: Serves one method. What it raises, the client gets as RemoteCallError; the server goes on. It runs in the
#: server's thread, so it must not wait; what takes long is answered LATER.
Handler: TypeAlias = Callable[[IncomingCall], "Result | Later | None"]
