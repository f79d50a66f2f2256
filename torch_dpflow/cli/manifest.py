"""`dpflow manifest`: the objects of a cluster on a platform."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
import msgspec

from torch_dpflow.cli.common import size_of, with_options
from torch_dpflow.errors import MissingExtraError, OptionError
from torch_dpflow.remote.launchers.registry import resolve

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch_dpflow.remote.launchers.kubernetes_manifest import ClusterManifest

_PLAIN = re.compile(r"v1|[A-Za-z/-][\w.:/()$-]{2,}", re.ASCII)


@click.group()
def manifest() -> None:
    """Print the objects of a cluster on a platform, with the settings of dpflow.toml."""


_options = with_options(
    click.option("--name", default="dpflow", show_default=True, help="Name of the cluster and its objects."),
    click.option("--namespace", help="Existing namespace; by default that of the settings, or default."),
    click.option("--image", help="Image of the coordinator and its workers, as by `dpflow image`."),
    click.option("--workers", type=click.IntRange(1, 4096), help="Maximum number of workers of all flows together."),
    click.option("--autoscale", metavar="MIN:MAX", help="Have as many workers as jobs need, within these bounds."),
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
    click.option("--state-secret", default="", help="Secret whose `url` is that address, with a password."),
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
    click.option("--keys", help="File of `dpflow keygen`. Without it, new keys are generated."),
    click.option("--without-secrets", is_flag=True, help="Print no keys, as their secrets exist already."),
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
    """Print a cluster with workers in pods as YAML for `kubectl apply -f -`, by [platform.kubernetes].

    The output has keys, unless --without-secrets is given: keep it secret. Pods of jobs need the label
    dpflow-cluster=NAME, the secret NAME-jobs as a volume, and the path of its file as DPFLOW_ADDRESS.
    """
    from torch_dpflow.cluster.messages.coordinator import ClusterLimits
    from torch_dpflow.cluster.services.local_cluster import scaled_limits
    from torch_dpflow.remote.launchers.kubernetes import Kubernetes
    from torch_dpflow.remote.launchers.kubernetes_manifest import ClusterManifest, NodePods

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
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "`dpflow manifest` needs PyYAML; install it with: pip install 'torch_dpflow[kubernetes]'"
        ) from error

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
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
