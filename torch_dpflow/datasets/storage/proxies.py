"""Servers of connections, heads of requests, and the proxies that the environment names."""

from __future__ import annotations

import base64
import functools
import urllib.request
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from torch_dpflow.errors import OptionError


class Origin(NamedTuple):
    """Server of a connection: its host and port, and whether they expect TLS."""

    is_tls: bool
    host: str
    port: int

    @property
    def address(self) -> str:
        """Host and port, as in "example.org:443"; brackets enclose an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    @functools.lru_cache(maxsize=1024)  # noqa: B019  # of a tuple
    def host_header(self) -> str:
        """The Host header of requests to this server: `address` without the default port."""
        default = f":{443 if self.is_tls else 80}"
        return self.address.removesuffix(default) if self.address.endswith(default) else self.address


class Proxy(NamedTuple):
    """An HTTP proxy, and the header fields that requests to it need, such as its login."""

    origin: Origin
    fields: dict[str, str]


def proxy_of(origin: Origin) -> Proxy | None:
    """Return the proxy that HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY name for a server; None: no proxy.

    Raises OptionError for a proxy whose address is not http://HOST:PORT.
    """
    found = urllib.request.getproxies()
    url = found.get("https" if origin.is_tls else "http") or found.get("all")
    if not url or urllib.request.proxy_bypass(origin.address):
        return None
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None or parts.scheme != "http":
        raise OptionError(
            f"the environment names a proxy for {origin.address} that is not http://HOST:PORT; correct HTTP_PROXY, "
            "HTTPS_PROXY or ALL_PROXY, or name the server in NO_PROXY"
        )
    login = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    fields = {"Proxy-Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"} if parts.username else {}
    return Proxy(Origin(False, host, port or 80), fields)


def request_head(method: str, host: str, target: str, headers: Mapping[str, str]) -> bytes:
    """Return the bytes of a request line with the escaped `target`, and of the headers.

    Raises OptionError for a line break in a header.
    """
    fields = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    head = f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nAccept-Encoding: identity\r\n{fields}\r\n"
    if head.count("\n") + head.count("\r") != 2 * (len(headers) + 4):
        raise OptionError(f"a header for {host} has a line break in it; look at keys, tokens and `headers`")
    return head.encode("latin-1")
