"""How the command line shows a cluster."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from torch_dpflow.remote.protocol import FlowView, ProcessView

#: What `top` shows of a shard's figures: heading and name.
_FIGURES = (
    ("workers", "workers"),
    ("jobs", "jobs"),
    ("served", "served"),
    ("loads", "loads"),
    ("queued", "queued"),
    ("loading", "loading"),
    ("cached", "cached"),
    ("reloads", "reloads"),
)


def to_json(value: Any) -> str:
    """What the services said, as JSON with the fields' names."""
    return msgspec.json.encode(_named(value)).decode()


def print_flows(flows: list[FlowView]) -> None:
    """One row for each flow."""
    table = Table("flow", "version", "state", "jobs", "samples", "shards", "workers", "memory", title="flows")
    for flow in flows:
        spec = flow.spec
        numbers = [flow.jobs, spec.size, spec.shards, spec.workers]
        table.add_row(
            spec.name,
            str(spec.version),
            flow.state,
            *map(str, numbers),
            f"{spec.memory_bytes / 2**20:,.0f} MiB",
        )
    Console().print(table)


def print_processes(processes: list[ProcessView]) -> None:
    """One row for each process."""
    table = Table("process", "role", "pid", "incarnation", "address", title="processes")
    for view in processes:
        table.add_row(view.id, view.role, str(view.pid or "starting"), str(view.incarnation), view.address)
    Console().print(table)


def print_top(processes: list[ProcessView], *, clear: bool) -> None:
    """One row for each shard: what it has done and what it holds."""
    table = Table("shard", *(heading for heading, _ in _FIGURES), "loads/served", "held", title="shards")
    for view in processes:
        if view.role == "shard" and view.status:
            figures = [f"{view.status.get(name, 0):,}" for _, name in _FIGURES]
            share = view.status.get("loads", 0) / max(1, view.status.get("served", 0))
            held = f"{view.status.get('held_bytes', 0) / 2**20:,.1f} MiB"
            table.add_row(view.id, *figures, f"{share:.2f}", held)
    console = Console()
    if clear:
        console.clear()
    console.print(table)


def _named(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return {name: _named(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list):
        return [_named(one) for one in value]
    if isinstance(value, dict):
        return {name: _named(one) for name, one in value.items()}
    return value
