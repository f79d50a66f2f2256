"""Endpoints of object stores, and the address of a bucket below them.

Addresses of ordinary S3 buckets are computed here. Access points, S3 Express, Outposts, FIPS, dual-stack and
accelerated endpoints and unusual regions are left to botocore, through s3fs.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from torch_dpflow.datasets.storage.credentials import aws_services
from torch_dpflow.datasets.storage.proxies import Origin
from torch_dpflow.datasets.storage.urls import check_url
from torch_dpflow.errors import OptionError

#: A part of a bucket's name that may be a label of a host's name.
_DNS_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
#: Ends of the names of directory buckets (S3 Express), their access points, and access points on Outposts.
_SPECIAL_BUCKETS = ("--x-s3", "--xa-s3", "--op-s3")
#: Regions whose servers have the usual names. Servers of other regions, such as us-iso-east-1, are in botocore's rules.
_USUAL_REGION = re.compile("(us|eu|ap|sa|ca|me|af|il|mx|cn)-(gov-)?[a-z]+-[0-9]+")
#: Switches of AWS for other servers: the variable ("" if it has none) and the name in ~/.aws/config.
_OTHER_SERVERS = (
    ("AWS_USE_FIPS_ENDPOINT", "use_fips_endpoint"),
    ("AWS_USE_DUALSTACK_ENDPOINT", "use_dualstack_endpoint"),
    ("", "use_accelerate_endpoint"),
)


class Endpoint(NamedTuple):
    """A server, and the path below which it serves objects: "" or "/some/path", without escapes."""

    origin: Origin
    prefix: str = ""

    def of_bucket(self, bucket: str, *, is_virtual: bool) -> Endpoint:
        """Return the endpoint of a bucket: its own host if `is_virtual` and its name allows that, else a path."""
        origin, prefix = self
        if is_virtual and _is_host_name(bucket, is_tls=origin.is_tls):
            return Endpoint(origin._replace(host=f"{bucket}.{origin.host}"), prefix)
        return Endpoint(origin, f"{prefix}/{bucket}")


def parse_endpoint(endpoint: str, scheme: str = "https") -> Endpoint:
    """Parse an endpoint from an option or a variable. Raises OptionError."""
    url = endpoint if "://" in endpoint else f"{scheme}://{endpoint}"
    try:
        if not url.isprintable() or " " in url:
            raise ValueError("it has whitespace or a control character")
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        has_more = parts.query or parts.fragment or "@" in parts.netloc
        if parts.scheme not in ("http", "https") or not host or has_more:
            raise ValueError("it needs a host, and may have a port and a path")
    except ValueError as error:
        raise OptionError(
            f"endpoint {endpoint!r}: {error}; give http:// or https:// and a host, as in https://minio.example:9000"
        ) from error
    is_tls = parts.scheme == "https"
    return Endpoint(Origin(is_tls, host, port or (443 if is_tls else 80)), unquote(parts.path).rstrip("/"))


def _is_host_name(bucket: str, *, is_tls: bool) -> bool:
    """Whether a bucket may be part of a host's name. With TLS it may have no dot, which no certificate covers."""
    labels = bucket.split(".")
    if len(bucket) < 3 or (is_tls and len(labels) > 1) or is_address(bucket):
        return False
    return all(map(_DNS_LABEL.fullmatch, labels))


def is_address(host: str) -> bool:
    """Return whether the host is an IP address or localhost, where buckets have no host names."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def split_url(url: str) -> tuple[str, str]:
    """Return bucket and key of a URL such as `oss://bucket/some/key`. Raises OptionError if one is missing."""
    # ossfs puts a slash before the bucket.
    bucket, _, key = url.partition("://")[2].lstrip("/").partition("/")
    if not bucket or not key:
        raise OptionError(f"{url}: give a bucket and a key, as in oss://bucket/folder/name.jpg")
    return bucket, key


def needs_vendor(bucket: str) -> bool:
    """Return whether only s3fs reads a bucket: an access point's ARN, or a bucket of S3 Express or Outposts."""
    return bucket.startswith("arn:") or bucket.endswith(_SPECIAL_BUCKETS)


class S3Endpoints:
    """The addresses of ordinary S3 buckets, from options, the environment and AWS's shared configuration.

    Raises OptionError for settings that are malformed.

    Args:
        endpoint, addressing_style: the options of these names; None if not given.
        scheme: the scheme of endpoints without one.
        region: the region of the client.
        profile: the result of `aws_profile`.
    """

    def __init__(
        self, endpoint: str | None, addressing_style: str | None, scheme: str, region: str, profile: Mapping[str, Any]
    ) -> None:
        nested = profile.get("s3")
        nested = nested if isinstance(nested, Mapping) else {}
        switches = [_switch(*names, profile, nested) for names in _OTHER_SERVERS]
        given = endpoint or _configured_endpoint(profile)
        self._endpoint = None if given is None else parse_endpoint(given, scheme)
        self._scheme = scheme
        style = addressing_style or nested.get("addressing_style") or "auto"
        if style not in ("path", "virtual", "auto"):
            raise OptionError(f"addressing_style={style!r}: give 'path', 'virtual' or 'auto'")
        self._is_virtual = style == "virtual" or (style == "auto" and given is None)
        #: Whether these settings are of servers that only botocore can name.
        self.needs_vendor = any(switches) or (given is None and not _USUAL_REGION.fullmatch(region))
        self._places: dict[tuple[str, str], Endpoint] = {}

    def place(self, bucket: str, region: str) -> Endpoint:
        """Return the address of `bucket`, assuming that it is in `region`. Raises OptionError for a malformed one."""
        try:
            return self._places[bucket, region]
        except KeyError:
            check_url(f"s3://{bucket}")
            suffix = ".cn" if region.startswith("cn-") else ""
            endpoint = self._endpoint or parse_endpoint(f"s3.{region}.amazonaws.com{suffix}", self._scheme)
            place = endpoint.of_bucket(bucket, is_virtual=self._is_virtual)
            return self._places.setdefault((bucket, region), place)


def _configured_endpoint(profile: Mapping[str, Any]) -> str | None:
    if _switch("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "ignore_configured_endpoint_urls", profile):
        return None
    services = profile.get("services")
    nested = aws_services(services).get("s3") if services else None
    return (
        os.environ.get("AWS_ENDPOINT_URL_S3")
        or os.environ.get("AWS_ENDPOINT_URL")
        or (nested.get("endpoint_url") if isinstance(nested, Mapping) else None)
        or profile.get("endpoint_url")
        or None
    )


def _switch(variable: str, name: str, profile: Mapping[str, Any], nested: Mapping[str, Any] | None = None) -> bool:
    """Return a setting of AWS that is on or off. Raises OptionError for other words, which botocore takes for "off"."""
    for where, text in (
        (variable, os.environ.get(variable)),
        (f"{name} in ~/.aws/config", profile.get(name)),
        (f"s3.{name} in ~/.aws/config", (nested or {}).get(name)),
    ):
        if text:
            if text.lower() not in ("true", "false"):
                raise OptionError(f"{where}={text!r}: give true or false")
            return bool(text.lower() == "true")
    return False
