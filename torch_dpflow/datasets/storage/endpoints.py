"""Endpoints of object stores, and the address of a bucket below them.

Addresses of ordinary S3 buckets are computed here. Addresses of access points, Outposts and unusual regions come from
botocore's rules.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from torch_dpflow.datasets.storage.credentials import aws_services
from torch_dpflow.datasets.storage.http_connection import Origin
from torch_dpflow.datasets.storage.urls import check_url
from torch_dpflow.errors import MissingExtraError, OptionError

#: A part of a bucket's name that may be a label of a host's name.
_DNS_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
#: ARNs that may replace a bucket; the rest of a path is the key.
_ARN = re.compile(
    r"arn:[^:/]+:(?:s3|s3-object-lambda):[^:/]*:[0-9]{12}:accesspoint[:/][^:/]+"
    r"|arn:[^:/]+:s3-outposts:[^:/]+:[0-9]{12}:outpost[:/][^:/]+[:/]accesspoint[:/][^:/]+"
)
#: Ends of the names of directory buckets (S3 Express) and their access points, whose requests need a session.
_EXPRESS = ("--x-s3", "--xa-s3")
#: Ends of the names of access points on Outposts.
_OUTPOSTS = ("--op-s3",)
#: Regions whose servers have the usual names. Servers of other regions, such as us-iso-east-1, are in botocore's rules.
_USUAL_REGION = re.compile("(us|eu|ap|sa|ca|me|af|il|mx|cn)-(gov-)?[a-z]+-[0-9]+")


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


class BucketPlace(NamedTuple):
    """The address of a bucket's objects, and the region and service to sign requests for."""

    endpoint: Endpoint
    region: str
    service: str = "s3"


def split_url(url: str) -> tuple[str, str]:
    """Return bucket and key of a URL such as `oss://bucket/some/key`. Raises OptionError if one is missing."""
    # ossfs puts a slash before the bucket.
    path = url.partition("://")[2].lstrip("/")
    if not path.startswith("arn:"):
        bucket, _, key = path.partition("/")
    elif match := _ARN.match(path):
        bucket, key = match[0], path[match.end() :].removeprefix("/")
    else:
        raise OptionError(
            f"s3://{path}: give the ARN of an access point and a key, as in "
            "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/name/folder/name.jpg"
        )
    if not bucket or not key:
        raise OptionError(f"{url}: give a bucket and a key, as in oss://bucket/folder/name.jpg")
    return bucket, key


def needs_vendor(bucket: str) -> bool:
    """Return whether only botocore can sign requests: sessions of S3 Express, SigV4A of multi-region access points."""
    return bucket.endswith(_EXPRESS) or (bucket.startswith("arn:") and bucket.split(":")[3] == "")


class S3Endpoints:
    """The addresses of S3 buckets, from options, the environment and AWS's shared configuration.

    Raises OptionError for settings that are malformed or contradict each other.

    Args:
        endpoint, addressing_style: the options of these names; None if not given.
        scheme: the scheme of endpoints without one.
        profile: the result of `aws_profile`.
    """

    def __init__(
        self, endpoint: str | None, addressing_style: str | None, scheme: str, profile: Mapping[str, Any]
    ) -> None:
        nested = profile.get("s3")
        nested = nested if isinstance(nested, Mapping) else {}
        self._is_fips = _switch("AWS_USE_FIPS_ENDPOINT", "use_fips_endpoint", profile)
        self._is_dual = _switch("AWS_USE_DUALSTACK_ENDPOINT", "use_dualstack_endpoint", profile, nested)
        self._is_fast = _switch("", "use_accelerate_endpoint", profile, nested)
        self._uses_arn_region = _switch("AWS_S3_USE_ARN_REGION", "s3_use_arn_region", profile, default=True)
        given = endpoint or _configured_endpoint(profile)
        self._endpoint = None if given is None else parse_endpoint(given, scheme)
        self._scheme = scheme
        style = addressing_style or nested.get("addressing_style") or "auto"
        if style not in ("path", "virtual", "auto"):
            raise OptionError(f"addressing_style={style!r}: give 'path', 'virtual' or 'auto'")
        self._is_virtual = style == "virtual" or (style == "auto" and given is None)
        self._is_path = style == "path"
        switches = {"FIPS": self._is_fips, "dual-stack": self._is_dual, "acceleration": self._is_fast}
        unusual = [name for name, is_on in switches.items() if is_on]
        self._is_unusual = bool(unusual)
        if given is not None and unusual:
            raise OptionError(
                f"{' and '.join(unusual)} with the endpoint {given!r}: only AWS has such endpoints; unset one of them "
                "(options, AWS_USE_* and AWS_ENDPOINT_URL* variables, ~/.aws/config)"
            )
        self._places: dict[tuple[str, str], BucketPlace] = {}

    def place(self, bucket: str, region: str) -> BucketPlace:
        """Return the address of `bucket`, assuming that it is in `region`; an access point's ARN names its own.

        Raises:
            OptionError: there are no such servers.
            MissingExtraError: botocore, which has the rules, is not installed.
        """
        try:
            return self._places[bucket, region]
        except KeyError:
            check_url(f"s3://{bucket}")
            is_usual_server = self._endpoint is not None or _USUAL_REGION.fullmatch(region)
            is_special = bucket.startswith("arn:") or bucket.endswith((*_EXPRESS, *_OUTPOSTS))
            by_rules = self._is_unusual or is_special or not is_usual_server
            place = self._by_rules(bucket, region) if by_rules else self._usual(bucket, region)
            return self._places.setdefault((bucket, region), place)

    def _usual(self, bucket: str, region: str) -> BucketPlace:
        suffix = ".cn" if region.startswith("cn-") else ""
        endpoint = self._endpoint or parse_endpoint(f"s3.{region}.amazonaws.com{suffix}", self._scheme)
        return BucketPlace(endpoint.of_bucket(bucket, is_virtual=self._is_virtual), region)

    def _by_rules(self, bucket: str, region: str) -> BucketPlace:
        custom = {}
        if self._endpoint is not None:
            origin, prefix = self._endpoint
            custom = {"Endpoint": f"{'https' if origin.is_tls else 'http'}://{origin.host_header}{prefix}"}
        try:
            found = _rules().resolve_endpoint(
                Bucket=bucket,
                Region=region,
                UseFIPS=self._is_fips,
                UseDualStack=self._is_dual,
                Accelerate=self._is_fast,
                # As botocore, which ignores the style of addresses for an ARN.
                ForcePathStyle=self._is_path and not bucket.startswith("arn:"),
                UseGlobalEndpoint=False,
                UseArnRegion=self._uses_arn_region,
                DisableMultiRegionAccessPoints=False,
                DisableAccessPoints=False,
                **custom,
            )
        except MissingExtraError:
            raise
        except Exception as error:  # one of botocore, which need not be installed
            raise OptionError(f"s3://{bucket}, region {region}: {error}; correct the address or the region") from error
        schemes = found.properties.get("authSchemes") or [{"name": "sigv4"}]
        scheme: dict[str, Any] | None = next((one for one in schemes if one["name"] == "sigv4"), None)
        if scheme is None:
            raise OptionError(f"s3://{bucket}: its requests are signed by {schemes[0]['name']}, which is not supported")
        url = found.url if self._scheme == "https" or custom else found.url.replace("https://", "http://", 1)
        return BucketPlace(
            parse_endpoint(url), scheme.get("signingRegion") or region, scheme.get("signingName") or "s3"
        )


@functools.lru_cache(maxsize=1)
def _rules() -> Any:
    """botocore's rules for S3. Raises MissingExtraError."""
    try:
        import botocore.session
        from botocore.endpoint_provider import EndpointProvider
    except ImportError as error:
        raise MissingExtraError(
            "access points, S3 Express, FIPS, dual-stack and accelerated endpoints and regions of other partitions "
            f"need botocore's rules: {error}; pip install 'torch_dpflow[s3]'"
        ) from error
    loader = botocore.session.get_session().get_component("data_loader")
    rules = loader.load_service_model("s3", "endpoint-rule-set-1")
    return EndpointProvider(rules, loader.load_data("partitions"))


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


def _switch(
    variable: str,
    name: str,
    profile: Mapping[str, Any],
    nested: Mapping[str, Any] | None = None,
    *,
    default: bool = False,
) -> bool:
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
    return default
