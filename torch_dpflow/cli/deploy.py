"""`dpflow deploy` and `dpflow manifest`: create or print what a platform needs before it can run workers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
import msgspec

from torch_dpflow._core.lazy import imported
from torch_dpflow.cli.common import json_option, size_of, to_json, with_options
from torch_dpflow.errors import OptionError
from torch_dpflow.remote.launchers.registry import resolve, warn_experimental

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch_dpflow.cluster.security.connection_file import ConnectionFile
    from torch_dpflow.remote.launchers.kubernetes_manifest import ClusterManifest

_CLUSTER = re.compile(r"[0-9a-f]{8}", re.ASCII)


@click.group()
def deploy() -> None:
    """Create, change or remove a cloud function for workers (settings: dpflow.toml), or cluster nodes in a cloud."""


_function_options = with_options(
    click.option("--image", default="", help="Container image, in a registry of the region of the function."),
    click.option("--dry-run", is_flag=True, help="Print what would be done, and do nothing."),
    click.option("--remove", "removes", is_flag=True, help="Remove the function."),
    json_option,
)


@deploy.command()
@_function_options
def fc(image: str, as_json: bool, dry_run: bool, removes: bool) -> None:
    """Deploy the cloud function that runs the workers of platform="fc".

    Its settings are in [platform.fc] of dpflow.toml: region, function, cpu, memory, lifetime, role, vpc.
    """
    from torch_dpflow.remote.launchers import fc_deploy

    settings: Any = resolve("fc")
    _print_steps(
        fc_deploy.remove(settings, dry_run=dry_run) if removes else fc_deploy.deploy(settings, image, dry_run=dry_run),
        as_json=as_json,
    )


@deploy.command("lambda")
@_function_options
def lambda_(image: str, as_json: bool, dry_run: bool, removes: bool) -> None:
    """Deploy the cloud function that runs the workers of platform="lambda".

    Its settings are in [platform.lambda] of dpflow.toml: region, function, memory, lifetime, role, vpc.
    """
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
        help="With --list or --remove, in place of --join: the 8 digits in the names of the groups.",
    ),
    click.option("--nodes", type=click.IntRange(0, 256), help="Desired number of groups."),
    click.option("--image", default="", help="Container image; `dpflow image` writes its Dockerfile."),
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
    click.option("--spot", is_flag=True, help="Use cheaper groups, which the platform may end at any time."),
    click.option("--region", default="cn-hangzhou", show_default=True, help="The cloud's region."),
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

    A repeated call creates groups that are missing or have ended, and removes surplus groups.
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
    """Print each step when it is done; with --json, print all steps at the end."""
    done = []
    for step in steps:
        done.append(step)
        if not as_json:
            click.echo(step)
    if as_json:
        click.echo(to_json({"steps": done}))


_PLAIN = re.compile(r"v1|[A-Za-z/-][\w.:/()$-]{2,}", re.ASCII)


@click.group()
def manifest() -> None:
    """Print the YAML manifest of a cluster on a platform, with the settings of dpflow.toml."""


_options = with_options(
    click.option("--name", default="dpflow", show_default=True, help="Name of the cluster and its objects."),
    click.option("--namespace", help='Existing namespace; by default that of the settings, else "default".'),
    click.option("--image", help="Image of the coordinator and its workers; `dpflow image` writes its Dockerfile."),
    click.option("--workers", type=click.IntRange(1, 4096), help="Maximum number of workers of all flows together."),
    click.option("--autoscale", metavar="MIN:MAX", help="Run as many workers as jobs need, within these bounds."),
    click.option(
        "--memory",
        metavar="SIZE",
        default="8GiB",
        show_default=True,
        callback=size_of,
        help="Memory for samples.",
    ),
    click.option("--cpu", default="2", show_default=True, help="Processors that the coordinator requests."),
    click.option("--state", default="", help="Store of flows: redis://HOST:PORT/NUMBER."),
    click.option("--state-secret", default="", help="Secret whose key `url` has the store's URL, with a password."),
    click.option("--state-size", default="", help="Store flows on a volume of this size, such as 1Gi."),
    click.option("--storage-class", default="", help="Storage class of that volume; by default that of Kubernetes."),
    click.option("--port", type=int, default=7600, show_default=True, help="Port to which jobs connect."),
    click.option(
        "--worker-ports",
        default="7700-7799",
        show_default=True,
        help="Ports to which workers connect: one for each shard.",
    ),
    click.option(
        "--nodes",
        type=click.IntRange(0, 256),
        default=0,
        help="Run workers in this many pods that join the cluster as nodes; by default each worker is a pod.",
    ),
    click.option("--node-cpu", default="4", show_default=True, help="Processors that a node requests."),
    click.option("--node-memory", default="16Gi", show_default=True, help="Memory of a node."),
    click.option(
        "--jobs-in",
        metavar="NAMESPACE",
        multiple=True,
        help="Namespace of jobs; by default that of the cluster.",
    ),
    click.option(
        "--metrics-to",
        metavar="NAMESPACE",
        default="",
        help="Serve metrics at port 9400 to the pods of this namespace, where Prometheus runs.",
    ),
    click.option("--page", is_flag=True, help="Serve the live page at port 8265 of the pod, for kubectl port-forward."),
    click.option("--keys", help="File that `dpflow keygen` wrote. Without it, new keys are generated."),
    click.option("--without-secrets", is_flag=True, help="Print no keys, because their secrets exist already."),
)


@manifest.command()
@_options
def kubernetes(
    namespace: str | None,
    image: str | None,
    workers: int | None,
    autoscale: str | None,
    memory: int,
    keys: str | None,
    without_secrets: bool,
    nodes: int,
    node_cpu: str,
    node_memory: str,
    **given: Any,
) -> None:
    """Print YAML for `kubectl apply -f -`: a cluster with workers in pods. Settings are in [platform.kubernetes].

    Keep the output secret: without --without-secrets it contains keys. Pods of jobs need the label dpflow-cluster=NAME,
    the secret NAME-jobs as a volume, and the path of the secret's file as DPFLOW_ADDRESS.
    """
    from torch_dpflow.cluster.messages.coordinator import ClusterLimits
    from torch_dpflow.cluster.services.local_cluster import scaled_limits
    from torch_dpflow.remote.launchers.kubernetes import Kubernetes
    from torch_dpflow.remote.launchers.kubernetes_manifest import ClusterManifest
    from torch_dpflow.remote.launchers.kubernetes_node_pods import NodePods

    settings = resolve("kubernetes")
    assert isinstance(settings, Kubernetes)
    own: dict[str, Any] = {
        name: text for name, text in (("image", image), ("namespace", namespace)) if text is not None
    }
    settings = replace(settings, **own)
    limits = scaled_limits(ClusterLimits(workers=workers), autoscale)
    scale = limits.autoscale
    if limits.workers is None:
        raise OptionError("give the maximum number of workers: --autoscale MIN:MAX, such as 0:16, or --workers MAX")
    settings.check_workers(limits.workers)
    scaling = ("--workers", str(limits.workers))
    if scale is not None:
        scaling = ("--autoscale", f"{scale.least}:{scale.most}")
        given["hold_s"] = scale.hold_s
    given["nodes"] = NodePods(count=nodes, cpu=node_cpu, memory=node_memory)
    head = ClusterManifest(workers=settings, scaling=scaling, memory_bytes=memory, **given)
    click.echo(_written(head, keys, without_secrets), nl=False)


def _written(head: ClusterManifest, keys: str | None, without_secrets: bool) -> str:
    from torch_dpflow.cluster.security.connection_file import generate_keys, read_key_file

    if without_secrets and keys is None:
        return _yaml(head.objects())
    file = generate_keys("") if keys is None else read_key_file(keys)
    file.server_keys()
    objects = [*head.objects(public=file.server_public)]
    if without_secrets:
        return _yaml(objects)
    file = msgspec.structs.replace(file, address=head.address, sends_code=not head.nodes.count)
    connection = file.for_jobs()
    texts = [msgspec.json.encode(one).decode() for one in (file, connection)]
    return _yaml([*head.secrets(*texts), *objects])


def _yaml(objects: Iterable[Mapping[str, Any]]) -> str:
    yaml = imported("yaml", "`dpflow manifest` needs PyYAML", "kubernetes")

    class Dumper(yaml.SafeDumper):  # type: ignore[misc, name-defined]
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        # Readers differ in which other texts are numbers or booleans, such as 1e3 and y.
        style = None if _PLAIN.fullmatch(value) else "|" if "\n" in value else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    Dumper.add_multi_representer(Mapping, lambda dumper, value: dumper.represent_dict({**value}))
    found: str = yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, width=1_000, explicit_start=True)
    return found
