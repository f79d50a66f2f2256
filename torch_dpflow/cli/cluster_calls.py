"""Calls of the coordinator that several commands share."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from torch_dpflow._core.backoff import Backoff
from torch_dpflow.cluster.messages.coordinator import FlowView
from torch_dpflow.cluster.messages.node import ProcessView
from torch_dpflow.cluster.security.connection_file import NODE_SOCKET, find_cluster, keys_hint
from torch_dpflow.errors import DeadlineError, DPFlowError, ErrorKind, RemoteCallError, UsageError
from torch_dpflow.ipc.rpc import ClientOptions, RpcClient

#: Timeouts: of a coordinator's answer, of its start once it answers, and of a node's answer, seconds.
ANSWER_S, READY_S, NODE_S = 10.0, 3.0, 10.0

address_option = click.option(
    "--address",
    default="auto",
    show_default=True,
    help='The connection file of the cluster; "auto" uses DPFLOW_ADDRESS or the one that `dpflow up` wrote.',
)


def connect(address: str) -> RpcClient:
    """Return a client of the coordinator."""
    return find_cluster(address).connect(timeout_s=ANSWER_S)


def ask(coordinator: RpcClient, method: str, kind: Any, body: Any = None, *, doubt: str = "") -> Any:
    """Call the coordinator and return the answer, within `ANSWER_S`.

    A call is repeated if the coordinator starts or is overloaded.

    doubt: for the message if it does not answer, as it may execute the call all the same.
    Raises UsageError if the call is refused, or the cluster does not answer.
    """
    deadline, backoff = time.monotonic() + READY_S, Backoff()
    try:
        while True:
            try:
                return coordinator.call(method, body, reply_type=kind, timeout_s=ANSWER_S).body
            except RemoteCallError as error:
                if error.kind not in (ErrorKind.USAGE, ErrorKind.OVERLOADED):
                    raise
                if error.kind is ErrorKind.USAGE or time.monotonic() >= deadline:
                    raise UsageError(error.text) from error
            time.sleep(backoff.pause_s())
    except DeadlineError as error:
        address = coordinator.address
        parts = [
            f"no cluster answers at {address} within {ANSWER_S:g} s; is it up?",
            keys_hint(address),
            doubt,
        ]
        raise UsageError(" ".join(filter(None, parts))) from error


def ask_views(coordinator: RpcClient) -> tuple[list[FlowView], list[ProcessView]]:
    """Return the flows and the processes of a cluster."""
    flows: list[FlowView] = ask(coordinator, "flows", list[FlowView])
    processes: list[ProcessView] = ask(coordinator, "processes", list[ProcessView])
    return flows, processes


def end_cluster(coordinator: RpcClient) -> None:
    """Stop a cluster through its coordinator, or else through its node on this host. Raises as `ask`."""
    scheme, _, path = coordinator.address.partition("://")
    node = Path(path).parent / NODE_SOCKET
    was_here = scheme == "ipc" and node.exists()
    try:
        ask(coordinator, "stop", None, doubt="To end what is left of it, end the process of `dpflow up`.")
    except UsageError as error:
        if not isinstance(error.__cause__, DeadlineError) or scheme != "ipc":
            raise
        # The coordinator may have ended before its answer was sent, or may just be starting.
        has_ended = _stop_node(f"ipc://{node}") if node.exists() else was_here
        if not has_ended:
            raise


def _stop_node(address: str) -> bool:
    try:
        with RpcClient(address, options=ClientOptions(timeout_s=NODE_S)) as node:
            node.call("stop")
    except DPFlowError:
        return False
    return True
