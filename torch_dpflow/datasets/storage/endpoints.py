"""Endpoints of object stores, and the address of a bucket below them."""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from torch_dpflow.datasets.storage.credentials import aws_setting, nested_aws_setting
from torch_dpflow.datasets.storage.http_connection import Origin
from torch_dpflow.datasets.storage.urls import check_url
from torch_dpflow.errors import MissingExtraError, OptionError

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


#: ARNs that stand in the place of a bucket; the rest of a path is the key.
_ARN = re.compile(
    r"arn:[^:/]+:(?:s3|s3-object-lambda):[^:/]*:[0-9]{12}:accesspoint[:/][^:/]+"
    r"|arn:[^:/]+:s3-outposts:[^:/]+:[0-9]{12}:outpost[:/][^:/]+[:/]accesspoint[:/][^:/]+"
)
#: Endings of directory buckets (S3 Express, also their access points), whose requests need a session.
_EXPRESS = ("--x-s3", "--xa-s3")
#: Endings of access points on Outposts.
_OUTPOSTS = ("--op-s3",)
#: Regions whose servers have the usual names; those of others, such as us-iso-east-1, are in botocore's rules.
_USUAL_REGION = re.compile("(us|eu|ap|sa|ca|me|af|il|mx|cn)-(gov-)?[a-z]+-[0-9]+")


class BucketPlace(NamedTuple):
    """Where the objects of a bucket are, and for what requests are signed."""

    endpoint: Endpoint
    region: str
    #: the service in the signature
    service: str = "s3"


def split_arn(path: str) -> tuple[str, str]:
    """The ARN of an access point, and the key, of `ARN/key`. Raises OptionError for another ARN."""
    match = _ARN.match(path)
    if match is None:
        raise OptionError(
            f"s3://{path}: give the ARN of an access point and a key, as in "
            "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/name/folder/name.jpg"
        )
    return match[0], path[match.end() :].removeprefix("/")


def needs_vendor(bucket: str) -> bool:
    """Whether only botocore signs requests for it: sessions of S3 Express, and SigV4A of multi-region access points."""
    return bucket.endswith(_EXPRESS) or (bucket.startswith("arn:") and bucket.split(":")[3] == "")


class S3Endpoints:
    """The place of each bucket, from options, the environment and AWS's shared configuration.

    `endpoint` and `addressing_style` are options; None: not given. `scheme` is that of endpoints without one.

    Raises OptionError for settings that are no setting, or contradict each other.
    """

    def __init__(
        self, endpoint: str | None, addressing_style: str | None, scheme: str, environ: Mapping[str, str]
    ) -> None:
        nested = nested_aws_setting("s3", environ)
        self._is_fips = _switch("AWS_USE_FIPS_ENDPOINT", "use_fips_endpoint", environ)
        self._is_dual = _switch("AWS_USE_DUALSTACK_ENDPOINT", "use_dualstack_endpoint", environ, nested)
        self._is_fast = _switch("", "use_accelerate_endpoint", environ, nested)
        self._uses_arn_region = _switch("AWS_S3_USE_ARN_REGION", "s3_use_arn_region", environ, default=True)
        given = endpoint or _configured_endpoint(environ)
        self._endpoint = None if given is None else parse_endpoint(given, scheme)
        self._scheme = scheme
        style = addressing_style or nested.get("addressing_style") or "auto"
        if style not in ("path", "virtual", "auto"):
            raise OptionError(f"addressing_style={style!r}: give 'path', 'virtual' or 'auto'")
        self._is_virtual = style == "virtual" or (style == "auto" and given is None)
        self._is_path = style == "path"
        unusual = {"FIPS": self._is_fips, "dual-stack": self._is_dual, "acceleration": self._is_fast}
        #: whether the usual names are not those of the servers
        self._is_unusual = any(unusual.values())
        if given is not None and self._is_unusual:
            names = " and ".join(name for name, is_on in unusual.items() if is_on)
            raise OptionError(
                f"{names} with the endpoint {given!r}: only AWS has such endpoints; unset one of them (options, "
                "AWS_USE_* and AWS_ENDPOINT_URL* variables, ~/.aws/config)"
            )
        self._places: dict[tuple[str, str], BucketPlace] = {}

    def place(self, bucket: str, region: str) -> BucketPlace:
        """Where `bucket` is, if it is in `region`; an access point's ARN names its own.

        Raises:
            OptionError: there are no such servers.
            MissingExtraError: botocore, which has the rules, is not installed.
        """
        try:
            return self._places[bucket, region]
        except KeyError:
            check_url(f"s3://{bucket}")
            place = (
                self._by_rules(bucket, region)
                if self._has_rules(bucket, region)
                else self._usual(bucket, region)
            )
            return self._places.setdefault((bucket, region), place)

    def _has_rules(self, bucket: str, region: str) -> bool:
        is_usual = self._endpoint is not None or _USUAL_REGION.fullmatch(region)
        return (
            self._is_unusual
            or not is_usual
            or bucket.startswith("arn:")
            or bucket.endswith((*_EXPRESS, *_OUTPOSTS))
        )

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
                # As botocore, which ignores the style where an ARN stands.
                ForcePathStyle=self._is_path and not bucket.startswith("arn:"),
                UseGlobalEndpoint=False,
                UseArnRegion=self._uses_arn_region,
                DisableMultiRegionAccessPoints=False,
                DisableAccessPoints=False,
                **custom,
            )
        except MissingExtraError:
            raise
        except Exception as error:  # botocore's, which need not be installed
            raise OptionError(
                f"s3://{bucket}, region {region}: {error}; correct the address or the region"
            ) from error
        schemes = found.properties.get("authSchemes") or [{"name": "sigv4"}]
        scheme: dict[str, Any] | None = next((one for one in schemes if one["name"] == "sigv4"), None)
        if scheme is None:
            raise OptionError(
                f"s3://{bucket}: its requests are signed by {schemes[0]['name']}, which is not supported here"
            )
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


def _configured_endpoint(environ: Mapping[str, str]) -> str | None:
    if _switch("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "ignore_configured_endpoint_urls", environ):
        return None
    services = aws_setting("services", environ)
    return (
        environ.get("AWS_ENDPOINT_URL_S3")
        or environ.get("AWS_ENDPOINT_URL")
        or (
            nested_aws_setting("s3", environ, f"services {services}").get("endpoint_url")
            if services
            else None
        )
        or aws_setting("endpoint_url", environ)
        or None
    )


def _switch(
    variable: str,
    name: str,
    environ: Mapping[str, str],
    nested: Mapping[str, str] | None = None,
    *,
    default: bool = False,
) -> bool:
    """A setting of AWS that is on or off. Raises OptionError for another word, which botocore takes for "off"."""
    for where, text in (
        (variable, environ.get(variable) if variable else None),
        (f"{name} in ~/.aws/config", aws_setting(name, environ)),
        (f"s3.{name} in ~/.aws/config", (nested or {}).get(name)),
    ):
        if text:
            if text.lower() not in ("true", "false"):
                raise OptionError(f"{where}={text!r}: give true or false")
            return text.lower() == "true"
    return default
