"""Who may read the live page, and how often. Pure: time is an argument."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

#: Requests a second of one address, on average, and at once.
RATE, BURST = 20.0, 60.0
#: Addresses that are remembered; the one that was silent longest is forgotten.
MOST_CLIENTS = 256
#: Hosts of a URL by which this machine alone is reached.
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Refusal(NamedTuple):
    """Why a request is not answered."""

    status: int
    text: str
    headers: Mapping[str, str] = {}


def digest_of(token: str) -> bytes:
    """What is kept of a token, to compare with."""
    return hashlib.sha256(token.encode()).digest()


class PageGuard:
    """Decides about requests. Not thread-safe.

    Args:
        digest: of the token that each request needs; empty: none is needed.
        hosts: by which names the page may be called; empty: by any. Where no token is needed, the page of a stranger
            could otherwise have its own name lead here, and read.
    """

    def __init__(self, digest: bytes = b"", hosts: frozenset[str] = frozenset()) -> None:
        self._digest = digest
        self._hosts = hosts
        #: Requests that each address may still make, as of when, seconds.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def refuse(self, method: str, client: str, host: str, authorization: str, now: float) -> Refusal | None:
        """Why a request is not answered; None: it is.

        host, authorization: its headers, empty where there are none.
        """
        if not self._may_ask(client, now):
            return Refusal(429, "too many requests; wait a second", {"Retry-After": "1"})
        if method not in ("GET", "HEAD"):
            return Refusal(405, "this page is read-only", {"Allow": "GET, HEAD"})
        if self._hosts and _name_of(host) not in self._hosts:
            return Refusal(421, "this page is not called by that name; use http://127.0.0.1 and its port")
        if self._digest and not self._knows(authorization):
            text = "this page needs its token: as the password, with any user name"
            return Refusal(401, text, {"WWW-Authenticate": 'Basic realm="dpflow", charset="UTF-8"'})
        return None

    def _may_ask(self, client: str, now: float) -> bool:
        left, then = self._left.pop(client, (BURST, now))
        left = min(BURST, left + RATE * max(0.0, now - then))
        may = left >= 1.0
        self._left[client] = (left - may, now)
        while len(self._left) > MOST_CLIENTS:
            self._left.popitem(last=False)
        return may

    def _knows(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        token = ""
        if scheme.lower() == "bearer":
            token = given.strip()
        elif scheme.lower() == "basic":
            try:
                token = base64.b64decode(given.strip(), validate=True).decode().partition(":")[2]
            except ValueError:  # no base64, no ASCII, or no text
                return False
        # Digests: of equal length, so the time tells nothing of the token's either.
        return hmac.compare_digest(digest_of(token), self._digest)


def _name_of(host: str) -> str:
    """The host of a header such as localhost:8265 or [::1]:8265."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()
