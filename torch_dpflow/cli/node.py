"""`dpflow node`: this host runs workers of flows, for a cluster that another host has started."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from torch_dpflow.cli.cluster_calls import json_option, to_json
from torch_dpflow.log import FORMATS, LEVELS, LogOptions

if TYPE_CHECKING:
    from torch_dpflow.cluster.services.joining_node import JoiningNode


@click.command()
@click.option(
    "--join",
    metavar="FILE",
    required=True,
    help="The cluster's connection file, with its keys, as `dpflow up --listen` has written it.",
)
@click.option("--name", help="Tells it from the cluster's other nodes; else the name of this host.")
@click.option(
    "--listen",
    metavar="ADDRESS",
    help="The IP address of this host by which jobs reach it; else the one by which it reaches the cluster.",
)
@click.option(
    "--preload",
    metavar="MODULE",
    multiple=True,
    help="A module to import once for all workers, as torchvision: they start at once and share it.",
)
@click.option("--log-format", type=click.Choice(FORMATS), default="text", envvar="DPFLOW_LOG_FORMAT")
@click.option("--log-level", type=click.Choice(LEVELS), default="info", envvar="DPFLOW_LOG_LEVEL")
@json_option
def node(
    join: str,
    name: str | None,
    listen: str | None,
    preload: tuple[str, ...],
    log_format: str,
    log_level: str,
    as_json: bool,
) -> None:
    """Run shards and workers of a cluster's flows here, until Ctrl-C, SIGTERM or the cluster's end.

    Told to stop, it first waits until jobs have left its shards, for a minute at most; told twice, it ends at once. It
    ends by itself after a minute in which the cluster does not answer.
    """
    from torch_dpflow.cluster.services.joining_node import JoiningNode, NodeOptions
    from torch_dpflow.cluster.services.node import stopped_by_signals
    from torch_dpflow.workers.local_platform import end_fork_server

    sys.path.insert(0, os.getcwd())  # as `dpflow up` does
    joined = JoiningNode(
        NodeOptions(
            join=join,
            name=name,
            listen=listen,
            preload=preload,
            log=LogOptions(format=log_format, level=log_level),
        )
    )
    with stopped_by_signals(joined):
        try:
            joined.serve(ready=lambda: _announce(joined, as_json=as_json))
        finally:
            end_fork_server()
    if not as_json:
        click.echo(f"node {joined.name} has left")


def _announce(joined: JoiningNode, *, as_json: bool) -> None:
    cluster = joined.cluster.address
    facts = {"node": joined.name, "address": joined.address, "cluster": cluster, "pid": os.getpid()}
    text = f"node {joined.name} at {joined.address} has joined the cluster at {cluster}"
    with suppress(OSError):  # whoever has started it may have closed the pipe
        click.echo(to_json(facts) if as_json else text)
