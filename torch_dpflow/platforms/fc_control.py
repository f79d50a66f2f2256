"""The control plane of Function Compute 3.0, by the vendor's client: only this module imports it, and late.

Calls are made once: the client tries nothing again. Errors are those of `PlatformError`, by the status and code of the
answer, and quote nothing of what was sent.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch_dpflow.errors import (
    AnswerLostError,
    DeniedError,
    ExpiredError,
    MissingExtraError,
    PlatformError,
    QuotaError,
    RejectedError,
    ThrottledError,
    UnavailableError,
)

_LIBRARY = "alibabacloud_fc20230330"
_NOT_INSTALLED = "platform='fc' needs the vendor's client; install it with: pip install 'torch_dpflow[fc]'"
#: How long a connection may take, and the answer to a call other than a start, seconds.
CONNECT_S, ANSWER_S = 5.0, 20.0
#: Tasks on one page of a list: as many as there may be.
PAGE = 100
#: Parts of codes: of a quota that is used up, and of credentials that are wrong, expired or lack a right.
_QUOTA = ("Exhausted", "Quota", "LimitExceeded")
_DENIED = ("AccessKey", "SecurityToken", "Signature")
_NO_RIGHT = ("AccessDenied", "Forbidden", "Unauthorized", "NoPermission")
#: By which the vendor's client, and what it calls over HTTP, write tracebacks of what this module tells as an error.
_LOGGERS = ("credentials", "urllib3.connectionpool")
_CALLS = threading.local()
_KEYS = ("ALIBABA_CLOUD_ACCESS_KEY_ID", "ALIBABA_CLOUD_ACCESS_KEY_SECRET", "ALIBABA_CLOUD_SECURITY_TOKEN")


class MissingError(RejectedError):
    """There is no such function or task."""


class ConflictError(RejectedError):
    """There is one of this name, or its state does not allow the call."""


def check_installed() -> None:
    """Raise MissingExtraError if the vendor's client is not installed; does not import it."""
    if importlib.util.find_spec(_LIBRARY) is None:
        raise MissingExtraError(_NOT_INSTALLED)


class FunctionControl:
    """One function. Any thread may call.

    Args:
        region: as "cn-hangzhou".
        endpoint: `http(s)://HOST[:PORT]` of the control plane; empty: the region's.
        function: its name.

    Raises:
        MissingExtraError: the vendor's client is not installed.
    """

    def __init__(self, region: str, endpoint: str, function: str) -> None:
        check_installed()
        self.region, self.endpoint, self.function = region, endpoint, function
        self._client: Any = None
        #: Where credentials were looked for, for people.
        self._source = ""

    # --- invocations ---

    def invoke(self, task: str, payload: bytes, *, deadline_s: float) -> None:
        """Have the function run once, later, under the name of a task. Raises ConflictError if there is one already."""
        from alibabacloud_fc20230330.models import InvokeFunctionHeaders, InvokeFunctionRequest

        request = InvokeFunctionRequest(body=payload)
        headers = InvokeFunctionHeaders(x_fc_invocation_type="Async", x_fc_async_task_id=task)
        self._call(f"{task} cannot be started", "invoke_function", request, headers, answer_s=deadline_s)

    def task(self, task: str) -> Any:
        """A task, as the vendor's `AsyncTask`. Raises MissingError if there is none."""
        from alibabacloud_fc20230330.models import GetAsyncTaskRequest

        return self._call(
            f"{task} cannot be looked at", "get_async_task", task, GetAsyncTaskRequest(), {}
        ).body

    def tasks(self, prefix: str, status: str | None = None) -> Iterator[Any]:
        """The tasks whose names begin so, in this state, as the vendor's `AsyncTask`."""
        from alibabacloud_fc20230330.models import ListAsyncTasksRequest

        token = None
        while True:
            request = ListAsyncTasksRequest(limit=PAGE, next_token=token, prefix=prefix, status=status)
            page = self._call("members cannot be listed", "list_async_tasks", request, {}).body
            yield from page.tasks or []
            token = page.next_token
            if not token:
                return

    def stop_task(self, task: str) -> None:
        """End a task by force. Raises MissingError if there is none, and ConflictError if it has ended."""
        from alibabacloud_fc20230330.models import StopAsyncTaskRequest

        self._call(f"{task} cannot be stopped", "stop_async_task", task, StopAsyncTaskRequest(), {})

    # --- the function ---

    def get(self) -> Any:
        """The function, as the vendor's `Function`. Raises MissingError if there is none."""
        from alibabacloud_fc20230330.models import GetFunctionRequest

        return self._call(self._about("looked at"), "get_function", GetFunctionRequest(), {}).body

    def async_config(self) -> Any:
        """How the function treats asynchronous invocations. Raises MissingError if nobody has said."""
        from alibabacloud_fc20230330.models import GetAsyncInvokeConfigRequest

        request = GetAsyncInvokeConfigRequest()
        return self._call(self._about("looked at"), "get_async_invoke_config", request, {}).body

    def put(self, settings: Mapping[str, Any], asynchronous: Mapping[str, Any], *, is_new: bool) -> None:
        """Create or change the function. The mappings are the vendor's JSON."""
        from alibabacloud_fc20230330 import models

        if is_new:
            given = models.CreateFunctionInput().from_map({"functionName": self.function, **settings})
            request = models.CreateFunctionRequest(body=given)
            self._call(self._about("created"), "create_function", request, {}, names_function=False)
        else:
            changed = models.UpdateFunctionRequest(body=models.UpdateFunctionInput().from_map(dict(settings)))
            self._call(self._about("changed"), "update_function", changed, {})
        told = models.PutAsyncInvokeConfigInput().from_map(dict(asynchronous))
        self._call(
            self._about("changed"),
            "put_async_invoke_config",
            models.PutAsyncInvokeConfigRequest(body=told),
            {},
        )

    def delete(self) -> None:
        """Remove the function. Raises MissingError if there is none."""
        self._call(self._about("removed"), "delete_function", {})

    # --- calls ---

    def _about(self, done: str) -> str:
        return f"the function {self.function!r} cannot be {done}"

    def _call(
        self, what: str, call: str, *arguments: Any, answer_s: float = ANSWER_S, names_function: bool = True
    ) -> Any:
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
            return method(*([self.function] if names_function else []), *arguments, runtime)
        except Exception as error:
            lost = self._failure(what, error)
            if isinstance(lost, DeniedError):
                self._client = None  # they are looked up again
            # Not from it: it has the whole request in it, with the key of an order.
            raise lost from None
        finally:
            _CALLS.under_way = False

    def _connect(self) -> Any:
        from alibabacloud_credentials.client import Client as Credentials
        from alibabacloud_credentials.models import Config as Keys
        from alibabacloud_fc20230330.client import Client
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
            self._source = (
                "the vendor's chain: no ALIBABA_CLOUD_ACCESS_KEY_ID, then its files and the machine's role"
            )
            keys = Credentials()
        scheme, _, host = self.endpoint.rpartition("://")
        return Client(
            Config(
                credential=keys,
                region_id=self.region,
                endpoint=host or None,
                protocol=scheme or "https",
            )
        )

    def _failure(self, what: str, error: Exception) -> PlatformError:
        """An error of the vendor's client as one of ours."""
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
                return DeniedError(
                    f"{what}: no credentials were found in {self._source}; set {_KEYS[0]} and {_KEYS[1]}, or give this "
                    f"machine a role ({_line_of(one)})"
                )
            reason = getattr(one.args[0] if one is not None and one.args else None, "reason", None)
            if isinstance(one, ConnectTimeout | SSLError) or isinstance(reason, NewConnectionError):
                place = self.endpoint or f"the control plane of {self.region}"
                return UnavailableError(f"{what}: {place} cannot be reached: {type(one).__name__}")
        return AnswerLostError(f"{what}: {_line_of(chain[-2])}")

    def _refusal(self, what: str, error: Any) -> PlatformError:
        status, code = int(error.status_code or 0), str(error.code)
        text = f"{what}: {status} {code}: {_line_of(error.message)}"
        if status == 429 or error.retry_after is not None or "Throttl" in code:
            if any(part in code for part in _QUOTA):
                return QuotaError(f"{text}; the account's quota of instances is shown in its Quota Center")
            return ThrottledError(text, (error.retry_after or 0) / 1000)
        if "Expired" in code and "Token" in code:
            return ExpiredError(f"{text}; the credentials are from {self._source}: renew them there")
        if any(part in code for part in _DENIED):
            return DeniedError(f"{text}; the credentials are from {self._source}: give others there")
        if status in (401, 403) or any(part in code for part in _NO_RIGHT):
            advice = f"give them the right to this for function {self.function!r} in {self.region}"
            return DeniedError(f"{text}; the credentials are from {self._source}: {advice}")
        if status == 404:
            if "AsyncTask" in code or "Task" in code:
                return MissingError(text)
            return MissingError(
                f"{text}; is there a function {self.function!r} in {self.region}? `dpflow deploy fc --image IMAGE` "
                "makes it"
            )
        if any(part in code for part in _QUOTA):
            return QuotaError(text)
        if status in (409, 412):
            return ConflictError(text)
        if status == 504:
            return AnswerLostError(text)
        return UnavailableError(text) if status >= 500 or status in (0, 408) else RejectedError(text)


def _is_others(record: logging.LogRecord) -> bool:
    """Whether what is logged is of no call that this module makes in this thread."""
    return not getattr(_CALLS, "under_way", False)


def _line_of(text: object) -> str:
    """What an error says, on one line."""
    return " ".join(str(text).split())[:600]
