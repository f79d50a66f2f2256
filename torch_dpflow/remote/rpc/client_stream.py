"""A stream as the code that opened it sees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch_dpflow.errors import DeadlineError, PeerLostError
from torch_dpflow.remote.messages import encode_body
from torch_dpflow.remote.rpc.client_session import Answer, StreamEnd
from torch_dpflow.remote.transport import Frame

if TYPE_CHECKING:
    from torch_dpflow.remote.rpc.client import RpcClient


class ClientStream:
    """Items in order, in both directions, each direction with its own end. Thread-safe.

    Every item arrives once and in its place, or the stream breaks: `receive` still gives what came before,
    then it raises, and the stream has to be opened anew.
    """

    def __init__(self, client: RpcClient, end: StreamEnd) -> None:
        self._client = client
        self._end = end

    def send(self, body: Any = None, frames: Sequence[Frame] = (), *, timeout_s: float | None = None) -> None:
        """Send one item, as soon as the server grants room for it.

        Raises DeadlineError where it grants none for `timeout_s`, StateError after `end`, and whatever broke
        the stream.
        """
        packed, state = encode_body(body), self._end.state
        client = self._client
        with client._usable:
            deadline = None if timeout_s is None else client._clock() + timeout_s
            if not client._wait(lambda: state.credit > 0 or state.over or state.ended, deadline):
                raise DeadlineError(f"{client.address} granted no room for another item for {timeout_s} s")
            client._session.send_item(self._end, packed, frames)
            client._push()

    def receive(self, timeout_s: float | None = None) -> Answer | None:
        """The next item; None when the server has ended its direction and everything has been received.

        Raises DeadlineError where none comes for `timeout_s`, and whatever broke the stream.
        """
        client, end = self._client, self._end
        with client._usable:
            deadline = None if timeout_s is None else client._clock() + timeout_s
            if not client._wait(self._has_news, deadline):
                raise DeadlineError(f"no item came from {client.address} for {timeout_s} s")
            if not end.inbox:
                if end.state.error is not None:
                    raise end.state.error
                return None
            item = client._session.take_item(end)
            if client._session.outbox:
                client._push()
            return item

    def end(self) -> None:
        """Send no more items; the server is told. Receiving goes on."""
        with self._client._usable:
            self._client._session.end_stream(self._end)
            self._client._push()

    def abort(self, reason: str) -> None:
        """Break the stream for both sides."""
        with self._client._usable:
            error = PeerLostError(f"this side has aborted the stream: {reason}")
            self._client._session.abort_stream(self._end, error, reason)
            self._client._push()

    def __iter__(self) -> Iterator[Answer]:
        while (item := self.receive()) is not None:
            yield item

    def __enter__(self) -> ClientStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._end.state.over and not self._client._closed:
            self.abort("its reader has left")

    def _has_news(self) -> bool:
        state = self._end.state
        return bool(self._end.inbox) or state.peer_ended or state.error is not None
