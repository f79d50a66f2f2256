"""The live page over HTTP: files, the present state as JSON, and a stream of updates. Needs the extra `web`.

As a program (`python -m`, with the file descriptor of a socket and a title) it shows the loaders of its parent process.
Each line of standard input is JSON: a `PagePlace`, then an `Observation` each. The program ends with its parent.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from torch_dpflow._core.decoding import json_decoder
from torch_dpflow.cluster.monitoring.page_access import PageAuthenticator, PagePlace
from torch_dpflow.cluster.monitoring.page_figures import Observation
from torch_dpflow.cluster.monitoring.page_history import PageHistory
from torch_dpflow.workers.process_control import at_parents_end, exit_with

#: Maximum simultaneous connections, and streams of updates.
MAX_CONNECTIONS, MAX_STREAMS = 128, 32
#: Maximum bytes of the head of a request; timeouts of receiving a head, and of a client that must receive (seconds).
MAX_HEAD, HEAD_S, STUCK_S = 16 << 10, 10.0, 20.0
#: Maximum duration of a stream (seconds), so that streams to vanished clients end. Browsers then open another stream.
STREAM_S = 600.0
_FILES = Path(__file__).with_name("page")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src "
    "'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageServer:
    """Server of the live page, in a thread. Another thread passes it observations by `observe`.

    Args:
        listener: a listening socket; owned by the server.
        history: turns observations into updates; only the server uses it.
    """

    def __init__(self, listener: socket.socket, authenticator: PageAuthenticator, history: PageHistory) -> None:
        self._listener = listener
        self._history = history
        #: For the history, which two threads use.
        self._lock = threading.Lock()
        self._latest = b""
        #: Set at an update, and then replaced. Used by the event loop only, like the number of streams.
        self._updated = asyncio.Event()
        self._streams = 0
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._files = {path.name: path.read_bytes() for path in _FILES.iterdir() if path.suffix in _TYPES}
        app = Starlette(
            routes=[
                Route("/", self._page),
                Route("/files/{name}", self._file),
                Route("/api/state", self._state),
                Route("/api/stream", self._stream),
            ],
            middleware=[Middleware(_Authenticated, authenticator=authenticator)],
        )
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=_BoundedProtocol,
                ws="none",
                lifespan="off",
                loop="asyncio",
                log_config=None,
                log_level="error",  # invalid requests are not logged
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=2,
                h11_max_incomplete_event_size=MAX_HEAD,
            )
        )
        self._thread = threading.Thread(target=self._run, name="dpflow-page", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def observe(self, seen: Observation) -> None:
        """Send an observation to all open pages. Call this in one thread only."""
        with self._lock:
            update = self._history.observe(seen, time.time())
            latest = _event(update.number, msgspec.json.encode(update))
        self._latest = latest
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._notify)

    @property
    def serves(self) -> bool:
        """Whether the server's thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        self._closing = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._notify)  # ends the streams
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve(sockets=[self._listener])

    def _notify(self) -> None:
        self._updated.set()
        self._updated = asyncio.Event()

    # -- answers ---------------------------------------------------------------------------------------------

    def _page(self, request: Request) -> Response:
        return Response(self._files["index.html"], media_type=_TYPES[".html"])

    def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._files:
            return PlainTextResponse("there is no such file", 404)
        return Response(self._files[name], media_type=_TYPES[Path(name).suffix])

    async def _state(self, request: Request) -> Response:
        number, whole = self._whole()
        if not number:
            return PlainTextResponse("nothing is known yet; retry", 503, {"Retry-After": "1"})
        return Response(whole, media_type="application/json")

    async def _stream(self, request: Request) -> Response:
        if self._streams >= MAX_STREAMS:
            return PlainTextResponse("too many pages are open", 503, {"Retry-After": "10"})
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        return StreamingResponse(self._updates(), media_type="text/event-stream")

    async def _updates(self) -> AsyncIterator[bytes]:
        self._streams += 1
        try:
            seen, until = -1, time.monotonic() + STREAM_S
            while time.monotonic() < until and not self._closing:
                updated, latest, number = self._updated, self._latest, self._history.number
                if seen == number - 1 and latest.startswith(b"id: %d\n" % number):
                    seen = number
                    yield latest
                elif number > max(seen, 0):
                    seen, whole = self._whole()
                    yield _event(seen, whole)
                await updated.wait()
        finally:
            self._streams -= 1

    def _whole(self) -> tuple[int, bytes]:
        with self._lock:
            number = self._history.number
            return number, msgspec.json.encode(self._history.whole()) if number else b""


def _event(number: int, data: bytes) -> bytes:
    return b"id: %d\ndata: %s\n\n" % (number, data)


class _Authenticated:
    """Middleware that refuses requests, and adds the headers of every answer."""

    def __init__(self, app: ASGIApp, authenticator: PageAuthenticator) -> None:
        self._app = app
        self._authenticator = authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = HTTPConnection(scope)
        client = "" if connection.client is None else connection.client.host
        host, authorization = (connection.headers.get(name, "") for name in ("host", "authorization"))
        refusal = self._authenticator.refuse(scope["method"], client, host, authorization, time.monotonic())

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message["headers"], *own]
            await send(message)

        app = self._app
        if refusal is not None:
            app = PlainTextResponse(refusal.text, refusal.status, dict(refusal.headers))
        await app(scope, receive, send_with_headers)


class _BoundedProtocol(H11Protocol):
    """Connection of a client, with timeouts and a maximum number of connections."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._abort_in(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.flow.write_paused:
            return  # data from a client does not show that it receives
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_deadline()
        elif self._deadline is None:  # the next head, or the rest of an unused body
            self._abort_in(HEAD_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_in(STUCK_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_deadline()

    def _abort_in(self, seconds: float) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def main() -> None:
    """Serve the page until the parent ends, or closes the pipe to standard input."""
    at_parents_end(signal.SIGCONT)
    exit_with(os.getppid())
    number, title = sys.argv[1:]
    place = json_decoder(PagePlace).decode(sys.stdin.buffer.readline())
    page = PageServer(socket.socket(fileno=int(number)), place.authenticator, PageHistory("loader", title))
    page.start()
    decoder = json_decoder(Observation)
    for line in sys.stdin.buffer:
        page.observe(decoder.decode(line))
    os._exit(0)


if __name__ == "__main__":
    main()
