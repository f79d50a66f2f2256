"""Server side of calls: sessions of clients, methods by name, and their execution."""

from __future__ import annotations

import enum
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgspec

from torch_dpflow._core.decoding import msgpack_decoder
from torch_dpflow.errors import ErrorKind, MessageError, PeerLostError, StateError, UsageError
from torch_dpflow.ipc.messages import headers as messages
from torch_dpflow.ipc.messages.fields import MAX_TEXT, OverloadedError, RecoverableError
from torch_dpflow.ipc.messages.headers import Frame, Header, Reply, decode_body, encode, encode_body
from torch_dpflow.ipc.rpc.carrier import Carrier
from torch_dpflow.ipc.rpc.leases import Expiry
from torch_dpflow.log import TRANSPORT


def kind_of(error: BaseException) -> ErrorKind:
    if isinstance(error, RecoverableError):
        return error.kind
    if isinstance(error, UsageError) and not isinstance(error, StateError):  # which a service's own store raises
        return ErrorKind.USAGE
    if isinstance(error, MessageError):
        return ErrorKind.MALFORMED
    return ErrorKind.LOST if isinstance(error, PeerLostError) else ErrorKind.INTERNAL


def describe(error: BaseException) -> tuple[ErrorKind, str]:
    """Return (kind, text) of an error, to be sent to a client; the text has at most `MAX_TEXT` characters.

    The text of an unexpected error is the end of its traceback.
    """
    kind = kind_of(error)
    is_foreseen = kind is not ErrorKind.INTERNAL or isinstance(error, StateError)
    text = str(error) if is_foreseen else "".join(traceback.format_exception(error))
    return kind, text[-MAX_TEXT:]


class Result(NamedTuple):
    """Result of a method: a small body that msgpack can encode, and frames of bulk data."""

    body: Any = None
    frames: Sequence[Frame] = ()


class Later(enum.Enum):
    """Marker that a handler returns if `IncomingCall.answer` or `fail` is called later."""

    LATER = enum.auto()


LATER = Later.LATER
#: How a call ends: with a result, or with an error for the caller.
Outcome: TypeAlias = "Result | Exception"


class IncomingCall:
    """Call that a server has received from a client. The frames are writable and belong to the handler."""

    __slots__ = ("_finish", "body", "client", "frames", "method", "timeout_s")

    def __init__(
        self,
        client: bytes,
        method: str,
        body: Any,
        frames: list[memoryview],
        timeout_s: float,
        finish: Callable[[Outcome], None],
    ) -> None:
        #: Identity of the client's connection.
        self.client = client
        self.method = method
        self.body = body
        self.frames = frames
        #: How long the client waits, seconds.
        self.timeout_s = timeout_s
        self._finish = finish

    def answer(self, body: Any = None, frames: Sequence[Frame] = ()) -> None:
        """Answer the call; only the first answer or failure counts. Any thread may call.

        `frames` must not change afterwards.
        """
        self._finish(Result(body, frames))

    def fail(self, error: Exception) -> None:
        """Answer the call with an error: the client receives the error's kind and text."""
        self._finish(error)


#: Function that serves calls of one method, in the server's thread. It must not block: if the answer takes long, it
#: returns LATER. If it raises an exception, the client gets a RemoteCallError.
Handler: TypeAlias = Callable[[IncomingCall], "Result | Later | None"]


#: Function that sends a message to a client, and returns False if the client is gone or its queue is full. The caller
#: may ignore False: a client inquires about calls that were not answered.
Send: TypeAlias = Callable[[bytes, Sequence[Frame]], bool]


@dataclass(kw_only=True)
class ServerStats:
    """Counters of a server."""

    messages: int = 0
    #: Dropped messages: with too many frames, an invalid header, or a header that no client sends, among others.
    malformed: int = 0
    #: Messages of peers without a session: no handshake yet, or the session was dropped.
    without_session: int = 0
    calls: int = 0
    #: Repeated calls that were ignored, because the first was still running.
    repeats: int = 0
    #: Calls answered with an error.
    failures: int = 0
    clients: int = 0


class Session:
    """State of one client, from its handshake until the session is dropped."""

    def __init__(self, client: bytes, carrier: Carrier, send: Send) -> None:
        self.client = client
        self.carrier = carrier
        #: When the client's latest message arrived; the server's clock, seconds.
        self.received_at = 0.0
        #: For each running call, when its caller stops waiting; the server's clock, seconds.
        self.running: dict[int, float] = {}
        self._send = send

    def begin(self, header: messages.Request, most: int) -> None:
        """Record that a call runs.

        Raises OverloadedError if the client then has more than `most` calls whose deadlines have not passed.
        """
        self.running[header.call] = self.received_at + header.timeout_s
        if len(self.running) > most:
            self.running = {call: until for call, until in self.running.items() if until > self.received_at}
        if len(self.running) > most:
            raise OverloadedError("too many calls of this client are open; wait for some answers")

    def send(self, header: Header) -> None:
        """Send a message without payload."""
        self._send(self.client, [encode(header)])

    def send_payload(self, header: Reply, frames: Sequence[Frame]) -> None:
        """Send a message with payload. Raises MessageError if it exceeds a limit."""
        if frames:
            frames, header.packing = self.carrier.pack(frames)
        self._send(self.client, [encode(header), *frames])

    def close(self) -> None:
        """Release the shared memory that was lent to the client."""
        self.carrier.close()


class SessionTable:
    """Sessions of all clients.

    Args:
        most: maximum number of sessions; beyond it, a new session replaces the session that is idle longest.
        idle_s: how long a session may be idle before it is dropped, seconds.
    """

    def __init__(self, *, most: int, idle_s: float) -> None:
        self._most = most
        self._active: Expiry[bytes] = Expiry(idle_s)
        self._sessions: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, client: bytes) -> Session | None:
        return self._sessions.get(client)

    def on_message(self, client: bytes, now: float) -> Session | None:
        """Record that a client has sent a message; return the client's session, or None if it has none."""
        session = self._sessions.get(client)
        if session is not None:
            self._active.renew(client, now)
            session.received_at = now
        return session

    def add(self, session: Session, now: float) -> None:
        while len(self._sessions) >= self._most:
            self._drop(next(iter(self._active)))
        self._sessions[session.client] = session
        self.on_message(session.client, now)

    def tick(self, now: float) -> None:
        for client in self._active.expire(now):
            self._drop(client)

    def clear(self) -> None:
        for client in [*self._sessions]:
            self._drop(client)

    def _drop(self, client: bytes) -> None:
        self._active.drop(client)
        self._sessions.pop(client).close()


#: Schedules a function for the server's thread.
RunSoon: TypeAlias = Callable[[Callable[[], None]], None]


@dataclass(frozen=True)
class _Method:
    handler: Handler
    decoder: msgspec.msgpack.Decoder[Any]


class CallService:
    """Executor of clients' calls: runs the methods' handlers, in the server's thread.

    Args:
        max_open: maximum number of one client's calls that run at once.
        post: schedules a function for the server's thread.
    """

    def __init__(self, sessions: SessionTable, stats: ServerStats, *, max_open: int, post: RunSoon) -> None:
        self._sessions = sessions
        self._stats = stats
        self._max_open = max_open
        self._post = post
        self._methods: dict[str, _Method] = {}

    def register(self, name: str, handler: Handler, *, body_type: Any) -> None:
        self._methods[name] = _Method(handler, msgpack_decoder(body_type))

    def on_request(self, session: Session, header: messages.Request, frames: list[memoryview]) -> None:
        """Run the handler of a call; answer unless it returned LATER. A repetition of a running call is ignored."""
        if header.call in session.running:
            self._stats.repeats += 1
            session.carrier.unpack(frames, header.packing)  # opening shared memory is what releases it to the client
            return

        def finish(outcome: Outcome) -> None:
            self._finish(session, header.call, outcome)

        # The request's frames are released before the answer is sent, so that the client finds its memory free.
        outcome = self._run(session, header, frames, finish)
        if not isinstance(outcome, Later):
            finish(outcome)

    def on_inquiry(self, session: Session, header: messages.Inquiry, *_: object) -> None:
        """Send `Missing` for each call in the inquiry that does not run."""
        for call in header.calls:
            if call not in session.running:
                session.send(messages.Missing(call))

    def _run(
        self,
        session: Session,
        header: messages.Request,
        frames: list[memoryview],
        finish: Callable[[Outcome], None],
    ) -> Outcome | Later:
        try:
            session.begin(header, self._max_open)
            payload = session.carrier.unpack(frames, header.packing)
            self._stats.calls += 1
            method = self._methods.get(header.method)
            if method is None:
                raise UsageError(f"no method {header.method!r} here, only {sorted(self._methods)}")
            call = IncomingCall(
                session.client,
                header.method,
                decode_body(header.body, method.decoder),
                payload,
                header.timeout_s,
                lambda outcome: self._post(lambda: finish(outcome)),
            )
            result = method.handler(call)
        except Exception as error:
            if kind_of(error) is ErrorKind.INTERNAL:
                TRANSPORT.exception("a call of %r failed", header.method)
            return error
        return Result() if result is None else result

    def _finish(self, session: Session, call: int, outcome: Outcome) -> None:
        """Answer a call, unless its session was dropped: that client repeats the call in its next session."""
        if session.running.pop(call, None) is None or self._sessions.get(session.client) is not session:
            return
        error = outcome if isinstance(outcome, Exception) else _sent(session, call, outcome)
        if error is not None:
            self._stats.failures += 1
            session.send(messages.Failure(call, *describe(error)))


def _sent(session: Session, call: int, result: object) -> Exception | None:
    """Send a method's result; return the error if that fails, else None."""
    if not isinstance(result, Result):
        return TypeError(f"the method returned a {type(result).__name__}; return Result, LATER or None")
    try:
        session.send_payload(messages.Reply(call, encode_body(result.body)), result.frames)
    except (TypeError, ValueError, OverflowError) as error:  # no msgpack, or larger than a message may be
        return error
    return None
