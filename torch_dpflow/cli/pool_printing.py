"""Output of `dpflow pool`: what the pool caches, and how fast it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from torch_dpflow.cli.common import cell
from torch_dpflow.pool.messages import CachedDataset, CachedDatasetList
from torch_dpflow.pool.server_messages import ServerInfo


def dataset_id(info: CachedDataset) -> str:
    """Return the id of a cached dataset in commands."""
    return info.identity.hex()[:8]


def dataset_facts(info: CachedDataset) -> dict[str, Any]:
    """Return a cached dataset as JSON; bytes and samples are counts."""
    return {
        "id": dataset_id(info),
        "ref": info.ref,
        "url": info.url,
        "samples": info.records,
        "placed": info.placed if info.is_placed else None,
        "in_memory": info.loaded,
        "failed": info.failed,
        "error": info.error,
        "bytes": info.reserved_bytes,
        "stays": info.is_explicit,
        "readers": info.readers,
        "hits": info.hits,
        "misses": info.misses,
    }


def pool_facts(listed: CachedDatasetList, servers: Sequence[ServerInfo] = ()) -> dict[str, Any]:
    """Return all cached datasets and servers as JSON."""
    names = ("directory", "host", "listen", "memory", "free")
    return {
        "datasets": [dataset_facts(info) for info in listed.datasets],
        "servers": [{name: getattr(one, name) for name in names} for one in servers],
        "free": listed.free,
        "capacity": listed.capacity,
    }


def servers_table(servers: Sequence[ServerInfo]) -> Table:
    """Return a table with one line for each server, the leader first."""
    table = Table("server", "host", "role", "bytes", "free")
    for number, one in enumerate(servers):
        role = "follower" if number else "leader"
        table.add_row(cell(one.directory), cell(one.host), role, f"{one.memory:,}", f"{one.free:,}")
    return table


@contextmanager
def updated_table(console: Console) -> Iterator[Callable[[Table], None]]:
    """Yield a function that replaces the table on a terminal, and else prints it below the last one."""
    if not console.is_terminal:
        yield console.print
        return
    with Live(console=console) as live:
        yield live.update


def read_rates(before: CachedDatasetList, now: CachedDatasetList, seconds: float) -> dict[bytes, tuple[float, float]]:
    """Return samples a second that readers of each dataset read from memory and from storage, between two lists."""
    earlier = {one.identity: one for one in before.datasets}
    return {
        one.identity: ((one.hits - was.hits) / seconds, (one.misses - was.misses) / seconds)
        for one in now.datasets
        if (was := earlier.get(one.identity)) is not None
    }


def datasets_table(listed: CachedDatasetList, rates: Mapping[bytes, tuple[float, float]] | None = None) -> Table:
    """Return a table with one line for each dataset, and the free memory; with `rates`, how fast each is read."""
    free = f"{listed.free:,} of {listed.capacity:,} bytes are free"
    table = Table("id", "dataset", "samples", "in memory", "bytes", "stays", "readers", caption=free)
    for heading in ("from memory/s", "from storage/s", "hit rate") if rates is not None else ():
        table.add_column(heading, justify="right")
    for info in listed.datasets:
        hits, misses = (rates or {}).get(info.identity, (0.0, 0.0))
        share = f"{hits / (hits + misses):.1%}" if hits + misses else ""
        table.add_row(
            dataset_id(info),
            cell(info.ref),
            f"{info.records:,}",
            f"{info.loaded:,}" if info.is_placed else "being placed",
            f"{info.reserved_bytes:,}",
            "until unloaded" if info.is_explicit else "while it is read",
            f"{info.readers}",
            *([f"{hits:,.0f}", f"{misses:,.0f}", share] if rates is not None else []),
        )
    return table
