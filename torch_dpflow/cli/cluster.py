"""`dpflow down`, `status`, `top`, `flow` and `keygen`: commands for a cluster from which several jobs read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from msgspec.structs import asdict

from torch_dpflow.cli.cluster_views import (
    address_option,
    ask,
    ask_views,
    connect,
    end_cluster,
    print_ended,
    print_flow,
    print_flows,
    print_jobs,
    print_missing,
    print_nodes,
    print_processes,
    print_scaled,
    print_sharing,
    print_top,
)
from torch_dpflow.cli.common import Command, json_option, seconds_of, to_json
from torch_dpflow.cluster.messages.coordinator import MAX_SHARDS, EndedJob, FlowView, Scale
from torch_dpflow.cluster.messages.node import NodeView
from torch_dpflow.cluster.monitoring.cluster_figures import ClusterFigures, figures_of
from torch_dpflow.errors import OptionError, UsageError

if TYPE_CHECKING:
    from torch_dpflow.ipc.rpc import RpcClient


@click.command()
@address_option
@json_option
def down(address: str, as_json: bool) -> None:
    """End a cluster and everything that it runs."""
    with connect(address) as coordinator:
        end_cluster(coordinator)
        if as_json:
            click.echo(to_json({"stopped": coordinator.address}))
        else:
            click.echo(f"{coordinator.address} is stopping")


@click.command()
@address_option
@json_option
@click.option("--ended", is_flag=True, help="List instead the jobs that have ended, and what last limited each.")
def status(address: str, as_json: bool, ended: bool) -> None:
    """List the flows, jobs, joined nodes and processes of a cluster."""
    with connect(address) as coordinator:
        if ended:
            jobs: list[EndedJob] = ask(coordinator, "ended", list[EndedJob])
            click.echo(to_json({"ended": jobs})) if as_json else print_ended(jobs)
            return
        flows, processes = ask_views(coordinator)
        nodes: list[NodeView] = ask(coordinator, "nodes", list[NodeView])
    figures = figures_of(flows, processes)
    if as_json:
        click.echo(to_json({"flows": flows, "jobs": figures.jobs, "nodes": nodes, "processes": processes}))
    else:
        print_flows(flows)
        print_jobs(figures)
        print_missing(flows, figures)
        print_sharing(figures)
        print_nodes(nodes, processes)
        print_processes(processes)


@click.command()
@address_option
@json_option
@click.option(
    "--interval", type=float, callback=seconds_of, default=1.0, show_default=True, help="Seconds between updates."
)
@click.option("--count", type=click.IntRange(min=1), help="Number of updates; by default until Ctrl-C.")
def top(address: str, as_json: bool, interval: float, count: int | None) -> None:
    """Show the activity of a cluster, updated continuously: stall shares, hit rates, decodes, queues, bytes.

    With --json, print one line for each update.
    """
    with suppress(KeyboardInterrupt), connect(address) as coordinator:  # Ctrl-C is the usual way to end it
        _show_updates(coordinator, interval, count, as_json=as_json)


def _show_updates(coordinator: RpcClient, interval: float, count: int | None, *, as_json: bool) -> None:
    updates = 0
    earlier: ClusterFigures | None = None
    while count is None or updates < count:
        if updates:
            time.sleep(interval)
        figures = figures_of(*ask_views(coordinator))
        if as_json:
            click.echo(to_json(_with_rates(figures)))
        else:
            print_top(figures, earlier, clear=updates > 0)
        updates, earlier = updates + 1, figures


def _pem_option(name: str, text: str) -> Callable[[Command], Command]:
    return click.option(f"--{name}", metavar="FILE", type=click.Path(path_type=Path), multiple=True, help=text)


@click.command()
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
@_pem_option("authority", "Certificate of your own authority, PEM, instead of a generated one.")
@_pem_option("server", "Certificate of servers for the name server.dpflow, and its key; twice for two files.")
@_pem_option("client", "Certificate of clients for the name client.dpflow, and its key; twice for two files.")
@json_option
def keygen(
    path: Path, authority: tuple[Path, ...], server: tuple[Path, ...], client: tuple[Path, ...], as_json: bool
) -> None:
    """Generate the keys of a cluster into PATH, for `dpflow up --listen ... --keys PATH`.

    With the extra `pool` installed it also generates certificates, for `dpflow pool serve --listen ... --connection
    PATH`. With --authority, --server and --client it stores your own certificates instead.
    """
    from torch_dpflow.cluster.security.certificates import can_draw_certificates, read_certificates
    from torch_dpflow.cluster.security.connection_file import generate_keys, write_connection_file

    if path == Path():
        raise OptionError("PATH is empty or a directory; give the path of a file")
    if os.path.lexists(path):
        raise UsageError(f"{str(path)!r} exists already; remove it, or give another path")
    own = [authority, client, server]
    if any(own) and not all(own):
        raise UsageError("give --authority, --server and --client together, or none of them")
    try:
        keys = generate_keys("tcp://127.0.0.1:0", certificates=not any(own) and can_draw_certificates())
        keys = keys.with_certificates(read_certificates(*own)) if any(own) else keys
        write_connection_file(path, keys)
    except OSError as error:
        raise OptionError(f"{str(path)!r} cannot be written: {error.strerror}; give another path") from error
    if as_json:
        click.echo(to_json({"path": str(path)}))
    else:
        click.echo(f"wrote {path}; everyone who can read it can run code on the workers of the cluster")


def _with_rates(figures: ClusterFigures) -> dict[str, list[dict[str, Any]]]:
    """Return the figures as JSON values, including the rates that are computed from them."""
    named: dict[str, list[dict[str, Any]]] = {"flows": [], "shards": [], "jobs": []}
    for kind, rows in (("flows", figures.flows), ("shards", figures.shards)):
        for row in rows:
            rates = {"hit_rate": row.figures.hit_rate, "decodes_per_sample": row.figures.decodes_per_sample}
            named[kind].append({**asdict(row.figures), **asdict(row), **rates})
            del named[kind][-1]["figures"]
    named["jobs"] = [{**asdict(job), "stall_share": job.stall_share} for job in figures.jobs]
    return named


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
    """Show a flow: its state, its share of the cluster, and its jobs.

    NAME:v2 is version 2. Without a version, all registered versions are shown.
    """
    with connect(address) as coordinator:
        flows, processes = ask_views(coordinator)
    found = _named(name, flows)
    if as_json:
        click.echo(to_json(found))
        return
    for one in found:
        print_flow(one, figures_of([one], processes))


def _number_of_shards(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> int | Literal["auto"] | None:
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if not (text.isdecimal() and 1 <= int(text) <= MAX_SHARDS):
        raise click.BadParameter(f'{text!r}: give a number from 1 to {MAX_SHARDS}, or "auto"')
    return int(text)


@flow.command()
@click.argument("name")
@click.option(
    "--shards",
    metavar="N|auto",
    callback=_number_of_shards,
    help='New number of shards, or "auto" for as many as the rate needs; by default unchanged.',
)
@click.option(
    "--workers",
    type=click.IntRange(1, 4096),
    help="New number of workers of all shards together; by default unchanged, with at least one for each shard.",
)
@address_option
@json_option
def scale(name: str, shards: int | Literal["auto"] | None, workers: int | None, address: str, as_json: bool) -> None:
    """Change the numbers of shards and workers of a flow, even while jobs read it.

    NAME:v2 is version 2. Without a version, the highest one is changed.

    Jobs continue. Each key moves to another shard at most once, and a removed shard ends once its jobs use the other
    shards.
    """
    if shards is None and workers is None:
        raise click.UsageError("give --shards, --workers or both")
    with connect(address) as coordinator:
        scaled: FlowView = ask(coordinator, "scale", FlowView, Scale(name, shards, workers), doubt=_doubt(name))
        flows, processes = ask_views(coordinator)
    if as_json:
        click.echo(to_json(scaled))
        return
    print_scaled(scaled, figures_of([scaled], processes))
    others = _versions_of(scaled.spec.name, flows, but=scaled.spec.version)
    if others:
        click.echo(f"unchanged versions: {others}")


@flow.command()
@click.argument("name")
@address_option
@json_option
def delete(name: str, address: str, as_json: bool) -> None:
    """Delete a flow that no job reads.

    NAME:v2 is version 2. Without a version, the highest one is deleted.
    """
    with connect(address) as coordinator:
        flows: list[FlowView] = ask(coordinator, "flows", list[FlowView])
        # By its version: a repeated call must not delete the next lower one.
        instance = max(_named(name, flows), key=lambda one: one.spec.version).spec.instance
        ask(coordinator, "delete", None, instance, doubt=_doubt(name))
    if as_json:
        click.echo(to_json({"deleted": instance}))
        return
    base, _, version = instance.rpartition(":v")
    others = _versions_of(base, flows, but=int(version))
    click.echo(f"deleted {instance}" + (f"; still registered: {others}" if others else ""))


def _named(name: str, flows: list[FlowView]) -> list[FlowView]:
    """Return the flows of this name, which can include a version. Raises UsageError if there are none."""
    found = [one for one in flows if name in (one.spec.name, one.spec.instance)]
    if not found:
        known = sorted({one.spec.name for one in flows})
        raise UsageError(f"flow {name!r:.80} is not registered; registered are {known}")
    return found


def _versions_of(name: str, flows: list[FlowView], *, but: int) -> str:
    """Return a text that lists the other versions of a flow; empty if there are none. but: the version to leave out."""
    versions = sorted(one.spec.version for one in flows if one.spec.name == name)
    return ", ".join(f"{name}:v{version}" for version in versions if version != but)


def _doubt(name: str) -> str:
    return f"Whether it was done is unknown; see `dpflow flow show {name}` once the cluster answers."
