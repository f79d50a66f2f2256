"""What goes to a server and what may come back: requests, refusals, and who knows what to make of them."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch_dpflow.datasets.storage.base import ByteRange
from torch_dpflow.datasets.storage.connections import Origin
from torch_dpflow.datasets.storage.credentials import Credentials
from torch_dpflow.datasets.storage.failures import BY_STATUS
from torch_dpflow.errors import StorageError

_ELEMENT = "<{0}>([^<]{{1,500}})</{0}>"
#: S3 answers these with status 400.
_STATUS_OF_CODE = {"RequestTimeout": 408, "ExpiredToken": 403, "InvalidToken": 403}


@dataclass(frozen=True)
class GetRequest:
    """A GET, ready to be sent."""

    origin: Origin
    #: the path as it stands in the request line
    target: str
    headers: Mapping[str, str] = field(repr=False)
    #: what it is signed with
    credentials: Credentials | None = None
    region: str = ""


@dataclass(frozen=True)
class ErrorResponse:
    """An answer that brings no object; `body` is how it begins."""

    status: int
    reason: str
    #: by lower-case name
    headers: Mapping[str, str]
    body: bytes

    def element(self, name: str) -> str:
        """The text of an element of the body, which is XML where S3 or OSS answers; "" without one."""
        match = re.search(_ELEMENT.format(name).encode(), self.body)
        return match[1].decode("utf-8", "replace").strip() if match else ""

    @property
    def meaning(self) -> int:
        """The HTTP status that says what is wrong."""
        return _STATUS_OF_CODE.get(self.element("Code"), self.status)

    def error(self, span: ByteRange) -> StorageError:
        """What it means for the reader of `span`."""
        message = self.element("Message")
        told = f"{self.status} {self.element('Code') or self.reason}" + (f": {message}" if message else "")
        text = f"{span}: the storage answered {told}"
        known = BY_STATUS.get(self.meaning)
        if known is not None:
            return known[0](f"{text}; {known[1]}")
        region = self.headers.get("x-amz-bucket-region")
        return StorageError(f"{text}; the bucket lies in region {region}" if region else text)


class Service(Protocol):
    """A vendor's way to name objects and to sign requests."""

    #: Whether the bytes of an answer with a Content-Encoding are the object's: object stores keep it as a note.
    notes_encoding: bool

    def origin(self, url: str) -> Origin:
        """The server to connect to."""

    def request(self, url: str) -> GetRequest:
        """A signed request for the whole object, good for the next minutes. Raises AccessDeniedError."""

    def follow(self, url: str, request: GetRequest, refusal: ErrorResponse) -> GetRequest | None:
        """What to ask after `request` was refused: elsewhere, or with other credentials; None: it is final."""

    def tls(self) -> ssl.SSLContext:
        """How the certificates of its servers are checked. Raises OptionError."""
