"""Objects of web servers."""

from __future__ import annotations

import base64
import os
import re
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from torch_dpflow.datasets.storage.http_storage import ErrorResponse, GetRequest
from torch_dpflow.datasets.storage.proxies import Origin
from torch_dpflow.datasets.storage.urls import check_url, printable_url
from torch_dpflow.errors import OptionError, OptionTypeError

_OPTIONS = frozenset({"headers", "username", "password", "verify"})
#: A percent sign that begins no escape.
_LONE_PERCENT = re.compile("%(?![0-9a-fA-F]{2})")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class WebService:
    """Service of web servers, for `http://` and `https://`.

    A URL is sent as given, including its query. Characters that are not allowed are escaped, including "#", which some
    names contain. Redirects are followed. Redirected requests to a different server lack the headers of `options`.

    Args:
        options: `headers` for every request, `username` and `password`, and `verify`, see `tls_context`.

    Raises:
        OptionError, OptionTypeError: an option is unknown, or its value is not allowed.
    """

    checks_encoding = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._headers = web_headers(options)
        self._options = options

    def origin(self, url: str) -> Origin:
        return _parse(url)[0]

    def request(self, url: str) -> GetRequest:
        origin, target = _parse(url)
        return GetRequest(origin, target, self._headers)

    def follow(self, url: str, request: GetRequest, refusal: ErrorResponse) -> GetRequest | None:
        location = _decoded(refusal.headers.get("location", ""))
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
        return tls_context(self._options)


def _decoded(field: str) -> str:
    """Decode a header field, which may be UTF-8 instead of escapes. Bytes that are not UTF-8 are escaped."""
    sent = field.encode("latin-1")
    try:
        return sent.decode()
    except UnicodeDecodeError:
        return "".join(chr(byte) if byte < 0x80 else f"%{byte:02X}" for byte in sent)


def _parse(url: str) -> tuple[Origin, str]:
    check_url(url)
    try:
        parts = urlsplit(_LONE_PERCENT.sub("%25", url).replace("#", "%23"))
        host, port = parts.hostname or "", parts.port
        host = host if host.isascii() else host.encode("idna").decode()
    except ValueError as error:  # UnicodeError is one
        raise OptionError(f"{printable_url(url)}: {error}; correct the host or the port") from error
    if parts.scheme not in ("http", "https") or not host:
        raise OptionError(f"{printable_url(url)}: give http:// or https://, a host and a path")
    is_tls = parts.scheme == "https"
    target = (parts.path or "/") + (f"?{parts.query}" if "?" in url else "")
    return Origin(is_tls, host, port or (443 if is_tls else 80)), quote(target, safe="/%?&=+,;:@!$'()*~[]")


def web_headers(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers of every request from the options of a `WebService`. Raises OptionError, OptionTypeError."""
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise OptionError(
            f"http:// has no option {unknown}; give headers, username and password, or verify; if the data "
            "is not on the storage of the store, give its options separately"
        )
    headers = options.get("headers") or {}
    if not isinstance(headers, Mapping):
        raise OptionTypeError(f"headers are of type {type(headers).__name__}; give a dict of names and texts")
    found = {str(name): str(value) for name, value in headers.items()}
    if options.get("username") is not None:
        login = f"{options['username']}:{options.get('password') or ''}"
        found["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
    return found


def tls_context(options: Mapping[str, Any], bundle: str | None = None) -> ssl.SSLContext:
    """Return a TLS context from the option `verify`, else the path `bundle`, else the variable REQUESTS_CA_BUNDLE.

    `verify` is as in botocore and requests: False checks nothing; a path names a file or a directory of certificates;
    True means the system's certificates, which are also the default.

    Raises OptionError: no certificates can be loaded from the path.
    """
    verify: Any = options.get("verify")
    if verify is False:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    if verify is None:
        verify = bundle or os.environ.get("REQUESTS_CA_BUNDLE") or True
    if verify is True:
        return ssl.create_default_context()
    try:
        path = os.fspath(verify)
        is_folder = os.path.isdir(path)
        return ssl.create_default_context(cafile=None if is_folder else path, capath=path if is_folder else None)
    except (OSError, TypeError) as error:  # errors of ssl are OSErrors
        raise OptionError(
            f"there are no certificates at {verify!r}: {error}; look at `verify`, AWS_CA_BUNDLE and "
            "REQUESTS_CA_BUNDLE, which name a file in PEM form or a directory"
        ) from error
