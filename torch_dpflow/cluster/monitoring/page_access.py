"""Access to the live page: its address, its token, and which requests are refused."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import os
import re
import socket
import stat
from collections import OrderedDict
from collections.abc import Mapping
from importlib.util import find_spec
from typing import NamedTuple

import msgspec

from torch_dpflow._core.checks import is_loopback_host
from torch_dpflow.errors import MissingExtraError, OptionError

#: Environment variable with the path of the file with the token.
TOKEN_FILE = "DPFLOW_WEB_TOKEN_FILE"
MIN_TOKEN, MAX_TOKEN = 16, 1024
#: Allowed requests of one client address: number per second on average, and number at once.
RATE, BURST = 20.0, 60.0
#: Maximum number of client addresses whose rate is tracked. Beyond it, the address silent for longest is dropped.
MAX_CLIENTS = 256
#: Names of hosts in URLs that reach only this machine.
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


def parse_address(name: str, address: str, example: str) -> tuple[str, int]:
    """Return (host, port) of the address HOST:PORT. Raises OptionError with the option's `name` and the `example`."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]").lower()
    try:
        is_host = bool(ipaddress.ip_address(host) if ":" in host else host.encode("idna")) and "/" not in host
    except ValueError:
        is_host = False
    if not is_host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise OptionError(f"{name}={address!r:.200}: give HOST:PORT, such as {example}")
    return host, int(port)


def listen_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address. Raises OSError if that is not possible."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def check_vacant(name: str, host: str, port: int) -> None:
    """Raise OptionError, which names the option `name`, if this process cannot listen at the address."""
    try:
        listen_at(host, port).close()
    except OSError as error:
        raise OptionError(f"{name}={f'{host}:{port}'!r}: {error.strerror or error}; give another") from error


class Refusal(NamedTuple):
    """Answer to a refused request: HTTP status, text and headers."""

    status: int
    text: str
    headers: Mapping[str, str] = {}


def digest_of(token: str) -> bytes:
    """Return the digest of a token. Only the digest is stored."""
    return hashlib.sha256(token.encode()).digest()


class PageAuthenticator:
    """Authenticator of requests to the live page, with a limit of each client's rate. Not thread-safe.

    Args:
        digest: digest of the token that each request needs; empty without a token.
        hosts: host names that requests may be sent to; empty: any. Needed without a token: otherwise a foreign page
            could let its own name resolve to this host and read this page (DNS rebinding).
    """

    def __init__(self, digest: bytes = b"", hosts: frozenset[str] = frozenset()) -> None:
        self._digest = digest
        self._hosts = hosts
        #: By address: requests left, and at which time (seconds).
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def refuse(self, method: str, client: str, host: str, authorization: str, now: float) -> Refusal | None:
        """Return the answer if a request is refused; None if it is accepted.

        client: the client's address. host, authorization: headers of the request, empty if absent.
        now: time in seconds.
        """
        if not self._is_within_rate(client, now):
            return Refusal(429, "too many requests; wait a second", {"Retry-After": "1"})
        if method not in ("GET", "HEAD"):
            return Refusal(405, "this page is read-only", {"Allow": "GET, HEAD"})
        if self._hosts and _name_of(host) not in self._hosts:
            return Refusal(421, "this page does not have that name; use http://127.0.0.1 and its port")
        if self._digest and not self._is_authorized(authorization):
            text = "this page needs its token: as the password, with any user name"
            return Refusal(401, text, {"WWW-Authenticate": 'Basic realm="dpflow", charset="UTF-8"'})
        return None

    def _is_within_rate(self, client: str, now: float) -> bool:
        left, then = self._left.pop(client, (BURST, now))
        left = min(BURST, left + RATE * max(0.0, now - then))
        may = left >= 1.0
        self._left[client] = (left - may, now)
        while len(self._left) > MAX_CLIENTS:
            self._left.popitem(last=False)
        return may

    def _is_authorized(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        token = ""
        if scheme.lower() == "bearer":
            token = given.strip()
        elif scheme.lower() == "basic":
            try:
                token = base64.b64decode(given.strip(), validate=True).decode().partition(":")[2]
            except ValueError:  # no base64, no ASCII, or no text
                return False
        # Digests have equal length, so the time does not reveal the length of the token.
        return hmac.compare_digest(digest_of(token), self._digest)


def _name_of(host: str) -> str:
    """Return the host in a Host header such as localhost:8265 or [::1]:8265."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()


class PagePlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Address of a page, and the digest of its token."""

    host: str
    port: int
    #: Digest of the page's token, by `digest_of`; empty without a token.
    digest: bytes = b""

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def authenticator(self) -> PageAuthenticator:
        if self.digest:
            return PageAuthenticator(self.digest)
        return PageAuthenticator(hosts=LOOPBACK_NAMES | {self.url.removeprefix("http://").rpartition(":")[0]})


def check_page(name: str, address: str, token_file: str | None, *, vacant: bool = True) -> PagePlace:
    """Check the address and the token of a page, and return them.

    name: the option, for messages. address: HOST:PORT. token_file: path of the file with the token; None: no token.
    vacant: whether to check that the port is free.

    Raises:
        OptionError: the address is not HOST:PORT, is in use, or can be reached from other machines although there is no
            token. Or the token file cannot be read, contains no token, or can be read by other users.
        MissingExtraError: the packages for the page are not installed.
    """
    host, port = parse_address(name, address, "127.0.0.1:8265")
    if token_file is None and not is_loopback_host(host):
        raise OptionError(
            f"{name}={address!r:.200} reaches beyond this machine, so others could read the names of flows, "
            f"jobs and hosts; give 127.0.0.1, or a token: a file of mode 600 with at least {MIN_TOKEN} random "
            f"characters, by `dpflow up --web-token-file` or {TOKEN_FILE}"
        )
    digest = b"" if token_file is None else digest_of(_read_token(token_file))
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise MissingExtraError(
            "the live page needs the packages uvicorn and starlette: pip install 'torch_dpflow[web]'"
        )
    if vacant:
        check_vacant(name, host, port)
    return PagePlace(host, port, digest)


def _read_token(path: str) -> str:
    name = f"token file {path!r:.500}"
    try:
        # Without O_NONBLOCK, opening a FIFO would block.
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            content = file.read(MAX_TOKEN + 2) if stat.S_ISREG(status.st_mode) else b""
    except (OSError, ValueError) as error:
        raise OptionError(f"{name}: {getattr(error, 'strerror', None) or error}; give another") from error
    if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid not in (os.getuid(), 0):
        raise OptionError(f"{name} can be read by others: make it yours, and chmod 600")
    token = content.decode("ascii", "replace").strip()
    if not MIN_TOKEN <= len(token) <= MAX_TOKEN or not (token.isascii() and token.isprintable()):
        raise OptionError(
            f"{name} holds no token: write {MIN_TOKEN} to {MAX_TOKEN} printable characters into it, as by "
            f"`(umask 077; openssl rand -hex 24 > {path:.500})`"
        )
    return token
