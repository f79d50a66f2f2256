"""The function of Function Compute: its control plane, by the vendor's client, and `dpflow deploy fc`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch_dpflow.errors import DeniedError, OptionError
from torch_dpflow.remote.launchers.alibaba_client import ANSWER_S, AlibabaClient, MissingError
from torch_dpflow.remote.launchers.contract import require
from torch_dpflow.remote.launchers.processes import MODULE

if TYPE_CHECKING:
    from torch_dpflow.remote.launchers.fc import FunctionCompute

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


#: What the image runs, and the port of its server.
COMMAND, PORT = ("python", "-m", "torch_dpflow.remote.worker.fc"), 9000
#: How long an instance may take to import torch, seconds, and its temporary disk, in MiB: the minimum.
INITIALIZE_S, DISK_MIB = 300, 512
#: The platform retries nothing: the shard starts another worker.
ASYNCHRONOUS = {"asyncTask": True, "maxAsyncEventAgeInSeconds": QUEUE_S, "maxAsyncRetryAttempts": 0}


def function_of(settings: FunctionCompute, image: str, module: str = MODULE) -> dict[str, Any]:
    """Return the function, as the vendor's JSON. module: whose `run(launch_spec)` workers run."""
    vpc = settings.vpc
    return {
        "description": "a worker of torch_dpflow",
        "runtime": "custom-container",
        "handler": "unused",
        "cpu": float(settings.cpu),
        "memorySize": settings.memory_mib,
        "diskSize": DISK_MIB,
        # The platform's own limit comes after the workers', which end by themselves.
        "timeout": settings.timeout_s,
        "instanceConcurrency": 1,
        "internetAccess": True,
        "customContainerConfig": {"image": image, "command": [*COMMAND, module], "port": PORT},
        "instanceLifecycleConfig": {
            "initializer": {"handler": "/initialize", "timeout": INITIALIZE_S},
            "preStop": {"handler": "/pre-stop", "timeout": 10},
        },
        **({"role": settings.role} if settings.role else {}),
        **(
            {
                "vpcConfig": {
                    "vpcId": vpc["id"],
                    "vSwitchIds": [*vpc["vswitches"]],
                    "securityGroupId": vpc["security_group"],
                }
            }
            if vpc
            else {}
        ),
    }


def deploy(settings: FunctionCompute, image: str, *, module: str = MODULE, dry_run: bool = False) -> Iterator[str]:
    """Create the function or update it to these settings; yield what is done, for display.

    Args:
        module: as of `function_of`.
        dry_run: only report what would be done; without credentials nothing is compared.

    Raises:
        OptionError: there is no image.
        PlatformError: the platform rejects a call.
    """
    if not image:
        raise OptionError("no image: give --image REGISTRY/NAME:TAG, which `dpflow image` describes")
    control = settings.control()
    wanted = function_of(settings, image, module)
    try:
        there, done = _there(control), ""
    except DeniedError as error:
        if not dry_run:
            raise
        there, done = None, "created, or changed where it differs"
        yield f"the existing state is unknown: {error}"
    would = "would be " if dry_run else ""
    changes = [*_changes(there, wanted)]
    done = done or ("changed" if there else "created")
    yield f"function {settings.function!r} in {settings.region} {would}{done}:"
    yield from changes or ["  nothing differs"]
    yield f"  asynchronous invocations are tasks, wait {QUEUE_S} s for an instance, and are never tried again"
    if not dry_run:
        control.put(wanted, ASYNCHRONOUS, is_new=there is None)


def remove(settings: FunctionCompute, *, dry_run: bool = False) -> Iterator[str]:
    """Remove the function; yield what is done, for display. Raises PlatformError."""
    control = settings.control()
    place = f"function {settings.function!r} in {settings.region}"
    try:
        if _there(control) is None:
            yield f"there is no {place}"
            return
    except DeniedError as error:
        if not dry_run:
            raise
        yield f"the existing state is unknown: {error}"
    if not dry_run:
        control.delete()
    yield f"{place} {'would be ' if dry_run else ''}removed"


def _there(control: FunctionControl) -> Mapping[str, Any] | None:
    try:
        found: Mapping[str, Any] = control.get().to_map()
    except MissingError:
        return None
    return found


def _changes(there: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is to be changed, for display."""
    for key, value in wanted.items():
        has = None if there is None else there.get(key)
        # The platform adds fields of its own.
        if isinstance(value, dict) and isinstance(has, Mapping):
            has = {name: has.get(name) for name in value}
        if has != value:
            yield f"  {key}: {value}" if has is None else f"  {key}: {has} -> {value}"
