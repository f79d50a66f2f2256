"""Checks the signature of a request as Alibaba Cloud's API gateway does: ACS3-HMAC-SHA256."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from urllib.parse import parse_qsl, quote

ALGORITHM = "ACS3-HMAC-SHA256"
#: How far the clock of who signs may be away.
SKEW = timedelta(minutes=15)


def key_id_of(headers: Mapping[str, str]) -> str:
    """Whose key signs; empty if none does."""
    return _part(headers.get("Authorization", ""), "Credential")


def is_signed(method: str, target: str, headers: Mapping[str, str], body: bytes, secret: str) -> bool:
    """Whether a request is whole, recent and signed with this secret. headers: of any case."""
    path, _, query = target.partition("?")
    authorization = headers.get("Authorization", "")
    signed = _part(authorization, "SignedHeaders")
    needed = {"host", "x-acs-action", "x-acs-content-sha256", "x-acs-date", "x-acs-signature-nonce"}
    if not authorization.startswith(ALGORITHM) or not needed <= {*signed.split(";")}:
        return False
    digest = hashlib.sha256(body).hexdigest()
    when = datetime.strptime(headers["x-acs-date"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    if headers["x-acs-content-sha256"] != digest or abs(datetime.now(timezone.utc) - when) > SKEW:
        return False
    pairs = sorted(parse_qsl(query, keep_blank_values=True))
    asked = "&".join(f"{quote(key, safe='~')}={quote(value, safe='~')}" for key, value in pairs)
    named = "".join(f"{name}:{(headers.get(name) or '').strip()}\n" for name in signed.split(";"))
    canonical = "\n".join((method, path, asked, named, signed, digest))
    text = f"{ALGORITHM}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    mine = hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()
    return hmac.compare_digest(mine, _part(authorization, "Signature"))


def _part(authorization: str, name: str) -> str:
    for part in authorization.partition(" ")[2].split(","):
        if part.startswith(f"{name}="):
            return part.partition("=")[2]
    return ""
