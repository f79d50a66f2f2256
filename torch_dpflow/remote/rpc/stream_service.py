"""The server's side of streams: handlers by name, and what clients say on the streams they opened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from torch_dpflow.errors import (
    DPFlowError,
    ErrorKind,
    MessageError,
    PeerLostError,
    RemoteCallError,
    UsageError,
)
from torch_dpflow.remote import messages
from torch_dpflow.remote.messages import body_decoder, decode_body
from torch_dpflow.remote.rpc.describing import describe
from torch_dpflow.remote.rpc.incoming import IncomingStream, StreamHandler
from torch_dpflow.remote.rpc.sessions import ServerStats, Session

#: Makes the handler of a stream that a client opens; what it raises refuses the stream.
StreamFactory: TypeAlias = Callable[[IncomingStream], StreamHandler]


@dataclass(frozen=True)
class _StreamMethod:
    factory: StreamFactory
    decoder: msgspec.msgpack.Decoder[Any]
    item_decoder: msgspec.msgpack.Decoder[Any]


class StreamService:
    """Opens and feeds streams. Belongs to the server's thread.

    A handler's error breaks its stream and no other.
    """

    def __init__(self, stats: ServerStats, *, max_streams: int, window: int) -> None:
        self._stats = stats
        self._max_streams = max_streams
        self._window = window
        self._methods: dict[str, _StreamMethod] = {}

    def register(self, name: str, factory: StreamFactory, *, body_type: Any, item_type: Any) -> None:
        """Serve streams to `name`."""
        self._methods[name] = _StreamMethod(factory, body_decoder(body_type), body_decoder(item_type))

    def on_open(self, session: Session, header: messages.Open, frames: list[memoryview]) -> None:
        """A client opens a stream."""
        payload = session.carrier.unpack(frames, header.packing)
        try:
            stream = self._open(session, header, payload)
        except Exception as error:
            session.send(messages.Abort(header.stream, *describe(error)))
            return
        session.streams[header.stream] = stream
        session.send(messages.Credit(header.stream, self._window))
        if stream.credit:
            self._guard(stream, stream.handler.writable)

    def on_item(self, session: Session, header: messages.Item, frames: list[memoryview]) -> None:
        """An item came."""
        payload = session.carrier.unpack(frames, header.packing)
        stream = session.streams.get(header.stream)
        if stream is None:
            return
        error = stream.state.on_item(header.position)
        if error is not None:
            self._break(stream, error)
            return
        self._guard(stream, lambda: stream.take(decode_body(header.body, stream.decoder), payload))

    def on_credit(self, session: Session, header: messages.Credit, *_: object) -> None:
        """A client grants room for items."""
        stream = session.streams.get(header.stream)
        if stream is not None:
            stream.state.on_credit(header.items)
            self._guard(stream, stream.handler.writable)

    def on_end(self, session: Session, header: messages.End, *_: object) -> None:
        """A client sends no more items."""
        stream = session.streams.get(header.stream)
        if stream is None:
            return
        error = stream.state.on_end(header.position)
        if error is not None:
            self._break(stream, error)
        else:
            self._on_end(session, stream)

    def on_abort(self, session: Session, header: messages.Abort, *_: object) -> None:
        """A client breaks a stream."""
        stream = session.streams.pop(header.stream, None)
        if stream is not None:
            stream.lose(RemoteCallError(header.text, header.kind))

    def on_reports(self, session: Session, reports: list[messages.StreamReport]) -> None:
        """A client lists its open streams: make up for what was lost on the way, or break the stream."""
        listed = {report.stream for report in reports}
        for dropped in [stream for stream in session.streams.values() if stream.id not in listed]:
            session.forget(dropped)
            dropped.lose(PeerLostError("the client has dropped the stream"))
        for report in reports:
            stream = session.streams.get(report.stream)
            if stream is None:
                unknown = "the server does not know this stream"
                session.send(messages.Abort(report.stream, ErrorKind.LOST, unknown))
            else:
                self._on_report(session, stream, report)

    def _on_report(self, session: Session, stream: IncomingStream, report: messages.StreamReport) -> None:
        state = stream.state
        could_send, had_ended = stream.credit > 0, state.peer_ended
        error = state.on_report(sent=report.sent, ended=report.ended, granted=report.granted)
        if error is not None:
            self._break(stream, error)
            return
        if stream.credit and not could_send:
            self._guard(stream, stream.handler.writable)
        if state.peer_ended and not had_ended:
            self._on_end(session, stream)

    def _open(self, session: Session, header: messages.Open, payload: list[memoryview]) -> IncomingStream:
        if header.stream in session.streams or len(session.streams) >= self._max_streams:
            raise MessageError(
                f"stream {header.stream}: this client has {len(session.streams)} streams open, of at most "
                f"{self._max_streams}; a number is used once"
            )
        method = self._methods.get(header.method)
        if method is None:
            raise UsageError(f"no stream method {header.method!r} here, only {sorted(self._methods)}")
        body = decode_body(header.body, method.decoder)
        stream = IncomingStream(
            session.client,
            header,
            body,
            payload,
            window=self._window,
            decoder=method.item_decoder,
            port=session,
        )
        stream.handler = method.factory(stream)
        return stream

    def _on_end(self, session: Session, stream: IncomingStream) -> None:
        self._guard(stream, stream.handler.ended)
        if stream.state.over:
            session.forget(stream)

    def _guard(self, stream: IncomingStream, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._stats.failures += 1
            stream.abort(error)

    def _break(self, stream: IncomingStream, error: DPFlowError) -> None:
        stream.abort(error)
        stream.mourn(error)
