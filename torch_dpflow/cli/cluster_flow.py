"""`dpflow flow`: list, show, scale and delete the flows of a cluster."""

from __future__ import annotations

import click

from torch_dpflow.cli.cluster_calls import address_option, ask, ask_views, connect, json_option, to_json
from torch_dpflow.cli.cluster_printing import print_flow, print_flows, print_scaled
from torch_dpflow.cluster.messages.coordinator import FlowView, Scale
from torch_dpflow.cluster.monitoring.cluster_figures import figures_of
from torch_dpflow.errors import UsageError


@click.group()
def flow() -> None:
    """List, show, scale and delete flows."""


@flow.command("list")
@address_option
@json_option
def list_flows(address: str, as_json: bool) -> None:
    """List the flows of a cluster."""
    with connect(address) as coordinator:
        flows: list[FlowView] = ask(coordinator, "flows", list[FlowView])
    if as_json:
        click.echo(to_json(flows))
    else:
        print_flows(flows)


@flow.command()
@click.argument("name")
@address_option
@json_option
def show(name: str, address: str, as_json: bool) -> None:
    """Show a flow: its state, its part of the cluster, and the jobs that read it.

    NAME:v2 is its version 2; without a version, every one that is in force or still read is shown.
    """
    with connect(address) as coordinator:
        flows, processes = ask_views(coordinator)
    found = [one for one in flows if name in (one.spec.name, one.spec.instance)]
    if not found:
        raise UsageError(
            f"flow {name!r} is not registered; registered are {sorted({one.spec.name for one in flows})}"
        )
    if as_json:
        click.echo(to_json(found))
        return
    for one in found:
        print_flow(one, figures_of([one], processes))


@flow.command()
@click.argument("name")
@click.option(
    "--shards", type=click.IntRange(1, 256), help="The new number of shards; without it, as many as now."
)
@click.option(
    "--workers",
    type=click.IntRange(1, 4096),
    help="The new number of workers of all its shards together; without it, as many as now, but one for each shard.",
)
@address_option
@json_option
def scale(name: str, shards: int | None, workers: int | None, address: str, as_json: bool) -> None:
    """Change a flow's numbers of shards and workers, whether or not jobs read it.

    NAME:v2 is its version 2; without a version, the highest one is changed.

    Jobs read on: each key changes its owner once, and a removed shard ends when its jobs have moved to the others.
    """
    if shards is None and workers is None:
        raise click.UsageError("give --shards, --workers or both")
    with connect(address) as coordinator:
        scaled: FlowView = ask(
            coordinator, "scale", FlowView, Scale(name, shards, workers), doubt=_doubt(name)
        )
        flows, processes = ask_views(coordinator)
    if as_json:
        click.echo(to_json(scaled))
        return
    print_scaled(scaled, figures_of([scaled], processes))
    others = _versions_of(scaled.spec.name, flows, but=scaled.spec.version)
    if others:
        click.echo(f"its other versions are as before: {others}")


@flow.command()
@click.argument("name")
@address_option
@json_option
def delete(name: str, address: str, as_json: bool) -> None:
    """Delete a flow that no job reads.

    NAME:v2 is its version 2; without a version, the highest one is deleted.
    """
    with connect(address) as coordinator:
        instance: str = ask(coordinator, "delete", str, name, doubt=_doubt(name))
        flows: list[FlowView] = ask(coordinator, "flows", list[FlowView])
    if as_json:
        click.echo(to_json({"deleted": instance}))
        return
    others = _versions_of(instance.rpartition(":v")[0], flows)
    click.echo(f"deleted {instance}" + (f"; registered still: {others}" if others else ""))


def _versions_of(name: str, flows: list[FlowView], *, but: int = 0) -> str:
    """The versions of a flow but for one, for people; empty if there are none."""
    versions = sorted(one.spec.version for one in flows if one.spec.name == name)
    return ", ".join(f"{name}:v{version}" for version in versions if version != but)


def _doubt(name: str) -> str:
    return f"Whether it was done is unknown; `dpflow flow show {name}` tells once the cluster answers."
