"""Workers as long asynchronous invocations of one function of Alibaba Cloud's Function Compute 3.0."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch_dpflow._core.checks import (
    BYTES_ALLOWED,
    check_fields,
    check_int,
    check_number,
    check_type,
    is_loopback,
    parse_bytes,
)
from torch_dpflow.errors import OptionError, PlatformError
from torch_dpflow.remote.launchers.alibaba_client import ANSWER_S, AlibabaClient, ConflictError, MissingError
from torch_dpflow.remote.launchers.contract import (
    AdoptingPlatform,
    Fate,
    Finding,
    Launcher,
    Ref,
    require,
)
from torch_dpflow.remote.launchers.function_settings import FunctionSettings, answer_in
from torch_dpflow.remote.launchers.threaded_platform import ThreadedPlatform
from torch_dpflow.workers.platform import MAX_REPORT_CHARS, End, Limits

#: How long an invocation may wait for an instance, in seconds.
QUEUE_S = 300
#: Arguments of `require`: the vendor's client, what needs it, and the extra that installs it.
REQUIRED = ("alibabacloud_fc20230330", "platform='fc' needs the vendor's client", "fc")
#: Maximum tasks on one page of a list.
PAGE = 100


class FunctionControl(AlibabaClient):
    """Client of one function in Function Compute. Thread-safe.

    Args:
        region: such as "cn-hangzhou".
        endpoint: address of the control plane, `http(s)://HOST[:PORT]`; empty: the region's default.
        function: the name of the function.

    Raises MissingExtraError: the vendor's client is not installed.
    """

    def __init__(self, region: str, endpoint: str, function: str) -> None:
        require(*REQUIRED)
        super().__init__(region, endpoint, f"function {function!r}")
        self.function = function

    @property
    def package(self) -> Any:
        import alibabacloud_fc20230330.client
        import alibabacloud_fc20230330.models

        return alibabacloud_fc20230330

    def missing(self, code: str) -> str:
        if "Task" in code:
            return ""
        place = f"{self.function!r} in {self.region}"
        return f"; is there a function {place}? `dpflow deploy fc --image IMAGE` makes it"

    # --- invocations ---

    def invoke(self, task: str, payload: bytes, *, deadline_s: float) -> None:
        """Invoke the function asynchronously; `task` is the task's id. Raises ConflictError if the task exists."""
        request = self.package.models.InvokeFunctionRequest(body=payload)
        headers = self.package.models.InvokeFunctionHeaders(x_fc_invocation_type="Async", x_fc_async_task_id=task)
        self._call(f"{task} cannot be started", "invoke_function", request, headers, answer_s=deadline_s)

    def task(self, task: str) -> Any:
        """Return a task, as the vendor's `AsyncTask`. Raises MissingError if there is no such task."""
        return self._call(
            f"{task} cannot be looked at", "get_async_task", task, self.package.models.GetAsyncTaskRequest(), {}
        ).body

    def tasks(self, prefix: str, status: str | None = None) -> Iterator[Any]:
        """Yield the tasks whose ids have this prefix, as the vendor's `AsyncTask`. status: their state; None: any."""
        token = None
        while True:
            request = self.package.models.ListAsyncTasksRequest(
                limit=PAGE, next_token=token, prefix=prefix, status=status
            )
            page = self._call("workers cannot be listed", "list_async_tasks", request, {}).body
            yield from page.tasks or []
            token = page.next_token
            if not token:
                return

    def stop_task(self, task: str) -> None:
        """End a task by force. Raises PlatformError, such as MissingError if the task does not exist."""
        self._call(f"{task} cannot be stopped", "stop_async_task", task, self.package.models.StopAsyncTaskRequest(), {})

    # --- the function ---

    def get(self) -> Any:
        """Return the function, as the vendor's `Function`. Raises MissingError if it does not exist."""
        return self._call(self._about("looked at"), "get_function", self.package.models.GetFunctionRequest(), {}).body

    def async_config(self) -> Any:
        """Return the function's settings for asynchronous invocations. Raises MissingError if it has none."""
        request = self.package.models.GetAsyncInvokeConfigRequest()
        return self._call(self._about("looked at"), "get_async_invoke_config", request, {}).body

    def put(self, settings: Mapping[str, Any], asynchronous: Mapping[str, Any], *, is_new: bool) -> None:
        """Create (`is_new`) or change the function and its settings for asynchronous calls, in the vendor's JSON."""
        models = self.package.models
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
        """Remove the function. Raises MissingError if it does not exist."""
        self._call(self._about("removed"), "delete_function", {})

    # --- calls ---

    def _about(self, done: str) -> str:
        return f"the function {self.function!r} cannot be {done}"

    def _call(self, what: str, call: str, *arguments: Any, answer_s: float = ANSWER_S) -> Any:
        return self.call(what, call, self.function, *arguments, answer_s=answer_s)


#: How long a worker may take from its start to its handshake, minimum and maximum, in seconds.
START_S = (30.0, 300.0)
#: Interval between checks of all workers, in seconds. Each check of a worker is a call.
SWEEP_S = 30.0
#: For this number of workers and more, one list is requested instead of the state of each.
MANY = 8
#: States of a task that has not ended, in their order.
_LIVE = ("Enqueued", "Dequeued", "Running", "Retrying", "Stopping")
_VPC = ("id", "vswitches", "security_group")


@dataclass(frozen=True, kw_only=True)
class FunctionCompute(FunctionSettings):
    """`platform="fc"`: workers as invocations of an Alibaba Cloud function, which `dpflow deploy fc` creates.

    Invocations are billed. Credentials are looked up where the vendor's client does: in ALIBABA_CLOUD_ACCESS_KEY_ID and
    related variables, in the client's files, or from the machine's role.

    Args:
        max_workers: maximum number of concurrent workers of this loader or cluster; required.
        region: the function's region.
        function: the name of the function.
        cpu, memory: CPUs and memory of each worker. Memory: such as "2GiB", or a number of bytes. The platform requires
            1 to 4 GiB for each CPU.
        lifetime: time after which a worker is replaced, such as "1h", or a number of seconds, at most 86,340.
        role: role whose permissions the workers have, such as "acs:ram::123:role/dpflow-data"; empty: none.
        vpc: VPC of the workers: `id`, `vswitches`, `security_group`; empty: no VPC.
        endpoint: address of the control plane, `https://HOST`; empty: the default of the region.
        price_per_hour: price of one worker for an hour, for reports.

    Raises:
        OptionError: a value is out of range.
        OptionTypeError: a value is of the wrong type.
    """

    region: str = "cn-hangzhou"
    cpu: float = 1.0
    memory: int | str = "2GiB"
    lifetime: float | str = "1h"
    endpoint: str = ""

    name = "fc"
    max_run_s, margin_s = 86400.0, 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, check_number, "cpu", minimum=0.05, maximum=16, unit="a number of CPUs")
        check_type("endpoint", self.endpoint, str, "text")
        if not self.region:
            raise OptionError("region is empty; give one, as 'cn-hangzhou'")
        _ = self.memory_mib
        if self.vpc and {*self.vpc} != {*_VPC}:
            raise OptionError(f"vpc has {sorted(self.vpc)}; give all of {list(_VPC)}, or none")
        # Launch specs have keys.
        if not (self.endpoint == "" or self.endpoint.startswith("https://") or self.is_near()):
            raise OptionError(f"endpoint={self.endpoint!r}: give https://HOST, or leave it out for the region's")

    @property
    def memory_mib(self) -> int:
        """`memory` in MiB. Raises OptionError or OptionTypeError for a size that is not allowed."""
        allowed = f"{BYTES_ALLOWED}, or their number as an int"
        size = parse_bytes("memory", self.memory, allowed) if isinstance(self.memory, str) else self.memory
        mib = check_int("memory", size, minimum=128 * 2**20, maximum=32 * 2**30) // 2**20
        if mib % 64:
            raise OptionError(f"memory={self.memory!r} is {mib} MiB; give a multiple of 64 MiB")
        return mib

    def is_near(self) -> bool:
        return is_loopback(self.endpoint)

    def check_installed(self) -> None:
        require(*REQUIRED)

    def control(self) -> FunctionControl:
        """Return a client of the function. Raises MissingExtraError if the vendor's client is not installed."""
        return FunctionControl(self.region, self.endpoint, self.function)

    def launcher(self) -> Launcher:
        return FunctionComputeLauncher(self)

    def open(self, *, outlived: bool = False) -> AdoptingPlatform:
        self.check_workers(0)
        return ThreadedPlatform(self.launcher(), sweep_s=SWEEP_S)


class FunctionComputeLauncher:
    """Launcher of workers as asynchronous tasks of one function; a worker's name is its task's id.

    Raises MissingExtraError if the vendor's client is not installed.
    """

    def __init__(self, settings: FunctionCompute) -> None:
        self.limits = Limits(
            max_lifetime_s=settings.lifetime_s,
            max_workers=settings.max_workers or None,
            calls_at_once=16,
            start_timeout_s=START_S,
        )
        self._settings = settings
        self._control = settings.control()

    def check(self) -> Sequence[Finding]:
        settings = self._settings
        there = self._control.get()
        image = getattr(there.custom_container_config, "image", None) or f"none, but runtime {there.runtime}"
        findings = [
            Finding(
                there.runtime == "custom-container",
                f"function {settings.function!r} in {settings.region}: image {image}, {there.cpu:g} CPUs, "
                f"{there.memory_size} MiB",
            )
        ]
        longest_s = there.timeout or 0
        if longest_s < settings.lifetime_s:
            findings.append(Finding(False, f"it ends workers after {longest_s} s, before their lifetime; {_DEPLOY}"))
        if (there.instance_concurrency or 1) != 1:
            findings.append(Finding(False, f"its instances run {there.instance_concurrency} workers each; {_DEPLOY}"))
        with suppress(MissingError):
            config = self._control.async_config()
            if config.async_task and not config.max_async_retry_attempts:
                most = settings.max_workers or "no number of"
                return [
                    *findings,
                    Finding(bool(settings.max_workers), f"at most {most} workers (max_workers)"),
                ]
        return [
            *findings,
            Finding(False, f"it does not keep invocations as tasks, or tries them again; {_DEPLOY}"),
        ]

    def start(self, name: str, launch_spec: bytes, *, deadline_s: float) -> Ref:
        with suppress(ConflictError):  # it was started before, under this name
            self._control.invoke(name, launch_spec, deadline_s=deadline_s)
        return name

    def look(self, workers: Mapping[str, Ref | None]) -> Mapping[str, Fate]:
        if len(workers) < MANY:
            return {name: fate for name in workers if (fate := self._look_at(name)) is not None}
        tasks = self._control.tasks(os.path.commonprefix([*workers]))  # noqa: RUF071 - by characters
        return {task.task_id: _fate_of(task) for task in tasks if task.task_id in workers}

    def stop(self, name: str, ref: Ref | None) -> None:
        try:
            self._control.stop_task(name)
        except MissingError:
            return
        except PlatformError:
            # Its answer may have been lost, and the platform may reject a stop of a task that has ended.
            fate = self._look_at(name)
            if fate is not None and fate.end is None:
                raise

    def list(self, prefix: str) -> Mapping[str, Ref]:
        # A task that changes its state meanwhile is found in one of them.
        return {task.task_id: task.task_id for state in _LIVE for task in self._control.tasks(prefix, state)}

    def close(self) -> None:
        """Do nothing: the vendor's client manages its connections itself."""

    def _look_at(self, name: str) -> Fate | None:
        try:
            return _fate_of(self._control.task(name))
        except MissingError:
            return None


_DEPLOY = "`dpflow deploy fc` sets that right"


def _fate_of(task: Any) -> Fate:
    if task.status in _LIVE:
        return Fate()
    place = f"instance {task.instance_id}" if task.instance_id else "its invocation"
    # By the platform, which bills it; the instance's own time lacks what comes before and after its worker.
    billed_s = None if task.duration_ms is None else task.duration_ms / 1000
    if task.status in ("Succeeded", "Failed"):
        for text in (task.return_payload, task.task_error_message):
            if (answer := answer_in(text or "")) is not None:
                end = answer.end()
                return Fate(end=replace(end, place=place, ran_s=end.ran_s if billed_s is None else billed_s))
    code = 0 if task.status == "Succeeded" else None
    report = f"{task.status}: {task.task_error_message or _WHY.get(task.status, 'no reason given')}"
    return Fate(
        end=End(
            code=code,
            report=report[-MAX_REPORT_CHARS:] if code is None else "",
            place=place,
            ran_s=billed_s,
        )
    )


_WHY = {
    "Expired": f"no instance was free within {QUEUE_S} s; is the account's quota of instances used up?",
    "Stopped": "it was told to stop",
}
