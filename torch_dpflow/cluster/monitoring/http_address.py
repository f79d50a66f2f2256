"""Addresses at which people and their tools read figures, over HTTP."""

from __future__ import annotations

import ipaddress
import re
import socket

from torch_dpflow.errors import OptionError


def parse_address(name: str, address: str, example: str) -> tuple[str, int]:
    """The host and the port of HOST:PORT. Raises OptionError, which calls it `name`."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]").lower()
    if not _is_name(host) or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise OptionError(f"{name}={address!r:.200}: give HOST:PORT, such as {example}")
    return host, int(port)


def _is_name(host: str) -> bool:
    """Whether a socket could take it: not a URL, say."""
    try:
        return bool(ipaddress.ip_address(host) if ":" in host else host.encode("idna")) and "/" not in host
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen_at(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises OSError."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def check_vacant(name: str, host: str, port: int) -> None:
    """Raise OptionError unless this process can listen there."""
    try:
        listen_at(host, port).close()
    except OSError as error:
        raise OptionError(f"{name}={f'{host}:{port}'!r}: {error.strerror or error}; give another") from error
