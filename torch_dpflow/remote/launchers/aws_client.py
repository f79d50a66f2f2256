"""Client of AWS Lambda, and translation of boto3's errors. No other module imports boto3."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from torch_dpflow._core.checks import is_loopback
from torch_dpflow.errors import (
    AnswerLostError,
    DeniedError,
    ExpiredError,
    OptionError,
    PlatformError,
    QuotaError,
    RejectedError,
    ThrottledError,
    UnavailableError,
)
from torch_dpflow.remote.launchers.contract import require, seconds_of

#: Arguments of `require`: what needs boto3, and the extra that installs it.
REQUIRED = ("platform='lambda' needs boto3", "aws")
#: How long to wait for a connection, in seconds.
CONNECT_S = 10.0
#: Codes of rejected credentials, some of which have a special status.
_DENIED = {
    "IncompleteSignature",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "MissingAuthenticationTokenException",
    "UnrecognizedClientException",
}
_NO_RIGHT = {"AccessDenied", "AccessDeniedException"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException"}
#: Concurrency limits, by the code, or by the reason of a TooManyRequestsException.
_FULL = {
    "ConcurrentInvocationLimitExceeded",
    "ReservedFunctionConcurrentInvocationLimitExceeded",
    "ENILimitReachedException",
    "ServiceQuotaExceededException",
    "SubnetIPAddressLimitReachedException",
}
#: Rejections that pass: the function is being created, updated or woken.
_PASSING = {"ResourceConflictException", "ResourceNotReadyException", "SnapStartNotReadyException"}
#: botocore's errors by their meaning: of credentials; before anything was sent; after.
_NO_CREDENTIALS = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ProfileNotFound",
    "TokenRetrievalError",
    "SSOError",
    "LoginError",
)
_NOT_SENT = ("EndpointConnectionError", "ConnectTimeoutError", "ProxyConnectionError", "SSLError")
_SENT = ("ReadTimeoutError", "ConnectionClosedError", "HTTPClientError", "ResponseStreamingError")
_CHAIN = "AWS's own chain: AWS_* variables, ~/.aws, SSO, or the role of this host or container"
_CHECK = "`aws sts get-caller-identity` says whose they are"


class AwsClient:
    """Client of AWS Lambda. Thread-safe. No call is retried.

    After rejected credentials, boto3's client is created again and the credentials are looked up again.

    Args:
        region: AWS region; empty: the region in AWS's own settings.
        read_timeout_s: how long to wait for the answer to a call, in seconds.
        connections: maximum number of connections to keep open for later calls.

    Raises:
        MissingExtraError: boto3 is not installed.
        OptionError: no region is set, or AWS's own settings name a remote service without https.
        PlatformError: AWS's own settings cannot be used, for example because they name a missing profile.
    """

    def __init__(self, region: str, *, read_timeout_s: float, connections: int) -> None:
        require("boto3", *REQUIRED)
        import boto3
        from botocore.config import Config

        self._boto3 = boto3
        self._region = region
        self._client_config = Config(
            connect_timeout=CONNECT_S,
            read_timeout=read_timeout_s,
            retries={"total_max_attempts": 1, "mode": "standard"},
            max_pool_connections=connections,
            tcp_keepalive=True,
        )
        self._lock = threading.Lock()
        self._client: Any = None
        with self.calling("AWS's settings cannot be used"):
            meta = self._current().meta
            #: Where calls go: the region, and whether to an emulator on this host.
            url = urlsplit(meta.endpoint_url)
            self.region, self.is_near = str(meta.region_name), is_loopback(meta.endpoint_url)
        if url.scheme != "https" and not self.is_near:  # launch specs have keys
            raise OptionError(f"AWS's settings name {meta.endpoint_url!r} as the service: give https://HOST")

    @contextmanager
    def calling(self, what: str) -> Iterator[Any]:
        """Yield boto3's client; translate errors that boto3 raises in the body. what: as in `aws_error`."""
        try:
            yield self._current()
        except (PlatformError, OptionError):
            raise
        except Exception as error:
            translated = aws_error(what, error)
            if isinstance(translated, DeniedError):
                with self._lock:
                    self._client = None
            raise translated from error

    def close(self) -> None:
        """Release idle connections; running calls continue. Idempotent."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _current(self) -> Any:
        with self._lock:  # sessions are not thread-safe
            if self._client is None:
                session = self._boto3.Session(region_name=self._region or None)
                self._client = session.client("lambda", config=self._client_config)
            return self._client


def aws_error(what: str, error: Exception) -> PlatformError | OptionError:
    """Translate an error of boto3. AnswerLostError: the call may have been executed. what: beginning of the text."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "ClientError" in kinds:
        return _of_answer(what, error)
    text = f"{what}: {type(error).__name__}: {str(error)[:600]}"
    if "NoRegionError" in kinds:
        return OptionError(f"{what}: no region is set; give `region` in [platform.lambda], or AWS_DEFAULT_REGION")
    if kinds & {*_NO_CREDENTIALS}:
        return DeniedError(f"{text} (credentials are looked for in {_CHAIN}): give some there")
    if kinds & {*_NOT_SENT}:
        return UnavailableError(text)
    if kinds & {*_SENT} or "BotoCoreError" not in kinds:
        return AnswerLostError(text)
    return RejectedError(text)


def _of_answer(what: str, error: Any) -> PlatformError:
    answer = error.response
    code = str(answer.get("Error", {}).get("Code", ""))
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    reason = str(answer.get("Reason") or code)
    text = f"{what}: {status} {reason}: {str(answer.get('Error', {}).get('Message', ''))[:600]}"
    if {code, reason} & _FULL:
        return QuotaError(f"{text}; give fewer workers, or have the account's concurrency raised")
    if status == 429 or "Throttl" in code:
        return ThrottledError(text, seconds_of(answer.get("retryAfterSeconds")))
    if code in _EXPIRED:
        return ExpiredError(f"{text} (credentials are those of {_CHAIN}): renew them there")
    if code in _NO_RIGHT:
        return DeniedError(f"{text} (credentials are those of {_CHAIN}; {_CHECK}): give them that right")
    if status in (401, 403) or code in _DENIED:
        return DeniedError(f"{text} (credentials are those of {_CHAIN}; {_CHECK}): give others")
    if status >= 500 or code in _PASSING:
        return UnavailableError(text)
    hint = "; create it with `dpflow deploy lambda`" if code == "ResourceNotFoundException" else ""
    return RejectedError(f"{text}{hint}")
