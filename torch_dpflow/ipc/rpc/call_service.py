"""The server's side of calls: methods by name, execution, and replies that are kept for repeated calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from torch_dpflow.errors import ErrorKind, MessageError, UsageError
from torch_dpflow.ipc.messages import headers as messages
from torch_dpflow.ipc.messages.headers import body_decoder, decode_body, encode_body
from torch_dpflow.ipc.messages.payload_table import Frame
from torch_dpflow.ipc.rpc.describing import describe, kind_of
from torch_dpflow.ipc.rpc.incoming import Handler, IncomingCall, Later, Outcome, Result
from torch_dpflow.ipc.rpc.replies import ReplyMemory, Verdict
from torch_dpflow.ipc.rpc.sessions import ServerStats, Session, SessionTable
from torch_dpflow.log import TRANSPORT

#: Schedules a function for the server's thread.
RunSoon: TypeAlias = Callable[[Callable[[], None]], None]

_REFUSALS = {
    Verdict.FORGOTTEN: (
        ErrorKind.FORGOTTEN,
        "the call was executed, but its reply was evicted",
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
    """A call's result, encoded, which may be sent any number of times."""

    body: msgspec.Raw
    frames: Sequence[Frame] = ()
    failure: tuple[ErrorKind, str] | None = None

    @property
    def nbytes(self) -> int:
        return len(bytes(self.body)) + sum(memoryview(frame).nbytes for frame in self.frames)


class CallService:
    """Executes calls in the server's thread. `post` schedules a function for that thread."""

    def __init__(
        self, sessions: SessionTable, replies: ReplyMemory[Any], stats: ServerStats, post: RunSoon
    ) -> None:
        self._sessions = sessions
        self._replies: ReplyMemory[_Reply] = replies
        self._stats = stats
        self._post = post
        self._methods: dict[str, _Method] = {}

    def register(self, name: str, handler: Handler, *, body_type: Any, remembered: bool) -> None:
        """Serve calls of `name`."""
        self._methods[name] = _Method(handler, body_decoder(body_type), remembered)

    def on_request(self, session: Session, header: messages.Request, frames: list[memoryview]) -> None:
        """A client calls."""
        verdict, reply = self._replies.admit(
            session.client, header.call, completed_below=header.completed_below, answered=header.answered
        )
        if verdict is Verdict.EXECUTE:
            self._execute(session, header, frames)
            return
        self._stats.repeats += verdict is not Verdict.OVERLOADED
        self._respond(session, header.call, verdict, reply)
        session.carrier.unpack(
            frames, header.packing
        )  # opening shared memory is what releases it to the client

    def on_inquiry(self, session: Session, header: messages.Inquiry, *_: object) -> None:
        """A client asks for the state of calls that it still waits for."""
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
                header.patience_s,
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
            return  # it was answered before, or the client has given it up
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
