"""Where the objects of S3 and OSS are found, and how a request for one is signed."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Protocol
from urllib.parse import urlsplit

from torch_dpflow.datasets.storage.connections import Origin
from torch_dpflow.datasets.storage.credentials import (
    Credentials,
    CredentialSource,
    aws_setting,
    find_oss_credentials,
    find_s3_credentials,
    no_credentials,
    ossutil_settings,
)
from torch_dpflow.datasets.storage.fsspec_options import endpoint_of
from torch_dpflow.datasets.storage.signing import encode_path, sign_oss_v1, sign_oss_v4, sign_s3
from torch_dpflow.errors import OptionError

_COMMON_OPTIONS = frozenset({"key", "secret", "token", "anon", "endpoint", "endpoint_url", "region"})
#: Options that we understand, by the same names for both. With any other the vendor's own client must read.
S3_OPTIONS = _COMMON_OPTIONS | {"addressing_style"}
OSS_OPTIONS = _COMMON_OPTIONS


@dataclass(frozen=True)
class Request:
    """A GET, ready to be sent."""

    origin: Origin
    #: the path as it stands in the request line
    target: str
    headers: Mapping[str, str]


class Service(Protocol):
    """A vendor's way to name objects and to sign requests."""

    def origin(self, url: str) -> Origin:
        """The server to connect to."""

    def request(self, url: str) -> Request:
        """A signed request for the whole object, good for the next minutes. Raises AccessDeniedError."""

    def renew(self) -> bool:
        """Look for other credentials; whether there are any."""


class S3Service:
    """S3 and what speaks its protocol. `options` are those in S3_OPTIONS.

    With an `endpoint` the bucket goes into the path, which every such server understands, unless
    `addressing_style` is "virtual"; at AWS itself it goes into the host's name.
    """

    def __init__(self, options: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> None:
        self._credentials = CredentialSource(
            lambda: None if options.get("anon") else find_s3_credentials(options, environ)
        )
        self._is_anonymous = bool(options.get("anon"))
        self._region: str = (
            options.get("region")
            or environ.get("AWS_REGION")
            or environ.get("AWS_DEFAULT_REGION")
            or aws_setting("region", environ)
            or "us-east-1"
        )
        endpoint = (
            endpoint_of("s3", options)
            or environ.get("AWS_ENDPOINT_URL_S3")
            or environ.get("AWS_ENDPOINT_URL")
            or aws_setting("endpoint_url", environ)
        )
        style = options.get("addressing_style") or ("path" if endpoint else "virtual")
        if style not in ("path", "virtual"):
            raise OptionError(f"addressing_style={style!r}: give 'path' or 'virtual'")
        self._is_virtual = style == "virtual"
        self._endpoint = _parse_endpoint(endpoint or f"https://s3.{self._region}.amazonaws.com")

    def origin(self, url: str) -> Origin:
        return self._locate(split_url(url)[0])[0]

    def request(self, url: str) -> Request:
        bucket, key = split_url(url)
        origin, prefix = self._locate(bucket)
        path = encode_path(f"{prefix}/{key}")
        if self._is_anonymous:
            return Request(origin, path, {})
        credentials = self._credentials.get()
        if credentials is None:
            raise no_credentials(url, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile")
        now = datetime.now(timezone.utc)
        return Request(origin, path, sign_s3(_host_header(origin), path, self._region, credentials, now))

    def renew(self) -> bool:
        return not self._is_anonymous and self._credentials.renew()

    def _locate(self, bucket: str) -> tuple[Origin, str]:
        # No certificate covers two labels below the endpoint, so a bucket with a dot goes into the path.
        is_virtual = self._is_virtual and not ("." in bucket and self._endpoint.is_tls)
        return _locate(self._endpoint, bucket, is_virtual=is_virtual)


class OSSService:
    """Alibaba Cloud OSS. `options` are those in OSS_OPTIONS.

    Requests are signed with version 4 where a `region` is known (`region`, OSS_REGION), else with version 1.
    """

    def __init__(self, options: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> None:
        settings = ossutil_settings(environ)
        endpoint = endpoint_of("oss", options) or environ.get("OSS_ENDPOINT") or settings.get("endpoint")
        if not endpoint:
            raise OptionError(
                "oss:// needs the endpoint of the bucket's region: give storage_options={'endpoint': "
                "'https://oss-cn-hangzhou.aliyuncs.com'} or set OSS_ENDPOINT"
            )
        self._endpoint = _parse_endpoint(endpoint)
        self._region = options.get("region") or environ.get("OSS_REGION") or settings.get("region")
        self._is_anonymous = bool(options.get("anon"))
        self._credentials = CredentialSource(
            lambda: None if options.get("anon") else find_oss_credentials(options, environ)
        )
        self._is_virtual = not _is_address(self._endpoint.host)

    def origin(self, url: str) -> Origin:
        return _locate(self._endpoint, split_url(url)[0], is_virtual=self._is_virtual)[0]

    def request(self, url: str) -> Request:
        bucket, key = split_url(url)
        origin, prefix = _locate(self._endpoint, bucket, is_virtual=self._is_virtual)
        path = encode_path(f"{prefix}/{key}")
        if self._is_anonymous:
            return Request(origin, path, {})
        credentials = self._credentials.get()
        if credentials is None:
            raise no_credentials(url, "OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET")
        return Request(origin, path, self._sign(bucket, key, credentials))

    def renew(self) -> bool:
        return not self._is_anonymous and self._credentials.renew()

    def _sign(self, bucket: str, key: str, credentials: Credentials) -> dict[str, str]:
        now = datetime.now(timezone.utc)
        if self._region is None:
            return sign_oss_v1(bucket, key, credentials, now)
        return sign_oss_v4(bucket, key, self._region, credentials, now)


def split_url(url: str) -> tuple[str, str]:
    """Bucket and key of a URL such as `oss://bucket/some/key`. Raises OptionError where one is missing."""
    # ossfs puts a slash before the bucket.
    bucket, _, key = url.partition("://")[2].lstrip("/").partition("/")
    if not bucket or not key:
        raise OptionError(f"{url}: give a bucket and a key, as in oss://bucket/folder/name.jpg")
    return bucket, key


def _locate(endpoint: Origin, bucket: str, *, is_virtual: bool) -> tuple[Origin, str]:
    if is_virtual:
        return endpoint._replace(host=f"{bucket}.{endpoint.host}"), ""
    return endpoint, f"/{bucket}"


def _parse_endpoint(endpoint: str) -> Origin:
    parts = urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise OptionError(f"endpoint {endpoint!r}: give http:// or https:// and a host, without a path")
    is_tls = parts.scheme == "https"
    return Origin(is_tls, parts.hostname, parts.port or (443 if is_tls else 80))


def _host_header(origin: Origin) -> str:
    """The Host header as http.client writes it."""
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    is_default = origin.port == (443 if origin.is_tls else 80)
    return host if is_default else f"{host}:{origin.port}"


def _is_address(host: str) -> bool:
    """Whether it has no name under which a bucket could have one of its own."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True
