"""Checks the signatures of requests: OSS header signatures, version 1 and version 4."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from urllib.parse import quote

from tests.support.oss_server.messages import OSSError, Request

#: How far a request's clock may be from ours, as at OSS.
CLOCK_SKEW = timedelta(minutes=15)

#: Parameters that version 1 signs; the others may be changed by anybody on the way.
SUBRESOURCES = frozenset(
    (
        "acl",
        "append",
        "bucketInfo",
        "continuation-token",
        "delete",
        "location",
        "objectMeta",
        "partNumber",
        "position",
        "response-cache-control",
        "response-content-disposition",
        "response-content-encoding",
        "response-content-language",
        "response-content-type",
        "response-expires",
        "security-token",
        "stat",
        "tagging",
        "uploadId",
        "uploads",
        "versionId",
        "versions",
        "x-oss-process",
    )
)

_V1 = re.compile(r"OSS ([^:]+):(.+)")
_V4 = re.compile(
    r"OSS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/oss/aliyun_v4_request, ?"
    r"(?:AdditionalHeaders=([^,]*), ?)?Signature=([0-9a-f]{64})(?:, ?AdditionalHeaders=(.*))?"
)


def check_signature(
    request: Request, secrets: Mapping[str, str], *, token: str | None = None, now: datetime | None = None
) -> None:
    """Raise OSSError unless the request is signed with one of `secrets` (key id -> secret), and now.

    With `token`, the request must carry that security token as well.
    """
    authorization = request.headers.get("authorization", "")
    if token is not None and request.headers.get("x-oss-security-token") != token:
        raise OSSError(403, "InvalidSecurityToken", "The security token you provided is invalid.")
    now = datetime.now(timezone.utc) if now is None else now
    if match := _V1.fullmatch(authorization):
        _check_clock(_date_of_v1(request), now)
        expected = sign_v1(request, _secret(secrets, match[1]))
        given = match[2]
    elif match := _V4.fullmatch(authorization):
        _check_clock(_date_of_v4(request, match[2]), now)
        extra = match[4] or match[6] or ""
        expected = sign_v4(request, _secret(secrets, match[1]), region=match[3], additional=extra)
        given = match[5]
    else:
        raise OSSError(403, "AccessDenied", "The request carries no signature of a known version.")
    if not hmac.compare_digest(given.encode(), expected.encode()):
        raise OSSError(403, "SignatureDoesNotMatch", "The request signature we calculated does not match.")


def sign_v1(request: Request, secret: str) -> str:
    """The signature of version 1: HMAC-SHA1 over method, digests, date, headers and resource; base64."""
    subresources = sorted((name, value) for name, value in request.params.items() if name in SUBRESOURCES)
    query = "&".join(f"{name}={value}" if value else name for name, value in subresources)
    resource = f"/{request.bucket}/{request.key}" if request.bucket else "/"
    headers = "".join(f"{name}:{request.headers[name]}\n" for name in _oss_headers(request))
    date = request.headers.get("x-oss-date") or request.headers.get("date", "")
    signed = "\n".join(
        (
            request.method,
            request.headers.get("content-md5", ""),
            request.headers.get("content-type", ""),
            date,
            headers + resource + (f"?{query}" if query else ""),
        )
    )
    return base64.b64encode(hmac.new(secret.encode(), signed.encode(), hashlib.sha1).digest()).decode()


def sign_v4(request: Request, secret: str, *, region: str, additional: str = "") -> str:
    """The signature of version 4: HMAC-SHA256 keyed for a date, region and product; hexadecimal."""
    also = sorted(filter(None, additional.split(";")))
    names = {name for name in ("content-type", "content-md5", *also) if name in request.headers}
    signed_headers = sorted(names.union(_oss_headers(request)))
    path = f"/{request.bucket}/{request.key}" if request.bucket else "/"
    params = sorted((quote(name, safe="~"), quote(value, safe="~")) for name, value in request.params.items())
    canonical = "\n".join(
        (
            request.method,
            quote(path, safe="/~"),
            "&".join(f"{name}={value}" if value else name for name, value in params),
            "".join(f"{name}:{request.headers[name].strip()}\n" for name in signed_headers),
            ";".join(also),
            request.headers.get("x-oss-content-sha256", ""),
        )
    )
    time = request.headers.get("x-oss-date", "")
    scope = f"{time[:8]}/{region}/oss/aliyun_v4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    key = f"aliyun_v4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signed = f"OSS4-HMAC-SHA256\n{time}\n{scope}\n{digest}"
    return hmac.new(key, signed.encode(), hashlib.sha256).hexdigest()


def _oss_headers(request: Request) -> list[str]:
    return sorted(name for name in request.headers if name.startswith("x-oss-"))


def _secret(secrets: Mapping[str, str], key_id: str) -> str:
    try:
        return secrets[key_id]
    except KeyError:
        raise OSSError(403, "InvalidAccessKeyId", "The OSS Access Key Id you provided is unknown.") from None


def _date_of_v1(request: Request) -> datetime:
    try:
        return parsedate_to_datetime(request.headers.get("x-oss-date") or request.headers.get("date", ""))
    except ValueError:
        raise OSSError(403, "AccessDenied", "OSS authentication requires a valid Date.") from None


def _date_of_v4(request: Request, day: str) -> datetime:
    text = request.headers.get("x-oss-date", "")
    try:
        date = datetime.strptime(text, "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)
    except ValueError:
        raise OSSError(403, "AccessDenied", "OSS authentication requires a valid x-oss-date.") from None
    if not text.startswith(day):
        raise OSSError(403, "AccessDenied", "The credential's scope is of another day.")
    return date


def _check_clock(date: datetime, now: datetime) -> None:
    if abs(date - now) > CLOCK_SKEW:
        raise OSSError(403, "RequestTimeTooSkewed", "The request's time and ours differ too much.")
