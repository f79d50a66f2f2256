"""Verifies version 4 of AWS's signatures, after AWS's description of it and without its library."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from urllib.parse import quote, urlsplit

#: How far the clocks of a client and AWS may be apart, seconds.
SKEW_S = 300.0
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(?P<key>[^/]+)/(?P<scope>[^,]+), *SignedHeaders=(?P<headers>[^,]+), *"
    r"Signature=(?P<signature>[0-9a-f]{64})"
)


@dataclass
class Credentials:
    """What a client may sign with."""

    key: str
    secret: str
    #: Of temporary credentials; None: they have none.
    token: str | None = None
    expired: bool = False


class Refusal(Exception):
    """A request is not let in: AWS's code for that, and its text."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, text)
        self.code, self.text = code, text


def verify(
    method: str,
    target: str,
    headers: Mapping[str, str],
    body: bytes,
    known: Mapping[str, Credentials],
    scope: str,
) -> None:
    """Raise Refusal unless a request was signed by one of the known. scope: REGION/SERVICE."""
    found = _AUTHORIZATION.fullmatch(headers.get("authorization", ""))
    if found is None:
        raise Refusal("MissingAuthenticationTokenException", "Missing Authentication Token")
    owner = known.get(found["key"])
    if owner is None or headers.get("x-amz-security-token") != owner.token:
        raise Refusal("UnrecognizedClientException", "The security token included in the request is invalid.")
    if owner.expired:
        raise Refusal("ExpiredTokenException", "The security token included in the request is expired")
    date = headers.get("x-amz-date", "")
    signed_at = datetime.strptime(date, "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc).timestamp()
    if abs(signed_at - time.time()) > SKEW_S:
        raise Refusal("InvalidSignatureException", f"Signature expired: {date}")
    if found["scope"] != f"{date[:8]}/{scope}/aws4_request":
        raise Refusal("InvalidSignatureException", f"Credential should be scoped to {scope}")
    names = found["headers"].split(";")
    required = {"host", "x-amz-date", *(["x-amz-security-token"] if owner.token else [])}
    if not required <= {*names}:
        raise Refusal("InvalidSignatureException", f"{required - {*names}} must be signed")
    url = urlsplit(target)
    canonical = [
        method,
        quote(url.path, safe="/-_.~"),
        "&".join(sorted(url.query.split("&"))),
        *[f"{name}:{' '.join(headers[name].split())}" for name in names],
        "",
        found["headers"],
        hashlib.sha256(body).hexdigest(),
    ]
    digest = hashlib.sha256("\n".join(canonical).encode()).hexdigest()
    key = f"AWS4{owner.secret}".encode()
    for part in found["scope"].split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    to_sign = "\n".join(["AWS4-HMAC-SHA256", date, found["scope"], digest])
    if not hmac.compare_digest(hmac.new(key, to_sign.encode(), "sha256").hexdigest(), found["signature"]):
        raise Refusal("InvalidSignatureException", "The request signature we calculated does not match")
