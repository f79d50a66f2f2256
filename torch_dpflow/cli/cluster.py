"""`dpflow up`, `down`, `status`, `top` and `keygen`: a cluster from which several jobs read."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torch_dpflow._core.descriptors import soft_limit
from torch_dpflow.cli.background import go_on_in_background
from torch_dpflow.cli.cluster_calls import (
    address_option,
    ask,
    ask_views,
    connect,
    end_cluster,
    json_option,
    seconds_of,
    size_of,
    to_json,
)
from torch_dpflow.cli.cluster_printing import (
    counted,
    print_flows,
    print_jobs,
    print_missing,
    print_nodes,
    print_processes,
    print_sharing,
    print_top,
)
from torch_dpflow.cli.dataset_options import Command
from torch_dpflow.cluster.messages.node import NodeView
from torch_dpflow.cluster.monitoring.cluster_figures import ClusterFigures, figures_of
from torch_dpflow.cluster.security.connection_file import ADDRESS_VARIABLE
from torch_dpflow.errors import OptionError, UsageError
from torch_dpflow.log import FORMATS, LEVELS, LogOptions

if TYPE_CHECKING:
    from torch_dpflow.cluster.services.local_cluster import ClusterOptions, LocalCluster
    from torch_dpflow.ipc.rpc import RpcClient


def _up_options(command: Command) -> Command:
    options = [
        click.option("--workers", type=click.IntRange(1, 4096), help="Most workers, of all flows together."),
        click.option(
            "--autoscale",
            metavar="MIN:MAX",
            help="Have as many workers as jobs need: at least and at most so many, of all flows together.",
        ),
        click.option(
            "--memory", metavar="SIZE", callback=size_of, help="Most memory for samples, of all flows: 8GiB."
        ),
        click.option(
            "--listen", help="tcp://ADDRESS:PORT, with keys; without it, only this user on this host."
        ),
        click.option(
            "--state",
            envvar="DPFLOW_STATE",
            show_envvar=True,
            help="Where flows are stored: a path, or redis://HOST:PORT/NUMBER; without it, until the cluster ends.",
        ),
        click.option("--connection-file", help="The path of the file by which jobs find the cluster."),
        click.option(
            "--keys",
            help="A file that `dpflow keygen` has written, for --listen; without it, new keys are generated.",
        ),
        click.option("--metrics", metavar="HOST:PORT", help="Where Prometheus finds metrics, over HTTP."),
        click.option("--metrics-public", is_flag=True, help="Let other hosts read --metrics, without a key."),
        click.option("--web", metavar="HOST:PORT", help="Where a browser finds the live page."),
        click.option(
            "--web-token-file",
            metavar="PATH",
            envvar="DPFLOW_WEB_TOKEN_FILE",
            show_envvar=True,
            help="A file of mode 600 with the token that the page needs; without it, --web is for this machine alone.",
        ),
        click.option(
            "--pool-memory",
            metavar="SIZE",
            callback=size_of,
            help="Run a server of the pool too, which holds datasets in so much memory of this host: 2GiB.",
        ),
        click.option(
            "--preload",
            metavar="MODULE",
            multiple=True,
            help="A module to import once for all workers, as torchvision: they start at once and share it.",
        ),
        click.option(
            "--platform",
            help="What runs the workers of flows: ray, kubernetes, fc, lambda; without it, this host.",
        ),
        click.option(
            "--worker-listen",
            help="With --platform, where workers call: tcp://HOST:PORT or tcp://HOST:FIRST-LAST.",
        ),
        click.option("--log-format", type=click.Choice(FORMATS), default="text", envvar="DPFLOW_LOG_FORMAT"),
        click.option("--log-level", type=click.Choice(LEVELS), default="info", envvar="DPFLOW_LOG_LEVEL"),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@_up_options
@click.option(
    "-d",
    "--detach",
    is_flag=True,
    help="Go on in the background once the cluster is up; its log is beside the connection file.",
)
@json_option
def up(
    workers: int | None,
    memory: int | None,
    detach: bool,
    as_json: bool,
    log_format: str,
    log_level: str,
    **given: Any,
) -> None:
    """Run a cluster until it is stopped: by Ctrl-C, SIGTERM or `dpflow down`.

    It logs to stderr, one line for each event, with the flow, the job and the worker concerned.
    """
    from torch_dpflow.cluster.messages.coordinator import ClusterLimits
    from torch_dpflow.cluster.services.local_cluster import ClusterOptions, LocalCluster
    from torch_dpflow.cluster.services.node import stopped_by_signals
    from torch_dpflow.ipc.memory.headroom import check_memory
    from torch_dpflow.workers.local_platform import end_fork_server

    if memory is not None and given["listen"] is None:  # else nodes of other hosts may have a part of it
        check_memory("--memory", memory)
    if given["pool_memory"] is not None:
        check_memory("--pool-memory", given["pool_memory"])
        _pool_directory(given["pool_memory"])  # which may be none
    sys.path.insert(0, os.getcwd())  # as `python -m` does; a console script has its own directory there
    options = ClusterOptions(
        limits=ClusterLimits(workers=workers, memory_bytes=memory),
        log=LogOptions(format=log_format, level=log_level),
        **given,
    )
    _warn_of_another_address(options.path)
    announce = go_on_in_background(options.path.with_suffix(".log")) if detach else click.echo
    cluster = LocalCluster(options)
    with stopped_by_signals(cluster):
        try:
            cluster.serve(ready=lambda: _announce(announce, cluster, options, as_json=as_json))
        finally:
            end_fork_server()
    if not as_json:
        click.echo("dpflow is down")


def _announce(
    announce: Callable[[str], object], cluster: LocalCluster, options: ClusterOptions, *, as_json: bool
) -> None:
    text = "\n".join(_up_lines(cluster, options, as_json=as_json))
    with suppress(OSError):  # whoever has started it may have closed the pipe, and reads from it all the same
        announce(text)


def _up_lines(cluster: LocalCluster, options: ClusterOptions, *, as_json: bool) -> Iterator[str]:
    if as_json:
        facts = {"address": cluster.address, "connection_file": str(options.path), "metrics": options.metrics}
        facts["web"] = options.web
        facts["pool"] = _pool_directory(options.pool_memory)
        yield to_json({**facts, "pid": os.getpid(), "most_workers": cluster.workers})
        return
    yield f"dpflow is up at {cluster.address}"
    yield f"jobs find it by {options.path}"
    workers = counted(cluster.workers, "worker")
    yield f"it may run {workers} (its limit of open files, `ulimit -Hn`, is {soft_limit()})"
    if options.metrics:
        yield f"metrics are at http://{options.metrics}/metrics"
    if options.pool_memory:
        directory = _pool_directory(options.pool_memory)
        yield f"the pool holds datasets in {options.pool_memory:,} bytes, at {directory}"
    if options.web:
        token = "; it asks for the token, as a password" if options.web_token_file else ""
        yield f"the live page is at http://{options.web}{token}"


def _warn_of_another_address(path: Path) -> None:
    named = os.environ.get(ADDRESS_VARIABLE)
    if named and Path(named).absolute() != path:
        click.echo(
            f"{ADDRESS_VARIABLE}={named!r}: where it is set so, jobs and commands look for another cluster; unset it, "
            "or give `dpflow up` that path as --connection-file",
            err=True,
        )


def _pool_directory(memory: int | None) -> str | None:
    """Where the server of the pool is that the cluster runs."""
    from torch_dpflow.pool.transport.address import find_directory

    return None if memory is None else str(find_directory())


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
def status(address: str, as_json: bool) -> None:
    """List the flows, their jobs, the nodes that have joined and the processes of a cluster."""
    with connect(address) as coordinator:
        flows, processes = ask_views(coordinator)
        nodes: list[NodeView] = ask(coordinator, "nodes", list[NodeView])
    figures = figures_of(flows, processes)
    if as_json:
        told = {"flows": flows, "jobs": figures.jobs, "nodes": nodes, "processes": processes}
        click.echo(to_json(told))
    else:
        print_flows(flows)
        print_jobs(figures)
        print_missing(flows, figures)
        print_sharing(figures)
        print_nodes(nodes)
        print_processes(processes)


@click.command()
@address_option
@json_option
@click.option(
    "--interval",
    type=float,
    callback=seconds_of,
    default=1.0,
    show_default=True,
    help="Seconds between updates.",
)
@click.option("--count", type=click.IntRange(min=1), help="Updates; without it, until Ctrl-C.")
def top(address: str, as_json: bool, interval: float, count: int | None) -> None:
    """Show the activity of a cluster, updated continually: stall shares, hit rates, decodes, queues, bytes.

    With --json, one line for each update.
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
    return click.option(
        f"--{name}", metavar="FILE", type=click.Path(path_type=Path), multiple=True, help=text
    )


@click.command()
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
@_pem_option("authority", "The certificate of your own authority, PEM, in the place of one that is drawn.")
@_pem_option(
    "server", "The servers' certificate for the name server.dpflow, and its key; twice for two files."
)
@_pem_option(
    "client", "The clients' certificate for the name client.dpflow, and its key; twice for two files."
)
@json_option
def keygen(
    path: Path, authority: tuple[Path, ...], server: tuple[Path, ...], client: tuple[Path, ...], as_json: bool
) -> None:
    """Generate the keys of a cluster into PATH, for `dpflow up --listen ... --keys PATH`.

    With the extra `pool` it gets certificates too, for `dpflow pool serve --listen ... --connection PATH`; or with
    --authority, --server and --client those that you have.
    """
    from torch_dpflow.cluster.security.certificates import can_draw_certificates, read_certificates
    from torch_dpflow.cluster.security.connection_file import generate_keys, write_connection_file

    if path == Path():
        raise OptionError("PATH is empty or a directory; give the path of a file")
    if os.path.lexists(path):
        raise UsageError(f"{str(path)!r} exists already; remove it, or give another path")
    own = [authority, client, server]
    if any(own) and not all(own):
        raise UsageError("own certificates are given as --authority, --server and --client, all three")
    try:
        keys = generate_keys("tcp://127.0.0.1:0", certificates=not any(own) and can_draw_certificates())
        keys = keys.with_certificates(read_certificates(*own)) if any(own) else keys
        write_connection_file(path, keys)
    except OSError as error:
        raise OptionError(f"{str(path)!r} cannot be written: {error.strerror}; give another path") from error
    if as_json:
        click.echo(to_json({"path": str(path)}))
    else:
        click.echo(f"wrote {path}; who can read it can run code on the cluster's workers")


def _with_rates(figures: ClusterFigures) -> dict[str, list[dict[str, Any]]]:
    """The figures for JSON, with the rates that are computed from them."""
    named: dict[str, list[dict[str, Any]]] = {"flows": [], "shards": [], "jobs": []}
    for kind, rows in (("flows", figures.flows), ("shards", figures.shards)):
        for row in rows:
            own = {name: getattr(row, name) for name in row.__struct_fields__ if name != "figures"}
            counts = {name: getattr(row.figures, name) for name in row.figures.__struct_fields__}
            rates = {
                "hit_rate": row.figures.hit_rate,
                "decodes_per_sample": row.figures.decodes_per_sample,
            }
            named[kind].append({**counts, **own, **rates})
    for job in figures.jobs:
        counts = {name: getattr(job, name) for name in job.__struct_fields__}
        named["jobs"].append({**counts, "stall_share": job.stall_share})
    return named
