"""`dpflow cache`: shows and clears a disk cache of samples."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from torch_dpflow._core.checks import format_duration
from torch_dpflow.cli.common import json_option, to_json
from torch_dpflow.datasets.storage.base import check_directory
from torch_dpflow.datasets.storage.disk_cache import DiskCache
from torch_dpflow.errors import DPFlowError, StorageError


def _open(context: click.Context, parameter: click.Parameter, directory: str) -> DiskCache:
    try:
        return DiskCache(check_directory("--directory", directory))
    except DPFlowError as error:
        raise click.BadParameter(str(error)) from error


_directory = click.option(
    "--directory",
    "disk_cache",
    envvar="DPFLOW_CACHE_DIR",
    show_envvar=True,
    required=True,
    callback=_open,
    help="The directory given as ReadOptions(cache_dir=).",
)


@click.group()
def cache() -> None:
    """Show or clear the disk cache of samples that are read from object stores."""


@cache.command()
@_directory
@json_option
def show(disk_cache: DiskCache, as_json: bool) -> None:
    """Print the size of the cache, and when it was last used."""
    try:
        usage = disk_cache.usage()
    except OSError as error:
        raise StorageError(f"{disk_cache.directory}: {error}; give the directory of a disk cache") from error
    facts: dict[str, Any] = asdict(usage)
    if as_json:
        click.echo(to_json(facts))
        return
    click.echo(usage.directory)
    click.echo(f"  samples   {usage.entries:,}")
    click.echo(f"  on disk   {usage.bytes:,} bytes; {usage.free:,} are free")
    click.echo(f"  last use  {'never' if usage.idle_s is None else f'{format_duration(round(usage.idle_s))} ago'}")


@cache.command()
@_directory
@json_option
def clear(disk_cache: DiskCache, as_json: bool) -> None:
    """Remove all samples. Processes that use the cache fill it again."""
    try:
        usage = disk_cache.usage()
        disk_cache.clear()
    except OSError as error:
        raise StorageError(f"{disk_cache.directory}: {error}; give the directory of a disk cache") from error
    if as_json:
        click.echo(to_json({"directory": usage.directory, "removed": usage.entries, "bytes": usage.bytes}))
    else:
        click.echo(f"removed {usage.entries:,} samples of {usage.bytes:,} bytes from {usage.directory}")
