"""`dpflow dataset discard, delete, prune, copy`: the upkeep of datasets in a store."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from torch_dpflow.cli.cluster_calls import to_json
from torch_dpflow.cli.dataset_options import storage_options_of, store_options, version_ref
from torch_dpflow.cli.dataset_printing import copied_lines, copy_progress
from torch_dpflow.datasets.copying import copy
from torch_dpflow.datasets.draft import Draft
from torch_dpflow.datasets.removal import delete, prune
from torch_dpflow.datasets.spec import DatasetRef
from torch_dpflow.datasets.store import DatasetStore
from torch_dpflow.datasets.verify import Compared
from torch_dpflow.errors import OptionError

_confirmed = click.option(
    "--yes", is_flag=True, help="Remove it; without this the command only says what it would remove."
)


def _unvaried(context: click.Context, parameter: click.Parameter, text: str | None) -> DatasetRef | None:
    """A dataset or a version, without a variant; None if none is given."""
    target = None if text is None else DatasetRef.parse(text)
    if target is not None and target.variant is not None:
        raise OptionError(f"{text!r} names a variant; versions are removed and copied as a whole")
    return target


def _dataset_only(context: click.Context, parameter: click.Parameter, text: str | None) -> DatasetRef | None:
    target = _unvaried(context, parameter, text)
    if target is not None and target.version is not None:
        raise OptionError(f"{text!r} names a version; give a dataset, such as {target.id}, or none")
    return target


@click.command()
@click.argument("target", metavar="NAMESPACE/NAME:VERSION", callback=version_ref)
@store_options
def discard(url: str, storage_options: dict[str, Any], target: DatasetRef, as_json: bool) -> None:
    """Remove what an unfinished import has written; its sources stay as they are."""
    store = DatasetStore(url, **storage_options)
    assert target.version is not None
    if target.version not in store.drafts(target.id):
        raise OptionError(f"{target} is no unfinished import of {store.url}; see dpflow dataset list")
    Draft(store, target.id, target.version).discard()
    click.echo(to_json({"discarded": str(target)}) if as_json else f"{target}: discarded")


@click.command("delete")
@click.argument("target", metavar="NAMESPACE/NAME[:VERSION]", callback=_unvaried)
@_confirmed
@store_options
def delete_(url: str, storage_options: dict[str, Any], target: DatasetRef, yes: bool, as_json: bool) -> None:
    """Remove a version, or a dataset with all versions and unfinished imports.

    Data that other versions refer to stays, as does data that no import has written. This cannot be undone.
    """
    store = DatasetStore(url, **storage_options)
    versions = store.versions(target.id)
    drafts = [] if target.version else store.drafts(target.id)
    if target.version:
        versions = [name for name in versions if name == target.version]
    if not versions and not drafts:
        raise store.not_found(target)
    published, unfinished = (
        [str(DatasetRef(target.id, name)) for name in part] for part in (versions, drafts)
    )
    names = [*published, *(f"the unfinished import {name}" for name in unfinished)]
    _check_meant(yes, f"{', '.join(names)} from {store.url}")
    delete(store, target.id, target.version)
    if as_json:
        click.echo(to_json({"deleted": published, "discarded": unfinished}))
        return
    for name in names:
        click.echo(f"{name}: deleted")


@click.command("prune")
@click.argument("target", metavar="[NAMESPACE/NAME]", required=False, callback=_dataset_only)
@_confirmed
@store_options
def prune_(
    url: str, storage_options: dict[str, Any], target: DatasetRef | None, yes: bool, as_json: bool
) -> None:
    """Remove unfinished imports, and imported files that no published version refers to; of all datasets by default.

    An import that runs meanwhile will not be published.
    """
    store = DatasetStore(url, **storage_options)
    ids = store.ids() if target is None else [target.id]
    drafts = [str(DatasetRef(name, version)) for name in ids for version in store.drafts(name)]
    imports = f", and the unfinished imports {', '.join(drafts)}" if drafts else ""
    _check_meant(yes, f"what no published version of {target or 'any dataset'} in {store.url} names{imports}")
    for name in ids:
        removed = prune(store, name)
        click.echo(
            to_json({"dataset": name, "files_removed": removed})
            if as_json
            else f"{name}: {removed} files removed"
        )


@click.command("copy")
@click.argument("target", metavar="NAMESPACE/NAME[:VERSION]", callback=_unvaried)
@click.option("--to", required=True, metavar="URL", help="The other store; one is made where there is none.")
@click.option(
    "--to-option",
    "to_options",
    metavar="NAME=VALUE",
    multiple=True,
    callback=storage_options_of,
    help="What fsspec needs to open the other store; may be repeated.",
)
@store_options
def copy_(
    url: str,
    storage_options: dict[str, Any],
    target: DatasetRef,
    to: str,
    to_options: dict[str, Any],
    as_json: bool,
) -> None:
    """Copy a version, the last one by default, to another store, and verify the copy before it is published.

    Data in the dataset's directory is copied; data elsewhere stays, and the copy refers to it too. Running the same
    command again continues an interrupted copy.
    """
    store, compared = DatasetStore(url, **storage_options), Compared()
    store.load(
        target.id, target.version
    )  # first: no other store is created for a version that does not exist
    other = DatasetStore.create(to, **to_options)
    with copy_progress() as progress:
        copied = copy(store, target.id, target.version, other, progress=progress, compared=compared)
    if as_json:
        click.echo(
            to_json(
                {"copied": f"{copied.id}:{copied.version}", "to": other.url, "compared": asdict(compared)}
            )
        )
        return
    for line in copied_lines(copied, other.url, compared):
        click.echo(line)


def _check_meant(yes: bool, what: str) -> None:
    if not yes:
        raise OptionError(f"nothing was removed; with --yes this removes {what}")
