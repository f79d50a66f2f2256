"""Output of `dpflow dataset` and `dpflow pool`: tables of stored and cached datasets, lines, and progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from torch_dpflow.cli.common import cell, stdout_console, to_json
from torch_dpflow.datasets.importers.base import Importer
from torch_dpflow.datasets.spec import Dataset, DatasetRef, SampleMeta, encode_file
from torch_dpflow.datasets.store import StoredDataset
from torch_dpflow.datasets.versions import Compared, Problem, checksums_in
from torch_dpflow.errors import DatasetError
from torch_dpflow.pool.messages import CachedDataset, CachedDatasetList, ServerInfo


def print_json(record: Dataset | SampleMeta) -> None:
    """Print a version's description, as in its file, or a sample's metadata, as one line of JSON."""
    click.echo(encode_file(record).decode())


def print_datasets(published: Sequence[Dataset], drafts: Sequence[DatasetRef]) -> None:
    """Print one line for each variant of each version, and one for each unfinished import."""
    table = Table(box=None)
    for heading in ("dataset", "version", "variant", "published"):
        table.add_column(heading, overflow="fold")
    table.add_column("samples", justify="right", overflow="fold")
    for dataset in published:
        for name, variant in dataset.variants.items():
            table.add_row(dataset.id, dataset.version, name, dataset.created, f"{variant.samples:,}")
    for draft in drafts:
        table.add_row(draft.id, str(draft.version), "", "unfinished import", "")
    stdout_console().print(table)


def print_version(variants: Sequence[StoredDataset], sample: SampleMeta | None) -> None:
    dataset = variants[0].dataset
    click.echo(f"{dataset.id}:{dataset.version}  published {dataset.created}")
    if dataset.description:
        click.echo(f"  {dataset.description}")
    if dataset.parent is not None:
        click.echo(f"  continues {dataset.parent}")
    for stored in variants:
        variant = stored.variant
        size = sum(entry.bytes for entry in variant.shards)
        click.echo(f"  {stored.variant_name}: {variant.samples:,} samples")
        click.echo(f"    data    {variant.data}")
        click.echo(f"    shards  {len(variant.shards)} of {variant.shard_size} samples, {size:,} bytes")
        click.echo(f"    checks  {_checksums_of(stored)}")
        for label, known in (("source", variant.source), ("info", variant.info)):
            text = msgspec.json.encode(known).decode()
            click.echo(f"    {label:<7} {text if len(text) <= 300 else text[:300] + '…'}")
    if sample is not None:
        click.echo(msgspec.json.format(msgspec.json.encode(sample)).decode())


def _checksums_of(stored: StoredDataset) -> str:
    """Return a short text about whether the samples have checksums."""
    try:
        counts = checksums_in(stored)
    except (DatasetError, OSError) as error:
        return f"not known: {error}"
    if not counts[""]:
        return f"{' and '.join(sorted(counts))} of every sample"
    if len(counts) == 1:
        return "no checksums; `import --checksum` reads all data and stores them"
    return f"checksums of {counts.total() - counts['']:,} of {counts.total():,} checked samples"


def problem_line(variant: str, problem: Problem, *, as_json: bool = False) -> str:
    if as_json:
        return to_json({"variant": variant, **problem._asdict()})
    last = problem.sample + problem.samples - 1
    where = f"sample {problem.sample}" if problem.samples == 1 else f"samples {problem.sample} to {last}"
    return f"{variant}, {where}: {problem.what}"


def checked_line(stored: StoredDataset, compared: Compared | None, *, as_json: bool) -> str:
    """Return a line on a finished check of a dataset. compared: what was compared; None if only metadata was read."""
    if as_json:
        counts = {} if compared is None else {"compared": asdict(compared)}
        return to_json({"checked": str(stored.ref), "samples": len(stored), **counts})
    if compared is not None:
        summary = _summary(compared) or "none is intact"
        return f"{stored.ref}: {len(stored)} samples checked with their data: {summary}"
    return f"{stored.ref}: metadata of {len(stored)} samples checked; --data also checks their data"


def copied_lines(copied: Dataset, url: str, compared: Compared) -> Iterator[str]:
    """Yield lines on a finished copy: one per variant, with the place of data that was not copied; one on checks."""
    for name, variant in copied.variants.items():
        where = f"; data stays at {variant.data}" if "://" in variant.data else ""
        yield f"{copied.id}:{copied.version}:{name}: {variant.samples} samples copied to {url}{where}"
    if summary := _summary(compared):
        yield f"data checked: {summary}"


def _summary(compared: Compared) -> str:
    well = (
        (compared.checksums, "match their checksums"),
        (compared.sizes, "have no checksum, only their size was compared"),
        (compared.presence, "have neither, but exist"),
    )
    return "; ".join(f"{samples} {what}" for samples, what in well if samples)


@contextmanager
def import_progress(variant: str, importer: Importer) -> Iterator[Callable[[int], None]]:
    """Show on stderr a progress bar for an import; yield a function that sets the number of imported samples."""
    with _bar() as bar:
        task = bar.add_task(variant, total=None)
        yield lambda samples: bar.update(task, completed=samples, total=importer.total())
        bar.update(task, total=bar.tasks[task].completed)


@contextmanager
def verify_progress(variant: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show on stderr a progress bar for a check; yield a function that sets the number of checked samples."""
    with _bar() as bar:
        task = bar.add_task(variant, total=total)
        yield lambda samples: bar.update(task, completed=samples)


@contextmanager
def preload_progress(name: str) -> Iterator[Callable[[int, int | None], None]]:
    """Show on stderr a progress bar for loading into a pool; yield a function that sets (samples, total or None)."""
    with _bar() as bar:
        task = bar.add_task(name, total=None)
        yield lambda samples, total: bar.update(task, completed=samples, total=total)


@contextmanager
def copy_progress() -> Iterator[Callable[[str, int], None]]:
    """Show on stderr a progress bar per copied variant; yield a function that sets (variant, copied samples)."""
    tasks: dict[str, TaskID] = {}
    with _bar() as bar:

        def update(variant: str, samples: int) -> None:
            if variant not in tasks:
                tasks[variant] = bar.add_task(variant, total=None)
            bar.update(tasks[variant], completed=samples)

        yield update


def _bar() -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("samples"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )


def dataset_id(info: CachedDataset) -> str:
    return info.identity.hex()[:8]


def dataset_facts(info: CachedDataset) -> dict[str, Any]:
    """Return a cached dataset as JSON values, with bytes and samples as numbers."""
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


def pool_facts(listed: CachedDatasetList, servers: Sequence[ServerInfo]) -> dict[str, Any]:
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
    """Yield a function that prints a table: in a terminal in place of the previous table, otherwise below it."""
    if not console.is_terminal:
        yield console.print
        return
    with Live(console=console) as live:
        yield live.update


def read_rates(before: CachedDatasetList, now: CachedDatasetList, seconds: float) -> dict[bytes, tuple[float, float]]:
    """Return (from memory, from storage) samples per second, by dataset's identity. seconds: from `before` to `now`."""
    earlier = {one.identity: one for one in before.datasets}
    return {
        one.identity: ((one.hits - was.hits) / seconds, (one.misses - was.misses) / seconds)
        for one in now.datasets
        if (was := earlier.get(one.identity)) is not None
    }


def datasets_table(listed: CachedDatasetList, rates: Mapping[bytes, tuple[float, float]] | None = None) -> Table:
    """Return a table of cached datasets, and free memory. rates: result of `read_rates`; None: no columns for rates."""
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
