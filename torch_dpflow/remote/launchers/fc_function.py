"""The function of Function Compute: its control plane, by the vendor's client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch_dpflow.remote.launchers.alibaba_client import ANSWER_S, AlibabaClient
from torch_dpflow.remote.launchers.contract import require

#: How long an invocation may wait for an instance, seconds.
QUEUE_S = 300
#: The vendor's client, what needs it, and the extra that installs it.
REQUIRED = ("alibabacloud_fc20230330", "platform='fc' needs the vendor's client", "fc")
#: Maximum tasks on one page of a list.
PAGE = 100


class FunctionControl(AlibabaClient):
    """One function. Any thread may call.

    Args:
        region: as "cn-hangzhou".
        endpoint: `http(s)://HOST[:PORT]` of the control plane; empty: the region's.
        function: its name.

    Raises:
        MissingExtraError: the vendor's client is not installed.
    """

    def __init__(self, region: str, endpoint: str, function: str) -> None:
        require(*REQUIRED)
        super().__init__(region, endpoint, f"function {function!r}")
        self.function = function

    def make(self, config: Any) -> Any:
        from alibabacloud_fc20230330.client import Client

        return Client(config)

    def missing(self, code: str) -> str:
        if "Task" in code:
            return ""
        place = f"{self.function!r} in {self.region}"
        return f"; is there a function {place}? `dpflow deploy fc --image IMAGE` makes it"

    # --- invocations ---

    def invoke(self, task: str, payload: bytes, *, deadline_s: float) -> None:
        """Invoke the function asynchronously, under the name of a task. Raises ConflictError if that exists."""
        from alibabacloud_fc20230330.models import InvokeFunctionHeaders, InvokeFunctionRequest

        request = InvokeFunctionRequest(body=payload)
        headers = InvokeFunctionHeaders(x_fc_invocation_type="Async", x_fc_async_task_id=task)
        self._call(f"{task} cannot be started", "invoke_function", request, headers, answer_s=deadline_s)

    def task(self, task: str) -> Any:
        """Return a task, as the vendor's `AsyncTask`. Raises MissingError if there is none."""
        from alibabacloud_fc20230330.models import GetAsyncTaskRequest

        return self._call(f"{task} cannot be looked at", "get_async_task", task, GetAsyncTaskRequest(), {}).body

    def tasks(self, prefix: str, status: str | None = None) -> Iterator[Any]:
        """Yield the tasks with this prefix and state, as the vendor's `AsyncTask`."""
        from alibabacloud_fc20230330.models import ListAsyncTasksRequest

        token = None
        while True:
            request = ListAsyncTasksRequest(limit=PAGE, next_token=token, prefix=prefix, status=status)
            page = self._call("workers cannot be listed", "list_async_tasks", request, {}).body
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
        """Return the function, as the vendor's `Function`. Raises MissingError if there is none."""
        from alibabacloud_fc20230330.models import GetFunctionRequest

        return self._call(self._about("looked at"), "get_function", GetFunctionRequest(), {}).body

    def async_config(self) -> Any:
        """Return the settings of asynchronous invocations. Raises MissingError if there are none."""
        from alibabacloud_fc20230330.models import GetAsyncInvokeConfigRequest

        request = GetAsyncInvokeConfigRequest()
        return self._call(self._about("looked at"), "get_async_invoke_config", request, {}).body

    def put(self, settings: Mapping[str, Any], asynchronous: Mapping[str, Any], *, is_new: bool) -> None:
        """Create or change the function. The mappings are the vendor's JSON."""
        from alibabacloud_fc20230330 import models

        if is_new:
            given = models.CreateFunctionInput().from_map({"functionName": self.function, **settings})
            request = models.CreateFunctionRequest(body=given)
            self.call(self._about("created"), "create_function", request, {})
        else:
            changed = models.UpdateFunctionRequest(body=models.UpdateFunctionInput().from_map(dict(settings)))
            self._call(self._about("changed"), "update_function", changed, {})
        result = models.PutAsyncInvokeConfigInput().from_map(dict(asynchronous))
        self._call(
            self._about("changed"),
            "put_async_invoke_config",
            models.PutAsyncInvokeConfigRequest(body=result),
            {},
        )

    def delete(self) -> None:
        """Remove the function. Raises MissingError if there is none."""
        self._call(self._about("removed"), "delete_function", {})

    # --- calls ---

    def _about(self, done: str) -> str:
        return f"the function {self.function!r} cannot be {done}"

    def _call(self, what: str, call: str, *arguments: Any, answer_s: float = ANSWER_S) -> Any:
        """Make a call about this function."""
        return self.call(what, call, self.function, *arguments, answer_s=answer_s)
