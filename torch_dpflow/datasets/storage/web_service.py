"""Objects of web servers."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from torch_dpflow.datasets.storage.connections import Origin
from torch_dpflow.datasets.storage.exchanges import ErrorResponse, GetRequest
from torch_dpflow.datasets.storage.tls import tls_context
from torch_dpflow.datasets.storage.urls import check_url, without_login
from torch_dpflow.datasets.storage.web_headers import web_headers
from torch_dpflow.errors import OptionError

#: A percent sign that begins no escape.
_LONE_PERCENT = re.compile("%(?![0-9a-fA-F]{2})")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class WebService:
    """`http://` and `https://`. `options`: `headers` for every request, `username` and `password`, `verify`.

    A URL is sent as given, including its query; characters that are not allowed are escaped, also "#", which
    some names have, while fragments are not used. Redirects are followed, to another server without the headers.

    Raises:
        OptionError, OptionTypeError: an option that is none of these.
    """

    notes_encoding = False

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._headers = web_headers(options)
        self._options = options

    def origin(self, url: str) -> Origin:
        return _parse(url)[0]

    def request(self, url: str) -> GetRequest:
        origin, target = _parse(url)
        return GetRequest(origin, target, self._headers)

    def follow(self, url: str, request: GetRequest, refusal: ErrorResponse) -> GetRequest | None:
        location = _as_sent(refusal.headers.get("location", ""))
        if refusal.status not in _REDIRECTS or not location:
            return None
        here = request.origin
        base = f"{'https' if here.is_tls else 'http'}://{here.host_header}{request.target}"
        # A fragment is for the reader of a page; no request has one.
        try:
            origin, target = _parse(urljoin(base, location.partition("#")[0] or request.target))
        except (OptionError, ValueError):
            return None
        return GetRequest(origin, target, request.headers if origin == here else {})

    def tls(self) -> ssl.SSLContext:
        return tls_context(self._options, os.environ)


def _as_sent(field: str) -> str:
    """A field's text, which may be UTF-8 instead of escapes; bytes that are not are escaped."""
    sent = field.encode("latin-1")
    try:
        return sent.decode()
    except UnicodeDecodeError:
        return "".join(chr(byte) if byte < 0x80 else f"%{byte:02X}" for byte in sent)


def _parse(url: str) -> tuple[Origin, str]:
    check_url(url)
    parts = urlsplit(_LONE_PERCENT.sub("%25", url).replace("#", "%23"))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise OptionError(f"{without_login(url)}: give http:// or https://, a host and a path")
    is_tls = parts.scheme == "https"
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        host = parts.hostname if parts.hostname.isascii() else parts.hostname.encode("idna").decode()
        port = parts.port or (443 if is_tls else 80)
    except ValueError as error:  # UnicodeError is one
        raise OptionError(f"{without_login(url)}: {error}; correct the host or the port") from error
    origin = Origin(is_tls, host, port)
    return origin, quote(target, safe="/%?&=+,;:@!$'()*~[]")
