"""S3 as far as a GET goes: signatures, regions and sessions are checked, and refused as AWS refuses them."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler

from tests.datasets.storage.web_server import reply, serve_ranges
from torch_dpflow.datasets.storage.credentials import Credentials
from torch_dpflow.datasets.storage.object_stores import sign_s3

_SCOPE = re.compile(r"Credential=([^/]+)/\d{8}/([^/]+)/s3/aws4_request")


class SignedS3:
    """What a web server answers: `data` for every key, to who signs with `accepted` for `region`."""

    def __init__(self, data: bytes, accepted: Credentials, region: str = "us-east-1") -> None:
        self.data = data
        self.accepted = accepted
        self.region = region
        #: whether another region is told of by a redirect, as by S3's oldest endpoint, or by a refusal
        self.redirects = False

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        match = _SCOPE.search(handler.headers.get("Authorization", ""))
        keys, token = self.accepted, handler.headers.get("x-amz-security-token")
        if match is None:
            _refuse(handler, 403, "AccessDenied")
        elif match[2] != self.region and self.redirects:
            reply(handler, 301, x_amz_bucket_region=self.region)
        elif match[2] != self.region:
            _refuse(handler, 400, "AuthorizationHeaderMalformed", f"<Region>{self.region}</Region>")
        elif (match[1], token) != (keys.key_id, keys.token):
            _refuse(handler, 400, "ExpiredToken")
        elif handler.headers["Authorization"] != self._signature(handler, keys):
            _refuse(handler, 403, "SignatureDoesNotMatch")
        else:
            serve_ranges(self.data)(handler)

    def _signature(self, handler: BaseHTTPRequestHandler, keys: Credentials) -> str:
        now = datetime.strptime(handler.headers["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)
        return sign_s3(handler.headers["Host"], handler.path, self.region, keys, now)["authorization"]


def _refuse(handler: BaseHTTPRequestHandler, status: int, code: str, more: str = "") -> None:
    reply(handler, status, f"<Error><Code>{code}</Code><Message>no</Message>{more}</Error>".encode())
