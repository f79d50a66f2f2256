"""`dpflow deploy`: makes what a platform needs before it can run workers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click
import msgspec

from torch_dpflow.cli.common import json_option, size_of, to_json, with_options
from torch_dpflow.errors import OptionError
from torch_dpflow.remote.launchers.registry import resolve, warn_experimental

if TYPE_CHECKING:
    from torch_dpflow.cluster.security.connection_file import ConnectionFile

_CLUSTER = re.compile(r"[0-9a-f]{8}", re.ASCII)


@click.group()
def deploy() -> None:
    """Make, change or remove the function that a platform's workers are, by dpflow.toml, or nodes of a cluster."""


_function_options = with_options(
    click.option(
        "--image", default="", help="The container's image, in a registry of the function's region."
    ),
    click.option("--dry-run", is_flag=True, help="Print what would be done, and do nothing."),
    click.option("--remove", "removes", is_flag=True, help="Remove the function."),
    json_option,
)


@deploy.command()
@_function_options
def fc(image: str, as_json: bool, dry_run: bool, removes: bool) -> None:
    """The function of platform="fc", by [platform.fc]: region, function, cpu, memory, lifetime, role, vpc."""
    from torch_dpflow.remote.launchers import fc_function

    settings: Any = resolve("fc")
    _say(
        fc_function.remove(settings, dry_run=dry_run)
        if removes
        else fc_function.deploy(settings, image, dry_run=dry_run),
        as_json=as_json,
    )


@deploy.command("lambda")
@_function_options
def lambda_(image: str, as_json: bool, dry_run: bool, removes: bool) -> None:
    """The function of platform="lambda", by [platform.lambda]: region, function, memory, lifetime, role, vpc."""
    from torch_dpflow.remote.launchers import aws_client

    settings: Any = resolve("lambda")
    _say(
        aws_client.remove(settings, dry_run=dry_run)
        if removes
        else aws_client.deploy(settings, image, dry_run=dry_run),
        as_json=as_json,
    )


_group_options = with_options(
    click.option(
        "--join",
        metavar="FILE",
        help="The cluster's connection file, with its keys, as `dpflow up --listen` has written it.",
    ),
    click.option(
        "--cluster", help="With --list and --remove, where that file is lost: what groups are named by."
    ),
    click.option("--nodes", type=click.IntRange(0, 256), help="As many groups as there are to be."),
    click.option("--image", default="", help="The container's image, which `dpflow image` describes."),
    click.option("--vswitch", default="", help="The vSwitch of the groups, in the cluster's network."),
    click.option("--security-group", default="", help="Has to let jobs reach all TCP ports of the groups."),
    click.option("--cpu", type=float, default=4.0, show_default=True, help="vCPUs of a group."),
    click.option(
        "--memory",
        metavar="SIZE",
        default="16GiB",
        show_default=True,
        callback=size_of,
        help="Of a group.",
    ),
    click.option("--spot", is_flag=True, help="For less, and the platform may end them at any time."),
    click.option("--region", default="cn-hangzhou", show_default=True),
    click.option("--endpoint", default="", help="http(s)://HOST of the control plane; else the region's."),
    click.option("--dry-run", is_flag=True, help="Print what would be done, and do nothing."),
    click.option("--remove", "removes", is_flag=True, help="Remove all groups of the cluster."),
    click.option("--list", "lists", is_flag=True, help="List the groups of the cluster."),
    json_option,
)


@deploy.command()
@_group_options
def eci(
    join: str | None,
    cluster: str | None,
    nodes: int | None,
    memory: int,
    region: str,
    endpoint: str,
    dry_run: bool,
    removes: bool,
    lists: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Nodes of a cluster as container groups of Alibaba Cloud's Elastic Container Instance.

    Called again, it makes those that are missing or have ended, and removes those that are too many.
    """
    from torch_dpflow.remote.launchers import eci
    from torch_dpflow.remote.launchers.eci import ContainerGroups

    warn_experimental("eci")
    if removes and lists:
        raise OptionError("--remove and --list exclude each other; give one of them")
    file = _cluster_file(join, cluster if removes or lists else None)
    name = eci.cluster_of(file.server_public) if file is not None else str(cluster)
    groups = ContainerGroups(region, endpoint)
    if removes or lists or file is None:
        lines = eci.remove(groups, name, dry_run=dry_run) if removes else eci.listed(groups, name)
    else:
        if nodes is None:
            raise OptionError("how many? Give --nodes, as 4")
        file.server_keys()
        wanted = eci.NodeGroups(
            cluster=name,
            address=file.address,
            keys=msgspec.json.encode(file),
            count=nodes,
            memory_gib=memory / 2**30,
            **given,
        )
        lines = eci.deploy(groups, wanted, dry_run=dry_run)
    _say(lines, as_json=as_json)


def _cluster_file(join: str | None, cluster: str | None) -> ConnectionFile | None:
    """The cluster's file; None: there is its name alone."""
    from torch_dpflow.cluster.security.connection_file import read_connection_file

    if join is not None:
        return read_connection_file(join)
    if cluster is None or not _CLUSTER.fullmatch(cluster):
        raise OptionError(
            "which cluster? Give --join FILE, its connection file; to list or remove groups, --cluster with the 8 "
            "hexadecimal digits in their names does as well"
        )
    return None


def _say(steps: Iterable[str], *, as_json: bool) -> None:
    """Print each step as it is done; with --json all of them at the end."""
    done = []
    for step in steps:
        done.append(step)
        if not as_json:
            click.echo(step)
    if as_json:
        click.echo(to_json({"steps": done}))
