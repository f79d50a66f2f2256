"""`dpflow deploy`: create what a platform needs before it can run workers."""

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
    """Create, change or remove the cloud function of workers, by dpflow.toml, or cluster nodes in a cloud."""


_function_options = with_options(
    click.option("--image", default="", help="Container image, in a registry of the region of the function."),
    click.option("--dry-run", is_flag=True, help="Print what would be done, and do nothing."),
    click.option("--remove", "removes", is_flag=True, help="Remove the function."),
    json_option,
)


@deploy.command()
@_function_options
def fc(image: str, as_json: bool, dry_run: bool, removes: bool) -> None:
    """Deploy the function of platform="fc", by [platform.fc]: region, function, cpu, memory, lifetime, role, vpc."""
    from torch_dpflow.remote.launchers import fc_deploy

    settings: Any = resolve("fc")
    _print_steps(
        fc_deploy.remove(settings, dry_run=dry_run) if removes else fc_deploy.deploy(settings, image, dry_run=dry_run),
        as_json=as_json,
    )


@deploy.command("lambda")
@_function_options
def lambda_(image: str, as_json: bool, dry_run: bool, removes: bool) -> None:
    """Deploy the function of platform="lambda", by [platform.lambda]: region, function, memory, lifetime, role, vpc."""
    from torch_dpflow.remote.launchers import lambda_deploy

    settings: Any = resolve("lambda")
    _print_steps(
        lambda_deploy.remove(settings, dry_run=dry_run)
        if removes
        else lambda_deploy.deploy(settings, image, dry_run=dry_run),
        as_json=as_json,
    )


_group_options = with_options(
    click.option(
        "--join",
        metavar="FILE",
        help="Connection file of the cluster, with its keys, as `dpflow up --listen` has written it.",
    ),
    click.option(
        "--cluster",
        help="With --list and --remove, if that file is lost: 8 digits in the names of the groups.",
    ),
    click.option("--nodes", type=click.IntRange(0, 256), help="Desired number of groups."),
    click.option("--image", default="", help="Container image, as by `dpflow image`."),
    click.option("--vswitch", default="", help="vSwitch of the groups, in the network of the cluster."),
    click.option(
        "--security-group",
        default="",
        help="Security group that lets jobs reach all TCP ports of the groups.",
    ),
    click.option("--cpu", type=float, default=4.0, show_default=True, help="vCPUs of a group."),
    click.option(
        "--memory",
        metavar="SIZE",
        default="16GiB",
        show_default=True,
        callback=size_of,
        help="Memory of a group.",
    ),
    click.option("--spot", is_flag=True, help="Cheaper groups that the platform may end at any time."),
    click.option("--region", default="cn-hangzhou", show_default=True),
    click.option("--endpoint", default="", help="http(s)://HOST of the control plane; by default that of the region."),
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
    """Run nodes of a cluster as container groups of Alibaba Cloud's Elastic Container Instance.

    A repeated call creates missing and ended groups, and removes superfluous ones.
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
            raise OptionError("give --nodes, such as 4")
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
    _print_steps(lines, as_json=as_json)


def _cluster_file(join: str | None, cluster: str | None) -> ConnectionFile | None:
    """Return the connection file; None if only the name of the cluster is given."""
    from torch_dpflow.cluster.security.connection_file import read_connection_file

    if join is not None:
        return read_connection_file(join)
    if cluster is None or not _CLUSTER.fullmatch(cluster):
        raise OptionError(
            "give --join FILE, the connection file of the cluster; to list or remove groups, --cluster with the 8 "
            "hexadecimal digits in their names is enough"
        )
    return None


def _print_steps(steps: Iterable[str], *, as_json: bool) -> None:
    """Print each step once it is done; with --json, all at the end."""
    done = []
    for step in steps:
        done.append(step)
        if not as_json:
            click.echo(step)
    if as_json:
        click.echo(to_json({"steps": done}))
