"""State machine of an RPC client: no socket, no lock, no clock.

`on_message` takes the server's messages; `outbox` has the messages to send, in order. The server may restart, or drop
the client's session, at any time. It then answers `NoSession`. The client repeats its handshake and inquires about all
open calls; the server answers which of them the client must send again.
"""

from __future__ import annotations

import itertools
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
from torch_dpflow.ipc.messages.headers import Frame, Header, decode, decode_body, encode
from torch_dpflow.ipc.rpc.carrier import Carrier


class Answer(NamedTuple):
    """Body and frames of a reply."""

    body: Any
    frames: list[memoryview]


@dataclass(slots=True, eq=False)
class Call:
    """State of a call: its message, to send it again, and its answer or error once it has ended."""

    id: int
    method: str
    body: msgspec.Raw
    frames: Sequence[Frame]
    #: When the call began, and when its caller stops waiting; seconds of the caller's clock.
    began: float
    deadline: float
    decoder: msgspec.msgpack.Decoder[Any]
    #: Whether the client has inquired about the call since it last sent the call.
    is_inquired: bool = False
    answer: Answer | None = None
    error: DPFlowError | None = None

    @property
    def is_over(self) -> bool:
        return self.answer is not None or self.error is not None

    def outcome(self) -> Answer:
        """Return the answer of an ended call, or raise its error."""
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
    #: Calls sent again because they, or their answers, were lost.
    repeats: int = 0
    #: Dropped messages: the header was invalid, or their shared memory could not be opened.
    malformed: int = 0


class ClientSession:
    """Open calls of one client, and its session. Not thread-safe; times are seconds of the caller's clock.

    Args:
        address: the server's address, for error messages.
        make_carrier: creates a carrier; called again if the server has restarted or dropped the session.
        check: raises MessageError for a message that the connection will not accept. Called when a call begins, because
            another thread, which must not get the error, may send the message later.
    """

    def __init__(
        self,
        address: str,
        make_carrier: Callable[[], Carrier],
        check: Callable[[Sequence[Frame]], None] = lambda _: None,
    ) -> None:
        self._check = check
        self.address = address
        self.outbox: list[Sequence[Frame]] = []
        self.stats = ClientStats()
        #: Open calls by number, in the order of their beginning.
        self.open: dict[int, Call] = {}
        self._numbers = itertools.count(1)
        self._make_carrier = make_carrier
        self._carrier = make_carrier()
        #: Whether the server has a session, as far as is known, and whether it had one.
        self._greeted = self._had_session = False
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
    ) -> Call:
        """Put the request of a new call into the outbox; return the call. Raises MessageError if it exceeds a limit."""
        call = Call(next(self._numbers), method, body, frames, now, now + timeout_s, decoder)
        self._send_request(call, now)
        self.open[call.id] = call
        self.stats.calls += 1
        return call

    def abandon(self, call: Call, error: DPFlowError) -> None:
        if not call.is_over:
            call.error = error
            self.open.pop(call.id, None)

    def inquire(self, now: float, older_s: float) -> None:
        """Inquire about calls older than `older_s` seconds; fail calls whose deadline has passed."""
        for call in list(self.open.values()):
            if call.deadline <= now:
                self.abandon(call, self.late(call))
        if calls := [call for call in self.open.values() if call.began < now - older_s]:
            if not self._greeted:
                self._send_handshake()
            self._inquire_about(calls)

    def fail_all(self, error: DPFlowError) -> None:
        """End every open call with this error."""
        for call in list(self.open.values()):
            self.abandon(call, error)

    def close(self) -> None:
        """Release the shared memory that was lent to the server."""
        self._carrier.close()

    def late(self, call: Call) -> DeadlineError:
        """Return the error of a call that was not answered in time."""
        return DeadlineError(
            f"{call.method!r} at {self.address} was not answered within {call.deadline - call.began:.3g} s; "
            "is the server up, and is that long enough?"
        )

    def send(self, header: Header, frames: Sequence[Frame] = ()) -> None:
        message = [encode(header), *frames]
        self._check(message)
        self.outbox.append(message)

    # --- messages of the server ---

    def on_message(self, frames: list[memoryview], now: float) -> None:
        """Handle one message. An invalid message is counted and dropped."""
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
        had_session, self._had_session, self._greeted = self._had_session, True, True
        if self._carrier.accept(header.offer):
            self.send(messages.Reading())
        if had_session:  # else the requests were sent after the handshake, and messages keep their order
            self._inquire_about([*self.open.values()])

    def _check_version(self, version: int) -> bool:
        """Return whether the server's protocol version is ours; otherwise fail all calls."""
        if version != messages.PROTOCOL_VERSION:
            text = (
                f"{self.address} has version {version} of the protocol and this side {messages.PROTOCOL_VERSION}; "
                "install the same release of torch_dpflow on both"
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
        answer = error = None
        try:
            # Unpacked even if it is late: opening shared memory is what releases it to the server.
            payload = self._carrier.unpack(frames, header.packing)
            open_call = self.open.get(header.call)
            answer = Answer(None if open_call is None else decode_body(header.body, open_call.decoder), payload)
        except (MessageError, DescriptorLimitError) as failure:
            error = failure
        if (call := self.open.pop(header.call, None)) is not None:
            call.answer, call.error = answer, error

    def _on_failure(self, header: messages.Failure, *_: object) -> None:
        if (call := self.open.pop(header.call, None)) is not None:
            call.error = RemoteCallError(header.text, header.kind)

    def _on_missing(self, header: messages.Missing, _: list[memoryview], now: float) -> None:
        call = self.open.get(header.call)
        if call is not None and call.is_inquired:  # else it was sent again for an earlier answer
            self.stats.repeats += 1
            self._send_request(call, now)

    # --- sending ---

    def _send_handshake(self) -> None:
        self.send(messages.Handshake(messages.PROTOCOL_VERSION, self._carrier.offer()))

    def _send_request(self, call: Call, now: float) -> None:
        packed, packing = self._carrier.pack(call.frames)
        timeout_s = min(max(0.0, call.deadline - now), MAX_SECONDS)
        self.send(messages.Request(call.id, call.method, timeout_s, call.body, packing), packed)
        call.is_inquired = False

    def _inquire_about(self, calls: Sequence[Call]) -> None:
        for call in calls:
            call.is_inquired = True
        self.send(messages.Inquiry([call.id for call in calls]))


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
