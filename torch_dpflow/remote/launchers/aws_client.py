"""Clients of AWS, the meaning of their errors, and `dpflow deploy lambda`: the only module that imports boto3."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
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

if TYPE_CHECKING:
    from torch_dpflow.remote.launchers.aws_lambda import Lambda

#: What needs boto3, and the extra that installs it.
REQUIRED = ("platform='lambda' needs boto3", "aws")
#: How long to wait for a connection, seconds.
CONNECT_S = 10.0
#: Codes of rejected credentials, some of which have a status of their own.
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
    """A client of one of AWS's services. Thread-safe. No call is tried twice.

    It is created anew, with credentials looked up again, once they were rejected.

    Args:
        service: as boto3 names it.
        region: empty: as AWS's own settings say.
        read_timeout_s: how long a call may take, seconds.
        connections: how many calls there may be at once.

    Raises:
        MissingExtraError: boto3 is not installed.
        OptionError: no region is set.
        DeniedError: AWS's own settings name a profile that does not exist.
    """

    def __init__(self, service: str, region: str, *, read_timeout_s: float, connections: int) -> None:
        require("boto3", *REQUIRED)
        import boto3
        from botocore.config import Config

        self._boto3 = boto3
        self._service = service
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
            #: Where its calls go, and whether that is an emulator of this host.
            url = urlsplit(meta.endpoint_url)
            self.region, self.is_near = str(meta.region_name), is_loopback(meta.endpoint_url)
        if url.scheme != "https" and not self.is_near:  # launch specs have keys
            raise OptionError(f"AWS's settings name {meta.endpoint_url!r} as the service: give https://HOST")

    @contextmanager
    def calling(self, what: str) -> Iterator[Any]:
        """Yield boto3's client and translate its errors. what: begins their messages, as "NAME cannot be started"."""
        try:
            yield self._current()
        except (PlatformError, OptionError):
            raise
        except Exception as error:
            translated = failure(what, error)
            if isinstance(translated, DeniedError):
                with self._lock:
                    self._client = None
            raise translated from error

    def close(self) -> None:
        """Release idle connections; calls under way go on. Idempotent."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _current(self) -> Any:
        with self._lock:  # sessions are not thread-safe
            if self._client is None:
                session = self._boto3.Session(region_name=self._region or None)
                self._client = session.client(self._service, config=self._client_config)
            return self._client


def failure(what: str, error: Exception) -> PlatformError | OptionError:
    """Translate an error of boto3. An unknown kind leaves open whether anything was done."""
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


#: What the image runs: AWS's runtime client, with our handler.
ENTRY_POINT, HANDLER = ("python", "-m", "awslambdaric"), "torch_dpflow.remote.worker.aws_lambda.handler"
#: Timeout of a change to the function, and how often to poll, seconds.
DONE_S, ASK_S = 300.0, 1.0
#: How long one call may take, seconds.
CALL_S = 60.0


def function_of(settings: Lambda, handler: str = HANDLER) -> dict[str, Any]:
    """Return the function's configuration, as AWS's client takes it."""
    vpc = settings.vpc
    return {
        "Role": settings.role,
        # Lambda's own limit comes after the workers', which end by themselves.
        "Timeout": settings.timeout_s,
        "MemorySize": settings.memory_mib,
        "ImageConfig": {"EntryPoint": [*ENTRY_POINT], "Command": [handler]},
        "VpcConfig": {
            "SubnetIds": [*vpc.get("subnets", ())],
            "SecurityGroupIds": [*vpc.get("security_groups", ())],
        },
    }


def deploy(settings: Lambda, image: str, *, dry_run: bool = False, handler: str = HANDLER) -> Iterator[str]:
    """Create the function or update it to these settings; yield what is done, for display.

    Args:
        dry_run: only report what would be done; without credentials nothing is compared.
        handler: runs the launch specs; another one is for tests of the launcher.

    Raises:
        OptionError: there is no image or no role.
        PlatformError: Lambda rejects a call.
    """
    if not image:
        raise OptionError("no image: give --image ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG, of the same region")
    if not settings.role:
        raise OptionError(
            "no role: give the ARN of one that Lambda may assume, as role in [platform.lambda] of dpflow.toml"
        )
    client = _client(settings)
    wanted = function_of(settings, handler)
    try:
        there, done = _there(client, settings), ""
    except DeniedError as error:
        if not dry_run:
            raise
        there, done = None, "created, or changed where it differs"
        yield f"the existing state is unknown: {error}"
    done = done or ("changed" if there else "created")
    yield f"{_place(client, settings)} {'would be ' if dry_run else ''}{done}:"
    has = {} if there is None else {**there["Configuration"], "image": there["Code"].get("ImageUri")}
    yield from [*_changes(has, {"image": image, **wanted})] or ["  nothing differs"]
    if dry_run:
        return
    name = settings.function
    with client.calling(f"function {name!r} cannot be deployed") as lambda_:
        if there is None:
            lambda_.create_function(
                FunctionName=name,
                Description="a worker of torch_dpflow",
                PackageType="Image",
                Code={"ImageUri": image},
                **wanted,
            )
        else:
            lambda_.update_function_configuration(FunctionName=name, **wanted)
            _await_done(client, settings)
            lambda_.update_function_code(FunctionName=name, ImageUri=image)
    _await_done(client, settings)
    yield f"  it is ready; try it with `dpflow check {settings.name}`"


def remove(settings: Lambda, *, dry_run: bool = False) -> Iterator[str]:
    """Remove the function; yield what is done, for display. Raises PlatformError."""
    client = _client(settings)
    try:
        if _there(client, settings) is None:
            yield f"there is no {_place(client, settings)}"
            return
    except DeniedError as error:
        if not dry_run:
            raise
        yield f"the existing state is unknown: {error}"
    if not dry_run:
        with client.calling(f"function {settings.function!r} cannot be removed") as lambda_:
            lambda_.delete_function(FunctionName=settings.function)
    yield f"{_place(client, settings)} {'would be ' if dry_run else ''}removed"


def _client(settings: Lambda) -> AwsClient:
    return AwsClient("lambda", settings.region, read_timeout_s=CALL_S, connections=1)


def _place(client: AwsClient, settings: Lambda) -> str:
    return f"function {settings.function!r} in {client.region}"


def _there(client: AwsClient, settings: Lambda) -> Mapping[str, Any] | None:
    try:
        with client.calling(f"function {settings.function!r} cannot be read") as lambda_:
            found: Mapping[str, Any] = lambda_.get_function(FunctionName=settings.function)
    except RejectedError as error:
        if "ResourceNotFoundException" in str(error):
            return None
        raise
    if found["Configuration"].get("PackageType") != "Image":
        raise OptionError(
            f"{_place(client, settings)} is no container image, and cannot become one: give another name, as function "
            "in [platform.lambda] of dpflow.toml, or remove it"
        )
    return found


def _await_done(client: AwsClient, settings: Lambda) -> None:
    """Wait until the latest change is done. Raises RejectedError if it failed, UnavailableError after a timeout."""
    deadline = time.monotonic() + DONE_S
    while True:
        with client.calling(f"function {settings.function!r} cannot be read") as lambda_:
            result = lambda_.get_function_configuration(FunctionName=settings.function)
        states = {result.get("State", "Active"), result.get("LastUpdateStatus", "Successful")}
        if "Failed" in states:
            why = result.get("StateReason") or result.get("LastUpdateStatusReason", "")
            raise RejectedError(f"{_place(client, settings)} cannot run: {why}")
        if not states & {"Pending", "InProgress"}:
            return
        if time.monotonic() >= deadline:
            raise UnavailableError(f"{_place(client, settings)} is not ready after {DONE_S:g} s; look at AWS's console")
        time.sleep(ASK_S)


def _changes(has: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is to be changed, for display."""
    for key, value in wanted.items():
        old = has.get(key)
        if key == "ImageConfig":
            old = has.get("ImageConfigResponse", {}).get("ImageConfig", old)
        if isinstance(value, dict) and isinstance(old, Mapping):  # Lambda adds fields of its own
            old = {name: old.get(name) for name in value}
        if old != value and (old or any(value.values()) if isinstance(value, dict) else True):
            yield f"  {key}: {value}" if old is None else f"  {key}: {old} -> {value}"
