"""`dpflow deploy fc`: creates, updates and removes the function whose invocations are workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch_dpflow.errors import OptionError
from torch_dpflow.remote.launchers.alibaba_client import MissingError
from torch_dpflow.remote.launchers.deployment import changes, existing, removal
from torch_dpflow.remote.launchers.fc import QUEUE_S, FunctionCompute, FunctionControl
from torch_dpflow.remote.launchers.processes import MODULE

#: What the image runs, and the port of its server.
COMMAND, PORT = ("python", "-m", "torch_dpflow.remote.worker.fc"), 9000
#: How long an instance may take to import torch, in seconds, and the size of its temporary disk, in MiB: the minimum.
INITIALIZE_S, DISK_MIB = 300, 512
#: Settings of asynchronous invocations: without retries, because the shard starts another worker.
ASYNCHRONOUS = {"asyncTask": True, "maxAsyncEventAgeInSeconds": QUEUE_S, "maxAsyncRetryAttempts": 0}


def function_of(settings: FunctionCompute, image: str, module: str = MODULE) -> dict[str, Any]:
    """Return the settings to deploy, in the vendor's JSON. module: the module whose `run(launch_spec)` workers run."""
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
    """Create the function, or update it to these settings; yield each step as a line of text.

    Args:
        module: as in `function_of`.
        dry_run: change nothing, and yield the steps that would be taken; without credentials nothing is compared.

    Raises OptionError if `image` is empty, PlatformError if the platform rejects a call, among others.
    """
    if not image:
        raise OptionError("no image: give --image REGISTRY/NAME:TAG, which `dpflow image` describes")
    control = settings.control()
    wanted = function_of(settings, image, module)
    there, unknown = existing(partial(_there, control), dry_run=dry_run)
    yield from changes(_place(settings), there, wanted, unknown, dry_run=dry_run)
    yield f"  asynchronous invocations are tasks, wait {QUEUE_S} s for an instance, and are never tried again"
    if not dry_run:
        control.put(wanted, ASYNCHRONOUS, is_new=there is None)


def remove(settings: FunctionCompute, *, dry_run: bool = False) -> Iterator[str]:
    """Remove the function; yield each step as a line of text. dry_run: as in `deploy`. Raises PlatformError."""
    control = settings.control()
    return removal(_place(settings), partial(_there, control), control.delete, dry_run=dry_run)


def _place(settings: FunctionCompute) -> str:
    return f"function {settings.function!r} in {settings.region}"


def _there(control: FunctionControl) -> Mapping[str, Any] | None:
    try:
        found: Mapping[str, Any] = control.get().to_map()
    except MissingError:
        return None
    return found
