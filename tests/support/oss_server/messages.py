"""Requests and answers of the OSS protocol, free of sockets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import unquote, unquote_plus, urlsplit
from xml.sax.saxutils import escape


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request: what was asked of which object."""

    method: str
    #: empty: of the service itself
    bucket: str
    #: empty: of the bucket itself
    key: str
    params: Mapping[str, str]
    #: by lower-case name
    headers: Mapping[str, str]
    body: bytes = b""

    @classmethod
    def parse(cls, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Request:
        """Read a request whose path begins with the bucket, as with an endpoint that is an IP address."""
        parts = urlsplit(target)
        bucket, _, key = parts.path.removeprefix("/").partition("/")
        params: dict[str, str] = {}
        for item in filter(None, parts.query.split("&")):
            name, _, value = item.partition("=")
            params[unquote_plus(name)] = unquote_plus(value)
        return cls(
            method=method,
            bucket=unquote(bucket),
            key=unquote(key),
            params=params,
            headers={name.lower(): value for name, value in headers.items()},
            body=body,
        )


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One answer."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    #: what Content-Length says of an answer without a body, to HEAD
    length: int | None = None


class OSSError(Exception):
    """An error of the protocol: becomes an answer with XML that says so."""

    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(status, code, message)
        self.status, self.code, self.message = status, code, message
        #: What the answer's head says besides, with `_` for `-`.
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def reply(self, request_id: str) -> Reply:
        body = element(
            "Error",
            element("Code", self.code),
            element("Message", self.message),
            element("RequestId", request_id),
        )
        reply = xml_reply(body, status=self.status)
        return replace(reply, headers={**reply.headers, **self.headers})


class Markup(str):
    """Text that is XML already."""


def element(name: str, *content: str) -> Markup:
    """One XML element; its content is escaped unless it is made of elements."""
    inner = "".join(part if isinstance(part, Markup) else escape(part) for part in content)
    return Markup(f"<{name}>{inner}</{name}>")


def xml_reply(root: Markup, *, status: int = 200) -> Reply:
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n{root}'
    return Reply(status=status, headers={"Content-Type": "application/xml"}, body=text.encode())
