"""Where the live page may listen, and the token that it needs beyond this machine."""

from __future__ import annotations

import os
import stat
from importlib.util import find_spec

import msgspec

from torch_dpflow.cluster.monitoring.http_address import check_vacant, is_loopback, parse_address
from torch_dpflow.cluster.monitoring.page_guard import LOOPBACK_NAMES, PageGuard, digest_of
from torch_dpflow.errors import MissingExtraError, OptionError

#: Names the file with the token.
TOKEN_FILE = "DPFLOW_WEB_TOKEN_FILE"
#: Characters of a token, least and most.
LEAST_TOKEN, MOST_TOKEN = 16, 1024


class PagePlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a page listens, and who may read it."""

    host: str
    port: int
    #: Of its token, as `digest_of` makes it; empty: it needs none.
    digest: bytes = b""

    @property
    def url(self) -> str:
        """By which it is opened."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def guard(self) -> PageGuard:
        """Who may read it."""
        if self.digest:
            return PageGuard(self.digest)
        return PageGuard(hosts=LOOPBACK_NAMES | {self.url.removeprefix("http://").rpartition(":")[0]})


def check_page(name: str, address: str, token_file: str | None, *, vacant: bool = True) -> PagePlace:
    """The place of a page at HOST:PORT. name: the option, for messages. vacant: whether to try to listen there.

    Raises:
        OptionError: it is not HOST:PORT, is in use, reaches beyond this machine and no token is given; or there is no
            token in that file, or others may read it.
        MissingExtraError: the packages for the page are not installed.
    """
    host, port = parse_address(name, address, "127.0.0.1:8265")
    if token_file is None and not is_loopback(host):
        raise OptionError(
            f"{name}={address!r:.200} reaches beyond this machine, and whoever connects may read the names of flows, "
            f"jobs and hosts; give 127.0.0.1, or a token: a file of mode 600 with at least {LEAST_TOKEN} random "
            f"characters, by `dpflow up --web-token-file` or {TOKEN_FILE}"
        )
    digest = b"" if token_file is None else digest_of(_read_token(token_file))
    require_server()
    if vacant:
        check_vacant(name, host, port)
    return PagePlace(host, port, digest)


def require_server() -> None:
    """Raise MissingExtraError unless the packages for the page are installed."""
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise MissingExtraError(
            "the live page needs the packages uvicorn and starlette: pip install 'torch_dpflow[web]'"
        )


def _read_token(path: str) -> str:
    name = f"token file {path!r:.500}"
    try:
        # Without O_NONBLOCK a FIFO is waited for until somebody writes to it.
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            content = file.read(MOST_TOKEN + 2) if stat.S_ISREG(status.st_mode) else b""
    except (OSError, ValueError) as error:
        raise OptionError(f"{name}: {getattr(error, 'strerror', None) or error}; give another") from error
    if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid not in (os.getuid(), 0):
        raise OptionError(f"{name} can be read by others: chmod 600, and have it be yours")
    token = content.decode("ascii", "replace").strip()
    if not LEAST_TOKEN <= len(token) <= MOST_TOKEN or not (token.isascii() and token.isprintable()):
        raise OptionError(
            f"{name} holds no token: write {LEAST_TOKEN} to {MOST_TOKEN} printable characters into it, as by "
            f"`(umask 077; openssl rand -hex 24 > {path:.500})`"
        )
    return token
