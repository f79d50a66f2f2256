"""Server side of calls: sessions of clients, methods by name, execution, replies kept for repeated calls."""

from __future__ import annotations

import enum
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgspec

from torch_dpflow.errors import ErrorKind, MessageError, PeerLostError, StateError, UsageError
from torch_dpflow.ipc.messages import headers as messages
from torch_dpflow.ipc.messages.fields import MAX_TEXT, RecoverableError
from torch_dpflow.ipc.messages.headers import Frame, Header, Reply, body_decoder, decode_body, encode, encode_body
from torch_dpflow.ipc.rpc.carrier import Carrier
from torch_dpflow.ipc.rpc.replies import ReplyMemory, Verdict
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
    """Return an error's kind and text; for an unforeseen error the end of its traceback, cut to a header's limit."""
    kind = kind_of(error)
    is_foreseen = kind is not ErrorKind.INTERNAL or isinstance(error, StateError)
    text = str(error) if is_foreseen else "".join(traceback.format_exception(error))
    return kind, text[-MAX_TEXT:]


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
        """Answer the call with an error: the client receives its kind and text."""
        self._finish(error)


#: Serves one method, in the server's thread: it must not block, and returns LATER if it needs long. An exception is
#: sent to the client, as RemoteCallError.
Handler: TypeAlias = Callable[[IncomingCall], "Result | Later | None"]


#: Sends a message to a client; False if it is gone or its queue is full. That may be ignored: the client inquires.
Send: TypeAlias = Callable[[bytes, Sequence[Frame]], bool]


@dataclass(kw_only=True)
class ServerStats:
    """Counters of a server."""

    messages: int = 0
    #: Messages without a valid header, that no client sends, or whose payload did not fit their header.
    malformed: int = 0
    #: Messages of peers without a session: no handshake yet, or the session was dropped.
    without_session: int = 0
    #: Calls executed.
    calls: int = 0
    #: Repeated calls that were not executed again.
    repeats: int = 0
    #: Calls answered with an error.
    failures: int = 0
    #: Clients with a session, and bytes of replies kept for repeated calls.
    clients: int = 0
    reply_bytes: int = 0


class Session:
    """One client, from its handshake until its session is dropped."""

    def __init__(self, client: bytes, carrier: Carrier, send: Send) -> None:
        self.client = client
        self.carrier = carrier
        #: When its latest message arrived; the server's clock, seconds.
        self.received_at = 0.0
        self._send = send

    def send(self, header: Header) -> None:
        """Send a message without payload."""
        self._send(self.client, [encode(header)])

    def send_payload(self, header: Reply, frames: Sequence[Frame]) -> None:
        """Send a message with payload. Raises MessageError if it exceeds a limit."""
        if frames:
            frames, header.packing = self.carrier.pack(frames)
        self._send(self.client, [encode(header), *frames])

    def close(self) -> None:
        """Release shared memory."""
        self.carrier.close()


class SessionTable:
    """Sessions, least recently active first.

    Args:
        most: maximum number of sessions; a new one replaces the one idle longest.
        idle_s: how long a session may be idle before it is dropped, seconds.
        drop: called with each session that is dropped.
    """

    def __init__(self, *, most: int, idle_s: float, drop: Callable[[Session], None]) -> None:
        self._most = most
        self._idle_s = idle_s
        self._drop = drop
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, client: bytes) -> Session | None:
        return self._sessions.get(client)

    def on_message(self, client: bytes, now: float) -> Session | None:
        """Record a client's message; return its session, if it has one."""
        session = self._sessions.get(client)
        if session is not None:
            self._sessions.move_to_end(client)
            session.received_at = now
        return session

    def add(self, session: Session, now: float) -> None:
        """Admit a client."""
        while len(self._sessions) >= self._most:
            self.drop(next(iter(self._sessions.values())))
        session.received_at = now
        self._sessions[session.client] = session

    def drop(self, session: Session) -> None:
        if self._sessions.pop(session.client, None) is not None:
            self._drop(session)

    def tick(self, now: float) -> None:
        """Drop idle sessions."""
        while self._sessions:
            oldest = next(iter(self._sessions.values()))
            if now - oldest.received_at < self._idle_s:
                break
            self.drop(oldest)

    def clear(self) -> None:
        for session in list(self._sessions.values()):
            self.drop(session)


#: Schedules a function for the server's thread.
RunSoon: TypeAlias = Callable[[Callable[[], None]], None]

_REFUSALS = {
    Verdict.FORGOTTEN: (
        ErrorKind.FORGOTTEN,
        "the call was executed, but its reply was evicted from memory",
    ),
    Verdict.OVERLOADED: (
        ErrorKind.OVERLOADED,
        "too many calls of this client are open; wait for some answers",
    ),
}


@dataclass(frozen=True)
class _Method:
    handler: Handler
    decoder: msgspec.msgpack.Decoder[Any]
    remembered: bool


@dataclass(frozen=True)
class _Reply:
    """A call's encoded result, which may be sent any number of times."""

    body: msgspec.Raw
    frames: Sequence[Frame] = ()
    failure: tuple[ErrorKind, str] | None = None

    @property
    def nbytes(self) -> int:
        return len(bytes(self.body)) + sum(memoryview(frame).nbytes for frame in self.frames)


class CallService:
    """Executes calls in the server's thread. `post` schedules a function for that thread."""

    def __init__(self, sessions: SessionTable, replies: ReplyMemory[Any], stats: ServerStats, post: RunSoon) -> None:
        self._sessions = sessions
        self._replies: ReplyMemory[_Reply] = replies
        self._stats = stats
        self._post = post
        self._methods: dict[str, _Method] = {}

    def register(self, name: str, handler: Handler, *, body_type: Any, remembered: bool) -> None:
        """Serve calls of `name`."""
        self._methods[name] = _Method(handler, body_decoder(body_type), remembered)

    def on_request(self, session: Session, header: messages.Request, frames: list[memoryview]) -> None:
        """Execute a call, or answer a repeated one from memory."""
        verdict, reply = self._replies.admit(
            session.client, header.call, completed_below=header.completed_below, answered=header.answered
        )
        if verdict is Verdict.EXECUTE:
            self._execute(session, header, frames)
            return
        self._stats.repeats += verdict is not Verdict.OVERLOADED
        self._respond(session, header.call, verdict, reply)
        session.carrier.unpack(frames, header.packing)  # opening shared memory is what releases it to the client

    def on_inquiry(self, session: Session, header: messages.Inquiry, *_: object) -> None:
        """Report the state of calls that a client waits for."""
        for call in header.calls:
            verdict, reply = self._replies.look_up(session.client, call)
            self._respond(session, call, verdict, reply)

    def _respond(self, session: Session, call: int, verdict: Verdict, reply: _Reply | None) -> None:
        if reply is not None:
            self._send(session, call, reply)
        elif verdict in _REFUSALS:
            session.send(messages.Failure(call, *_REFUSALS[verdict]))
        elif verdict is Verdict.EXECUTE:
            session.send(messages.Missing(call))

    def _execute(self, session: Session, header: messages.Request, frames: list[memoryview]) -> None:
        self._stats.calls += 1
        method = self._methods.get(header.method)
        remembered = method is None or method.remembered

        def finish(outcome: Outcome) -> None:
            self._finish(session.client, header.call, remembered, outcome)

        # The request's frames are released before the answer is sent, so that the client finds its memory free.
        outcome = self._run(method, session, header, frames, finish)
        if not isinstance(outcome, Later):
            finish(outcome)

    def _run(
        self,
        method: _Method | None,
        session: Session,
        header: messages.Request,
        frames: list[memoryview],
        finish: Callable[[Outcome], None],
    ) -> Outcome | Later:
        try:
            payload = session.carrier.unpack(frames, header.packing)
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

    def _finish(self, client: bytes, call: int, remembered: bool, outcome: Outcome) -> None:
        reply = _prepare(outcome)
        nbytes = reply.nbytes if remembered else 0
        if not self._replies.finish(client, call, reply, nbytes=nbytes, keep=remembered):
            return  # answered before, or abandoned by the client
        self._stats.failures += reply.failure is not None
        session = self._sessions.get(client)
        if session is not None:
            self._send(session, call, reply)

    def _send(self, session: Session, call: int, reply: _Reply) -> None:
        try:
            if reply.failure is not None:
                session.send(messages.Failure(call, *reply.failure))
            else:
                session.send_payload(messages.Reply(call, reply.body), reply.frames)
        except MessageError as error:  # larger than a message may be
            session.send(messages.Failure(call, *describe(error)))


def _prepare(outcome: object) -> _Reply:
    if isinstance(outcome, Result):
        try:
            return _Reply(encode_body(outcome.body), outcome.frames)
        except (TypeError, ValueError, OverflowError) as error:
            outcome = error
    if not isinstance(outcome, Exception):
        outcome = TypeError(f"the method returned a {type(outcome).__name__}; return Result, LATER or None")
    return _Reply(messages.EMPTY_BODY, failure=describe(outcome))
