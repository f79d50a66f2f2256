"""Calls and streams as the code that serves them sees them."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec

from torch_dpflow.errors import DPFlowError
from torch_dpflow.remote import messages
from torch_dpflow.remote.messages import Header, encode_body
from torch_dpflow.remote.rpc.describing import describe
from torch_dpflow.remote.rpc.streams import StreamState
from torch_dpflow.remote.transport.base import Frame


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


logger = logging.getLogger(__name__)

#: Serves one method. What it raises, the client gets as RemoteCallError; the server goes on. It runs in the
#: server's thread, so it must not wait; what takes long is answered LATER.
Handler: TypeAlias = Callable[[IncomingCall], "Result | Later | None"]


class StreamHandler:
    """Serves one stream; override what is of interest. In the server's thread, so no method may wait.

    What a method raises aborts the stream.
    """

    def received(self, body: Any, frames: list[memoryview]) -> None:
        """An item came. On return the client is granted room for another, unless the stream is held."""

    def writable(self) -> None:
        """The client has granted credit: `IncomingStream.credit` items may be sent."""

    def ended(self) -> None:
        """The client sends no more items; this side still may."""

    def lost(self, error: DPFlowError) -> None:
        """The stream is broken: the client aborted it or is gone. Not called for an abort of this side."""


class StreamPort(Protocol):
    """What an IncomingStream asks of its server."""

    def send(self, header: Header) -> None:
        """Send the stream's client a message without payload."""

    def send_payload(self, header: messages.Item, frames: Sequence[Frame]) -> None:
        """Send it one with payload."""

    def forget(self, stream: IncomingStream) -> None:
        """The stream is over."""


class IncomingStream:
    """One stream of a client. Belongs to the server's thread; `RpcServer.post` gets there from others."""

    def __init__(
        self,
        client: bytes,
        header: messages.Open,
        body: Any,
        frames: list[memoryview],
        *,
        window: int,
        decoder: msgspec.msgpack.Decoder[Any],
        port: StreamPort,
    ) -> None:
        #: Who opened it, by the identity of its connection, and what it said.
        self.client = client
        self.id = header.stream
        self.method = header.method
        self.body = body
        self.frames = frames
        self.state = StreamState(window=window)
        self.state.on_credit(header.credit)
        self.handler = StreamHandler()
        #: Of the items' bodies.
        self.decoder = decoder
        self._port = port
        self._held: int | None = None

    @property
    def credit(self) -> int:
        """How many items may be sent now; `StreamHandler.writable` tells of more."""
        return self.state.credit

    def send(self, body: Any = None, frames: Sequence[Frame] = ()) -> None:
        """Send one item. Raises StateError where `credit` is 0 or the stream has ended."""
        packed = encode_body(body)
        self._port.send_payload(messages.Item(self.id, self.state.send(), packed), frames)

    def end(self) -> None:
        """Send no more items."""
        position = self.state.end()
        if position is not None:
            self._port.send(messages.End(self.id, position))
            self._leave_if_over()

    def abort(self, error: Exception) -> None:
        """Break the stream for both sides; the client gets the error's kind and text."""
        if self.state.fail(DPFlowError(f"this side has aborted the stream: {error!r}")):
            self._port.send(messages.Abort(self.id, *describe(error)))
            self._leave_if_over()

    def hold(self) -> None:
        """Grant no credit for items until `release`, so that the client has to wait."""
        if self._held is None:
            self._held = 0

    def release(self) -> None:
        """Grant what was held back, and go on granting."""
        held, self._held = self._held or 0, None
        for _ in range(held):
            self._grant()

    def take(self, body: Any, frames: list[memoryview]) -> None:
        """Hand an item to the handler. The server's business."""
        self.handler.received(body, frames)
        if self._held is not None:
            self._held += 1
        elif not self.state.over:
            self._grant()

    def lose(self, error: DPFlowError) -> None:
        """Break the stream on this side and tell the handler. The server's business."""
        if self.state.fail(error):
            self.mourn(error)

    def mourn(self, error: DPFlowError) -> None:
        """Tell the handler that the stream is broken. The server's business."""
        try:
            self.handler.lost(error)
        except Exception:
            logger.exception("the handler of a stream to %r failed over its loss", self.method)

    def _grant(self) -> None:
        credit = self.state.consume()
        if credit is not None:
            self._port.send(messages.Credit(self.id, credit))

    def _leave_if_over(self) -> None:
        if self.state.over:
            self._port.forget(self)
