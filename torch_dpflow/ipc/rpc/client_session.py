"""A client's state machine: no socket, no lock, no clock.

Messages go in through `on_message`; messages to send come out in `outbox`, in order. The server may restart or drop
this client's session at any time: then it answers `NoSession`, the client sends `Handshake` again and asks for the
state of every open call, and the answers name the calls to send again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from torch_dpflow._core.checks import MAX_SECONDS
from torch_dpflow.errors import (
    DeadlineError,
    DescriptorLimitError,
    DPFlowError,
    MessageError,
    RemoteCallError,
    TransportError,
)
from torch_dpflow.ipc.messages import headers as messages
from torch_dpflow.ipc.messages.headers import Header, decode, decode_body, encode
from torch_dpflow.ipc.messages.payload_table import Frame
from torch_dpflow.ipc.rpc.carrier import Carrier


@dataclass(slots=True, eq=False)
class OpenCall:
    """A call that is not answered yet, with all that is needed to send it again."""

    id: int
    method: str
    body: msgspec.Raw
    frames: Sequence[Frame]
    #: When it was made and when its caller stops waiting; seconds of the caller's clock.
    began: float
    deadline: float


class CallTable:
    """Numbers the calls and keeps those that are open. Not thread-safe.

    The server keeps a reply until the client reports the call as completed: by `completed_below`, or where an older
    call stays open for long, by its number in `answered`.
    """

    def __init__(self) -> None:
        self._next = 1
        #: By id, in ascending order, because ids ascend and dicts keep the order of insertion.
        self._open: dict[int, OpenCall] = {}
        self._answered: list[int] = []

    @property
    def completed_below(self) -> int:
        """Every call below this number is answered or given up."""
        return next(iter(self._open), self._next)

    def begin(
        self, method: str, body: msgspec.Raw, frames: Sequence[Frame], *, now: float, timeout_s: float
    ) -> OpenCall:
        """Open a call."""
        call = OpenCall(self._next, method, body, frames, now, now + timeout_s)
        self._next += 1
        self._open[call.id] = call
        return call

    def finish(self, call_id: int) -> OpenCall | None:
        """Close a call that is answered or given up; None where it is closed already."""
        call = self._open.pop(call_id, None)
        if call is not None and self._open:
            self._answered.append(call_id)
        return call

    def take_answered(self) -> list[int]:
        """Calls that were completed since the last time and are not below `completed_below`, for the next request."""
        if not self._answered:
            return []
        answered, self._answered = self._answered, []
        first_open = self.completed_below
        return [call_id for call_id in answered if call_id >= first_open]

    def older_than(self, moment: float) -> list[int]:
        """The open calls that began before `moment`: their request or reply may be lost."""
        return [call.id for call in self._open.values() if call.began < moment]


class Answer(NamedTuple):
    """The body and the frames of a reply."""

    body: Any
    frames: list[memoryview]


@dataclass(slots=True, eq=False)
class Awaited:
    """One call and, once it is over, its answer or error."""

    call: OpenCall
    decoder: msgspec.msgpack.Decoder[Any]
    answer: Answer | None = None
    error: DPFlowError | None = None

    @property
    def known(self) -> bool:
        """Whether the call is over."""
        return self.answer is not None or self.error is not None

    def outcome(self) -> Answer:
        """The answer of a call that is over; raises its error."""
        if self.error is not None:
            # A copy: its traceback refers to the caller's frames, and these to this object. A cycle would keep alive
            # what they hold, a loader's iterator too, until the garbage collector runs.
            raise copy(self.error)
        assert self.answer is not None
        return self.answer


@dataclass(kw_only=True)
class ClientStats:
    """Counters of a client."""

    calls: int = 0
    #: Calls sent again because the server had not received them.
    repeats: int = 0
    #: Messages without a valid header, or whose payload did not fit it.
    malformed: int = 0
    #: Answers to calls that were over.
    late: int = 0
    #: How often the server has restarted.
    server_restarts: int = 0


class ClientSession:
    """The calls of one client. Not thread-safe; times are seconds of the caller's clock.

    Args:
        address: of the server, for messages.
        make_carrier: a new carrier for a server that has restarted or dropped the session.
    """

    def __init__(self, address: str, make_carrier: Callable[[], Carrier]) -> None:
        self.address = address
        self.outbox: list[Sequence[Frame]] = []
        self.waiting: dict[int, Awaited] = {}
        self.stats = ClientStats()
        self._calls = CallTable()
        self._incarnation: bytes | None = None
        self._make_carrier = make_carrier
        self._carrier = make_carrier()
        self._greeted = False
        self._send_handshake()

    # --- called by the client ---

    def begin_call(
        self,
        method: str,
        body: msgspec.Raw,
        frames: Sequence[Frame],
        decoder: msgspec.msgpack.Decoder[Any],
        *,
        now: float,
        timeout_s: float,
    ) -> Awaited:
        """Open a call. Raises MessageError where it exceeds a limit."""
        call = self._calls.begin(method, body, frames, now=now, timeout_s=timeout_s)
        awaited = self.waiting[call.id] = Awaited(call, decoder)
        self.stats.calls += 1
        try:
            self._send_request(call, now)
        except MessageError:
            self._finish(call.id)
            raise
        return awaited

    def give_up(self, awaited: Awaited, error: DPFlowError) -> None:
        """Close a call that is not answered."""
        if not awaited.known:
            awaited.error = error
            self._finish(awaited.call.id)

    def inquire(self, now: float, patience_s: float) -> None:
        """Ask for the state of calls older than `patience_s`; drop calls past their deadline."""
        for awaited in list(self.waiting.values()):
            if awaited.call.deadline <= now:
                self.give_up(awaited, self.late(awaited.call))
        calls = self._calls.older_than(now - patience_s)
        if not calls:
            return
        if not self._greeted:
            self._send_handshake()
        self.send(messages.Inquiry(calls))

    def fail_all(self, error: DPFlowError) -> None:
        """End every open call with this error."""
        for awaited in list(self.waiting.values()):
            self.give_up(awaited, error)

    def close(self) -> None:
        """Release shared memory."""
        self._carrier.close()

    def late(self, call: OpenCall) -> DeadlineError:
        """The error of a call that was not answered in time."""
        return DeadlineError(
            f"{call.method!r} at {self.address} was not answered within {call.deadline - call.began:.3g} s; "
            "is the server up, and is that long enough?"
        )

    def send(self, header: Header, frames: Sequence[Frame] = ()) -> None:
        """Queue a message."""
        self.outbox.append([encode(header), *frames])

    # --- messages of the server ---

    def on_message(self, frames: list[memoryview], now: float) -> None:
        """Handle one message. A message that is not valid is counted and dropped."""
        try:
            header = decode(frames[0])
            handler = _HANDLERS.get(type(header))
            if handler is None:
                raise MessageError(f"a server does not send {type(header).__name__}")
            handler(self, header, frames[1:], now)
        except TransportError:  # malformed, or it refers to the shared memory of a server that has died
            self.stats.malformed += 1
            self._check_version(messages.version_of(frames[0]))

    def _on_welcome(self, header: messages.Welcome, _: list[memoryview], now: float) -> None:
        if not self._check_version(header.version):
            return
        before, self._incarnation = self._incarnation, header.incarnation
        self._greeted = True
        if self._carrier.accept(header.offer):
            self.send(messages.Reading())
        if before is None:
            return  # requests were sent after the Handshake, and messages keep their order
        if before != header.incarnation:
            self.stats.server_restarts += 1
        self.send(messages.Inquiry(list(self.waiting)))

    def _check_version(self, version: int) -> bool:
        """Whether the server speaks this side's version; all calls fail where it does not."""
        if version != messages.PROTOCOL_VERSION:
            text = (
                f"{self.address} speaks version {version} of the protocol and this side "
                f"{messages.PROTOCOL_VERSION}; install the same release of torch_dpflow on both"
            )
            self.fail_all(MessageError(text))
        return version == messages.PROTOCOL_VERSION

    def _on_no_session(self, *_: object) -> None:
        if self._greeted:
            self._greeted = False
            self._carrier.close()
            self._carrier = self._make_carrier()
            self._send_handshake()

    def _on_reading(self, *_: object) -> None:
        self._carrier.shares = True

    def _on_reply(self, header: messages.Reply, frames: list[memoryview], now: float) -> None:
        answer: Answer | DPFlowError
        try:
            # Unpacked even where it is late: opening shared memory is what releases it to the server.
            payload = self._carrier.unpack(frames, header.packing)
            awaited = self.waiting.get(header.call)
            answer = Answer(None if awaited is None else decode_body(header.body, awaited.decoder), payload)
        except (MessageError, DescriptorLimitError) as error:
            answer = error
        awaited = self._finish(header.call)
        if awaited is None:
            return
        if isinstance(answer, DPFlowError):
            awaited.error = answer
        else:
            awaited.answer = answer

    def _on_failure(self, header: messages.Failure, *_: object) -> None:
        awaited = self._finish(header.call)
        if awaited is not None:
            awaited.error = RemoteCallError(header.text, header.kind)

    def _on_missing(self, header: messages.Missing, _: list[memoryview], now: float) -> None:
        awaited = self.waiting.get(header.call)
        if awaited is not None:
            self.stats.repeats += 1
            self._send_request(awaited.call, now)

    # --- sending ---

    def _send_handshake(self) -> None:
        self.send(messages.Handshake(messages.PROTOCOL_VERSION, self._carrier.offer()))

    def _send_request(self, call: OpenCall, now: float) -> None:
        packed, packing = self._carrier.pack(call.frames)
        patience_s = min(max(0.0, call.deadline - now), MAX_SECONDS)
        completed_below, answered = self._calls.completed_below, self._calls.take_answered()
        self.send(
            messages.Request(call.id, call.method, completed_below, answered, patience_s, call.body, packing),
            packed,
        )

    def _finish(self, call_id: int) -> Awaited | None:
        self._calls.finish(call_id)
        awaited = self.waiting.pop(call_id, None)
        if awaited is None:
            self.stats.late += 1
        return awaited


#: By header. Plain functions and not bound methods, which would be a reference cycle and leave the session, and its
#: shared memory, to the garbage collector.
_HANDLERS: dict[type, Callable[[ClientSession, Any, list[memoryview], float], None]] = {
    messages.Welcome: ClientSession._on_welcome,
    messages.NoSession: ClientSession._on_no_session,
    messages.Reading: ClientSession._on_reading,
    messages.Reply: ClientSession._on_reply,
    messages.Failure: ClientSession._on_failure,
    messages.Missing: ClientSession._on_missing,
}
