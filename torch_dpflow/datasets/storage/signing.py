"""Signatures of GET requests: AWS SigV4, OSS V1 and OSS V4, as headers.

Pure: no sockets and no clock; the time is an argument.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
from datetime import datetime
from email.utils import format_datetime
from urllib.parse import quote

from torch_dpflow.datasets.storage.credentials import Credentials

_EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


def encode_path(path: str) -> str:
    """A path as both vendors sign and send it: %-escapes for all but letters, digits, `-._~` and `/`."""
    return quote(path, safe="/~")


def sign_s3(
    host: str, path: str, region: str, credentials: Credentials, now: datetime, service: str = "s3"
) -> dict[str, str]:
    """Headers of a signed GET of S3's encoded `path` (AWS Signature Version 4). `now` is in UTC."""
    time = _basic_format(now)
    headers = {"host": host, "x-amz-content-sha256": _EMPTY_SHA256, "x-amz-date": time}
    if credentials.token is not None:
        headers["x-amz-security-token"] = credentials.token
    # The names are sorted already, and no value needs folding.
    names = ";".join(headers)
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    canonical = f"GET\n{path}\n\n{lines}\n{names}\n{_EMPTY_SHA256}"
    scope = (time[:8], region, service, "aws4_request")
    signature = _sign_v4("AWS4-HMAC-SHA256", "AWS4" + credentials.secret, scope, time, canonical)
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.key_id}/{'/'.join(scope)}, "
        f"SignedHeaders={names}, Signature={signature}"
    )
    del headers["host"]  # http.client sends it by itself
    return headers


def sign_oss_v1(bucket: str, key: str, credentials: Credentials, now: datetime) -> dict[str, str]:
    """Headers of a GET of an object of OSS, signed with version 1 (HMAC-SHA1). `now` is in UTC."""
    date = format_datetime(now, usegmt=True)
    headers = {"date": date}
    own = ""
    if credentials.token is not None:
        headers["x-oss-security-token"] = credentials.token
        own = f"x-oss-security-token:{credentials.token}\n"
    signed = f"GET\n\n\n{date}\n{own}/{bucket}/{key}"
    digest = hmac.digest(credentials.secret.encode(), signed.encode(), "sha1")
    headers["authorization"] = f"OSS {credentials.key_id}:{base64.b64encode(digest).decode()}"
    return headers


def sign_oss_v4(
    bucket: str, key: str, region: str, credentials: Credentials, now: datetime
) -> dict[str, str]:
    """Headers of a GET of an object of OSS, signed with version 4 (HMAC-SHA256). `now` is in UTC."""
    time = _basic_format(now)
    headers = {"x-oss-content-sha256": "UNSIGNED-PAYLOAD", "x-oss-date": time}
    if credentials.token is not None:
        headers["x-oss-security-token"] = credentials.token
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    canonical = f"GET\n{encode_path(f'/{bucket}/{key}')}\n\n{lines}\n\nUNSIGNED-PAYLOAD"
    scope = (time[:8], region, "oss", "aliyun_v4_request")
    signature = _sign_v4("OSS4-HMAC-SHA256", "aliyun_v4" + credentials.secret, scope, time, canonical)
    headers["authorization"] = (
        f"OSS4-HMAC-SHA256 Credential={credentials.key_id}/{'/'.join(scope)}, Signature={signature}"
    )
    return headers


def _basic_format(now: datetime) -> str:
    """`now` as ISO 8601 without separators; strftime takes ten times as long."""
    return f"{now.year:04d}{now.month:02d}{now.day:02d}T{now.hour:02d}{now.minute:02d}{now.second:02d}Z"


def _sign_v4(algorithm: str, secret: str, scope: tuple[str, ...], time: str, canonical: str) -> str:
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    signed = f"{algorithm}\n{time}\n{'/'.join(scope)}\n{digest}"
    # A copy is cheaper than `hmac.digest`, which also releases the GIL.
    mac = _keyed(secret, scope).copy()
    mac.update(signed.encode())
    return mac.hexdigest()


@functools.lru_cache(maxsize=64)
def _keyed(secret: str, scope: tuple[str, ...]) -> hmac.HMAC:
    """An HMAC with the key of one day, region and service, the same for a day's requests; copy it before use."""
    key = secret.encode()
    for part in scope:
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.new(key, None, "sha256")
