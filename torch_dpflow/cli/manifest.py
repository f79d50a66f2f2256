"""`dpflow manifest`: what a cluster on a platform consists of, as that platform takes it."""

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
    """Print what a cluster on a platform consists of, with the settings of dpflow.toml."""


_options = with_options(
    click.option("--name", default="dpflow", show_default=True, help="Of the cluster and its objects."),
    click.option(
        "--namespace", help="Where it is to be; it has to exist. Else that of the settings, or default."
    ),
    click.option("--image", help="Of the head and its workers, as `dpflow image` has it built."),
    click.option("--workers", type=click.IntRange(1, 4096), help="Most workers, of all flows together."),
    click.option("--autoscale", metavar="MIN:MAX", help="Have as many workers as jobs need."),
    click.option(
        "--memory",
        metavar="SIZE",
        default="8GiB",
        show_default=True,
        callback=size_of,
        help="For samples.",
    ),
    click.option("--cpu", default="2", show_default=True, help="Processors that the head asks for."),
    click.option("--state", default="", help="Where flows are stored: redis://HOST:PORT/NUMBER."),
    click.option("--state-secret", default="", help="A secret whose `url` is that address, with a password."),
    click.option("--state-size", default="", help="Store flows on a volume of this size, as 1Gi."),
    click.option("--storage-class", default="", help="Of that volume; else the cluster's default."),
    click.option("--port", type=int, default=7600, show_default=True, help="Where jobs find the head."),
    click.option(
        "--worker-ports",
        default="7700-7799",
        show_default=True,
        help="Where workers call: one for each shard.",
    ),
    click.option(
        "--nodes",
        type=click.IntRange(0, 256),
        default=0,
        help="Run workers in so many pods that join the cluster as nodes; else each is a pod of its own.",
    ),
    click.option("--node-cpu", default="4", show_default=True, help="Processors that a node asks for."),
    click.option("--node-memory", default="16Gi", show_default=True, help="Memory that a node has."),
    click.option(
        "--jobs-in", metavar="NAMESPACE", multiple=True, help="Where jobs run; else where the head does."
    ),
    click.option("--keys", help="A file that `dpflow keygen` has written; without it, new keys are drawn."),
    click.option("--without-secrets", is_flag=True, help="Print no keys: their secrets are there already."),
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
    """A head whose workers are pods, or in pods, by [platform.kubernetes], as YAML: for `kubectl apply -f -`.

    It has keys, unless --without-secrets is given: keep it as them. Pods of jobs need the label dpflow-cluster=NAME,
    the secret NAME-jobs as a volume, and its file as DPFLOW_ADDRESS.
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
        raise OptionError(
            "how many workers may there be? Give --autoscale MIN:MAX, as 0:16, or --workers MAX"
        )
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
        # Readers differ in what else is a number or a truth, as 1e3 and y.
        style = None if _PLAIN.fullmatch(value) else "|" if "\n" in value else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    Dumper.add_multi_representer(Mapping, lambda dumper, value: dumper.represent_dict({**value}))
    found: str = yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, width=1_000, explicit_start=True)
    return found
