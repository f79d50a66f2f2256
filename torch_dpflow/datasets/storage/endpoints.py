"""Endpoints of object stores, and where a bucket is below them. Pure."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from torch_dpflow.datasets.storage.connections import Origin
from torch_dpflow.errors import OptionError

#: Names of buckets that are a label, or several, of a host's name.
_DNS_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


class Endpoint(NamedTuple):
    """A server, and the path below which it serves objects: "" or "/some/path", without escapes."""

    origin: Origin
    prefix: str = ""

    def of_bucket(self, bucket: str, *, is_virtual: bool) -> Endpoint:
        """The endpoint of a bucket: a host of its own if `is_virtual` and its name allows that, else a path."""
        origin, prefix = self
        if is_virtual and is_host_name(bucket, is_tls=origin.is_tls):
            return Endpoint(origin._replace(host=f"{bucket}.{origin.host}"), prefix)
        return Endpoint(origin, f"{prefix}/{bucket}")


def parse_endpoint(endpoint: str, scheme: str = "https") -> Endpoint:
    """The endpoint that an option or a variable names. Raises OptionError."""
    url = endpoint if "://" in endpoint else f"{scheme}://{endpoint}"
    try:
        if not url.isprintable() or " " in url:
            raise ValueError("it has whitespace or a control character")
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        if (
            parts.scheme not in ("http", "https")
            or not host
            or parts.query
            or parts.fragment
            or "@" in parts.netloc
        ):
            raise ValueError("it needs a host, and may have a port and a path")
    except ValueError as error:
        raise OptionError(
            f"endpoint {endpoint!r}: {error}; give http:// or https:// and a host, as in https://minio.example:9000"
        ) from error
    is_tls = parts.scheme == "https"
    return Endpoint(Origin(is_tls, host, port or (443 if is_tls else 80)), unquote(parts.path).rstrip("/"))


def is_host_name(bucket: str, *, is_tls: bool) -> bool:
    """Whether a bucket may be part of a host's name; with TLS not with a dot, which no certificate covers."""
    labels = bucket.split(".")
    if len(bucket) < 3 or (is_tls and len(labels) > 1) or is_address(bucket):
        return False
    return all(map(_DNS_LABEL.fullmatch, labels))


def is_address(host: str) -> bool:
    """Whether the host is an IP address or localhost, below which there are no names for buckets."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True
