"""Proxies of the environment: ranges are checked behind them, and what no proxy is, is refused by name."""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import pytest

from tests.datasets.storage.signed_s3 import SignedS3
from tests.datasets.storage.web_server import WebServer, _Handler, reply, serve_ranges
from torch_dpflow.datasets.storage import ObjectReader, ReadOptions
from torch_dpflow.datasets.storage.credentials import Credentials
from torch_dpflow.errors import AccessDeniedError, OptionError, StorageUnavailableError

DATA = bytes(range(250))
ONCE = ReadOptions(attempts=1)
_LOGIN = "Basic bWU6cEBzcw=="  # me:p@ss


def pass_on(handler: BaseHTTPRequestHandler) -> None:
    """Fetch what the request line names, and answer with it."""
    opener = build_opener(ProxyHandler({}))
    headers = [(name, value) for name, value in handler.headers.items() if name != "Proxy-Authorization"]
    opener.addheaders = headers
    with opener.open(handler.path) as found:
        reply(handler, found.status, found.read(), content_range=found.headers["Content-Range"])


def connect(handler: _Handler) -> None:
    """Pass bytes on in both directions."""
    handler.server.owner.requests.append({"path": handler.path})
    if handler.headers.get("Proxy-Authorization") != _LOGIN:
        return reply(handler, 407)
    handler.send_response(200)
    handler.end_headers()
    handler.close_connection = True
    host, _, port = handler.path.partition(":")
    with closing(socket.create_connection((host, int(port)))) as server:
        ends = {handler.connection: server, server: handler.connection}
        while True:
            for one in select.select([*ends], [], [])[0]:
                data = one.recv(1 << 16)
                if not data:
                    return None
                ends[one].sendall(data)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[WebServer]:
    monkeypatch.setattr(_Handler, "do_CONNECT", connect, raising=False)
    with WebServer(pass_on) as proxy:
        at = proxy.url.removeprefix("http://")
        monkeypatch.setenv("http_proxy", f"http://me:p%40ss@{at}")
        monkeypatch.setenv("https_proxy", f"me:p%40ss@{at}")
        yield proxy


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_web_servers_and_s3_are_read_through_a_proxy(
    proxy: WebServer, scheme: str, tls: ssl.SSLContext, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = tls if scheme == "https" else None
    web = WebServer(serve_ranges(DATA), context)
    s3 = WebServer(SignedS3(DATA, Credentials("key", "secret")), context)
    with web, s3:
        options: dict[str, Any] = {"verify": str(certificate)}
        with ObjectReader(options) as reader:
            assert reader.read(f"{web.url}/x?y", 5, 9) == DATA[5:9]
            web.answer = lambda handler: reply(handler, 206, DATA[4:8], content_range="bytes 4-7/250")
        with ObjectReader(options, options=ONCE) as reader, pytest.raises(StorageUnavailableError, match="other range"):
            reader.read(f"{web.url}/x", 5, 9)
        with ObjectReader(options | {"key": "key", "secret": "secret", "endpoint": s3.url}) as reader:
            assert reader.read("s3://data/x", 5, 9) == DATA[5:9]
        used = len(proxy.requests)
        assert used == 3
        with ObjectReader(options) as reader:
            monkeypatch.setenv("no_proxy", "127.0.0.1")
            web.answer = serve_ranges(DATA)
            assert reader.read(f"{web.url}/x", 5, 9) == DATA[5:9]
        assert len(proxy.requests) == used


def test_a_proxy_that_refuses_is_named(proxy: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", proxy.url)
    with ObjectReader() as reader, pytest.raises(AccessDeniedError, match=r"answered 407 for 127\.0\.0\.1:9; correct"):
        reader.read("https://127.0.0.1:9/x")


@pytest.mark.parametrize("url", ["socks5://127.0.0.1:9", "https://127.0.0.1:9", "http://", "http://h:x"])
def test_what_is_no_http_proxy_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("http_proxy", raising=False)
    monkeypatch.setenv("all_proxy", url)
    with ObjectReader() as reader, pytest.raises(OptionError, match="that is not http://HOST:PORT"):
        reader.read("http://127.0.0.2:9/x")
