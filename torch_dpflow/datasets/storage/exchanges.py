"""Requests to servers, their error responses, and the contract of a service."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch_dpflow.datasets.storage.base import ByteRange
from torch_dpflow.datasets.storage.connections import Origin
from torch_dpflow.datasets.storage.credentials import Credentials
from torch_dpflow.datasets.storage.failures import error_of_status
from torch_dpflow.errors import StorageError

_ELEMENT = "<{0}>([^<]{{1,500}})</{0}>"
#: S3 answers these with status 400.
_STATUS_OF_CODE = {"RequestTimeout": 408, "ExpiredToken": 403, "InvalidToken": 403}


@dataclass(frozen=True)
class GetRequest:
    """A GET, ready to be sent."""

    origin: Origin
    #: the path in the request line
    target: str
    headers: Mapping[str, str] = field(repr=False)
    #: the credentials of its signature
    credentials: Credentials | None = None
    region: str = ""


@dataclass(frozen=True)
class ErrorResponse:
    """A response without an object; `body` is its beginning."""

    status: int
    reason: str
    #: by lower-case name
    headers: Mapping[str, str]
    body: bytes

    def element(self, name: str) -> str:
        """The text of an element of the body, which is XML from S3 and OSS; "" without one."""
        match = re.search(_ELEMENT.format(name).encode(), self.body)
        return match[1].decode("utf-8", "replace").strip() if match else ""

    @property
    def meaning(self) -> int:
        """The HTTP status that describes the error."""
        return _STATUS_OF_CODE.get(self.element("Code"), self.status)

    def error(self, span: ByteRange) -> StorageError:
        """The error for the reader of `span`."""
        message = self.element("Message")
        answer = f"{self.status} {self.element('Code') or self.reason}" + (f": {message}" if message else "")
        text = f"{span}: the storage answered {answer}"
        known = error_of_status(self.meaning, text)
        if known is not None:
            return known
        region = self.headers.get("x-amz-bucket-region")
        return StorageError(f"{text}; the bucket is in region {region}" if region else text)


class Service(Protocol):
    """A vendor's addressing of objects and signing of requests."""

    #: Whether Content-Encoding is only metadata of the object, as in object stores: the body is the object's bytes.
    notes_encoding: bool

    def origin(self, url: str) -> Origin:
        """The server to connect to."""

    def request(self, url: str) -> GetRequest:
        """A signed request for the whole object, valid for some minutes. Raises AccessDeniedError."""

    def follow(self, url: str, request: GetRequest, refusal: ErrorResponse) -> GetRequest | None:
        """The next request after `request` was refused: to another server, or with other credentials; None: none."""

    def tls(self) -> ssl.SSLContext:
        """The context that checks its servers' certificates. Raises OptionError."""
