"""`dpflow up`, `down`, `status`, `top`, `flow` and `keygen`: a cluster that several jobs read from."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from torch_dpflow.cli.cluster_printing import print_flows, print_processes, print_top, to_json
from torch_dpflow.errors import DeadlineError, RemoteCallError, UsageError
from torch_dpflow.remote.cluster_address import default_connection_file, find_cluster
from torch_dpflow.remote.protocol import FlowView, ProcessView
from torch_dpflow.remote.rpc import RpcClient

_address = click.option(
    "--address",
    default="auto",
    show_default=True,
    help='The connection file of the cluster; "auto" takes DPFLOW_ADDRESS or the one that `dpflow up` left.',
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


@click.command()
@click.option("--listen", help="tcp://HOST:PORT, with keys; without it, only this user on this machine.")
@click.option("--state", help="Where flows are kept: a path, or redis://HOST:PORT/NUMBER.")
@click.option("--connection-file", help="Where to leave the file by which jobs find the cluster.")
@click.option("--keys", help="A file that `dpflow keygen` has written; without it, new keys are drawn.")
def up(listen: str | None, state: str | None, connection_file: str | None, keys: str | None) -> None:
    """Run a cluster until it is told to stop: by Ctrl-C, SIGTERM or `dpflow down`."""
    from torch_dpflow.remote.services.local_cluster import ClusterOptions, LocalCluster
    from torch_dpflow.remote.services.node import stopped_by_signals

    options = ClusterOptions(listen=listen, state=state, connection_file=connection_file, keys=keys)
    cluster = LocalCluster(options)
    click.echo(f"dpflow is up at {cluster.address}")
    click.echo(f"jobs find it by {options.path}")
    with stopped_by_signals(cluster.node):
        cluster.serve()
    click.echo("dpflow is down")


@click.command()
@_address
def down(address: str) -> None:
    """End a cluster and everything that it runs."""
    with _connect(address) as coordinator:
        _ask(coordinator, "stop", None)
        click.echo(f"told {coordinator.address} to stop")


@click.command()
@_address
@_json
def status(address: str, as_json: bool) -> None:
    """Say which flows there are and which processes run."""
    with _connect(address) as coordinator:
        flows: list[FlowView] = _ask(coordinator, "flows", list[FlowView])
        processes: list[ProcessView] = _ask(coordinator, "processes", list[ProcessView])
    if as_json:
        click.echo(to_json({"flows": flows, "processes": processes}))
    else:
        print_flows(flows)
        print_processes(processes)


@click.command()
@_address
@_json
@click.option("--interval", default=1.0, show_default=True, help="Seconds between two looks.")
@click.option("--count", type=int, help="Looks; without it, until Ctrl-C.")
def top(address: str, as_json: bool, interval: float, count: int | None) -> None:
    """Show what a cluster does, again and again: hit rate, decodes, queues, bytes."""
    looks = 0
    with _connect(address) as coordinator:
        while count is None or looks < count:
            if looks:
                time.sleep(interval)
            processes: list[ProcessView] = _ask(coordinator, "processes", list[ProcessView])
            if as_json:
                click.echo(to_json(processes))
            else:
                print_top(processes, clear=looks > 0)
            looks += 1


@click.group()
def flow() -> None:
    """List, show and delete flows."""


@flow.command("list")
@_address
@_json
def list_flows(address: str, as_json: bool) -> None:
    """List the flows of a cluster."""
    with _connect(address) as coordinator:
        flows: list[FlowView] = _ask(coordinator, "flows", list[FlowView])
    if as_json:
        click.echo(to_json(flows))
    else:
        print_flows(flows)


@flow.command()
@click.argument("name")
@_address
def show(name: str, address: str) -> None:
    """Show a flow's description and state, as JSON."""
    with _connect(address) as coordinator:
        flows: list[FlowView] = _ask(coordinator, "flows", list[FlowView])
    found = [one for one in flows if one.spec.name == name]
    if not found:
        raise UsageError(
            f"flow {name!r} is not registered; registered are {[one.spec.name for one in flows]}"
        )
    click.echo(to_json(found))


@flow.command()
@click.argument("name")
@_address
def delete(name: str, address: str) -> None:
    """Delete a flow that nobody reads."""
    with _connect(address) as coordinator:
        _ask(coordinator, "delete", None, name)
    click.echo(f"deleted {name}")


@click.command()
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
def keygen(path: Path) -> None:
    """Draw the keys of a cluster into PATH, for `dpflow up --keys PATH`."""
    from torch_dpflow.remote.transport.curve import create_cluster, write_connection_file

    if path.exists():
        raise UsageError(f"{str(path)!r} is there already; remove it, or give another path")
    write_connection_file(path, create_cluster("tcp://127.0.0.1:0"))
    click.echo(f"wrote {path}; who can read it can run code on the cluster's workers")


def _connect(address: str) -> RpcClient:
    return find_cluster(address).connect(timeout_s=10.0)


def _ask(coordinator: RpcClient, method: str, kind: Any, body: Any = None) -> Any:
    try:
        return coordinator.call(method, body, reply_type=kind).body
    except RemoteCallError as error:
        raise UsageError(str(error.args[0])) from error
    except DeadlineError as error:
        raise UsageError(
            f"no cluster answers at {coordinator.address}; is it up? ({default_connection_file()})"
        ) from error
