"""Common part of the clients for Alibaba Cloud: credentials, calls without retries, and their errors.

Errors are subclasses of `PlatformError`, chosen by the answer's status and code. Their texts quote nothing of the
request. The vendor's modules are imported by the first call.
"""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch_dpflow.errors import (
    AnswerLostError,
    DeniedError,
    ExpiredError,
    PlatformError,
    QuotaError,
    RejectedError,
    ThrottledError,
    UnavailableError,
)
from torch_dpflow.remote.launchers.contract import line_of

#: Timeouts of a connection, and of the answer to a call that is not a start, in seconds.
CONNECT_S, ANSWER_S = 5.0, 20.0
#: Parts of error codes: of a used-up quota, and of credentials that are wrong, expired or lack a permission.
_QUOTA = ("Exhausted", "Quota", "LimitExceeded", "NoStock")
_DENIED = ("AccessKey", "SecurityToken", "Signature")
_NO_RIGHT = ("AccessDenied", "Forbidden", "Unauthorized", "NoPermission")
#: Loggers with which the vendor's client, and its HTTP library, write tracebacks of what this module reports as an
#: error, and addresses with what was sent.
_LOGGERS = ("credentials", "urllib3.connectionpool")
_CALLS = threading.local()
_KEYS = ("ALIBABA_CLOUD_ACCESS_KEY_ID", "ALIBABA_CLOUD_ACCESS_KEY_SECRET", "ALIBABA_CLOUD_SECURITY_TOKEN")


class MissingError(RejectedError):
    """Error: there is no such function, task or container group."""


class ConflictError(RejectedError):
    """Error: the name is taken, or the object's state does not allow the call."""


class AlibabaClient(ABC):
    """Base class of clients for one service of Alibaba Cloud. Thread-safe. No call is retried.

    Args:
        region: such as "cn-hangzhou".
        endpoint: address of the control plane, `http(s)://HOST[:PORT]`; empty: the region's default.
        subject: name of the object for which calls need permissions, for messages.
    """

    def __init__(self, region: str, endpoint: str, subject: str) -> None:
        self.region, self.endpoint, self._subject = region, endpoint, subject
        self._client: Any = None
        #: Where credentials were looked for, for display.
        self._source = ""

    @property
    @abstractmethod
    def package(self) -> Any:
        """The vendor's package, with the modules `client` and `models`; the first access imports it."""

    def missing(self, code: str) -> str:
        """Return advice to append to a MissingError's text; empty if there is none. code: the platform's error code."""
        return ""

    def call(self, what: str, call: str, *arguments: Any, answer_s: float = ANSWER_S) -> Any:
        """Call a method of the vendor's client with `arguments`, and return its answer. Raises PlatformError.

        what: beginning of error texts, such as "NAME cannot be started".
        call: name of the method, without "_with_options". answer_s: timeout of the answer, in seconds.
        """
        from darabonba.runtime import RuntimeOptions

        runtime = RuntimeOptions(
            autoretry=False,
            max_attempts=1,
            connect_timeout=int(CONNECT_S * 1000),
            read_timeout=int(answer_s * 1000),
        )
        _CALLS.under_way = True
        try:
            client = self._client
            if client is None:
                client = self._client = self._connect()
            method: Callable[..., Any] = getattr(client, f"{call}_with_options")
            return method(*arguments, runtime)
        except Exception as error:
            lost = DeniedError(f"{what}: {error}") if isinstance(error, DeniedError) else self._failure(what, error)
            if isinstance(lost, DeniedError):
                self._client = None  # they are looked up again
            # Not from it: it contains the whole request, with the key of a launch spec.
            raise lost from None
        finally:
            _CALLS.under_way = False

    def _connect(self) -> Any:
        from alibabacloud_credentials.client import Client as Credentials
        from alibabacloud_credentials.models import Config as Keys
        from alibabacloud_tea_openapi.models import Config

        for name in _LOGGERS:
            logging.getLogger(name).addFilter(_is_others)
        key_id, secret, token = (os.environ.get(name, "") for name in _KEYS)
        if key_id and secret:
            # The vendor's chain takes the environment as it was when it was imported.
            self._source = f"the environment ({_KEYS[0]})"
            keys = Credentials(
                Keys(
                    type="sts" if token else "access_key",
                    access_key_id=key_id,
                    access_key_secret=secret,
                    security_token=token or None,
                )
            )
        else:
            self._source = "the vendor's chain: no ALIBABA_CLOUD_ACCESS_KEY_ID, then its files and the machine's role"
            keys = Credentials()
            try:
                keys.get_credential()
            except Exception as error:  # also a machine's role that no server of roles answers for
                raise self._no_credentials(error) from None
        scheme, _, host = self.endpoint.rpartition("://")
        config = Config(credential=keys, region_id=self.region, endpoint=host or None, protocol=scheme or "https")
        return self.package.client.Client(config)

    def _no_credentials(self, error: Exception) -> DeniedError:
        return DeniedError(
            f"no credentials were found in {self._source}; set {_KEYS[0]} and {_KEYS[1]}, or give this machine a role "
            f"({line_of(error)})"
        )

    def _failure(self, what: str, error: Exception) -> PlatformError:
        """Translate an error of the vendor's client to a PlatformError."""
        from alibabacloud_credentials.exceptions import CredentialException
        from darabonba.exceptions import ResponseException
        from requests.exceptions import ConnectTimeout, SSLError
        from urllib3.exceptions import NewConnectionError

        if isinstance(error, ResponseException):
            return self._refusal(what, error)
        chain: list[Any] = [error]
        while chain[-1] is not None and len(chain) < 12:
            one = chain[-1]
            chain.append(getattr(one, "inner_exception", None) or one.__cause__ or one.__context__)
        for one in chain:
            if isinstance(one, CredentialException):
                return DeniedError(f"{what}: {self._no_credentials(one)}")
            reason = getattr(one.args[0] if one is not None and one.args else None, "reason", None)
            if isinstance(one, ConnectTimeout | SSLError) or isinstance(reason, NewConnectionError):
                place = self.endpoint or f"the control plane of {self.region}"
                return UnavailableError(f"{what}: {place} cannot be reached: {type(one).__name__}")
        return AnswerLostError(f"{what}: {line_of(chain[-2])}")

    def _refusal(self, what: str, error: Any) -> PlatformError:
        status, code = int(error.status_code or 0), str(error.code)
        text = f"{what}: {status} {code}: {line_of(error.message)}"
        if status == 429 or error.retry_after is not None or "Throttl" in code:
            if any(part in code for part in _QUOTA):
                return QuotaError(f"{text}; the account's quota of instances is shown in its Quota Center")
            return ThrottledError(text, (error.retry_after or 0) / 1000)
        if "Expired" in code and "Token" in code:
            return ExpiredError(f"{text}; the credentials are from {self._source}: renew them there")
        if any(part in code for part in _DENIED):
            return DeniedError(f"{text}; the credentials are from {self._source}: give others there")
        if any(part in code for part in _QUOTA):
            return QuotaError(text)
        if status in (401, 403) or any(part in code for part in _NO_RIGHT):
            advice = f"give them the right to this for {self._subject} in {self.region}"
            return DeniedError(f"{text}; the credentials are from {self._source}: {advice}")
        if status == 404:
            return MissingError(text + self.missing(code))
        if status in (409, 412):
            return ConflictError(text)
        if status == 504:
            return AnswerLostError(text)
        return UnavailableError(text) if status >= 500 or status in (0, 408) else RejectedError(text)


def _is_others(record: logging.LogRecord) -> bool:
    """Return whether a log record comes from a call of other code, and not of this module in this thread."""
    return not getattr(_CALLS, "under_way", False)
