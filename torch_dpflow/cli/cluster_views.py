"""Connection to a cluster's coordinator, and tables of what it reports, for several commands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torch_dpflow._core.checks import counted
from torch_dpflow._core.threads import repeat
from torch_dpflow.cli.common import cell, stdout_console
from torch_dpflow.cluster.control.flow_registry import FlowState
from torch_dpflow.cluster.messages.coordinator import EndedJob, FlowView
from torch_dpflow.cluster.messages.node import NodeView, ProcessView
from torch_dpflow.cluster.monitoring.cluster_figures import ClusterFigures, JobRow, ShardFigures, state_words
from torch_dpflow.cluster.monitoring.page_figures import limit_of
from torch_dpflow.cluster.security.connection_file import NODE_SOCKET, find_cluster, keys_hint
from torch_dpflow.errors import DeadlineError, DPFlowError, ErrorKind, RemoteCallError, UsageError
from torch_dpflow.ipc.messages.remote_worker import RemoteWorkerView
from torch_dpflow.ipc.rpc import ClientOptions, RpcClient
from torch_dpflow.ipc.transport import is_refused

#: Timeouts in seconds: for a coordinator's answer, for a coordinator that starts or is overloaded, for a node's answer.
ANSWER_S, READY_S, NODE_S = 10.0, 3.0, 10.0

address_option = click.option(
    "--address",
    default="auto",
    show_default=True,
    help='The connection file of the cluster; "auto" uses DPFLOW_ADDRESS or the one that `dpflow up` wrote.',
)


def connect(address: str) -> RpcClient:
    """Return a client of the coordinator of a cluster. address: as in `address_option`.

    Raises UsageError, among others if neither the coordinator nor its node listens, or if this user may not connect.
    """
    cluster = find_cluster(address)
    try:
        is_down = is_refused(cluster.address) and (not (node := _node_at(cluster.address)) or is_refused(node))
    except PermissionError as error:
        raise UsageError(
            f"{cluster.address}: {error.strerror}; a cluster is for the user who started it. Run this as that user"
        ) from error
    if is_down:
        raise UsageError(f"nothing listens at {cluster.address}; is the cluster up? Start one by `dpflow up`")
    return cluster.connect(timeout_s=ANSWER_S)


def _node_at(coordinator: str) -> str:
    """Return the address of the node that started a coordinator of this host; empty for one that is reached by tcp."""
    scheme, _, path = coordinator.partition("://")
    return f"ipc://{Path(path).parent / NODE_SOCKET}" if scheme == "ipc" else ""


def ask(coordinator: RpcClient, method: str, kind: Any, body: Any = None, *, doubt: str = "") -> Any:
    """Call the coordinator and return its answer, of the type `kind`.

    The timeout is `ANSWER_S`. If the coordinator is starting or overloaded, the call is repeated for `READY_S`.

    doubt: end of the error's text if there is no answer, because the call may have been executed. Raises UsageError if
    the call is refused or not answered, among others.
    """

    def check(error: DPFlowError, is_late: bool) -> None:
        if isinstance(error, DeadlineError):
            address = coordinator.address
            text = f"no cluster answers at {address} within {ANSWER_S:g} s; is it up, or is another program there?"
            raise UsageError(" ".join(filter(None, [text, keys_hint(address), doubt]))) from error
        if not isinstance(error, RemoteCallError) or error.kind not in (ErrorKind.USAGE, ErrorKind.OVERLOADED):
            raise error
        if error.kind is ErrorKind.USAGE or is_late:
            raise UsageError(error.text) from error

    return repeat(lambda: coordinator.call(method, body, reply_type=kind, timeout_s=ANSWER_S).body, check, READY_S)


def ask_views(coordinator: RpcClient) -> tuple[list[FlowView], list[ProcessView]]:
    flows: list[FlowView] = ask(coordinator, "flows", list[FlowView])
    processes: list[ProcessView] = ask(coordinator, "processes", list[ProcessView])
    return flows, processes


def end_cluster(coordinator: RpcClient) -> None:
    """Stop a cluster by its coordinator, or by the node here if no coordinator answers. Raises the errors of `ask`."""
    node = _node_at(coordinator.address)
    was_here = not is_refused(node) if node else False
    try:
        ask(coordinator, "stop", None, doubt="To end what is left of it, end the process of `dpflow up`.")
    except UsageError as error:
        # The coordinator may have ended before its answer was sent, or may just be starting.
        is_late = isinstance(error.__cause__, DeadlineError)
        if not (is_late and node and (was_here if is_refused(node) else _stop_node(node))):
            raise


def _stop_node(address: str) -> bool:
    try:
        with RpcClient(address, options=ClientOptions(timeout_s=NODE_S)) as node:
            node.call("stop")
    except DPFlowError:
        return False
    return True


#: Column headings for a shard, and for all shards of a flow together.
_FIGURES = ("workers", "hits", "decodes", "served", "/sample", "queue", "cached", "bytes")


def print_flows(flows: Sequence[FlowView]) -> None:
    """Print a table of flows, with their shares of the cluster's shards, workers and memory."""
    table = _table("flows", "flow", "version", "state", "jobs", "samples", "shards", "workers", "memory", "limited by")
    for flow in flows:
        spec, part = flow.spec, flow.part
        has = (part.shards, part.workers, part.memory_bytes) if part else (0, 0, 0)
        table.add_row(
            spec.name,
            str(spec.version),
            state_words(flow.state),
            *_counts(flow.jobs, spec.size),
            f"{has[0]}, auto" if spec.shards is None else f"{has[0]} of {spec.shards}",
            f"{has[1]} of {spec.workers}",
            f"{_bytes(has[2])} of {_bytes(spec.memory_bytes)}",
            flow.limited_by or "-",
        )
    stdout_console().print(table)


def print_ended(jobs: Sequence[EndedJob]) -> None:
    """Print one row for each ended job, the latest first, and then advice on what limited the jobs."""
    table = _table("ended jobs", "job", "flow", "ended", "samples", "waited", "limited by")
    for job in reversed(jobs):
        ended = datetime.fromtimestamp(job.at).isoformat(" ", "seconds")
        waited = f"{job.stall_s / job.reading_s:.0%}" if job.reading_s else "-"
        table.add_row(cell(job.job), job.flow, ended, f"{job.samples:,}", waited, job.limited_by or "-")
    stdout_console().print(table)
    for by in sorted({job.limited_by for job in jobs} - {"", "job"}):
        limit = limit_of(by)
        stdout_console(highlight=False).print(escape(f"{by}: limited by {limit.meaning}. To change: {limit.change}"))


def print_missing(flows: Sequence[FlowView], figures: ClusterFigures) -> None:
    """Print one line for each flow that has fewer workers than its share."""
    running = {row.flow: row.figures.workers for row in figures.flows}
    for flow in flows:
        given = flow.part.workers if flow.part else 0
        if (runs := running.get(flow.spec.instance, 0)) < given:
            text = f"{flow.spec.instance}: {runs:,} of its {counted(given, 'worker')} run; others start, or the log of "
            stdout_console(highlight=False).print(escape(f"{text}`dpflow up` has the reason"))


def print_sharing(figures: ClusterFigures) -> None:
    """Print for each flow in use how many samples jobs received, how many were loaded, and why few are shared."""
    restarted = {row.flow for row in figures.shards if row.restarts}
    for row in figures.flows:
        if row.figures.served:
            served, decodes = _counts(row.figures.served, row.figures.decodes)
            why = f" Little is shared: {row.sharing}." if row.sharing else ""
            since = " since its shards were last started" if row.flow in restarted else ""
            stdout_console(highlight=False).print(
                escape(f"{row.flow}: jobs received {served} samples{since}, for which {decodes} were loaded.{why}")
            )


def print_nodes(nodes: Sequence[NodeView], processes: Sequence[ProcessView]) -> None:
    """Print a table of joined nodes, and for each platform that runs nodes how many run and how many should."""
    if nodes:
        table = _table("nodes", "node", "address", "state", "last heartbeat", "processors", "shards", "workers")
        for node in nodes:
            counts = _counts(node.processors, node.shards, node.workers)
            state = "ready" if node.standing == "here" else node.standing
            table.add_row(node.name, escape(node.address), state, f"{node.silent_s:.1f} s ago", *counts)
        stdout_console().print(table)
    for fleet in (view.status for view in processes if view.role == "node-fleet" and view.status):
        why = f": {fleet['shortage']}" if fleet["shortage"] else ""
        text = f"{fleet['nodes']} of {counted(fleet['wanted'], 'node')} run on platform {fleet['platform']}{why}"
        stdout_console(highlight=False).print(cell(text))


def print_processes(processes: Sequence[ProcessView]) -> None:
    """Print one row for each process, with its node if there are joined nodes."""
    is_joined = any(view.node for view in processes)
    table = _table("processes", "process", "role", *(["node"] if is_joined else []), "pid", "restarts", "address")
    for view in processes:
        pid = str(view.pid) if view.pid else "starting"
        place = [view.node or "-"] if is_joined else []
        table.add_row(view.id, view.role, *place, pid, str(view.restarts), view.address)
    stdout_console().print(table)


def print_remote_workers(workers: Mapping[str, Sequence[RemoteWorkerView]]) -> None:
    """Print one row for each worker on a platform, by shard."""
    table = _table("workers", "worker", "shard", "state", "age", "samples", "/s", "where")
    for shard, views in workers.items():
        for view in views:
            rate = view.samples / view.age_s if view.age_s else 0.0
            cells = (view.state, _age(view.age_s), f"{view.samples:,}", f"{rate:.1f}")
            table.add_row(view.name, shard, *cells, escape(ascii(view.where)[1:-1]))
    stdout_console().print(table)


def print_costs(flows: Sequence[FlowView]) -> None:
    """Print one row for each running flow with known worker-hours: jobs, workers, worker-hours, cost, and its limit."""
    table = _table("flows", "flow", "jobs", "workers", "worker-hours", "cost", "limited by")
    for flow in flows:
        if flow.part is not None and flow.workers_s is not None:
            hours, price = flow.workers_s.total / 3600, flow.workers_s.price_per_hour
            cost = f"{hours * price:,.2f}" if price else "-"
            counts = _counts(flow.jobs, flow.part.workers)
            table.add_row(flow.spec.instance, *counts, f"{hours:,.3f}", cost, flow.limited_by or "-")
    stdout_console().print(table)


def print_top(figures: ClusterFigures, earlier: ClusterFigures | None, *, clear: bool) -> None:
    """Print tables of flows, shards and jobs. clear: clear the terminal first.

    Column `hits` is hits per requested sample, `/sample` decodes per served sample, `queue` the samples queued or
    loading, and `stall` a job's stall share since `earlier`, or since its start if it has read nothing since `earlier`.
    """
    console = stdout_console()
    if clear:
        console.clear()
    flows = _table("flows", "flow", "state", "jobs", "shards", *_FIGURES, "restarts", "limited by")
    for row in figures.flows:
        counts = _counts(row.jobs, row.shards)
        flows.add_row(
            row.flow, state_words(row.state), *counts, *_cells(row.figures), str(row.restarts), row.limited_by or "-"
        )
    console.print(flows)
    _print_shards(console, figures)
    print_jobs(figures, earlier)


def print_flow(flow: FlowView, figures: ClusterFigures) -> None:
    """Print a flow: its state, its share of the cluster, and its jobs."""
    console = stdout_console(highlight=False)
    console.print(f"{flow.spec.instance}: {flow.spec.size:,} samples, {_life_now(flow)}")
    steps = " → ".join(f"{state_words(step.state)} ({_age(step.age_s)} ago)" for step in flow.life)
    console.print(f"  life so far: {steps}")
    if flow.part is not None:
        part = flow.part
        console.print(
            f"  has {counted(part.shards, 'shard')}, {counted(part.workers, 'worker')}, {_bytes(part.memory_bytes)}; "
            f"cache policy {flow.spec.policy}, sampling strategy {flow.spec.strategy}"
        )
        print_sharing(figures)
        _print_shards(console, figures)
        print_jobs(figures)


def print_scaled(flow: FlowView, figures: ClusterFigures) -> None:
    """Print the requested and the present numbers of shards and workers of a flow."""
    spec, (row,) = flow.spec, figures.flows
    shards = "as many shards as needed" if spec.shards is None else counted(spec.shards, "shard")
    stdout_console(highlight=False).print(
        f"{spec.instance} will have {shards} and {counted(spec.workers, 'worker')}"
        + (
            f"; now it has {counted(row.shards, 'shard')} with keys and {counted(row.figures.workers, 'worker')}: "
            f"see `dpflow flow show {spec.name}`"
            if flow.part is not None
            else "; its services do not run"
        )
    )


def _life_now(flow: FlowView) -> str:
    if flow.state == FlowState.ACCESSED.value:
        return f"read by {counted(flow.jobs, 'job')}"
    if flow.idle_in_s is not None:
        return f"ready; its services end in {_age(flow.idle_in_s)} unless a job comes"
    return "a higher version is registered; ends unless a job comes" if flow.replaced else flow.state


def _print_shards(console: Console, figures: ClusterFigures) -> None:
    if figures.shards:
        table = _table("shards", "flow", "shard", "keys", *_FIGURES, "restarts")
        for row in figures.shards:
            restarts = str(row.restarts + row.worker_restarts)
            table.add_row(row.flow, row.shard, *_counts(row.figures.keys), *_cells(row.figures), restarts)
        console.print(table)


def print_jobs(figures: ClusterFigures, earlier: ClusterFigures | None = None) -> None:
    """Print one row for each job. See `print_top` for the stall shares."""
    if figures.jobs:
        table = _table("jobs", "flow", "job", "batches", "samples", "bytes", "stall")
        before = {(row.flow, row.job): row for row in earlier.jobs} if earlier is not None else {}
        for row in figures.jobs:
            stall = _recent_stall(row, before.get((row.flow, row.job)))
            counts = [*_counts(row.batches, row.samples), _bytes(row.bytes)]
            table.add_row(row.flow, escape(row.job), *counts, f"{stall:.0%}")
        stdout_console().print(table)


def _recent_stall(row: JobRow, before: JobRow | None) -> float:
    """Return the stall share since `before`, or since the job's start if nothing was read after `before`."""
    if before is None or row.reading_s <= before.reading_s:
        return row.stall_share
    return max(0.0, min(1.0, (row.stall_s - before.stall_s) / (row.reading_s - before.reading_s)))


def _cells(figures: ShardFigures) -> Iterable[str]:
    yield str(figures.workers)
    yield f"{figures.hit_rate:.0%}"
    yield from _counts(figures.decodes, figures.served)
    yield f"{figures.decodes_per_sample:.2f}"
    yield from _counts(figures.queued + figures.loading, figures.cached)
    yield _bytes(figures.held_bytes)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")  # an id that is cut in a narrow terminal is useless
    return table


def _counts(*counts: int) -> list[str]:
    return [f"{count:,}" for count in counts]


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
