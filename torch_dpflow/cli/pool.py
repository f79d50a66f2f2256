"""`dpflow pool`: runs a pool server, and shows and changes what the pool caches.

Commands name a dataset by its name in a store, and an array by its file; cached ones also by the ids that `list` shows.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import time
from contextlib import suppress
from types import FrameType
from typing import Any

import click

from torch_dpflow._core.checks import check_seconds, parse_bytes
from torch_dpflow._core.descriptors import raise_limit
from torch_dpflow.cli.common import (
    Command,
    json_option,
    on_one_line,
    stdout_console,
    storage_option,
    store_option,
    to_json,
)
from torch_dpflow.cli.tables import (
    dataset_facts,
    dataset_id,
    datasets_table,
    pool_facts,
    preload_progress,
    problem_line,
    read_rates,
    servers_table,
    updated_table,
    verify_progress,
)
from torch_dpflow.datasets.store import DatasetStore, StoredDataset
from torch_dpflow.errors import OptionError
from torch_dpflow.pool.array_files import array_ref, open_array
from torch_dpflow.pool.messages import ArraySource, CachedDataset
from torch_dpflow.pool.server.data_server import DataServer
from torch_dpflow.pool.sources import PoolComparison, identity_of, samples_of, source_of, verify_pool
from torch_dpflow.pool.transport.address import CONNECTION_VARIABLE, PoolAddress, find_address
from torch_dpflow.pool.transport.control_connection import PoolConnection

#: Requested limit of descriptors: a reader of another host takes two or more, a segment one.
_WANTED_DESCRIPTORS = 65536
#: Metavars of a dataset in storage, and of a cached one.
_IN_STORAGE = "NAMESPACE/NAME[:VERSION[:VARIANT]]|FILE[:PATH]"
_CACHED = f"ID|{_IN_STORAGE}"
_address = click.option(
    "--address",
    default="auto",
    envvar="DPFLOW_POOL",
    show_envvar=True,
    metavar="DIRECTORY|tcp://HOST:PORT",
    help="Directory of the pool's socket, or address of another host's server; by default your pool on this host.",
)
_connection = click.option(
    "--connection",
    envvar=CONNECTION_VARIABLE,
    show_envvar=True,
    metavar="FILE",
    help="Connection file from `dpflow keygen`, for servers that are reached over a network.",
)
_trust_network = click.option(
    "--trust-network",
    is_flag=True,
    help="Send samples over the network without TLS; both sides still prove that they hold the keys.",
)


def _at_pool(command: Command) -> Command:
    """Add the options that name a server; the command gets a `PoolAddress`."""

    @functools.wraps(command)
    def run(*args: Any, address: str, connection: str | None, trust_network: bool, **given: Any) -> Any:
        found = find_address(address, connection, trust_network=trust_network)
        return command(*args, address=found, **given)

    return _address(_connection(_trust_network(run)))


def _opens_dataset(command: Command) -> Command:
    """Add the argument and options that name a dataset in storage; the command gets it opened, as `stored`."""

    @functools.wraps(command)
    def run(*args: Any, target: str, url: str | None, storage_options: dict[str, Any], **given: Any) -> Any:
        return command(*args, stored=_open_target(target, url, storage_options), **given)

    argument = click.argument("target", metavar=_IN_STORAGE)
    return argument(store_option(required=False)(storage_option(run)))


@click.group()
def pool() -> None:
    """Cache datasets in this host's memory, where `PooledDataset` finds them: jobs then share one read from storage."""


@pool.command()
@click.option("--memory", required=True, help='Maximum memory for samples, such as "64GiB".')
@click.option(
    "--ahead-memory",
    help="Additional memory for reading ahead samples that do not fit; by default an eighth of --memory, at most 1GiB.",
)
@click.option(
    "--idle-s",
    type=click.FloatRange(min=0),
    default=600.0,
    show_default=True,
    help="Seconds after which a dataset that no process reads is removed, unless a command has loaded it.",
)
@click.option(
    "--join",
    metavar="DIRECTORY|tcp://HOST:PORT",
    help="Address of the pool's first server, its leader; this server adds its memory to that pool.",
)
@click.option(
    "--listen",
    metavar="tcp://HOST:PORT",
    help="The address at which other hosts reach this server; requires --connection. Without it, the server answers "
    "only this user on this host.",
)
@json_option
@_address
@_connection
@_trust_network
def serve(
    memory: str,
    ahead_memory: str | None,
    idle_s: float,
    join: str | None,
    listen: str | None,
    as_json: bool,
    address: str,
    connection: str | None,
    trust_network: bool,
) -> None:
    """Run a pool server until it is stopped by Ctrl-C or SIGTERM."""
    raise_limit(_WANTED_DESCRIPTORS)
    ahead_bytes = None if ahead_memory is None else parse_bytes("--ahead-memory", ahead_memory)
    memory_bytes = parse_bytes("--memory", memory)
    place = None if listen is None else find_address(listen, connection, trust_network=trust_network)
    leader = None if join is None else find_address(join, connection, trust_network=trust_network)
    server = DataServer(memory_bytes, address, idle_s=idle_s, ahead_bytes=ahead_bytes, listen=place, join=leader)

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        others = "" if server.address is None else f" and at {server.address}"
        facts = {"directory": str(server.directory), "listen": server.address}
        click.echo(
            to_json({**facts, "memory": memory_bytes, "pid": os.getpid()})
            if as_json
            else f"the pool listens at {server.directory}{others}, with {memory}"
        )
        server.serve()
    except KeyboardInterrupt:
        pass
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # it is ending already
        server.stop()


@pool.command()
@click.option("--part", is_flag=True, help="Cache the part that fits, instead of refusing a dataset that does not fit.")
@json_option
@_at_pool
@_opens_dataset
def preload(stored: StoredDataset | ArraySource, part: bool, as_json: bool, address: PoolAddress) -> None:
    """Load a dataset or an array, which stays until it is unloaded.

    An array is given by its file, .npy or HDF5: a URL, or a path that begins with / or contains a dot, such as ./FILE.
    In an HDF5 file the dataset's path follows after a colon, as in rows.h5:train/x.
    """
    with preload_progress(str(stored.ref)) as progress, PoolConnection(address) as connection:

        def show(info: CachedDataset) -> None:
            progress(info.loaded, info.placed if info.is_placed else None)

        source, identity = source_of(stored, None), identity_of(stored)
        info = connection.preload(source, identity, whole=not part, progress=show)
    text = f"{info.ref}: {info.loaded:,} of {info.records:,} samples in {info.reserved_bytes:,} bytes"
    click.echo(to_json(dataset_facts(info)) if as_json else text)
    if info.failed:
        raise click.ClickException(
            f"{info.failed:,} samples could not be read: {info.error or 'no lengths'}; those whose storage did not "
            f"answer are read again until they are there, for others unload {info.ref} and load it again"
        )


@pool.command()
@json_option
@_at_pool
@_opens_dataset
def verify(stored: StoredDataset | ArraySource, as_json: bool, address: PoolAddress) -> None:
    """Compare the cached part of a dataset or an array with its storage, which is read again.

    Print one line for each sample that differs; the exit status is then 1. With --json, print one object.
    """
    differ: list[dict[str, Any]] = []
    bad, compared = 0, PoolComparison()
    with verify_progress(str(stored.ref), samples_of(stored)) as progress:
        for problem in verify_pool(stored, address, progress=progress, compared=compared):
            bad += 1
            if as_json:
                differ.append({"sample": problem.sample, "what": problem.what})
            else:
                click.echo(problem_line(str(stored.ref), problem))
    equal, alone = compared.equal, compared.in_storage
    if as_json:
        facts = {"ref": str(stored.ref), "equal": equal, "in_storage_alone": alone, "differ": differ}
        click.echo(to_json(facts))
    else:
        click.echo(f"{stored.ref}: {equal:,} samples are in memory as in storage, {alone:,} in storage alone")
    if bad:
        raise click.ClickException(f"{bad:,} of {samples_of(stored):,} samples differ")


@pool.command("list")
@json_option
@_at_pool
def list_(as_json: bool, address: PoolAddress) -> None:
    """List what the pool caches, and its servers."""
    with PoolConnection(address) as connection:
        listed, servers = connection.contents(), connection.servers()
    if as_json:
        click.echo(to_json(pool_facts(listed, servers)))
        return
    console = stdout_console(highlight=False)
    console.print(datasets_table(listed))
    console.print(servers_table(servers))


@pool.command()
@click.option(
    "--interval-s",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    help="Seconds between two updates.",
)
@click.option("--count", type=click.IntRange(min=1), help="End after this many tables; without it, by Ctrl-C.")
@json_option
@_at_pool
def top(interval_s: float, count: int | None, as_json: bool, address: PoolAddress) -> None:
    """Show what the pool caches and how fast it is read, updated continuously.

    With --json, print one line for each update, with counts of the samples that were read so far.
    """
    check_seconds("--interval-s", interval_s)
    if as_json:
        with suppress(KeyboardInterrupt), PoolConnection(address) as connection:
            for update in itertools.count() if count is None else range(count):
                time.sleep(interval_s if update else 0)
                click.echo(to_json(pool_facts(connection.contents(), connection.servers())))
        return
    with (
        suppress(KeyboardInterrupt),  # the usual way to end it
        PoolConnection(address) as connection,
        updated_table(stdout_console(highlight=False)) as show_table,
    ):
        listed, since = connection.contents(), time.monotonic()
        show_table(datasets_table(listed, {}))
        for _ in range(count - 1) if count else itertools.count():
            time.sleep(interval_s)
            before, listed = listed, connection.contents()
            since, seconds = time.monotonic(), time.monotonic() - since
            show_table(datasets_table(listed, read_rates(before, listed, seconds)))


@pool.command()
@click.argument("target", metavar=_CACHED)
@json_option
@_at_pool
def show(target: str, as_json: bool, address: PoolAddress) -> None:
    """Show one cached dataset or array."""
    with PoolConnection(address) as connection:
        info = _find_cached(connection, target)
    if as_json:
        click.echo(to_json(dataset_facts(info)))
        return
    click.echo(f"{on_one_line(info.ref)}\nid: {dataset_id(info)}\nlocation: {on_one_line(info.url)}")
    click.echo(f"samples: {info.records:,}")
    click.echo(f"in memory: {info.loaded:,} of {info.placed:,} that fit, {info.reserved_bytes:,} bytes")
    click.echo(f"could not be read: {info.failed:,}" + (f": {on_one_line(info.error)}" if info.error else ""))
    click.echo(f"readers: {info.readers}\nstays: {'until unloaded' if info.is_explicit else 'while it is read'}")


@pool.command()
@click.argument("target", metavar=_CACHED)
@json_option
@_at_pool
def unload(target: str, as_json: bool, address: PoolAddress) -> None:
    """Unload a dataset or an array; its readers continue from storage."""
    with PoolConnection(address) as connection:
        info = _find_cached(connection, target)
        connection.unload(info.identity)
    text = f"{on_one_line(info.ref)}: unloaded; {info.reserved_bytes:,} bytes are free once no process reads them"
    click.echo(to_json({"unloaded": dataset_facts(info)}) if as_json else text)


def _find_cached(connection: PoolConnection, target: str) -> CachedDataset:
    """Return the cached dataset with this id, name or file. Version, variant and the path in the file may be left out.

    Raises OptionError if no dataset matches, or several do.
    """
    cached = connection.contents().datasets
    file = _array_file(target)
    ref = target if file is None else array_ref(*file)
    found = [one for one in cached if target == dataset_id(one) or ref == one.ref or one.ref.startswith(f"{ref}:")]
    if len(found) == 1:
        return found[0]
    if not cached:
        raise OptionError(f"{target!r}: the pool caches nothing; load it by `dpflow pool preload`")
    has = ", ".join(f"{dataset_id(one)} ({on_one_line(one.ref)})" for one in found or cached)
    raise OptionError(f"{target!r} names {len(found)} of the cached datasets; give one of: {has}")


def _open_target(target: str, url: str | None, storage_options: dict[str, Any]) -> StoredDataset | ArraySource:
    file = _array_file(target)
    if file is not None:
        if "path" in storage_options:
            raise OptionError(f"path is not a storage option; give the path in the file as {file[0]}:PATH")
        return open_array(file[0], path=file[1], **storage_options)
    if url is None:
        raise click.UsageError(
            f"Missing option '--store' (env var: 'DPFLOW_STORE') for the dataset {target!r}; an array is named by a "
            "URL, or by a path that begins with / or has a dot"
        )
    return DatasetStore(url, **storage_options).open(target)


def _array_file(target: str) -> tuple[str, str] | None:
    """Return (file of an array, path in the file); None for a dataset's name or an id, which contain no dot."""
    scheme, mark, place = target.rpartition("://")
    if not (mark or target.startswith("/") or "." in target.partition(":")[0]):
        return None
    file, colon, path = place.rpartition(":")
    # The host of a URL may have a port; the names of .npy files may have the time of day in them.
    if not colon or place.endswith(".npy") or (mark and "/" not in file):
        return target, ""
    return f"{scheme}{mark}{file}", path
