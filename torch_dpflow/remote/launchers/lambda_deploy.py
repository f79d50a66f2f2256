"""`dpflow deploy lambda`: creates, updates and removes the function whose invocations are workers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch_dpflow.errors import OptionError, RejectedError, UnavailableError
from torch_dpflow.remote.launchers.aws_client import AwsClient
from torch_dpflow.remote.launchers.aws_lambda import Lambda
from torch_dpflow.remote.launchers.deployment import changes, existing, removal

#: What the image runs: AWS's runtime client, with our handler.
ENTRY_POINT, HANDLER = ("python", "-m", "awslambdaric"), "torch_dpflow.remote.worker.aws_lambda.handler"
#: Timeout of a change to the function, and interval at which its state is read, in seconds.
DONE_S, ASK_S = 300.0, 1.0
#: How long to wait for the answer to one call, in seconds.
CALL_S = 60.0


def function_of(settings: Lambda, handler: str = HANDLER) -> dict[str, Any]:
    """Return the configuration to deploy, as arguments of AWS's client. handler: as in `deploy`."""
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
    """Create the function, or update it to these settings; yield each step as a line of text.

    Args:
        dry_run: change nothing, and yield the steps that would be taken; without credentials nothing is compared.
        handler: the function's entry point, which runs launch specs; tests replace it.

    Raises OptionError if the image or the role is missing, or the existing function is no container image;
    PlatformError if Lambda rejects a call or the function is not ready in time; among others.
    """
    if not image:
        raise OptionError("no image: give --image ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG, of the same region")
    if not settings.role:
        raise OptionError(
            "no role: give the ARN of one that Lambda may assume, as role in [platform.lambda] of dpflow.toml"
        )
    client = _client(settings)
    wanted = function_of(settings, handler)
    there, unknown = existing(partial(_there, client, settings), dry_run=dry_run)
    yield from changes(_place(client, settings), there, {"image": image, **wanted}, unknown, dry_run=dry_run)
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
    """Remove the function; yield each step as a line of text. dry_run, errors: as in `deploy`."""
    client = _client(settings)

    def delete() -> None:
        with client.calling(f"function {settings.function!r} cannot be removed") as lambda_:
            lambda_.delete_function(FunctionName=settings.function)

    return removal(_place(client, settings), partial(_there, client, settings), delete, dry_run=dry_run)


def _client(settings: Lambda) -> AwsClient:
    return AwsClient(settings.region, read_timeout_s=CALL_S, connections=1)


def _place(client: AwsClient, settings: Lambda) -> str:
    return f"function {settings.function!r} in {client.region}"


def _there(client: AwsClient, settings: Lambda) -> Mapping[str, Any] | None:
    """Return the existing function's configuration and image, in the form of `function_of`; None without one."""
    try:
        with client.calling(f"function {settings.function!r} cannot be read") as lambda_:
            found = lambda_.get_function(FunctionName=settings.function)
    except RejectedError as error:
        if "ResourceNotFoundException" in str(error):
            return None
        raise
    has: dict[str, Any] = {**found["Configuration"], "image": found["Code"].get("ImageUri")}
    if has.get("PackageType") != "Image":
        raise OptionError(
            f"{_place(client, settings)} is no container image, and cannot become one: give another name, as function "
            "in [platform.lambda] of dpflow.toml, or remove it"
        )
    has["ImageConfig"] = has.get("ImageConfigResponse", {}).get("ImageConfig", has.get("ImageConfig"))
    return has


def _await_done(client: AwsClient, settings: Lambda) -> None:
    """Wait until the latest change has taken effect.

    Raises RejectedError if it failed, UnavailableError after a timeout.
    """
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
