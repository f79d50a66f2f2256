"""How commands of `dpflow pool` name a set: a dataset by its name, an array by its file; what is held by its id too."""

from __future__ import annotations

import functools
from typing import Any

import click

from torch_dpflow.cli.console import on_one_line
from torch_dpflow.cli.dataset_options import Command, storage_option, store_option
from torch_dpflow.cli.pool_printing import dataset_id
from torch_dpflow.datasets.store import DatasetStore, StoredDataset
from torch_dpflow.errors import OptionError
from torch_dpflow.pool.array_files import array_ref, open_array
from torch_dpflow.pool.messages import ArraySource, CachedDataset
from torch_dpflow.pool.transport.control_connection import PoolConnection

#: What may stand for a set in storage, and for one that is held.
IN_STORAGE = "NAMESPACE/NAME[:VERSION[:VARIANT]]|FILE[:PATH]"
HELD = f"ID|{IN_STORAGE}"


def opens_dataset(command: Command) -> Command:
    """The argument and the options that name a set in storage; the command gets it, opened, as `stored`."""

    @functools.wraps(command)
    def run(*args: Any, target: str, url: str | None, storage_options: dict[str, Any], **given: Any) -> Any:
        return command(*args, stored=_open(target, url, storage_options), **given)

    argument = click.argument("target", metavar=IN_STORAGE)
    return argument(store_option(required=False)(storage_option(run)))


def find_held(connection: PoolConnection, target: str) -> CachedDataset:
    """The set of this id, name or file; a name may leave out version and variant, and a file the path in it.

    Raises OptionError: none, or several, are meant.
    """
    sets = connection.contents().datasets
    file = _array_file(target)
    ref = target if file is None else array_ref(*file)
    found = [
        one for one in sets if target == dataset_id(one) or ref == one.ref or one.ref.startswith(f"{ref}:")
    ]
    if len(found) == 1:
        return found[0]
    if not sets:
        raise OptionError(f"{target!r}: the pool holds nothing; load it by `dpflow pool preload`")
    has = ", ".join(f"{dataset_id(one)} ({on_one_line(one.ref)})" for one in found or sets)
    raise OptionError(f"{target!r} names {len(found)} of the sets in the pool; give one of: {has}")


def _open(target: str, url: str | None, storage_options: dict[str, Any]) -> StoredDataset | ArraySource:
    file = _array_file(target)
    if file is not None:
        if "path" in storage_options:
            raise OptionError(f"path is no option of a storage; give the path in the file as {file[0]}:PATH")
        return open_array(file[0], path=file[1], **storage_options)
    if url is None:
        raise click.UsageError(
            f"Missing option '--store' (env var: 'DPFLOW_STORE') for the dataset {target!r}; an array is named by a "
            "URL, or by a path that begins with / or has a dot"
        )
    return DatasetStore(url, **storage_options).open(target)


def _array_file(target: str) -> tuple[str, str] | None:
    """The file of an array, and the path in it; None: a dataset's name, or an id, in neither of which a dot is."""
    scheme, mark, place = target.rpartition("://")
    if not (mark or target.startswith("/") or "." in target.partition(":")[0]):
        return None
    file, colon, path = place.rpartition(":")
    # The host of a URL may have a port; the names of .npy files may have the time of day in them.
    if not colon or place.endswith(".npy") or (mark and "/" not in file):
        return target, ""
    return f"{scheme}{mark}{file}", path
