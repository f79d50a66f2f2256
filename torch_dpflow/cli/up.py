"""`dpflow up` and `dpflow node`: run a cluster, or run shards and workers here for a cluster of another host."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from torch_dpflow._core.checks import counted
from torch_dpflow._core.descriptors import soft_limit
from torch_dpflow.cli.common import json_option, log_options, size_of, to_json, with_options
from torch_dpflow.cluster.security.connection_file import ADDRESS_VARIABLE
from torch_dpflow.log import LogOptions

if TYPE_CHECKING:
    from torch_dpflow.cluster.services.joining_node import JoiningNode
    from torch_dpflow.cluster.services.local_cluster import ClusterOptions, LocalCluster

#: End of an announcement. The pipe's end does not show it: processes that the child starts may keep the pipe open.
_END = b"\0"
#: How long a start takes before its log is named, in seconds.
_NOTICE_S = 10.0
#: Maximum number of characters of a log in an error.
_MAX_TAIL = 2000


_up_options = with_options(
    click.option("--workers", type=click.IntRange(1, 4096), help="Maximum number of workers of all flows together."),
    click.option(
        "--autoscale",
        metavar="MIN:MAX",
        help="Run as many workers as jobs need, within these bounds for all flows together.",
    ),
    click.option(
        "--memory",
        metavar="SIZE",
        callback=size_of,
        help="Maximum memory for samples of all flows, such as 8GiB.",
    ),
    click.option(
        "--listen", help="Address for other hosts, tcp://ADDRESS:PORT. Without it, only you on this host can connect."
    ),
    click.option(
        "--state",
        envvar="DPFLOW_STATE",
        show_envvar=True,
        help="Store of flows: a path, or redis://HOST:PORT/NUMBER. Without it, flows are lost when the cluster ends.",
    ),
    click.option(
        "--address",
        "connection_file",
        metavar="FILE",
        help="Connection file to write, by which jobs and all other commands find the cluster.",
    ),
    click.option("--keys", help="File that `dpflow keygen` wrote, for --listen. Without it, new keys are generated."),
    click.option("--metrics", metavar="HOST:PORT", help="Address of metrics for Prometheus, over HTTP."),
    click.option("--metrics-public", is_flag=True, help="Allow other hosts to read --metrics, without a key."),
    click.option("--web", metavar="HOST:PORT", help="Address of the live page, for a browser."),
    click.option(
        "--web-token-file",
        metavar="PATH",
        envvar="DPFLOW_WEB_TOKEN_FILE",
        show_envvar=True,
        help="File of mode 600 with the token of the page. Without it, only this machine can open --web.",
    ),
    click.option(
        "--pool-memory",
        metavar="SIZE",
        callback=size_of,
        help="Also run a pool server, which caches datasets in this much memory of this host, such as 2GiB.",
    ),
    click.option(
        "--platform",
        help="Platform that runs the workers of flows: ray, kubernetes, fc, lambda. Without it, this host.",
    ),
    click.option(
        "--nodes",
        metavar="N|MIN:MAX",
        help="With --platform ray, how many nodes it runs, each with shards of flows and their workers; MIN:MAX: as "
        "many as workers need. Without it, the platform runs single workers.",
    ),
    click.option(
        "--worker-listen",
        help="With --platform, address to which workers connect: tcp://HOST:PORT or tcp://HOST:FIRST-LAST.",
    ),
    log_options,
)


@click.command()
@_up_options
@click.option(
    "-d",
    "--detach",
    is_flag=True,
    help="Continue in the background once the cluster is up. Its log is next to the connection file.",
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

    The cluster logs to stderr (with --detach to a file), one line per event, with its flow, job and worker.
    """
    from torch_dpflow.cluster.messages.coordinator import ClusterLimits
    from torch_dpflow.cluster.services.local_cluster import ClusterOptions, LocalCluster
    from torch_dpflow.cluster.services.node_host import stopped_by_signals
    from torch_dpflow.ipc.memory.headroom import check_memory
    from torch_dpflow.workers.fork_server import end_fork_server

    if memory is not None and given["listen"] is given["nodes"] is None:  # else nodes may have a part of it
        check_memory("--memory", memory)
    if given["pool_memory"] is not None:
        check_memory("--pool-memory", given["pool_memory"])
        _pool_directory(given["pool_memory"])  # raises if there is none
    sys.path.insert(0, os.getcwd())  # as `python -m` does; a console script has its own directory there
    options = ClusterOptions(
        limits=ClusterLimits(workers=workers, memory_bytes=memory),
        log=LogOptions(format=log_format, level=log_level),
        **given,
    )
    _warn_of_another_address(options.path)
    announce = go_on_in_background(options.path.with_suffix(".log")) if detach else click.echo
    cluster = LocalCluster(options)
    with stopped_by_signals(cluster.stop):
        try:
            cluster.serve(ready=lambda: _announce_cluster(announce, cluster, options, as_json=as_json))
        finally:
            end_fork_server()
    if not as_json:
        click.echo("dpflow is down")


def _announce_cluster(
    announce: Callable[[str], object], cluster: LocalCluster, options: ClusterOptions, *, as_json: bool
) -> None:
    text = "\n".join(_up_lines(cluster, options, as_json=as_json))
    with suppress(OSError):  # the parent process may have closed the pipe
        announce(text)


def _up_lines(cluster: LocalCluster, options: ClusterOptions, *, as_json: bool) -> Iterator[str]:
    if as_json:
        facts = {"address": cluster.address, "connection_file": str(options.path), "metrics": options.metrics}
        facts["web"] = options.web
        facts["pool"] = _pool_directory(options.pool_memory)
        yield to_json({**facts, "pid": os.getpid(), "max_workers": cluster.workers})
        return
    yield f"dpflow is up at {cluster.address}"
    yield f"jobs find it by {options.path}"
    workers = counted(cluster.workers, "worker")
    if not options.nodes:
        yield f"it may run {workers} (its limit of open files, `ulimit -Hn`, is {soft_limit()})"
    else:
        yield f"platform {options.platform} is to run nodes, {options.nodes} of them: `dpflow status` lists them"
    if options.metrics:
        yield f"metrics are at http://{options.metrics}/metrics"
    if options.pool_memory:
        directory = _pool_directory(options.pool_memory)
        yield f"the pool holds datasets in {options.pool_memory:,} bytes, at {directory}"
    if options.web:
        token = "; its password is the token" if options.web_token_file else ""
        yield f"the live page is at http://{options.web}{token}"


def _warn_of_another_address(path: Path) -> None:
    named = os.environ.get(ADDRESS_VARIABLE)
    if named and Path(named).absolute() != path:
        click.echo(
            f"{ADDRESS_VARIABLE}={named!r}: jobs and commands with this variable use another cluster; unset it, "
            "or give `dpflow up` that path as --address",
            err=True,
        )


def _pool_directory(memory: int | None) -> str | None:
    """Return the directory for the cluster's pool server; None if it runs no pool server."""
    from torch_dpflow.pool.transport.address import find_directory

    return None if memory is None else str(find_directory())


def go_on_in_background(log: Path) -> Callable[[str], None]:
    """Continue in a forked child, whose output goes to `log`; the parent prints the child's announcement and exits.

    Returns:
        A function that the child calls once, with the text to announce.

    Raises, in the parent:
        click.ClickException: the child ended without an announcement.
    """
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    begins_at = os.fstat(output).st_size
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if child := os.fork():
        os.close(writer)
        os.close(output)
        _print_announced(reader, child, log, begins_at)
        sys.exit(0)
    os.close(reader)
    os.setsid()  # so that Control-C and the end of the terminal do not reach it
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)

    def announce(text: str) -> None:
        os.write(writer, text.encode() + _END)
        os.close(writer)

    return announce


def _print_announced(reader: int, child: int, log: Path, begins_at: int) -> None:
    found = b""
    try:
        with open(reader, "rb", buffering=0) as pipe:
            while not found.endswith(_END):
                if not _is_readable(pipe, _NOTICE_S):
                    click.echo(f"the cluster is still starting; {log} has what it waits for", err=True)
                if not (part := pipe.read(4096)):
                    break
                found += part
    except KeyboardInterrupt:
        os.kill(child, signal.SIGTERM)
        raise
    if not found.endswith(_END):
        with open(log, "rb") as file:
            file.seek(begins_at)
            said = file.read().decode(errors="replace")[-_MAX_TAIL:].strip()
        said = said or "no line of this start; is there space left for it?"
        raise click.ClickException(f"the cluster has not started; {log} has:\n{said}")
    click.echo(found.removesuffix(_END).decode())


def _is_readable(pipe: BinaryIO, within_s: float) -> bool:
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    return bool(poller.poll(1000 * within_s))


@click.command()
@click.option(
    "--join",
    metavar="FILE",
    required=True,
    help="Connection file of the cluster, with its keys, as `dpflow up --listen` has written it.",
)
@click.option("--name", help="Unique name among the nodes of the cluster; by default the name of this host.")
@click.option(
    "--listen",
    metavar="ADDRESS",
    help="IP address of this host by which jobs reach it; by default the one by which it reaches the cluster.",
)
@log_options
@json_option
def node(
    join: str,
    name: str | None,
    listen: str | None,
    log_format: str,
    log_level: str,
    as_json: bool,
) -> None:
    """Run shards and workers of a cluster on this host, until Ctrl-C, SIGTERM or the end of the cluster.

    On the first signal the node waits up to a minute until jobs have left its shards; on the second signal it ends at
    once. It also ends if the cluster does not answer for a minute.
    """
    from torch_dpflow.cluster.services.joining_node import JoiningNode
    from torch_dpflow.cluster.services.joining_options import NodeOptions
    from torch_dpflow.cluster.services.node_host import stopped_by_signals
    from torch_dpflow.workers.fork_server import end_fork_server

    sys.path.insert(0, os.getcwd())  # as `dpflow up` does
    joined = JoiningNode(
        NodeOptions(
            join=join,
            name=name,
            listen=listen,
            log=LogOptions(format=log_format, level=log_level),
        )
    )
    with stopped_by_signals(joined.stop):
        try:
            joined.serve(ready=lambda: _announce_node(joined, as_json=as_json))
        finally:
            end_fork_server()
    if not as_json:
        click.echo(f"node {joined.name} has left")


def _announce_node(joined: JoiningNode, *, as_json: bool) -> None:
    cluster = joined.cluster.address
    facts = {"node": joined.name, "address": joined.address, "cluster": cluster, "pid": os.getpid()}
    text = f"node {joined.name} at {joined.address} has joined the cluster at {cluster}"
    with suppress(OSError):  # the parent process may have closed the pipe
        click.echo(to_json(facts) if as_json else text)
