"""`dpflow dataset`: import, list, show, verify, extend, copy, export and delete datasets."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import Any

import click

from torch_dpflow._core.checks import counted
from torch_dpflow.cli.common import name_value_pairs, storage_options_of, store_options, to_json, with_options
from torch_dpflow.cli.main import INTERRUPTED
from torch_dpflow.cli.tables import (
    checked_line,
    copied_lines,
    copy_progress,
    import_progress,
    print_datasets,
    print_json,
    print_version,
    problem_line,
    verify_progress,
)
from torch_dpflow.datasets.draft import MAX_SHARD_SIZE, SHARD_SIZE, Draft
from torch_dpflow.datasets.export import Exported, export
from torch_dpflow.datasets.importers import IMPORTERS, make_importer
from torch_dpflow.datasets.spec import Dataset, DatasetRef, next_version
from torch_dpflow.datasets.storage.urls import without_login
from torch_dpflow.datasets.store import DatasetStore
from torch_dpflow.datasets.versions import Compared, copy, delete, prune, verify
from torch_dpflow.errors import DatasetError, DatasetNotFoundError, OptionError


def version_ref(context: click.Context, parameter: click.Parameter, text: str) -> DatasetRef:
    """Parse NAMESPACE/NAME:VERSION. A version is required, a variant is refused (click's callback)."""
    if "=" in text:
        text = without_login(text)
        raise click.BadParameter(
            f"{text!r} stands where the dataset's name belongs; give NAMESPACE/NAME:VERSION before the sources, as "
            f"in core/pets:v1 {text}"
        )
    target = DatasetRef.parse(text)
    if target.version is None or target.variant is not None:
        raise OptionError(f"{text!r} should name a version, such as {target.id}:v1; variants go before sources")
    return target


def _kind(context: click.Context, parameter: click.Parameter, text: str) -> str:
    """Return the checked name of an importer (click's callback)."""
    if text in IMPORTERS:
        return text
    raise click.BadParameter(
        f"{without_login(text)!r} is no kind of source; give one of {', '.join(sorted(IMPORTERS))} first, then the "
        "dataset, then its sources, as in imagefolder core/pets:v1 train=/data/pets"
    )


_import_options = with_options(
    click.argument("kind", metavar=f"[{'|'.join(sorted(IMPORTERS))}]", callback=_kind),
    click.argument("target", metavar="NAMESPACE/NAME:VERSION", callback=version_ref),
    click.argument("sources", metavar="VARIANT=SOURCE...", nargs=-1, required=True, callback=name_value_pairs),
    click.option(
        "-s",
        "--setting",
        "settings",
        metavar="NAME=VALUE",
        multiple=True,
        callback=name_value_pairs,
        help="A setting of the importer, such as images=…; {variant} stands for the variant's name.",
    ),
    click.option(
        "--checksum",
        type=click.Choice(["crc32", "sha256"]),
        help="Read all data and store checksums; data that is copied into the store always has them.",
    ),
    click.option("--description", default="", help="Description, one line."),
    click.option("--restart", is_flag=True, help="Discard what an interrupted run has written."),
)


@click.group()
def dataset() -> None:
    """Import, list, show, verify, extend, copy, export and delete datasets."""


@dataset.command("import")
@_import_options
@click.option(
    "--shard-size",
    type=click.IntRange(1, MAX_SHARD_SIZE),
    default=SHARD_SIZE,
    show_default=True,
    help="Samples in a metadata file of the store.",
)
@store_options
def import_(
    url: str,
    storage_options: dict[str, Any],
    kind: str,
    target: DatasetRef,
    sources: dict[str, str],
    restart: bool,
    description: str,
    **how: Any,
) -> None:
    """Publish a version of a dataset from one source for each variant.

    The data stays where it is. Only samples of an iterable, or from compressed shards, are copied into the store.

    Repeat the same command to continue an interrupted import.

    \b
    dpflow dataset import imagefolder core/imagenet:v1 train=/data/train val=/data/val
    dpflow dataset import coco core/mscoco:v1 train2017=/coco/instances_train2017.json \\
        -s images=/coco/{variant}
    dpflow dataset import speech core/libri-speech:v1 train-clean-100=/libri/train-clean-100
    dpflow dataset import webdataset core/laion:v1 'train=s3://bucket/{000..146}.tar'
    dpflow dataset import listing core/clicks:v1 train=s3://bucket/clicks.parquet -s path_column=key
    dpflow dataset import iterable core/digits:v1 train=my_package.digits:samples
    """
    store = DatasetStore.create(url, **storage_options)
    draft = Draft(store, target.id, str(target.version), description=description)
    _run(draft, kind, sources, restart=restart, options=storage_options, **how)


@dataset.command()
@_import_options
@click.option("--as", "version", help="Name of the new version; by default the next number.")
@store_options
def append(
    url: str,
    storage_options: dict[str, Any],
    kind: str,
    target: DatasetRef,
    sources: dict[str, str],
    version: str | None,
    restart: bool,
    description: str,
    **how: Any,
) -> None:
    """Publish a new version with all samples of an older one, followed by new ones.

    \b
    dpflow dataset append imagefolder core/imagenet:v1 train=/data/more --as v2
    """
    store = DatasetStore(url, **storage_options)
    parent = str(target.version)
    draft = Draft(store, target.id, version or next_version(parent), parent=parent, description=description)
    _run(draft, kind, sources, restart=restart, options=storage_options, **how)


@dataset.command("list")
@store_options
def list_(url: str, storage_options: dict[str, Any], as_json: bool) -> None:
    """List all datasets with their versions, and unfinished imports; with --json one object for each version.

    Versions that cannot be read are listed last; the exit status is 1 if there are any.
    """
    store = DatasetStore(url, **storage_options)
    published, unreadable = [], []
    for ref in (DatasetRef(name, version) for name in store.ids() for version in store.versions(name)):
        try:
            published.append(store.load(ref.id, ref.version))
        except DatasetError as error:
            unreadable.append(str(error))
    drafts = [DatasetRef(name, version) for name in store.ids() for version in store.drafts(name)]
    if as_json:
        for version in published:
            print_json(version)
    else:
        print_datasets(published, drafts)
    if unreadable:
        raise click.ClickException("\n".join(unreadable))


@dataset.command()
@click.argument("ref", metavar="NAMESPACE/NAME[:VERSION[:VARIANT]]")
@click.option("--sample", type=click.IntRange(min=0), help="Also show the metadata of this sample.")
@store_options
def show(url: str, storage_options: dict[str, Any], ref: str, sample: int | None, as_json: bool) -> None:
    """Show a version, by default the last one: variants, counts, checksums, source, and location of its data.

    With --json, print the version's file as it is; with --json and --sample, only the metadata of the sample.
    """
    store = DatasetStore(url, **storage_options)
    target = DatasetRef.parse(ref)
    version = store.load(target.id, target.version)
    if as_json and sample is None:
        print_json(version)
        return
    described = None
    if sample is not None:
        stored = store.open(DatasetRef(target.id, version.version, target.variant or _only_variant(version)))
        if sample >= len(stored):
            raise OptionError(f"--sample={sample}: {stored.ref} has {len(stored)} samples, from 0")
        described = stored.sample(sample)
    if described is not None and as_json:
        print_json(described)
    else:
        names = [target.variant] if target.variant else sorted(version.variants)
        print_version([store.open(DatasetRef(target.id, version.version, name)) for name in names], described)


@dataset.command("verify")
@click.argument("ref", metavar="NAMESPACE/NAME[:VERSION[:VARIANT]]")
@click.option("--data", is_flag=True, help="Also check the object of every sample, not only its metadata.")
@store_options
def verify_(url: str, storage_options: dict[str, Any], ref: str, data: bool, as_json: bool) -> None:
    """Check that a version is complete: the metadata of its samples; with --data also the samples.

    With --data, samples with checksums are read and compared; for other samples only the existence and, if it is known,
    the size are checked. Each problem is one line; the exit status is then 1. With --json, each line is an object.
    """
    store = DatasetStore(url, **storage_options)
    target = DatasetRef.parse(ref)
    version = store.load(target.id, target.version)
    names = [target.variant] if target.variant else sorted(version.variants)
    bad = total = 0
    for name in names:
        stored = store.open(DatasetRef(target.id, version.version, name))
        compared = Compared() if data else None
        with verify_progress(name, len(stored)) as progress:
            for problem in verify(stored, data=data, progress=progress, compared=compared):
                bad += problem.samples
                click.echo(problem_line(name, problem, as_json=as_json))
        total += len(stored)
        click.echo(checked_line(stored, compared, as_json=as_json))
    if bad:
        raise click.ClickException(f"{bad} of {total} samples are damaged or missing")


def _run(
    draft: Draft,
    kind: str,
    sources: dict[str, str],
    *,
    settings: dict[str, str],
    options: dict[str, str],
    restart: bool,
    as_json: bool,
    **how: Any,
) -> None:
    """Import every source into a draft, and publish it."""
    if restart:
        draft.discard()
    draft.check_variants(sources)
    if kind == "iterable":
        sys.path.insert(0, os.getcwd())  # as `python -m` does; a console script has its own directory there
    try:
        for variant, source in sources.items():
            filled = {name: value.replace("{variant}", variant) for name, value in settings.items()}
            importer = make_importer(kind, source, filled, options)
            with import_progress(variant, importer) as progress:
                draft.add(variant, importer, progress=progress, **how)
        published = draft.publish()
    except KeyboardInterrupt:
        click.echo("Interrupted. Run the same command again to continue.", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    if as_json:
        print_json(published)
        return
    for name in sources:
        click.echo(f"{published.id}:{published.version}:{name}: {published.variants[name].samples} samples")


def _only_variant(version: Dataset) -> str:
    if len(version.variants) != 1:
        raise DatasetNotFoundError(f"{version.id}:{version.version} has variants {sorted(version.variants)}; name one")
    return next(iter(version.variants))


_confirmed = click.option(
    "--yes", is_flag=True, help="Remove it. Without this option the command only prints what it would remove."
)


def _unvaried(context: click.Context, parameter: click.Parameter, text: str | None) -> DatasetRef | None:
    """Parse the name of a dataset, with or without a version (click's callback); None without a name."""
    target = None if text is None else DatasetRef.parse(text)
    if target is not None and target.variant is not None:
        raise OptionError(f"{text!r} names a variant; versions are removed and copied as a whole")
    return target


def _dataset_only(context: click.Context, parameter: click.Parameter, text: str | None) -> DatasetRef | None:
    target = _unvaried(context, parameter, text)
    if target is not None and target.version is not None:
        raise OptionError(f"{text!r} names a version; give a dataset, such as {target.id}, or none")
    return target


@dataset.command()
@click.argument("target", metavar="NAMESPACE/NAME:VERSION", callback=version_ref)
@store_options
def discard(url: str, storage_options: dict[str, Any], target: DatasetRef, as_json: bool) -> None:
    """Remove the files of an unfinished import; its sources are not changed."""
    store = DatasetStore(url, **storage_options)
    assert target.version is not None
    if target.version not in store.drafts(target.id):
        raise OptionError(f"{target} is no unfinished import of {store.url}; see dpflow dataset list")
    Draft(store, target.id, target.version).discard()
    click.echo(to_json({"discarded": str(target)}) if as_json else f"{target}: discarded")


@dataset.command("delete")
@click.argument("target", metavar="NAMESPACE/NAME[:VERSION]", callback=_unvaried)
@_confirmed
@store_options
def delete_(url: str, storage_options: dict[str, Any], target: DatasetRef, yes: bool, as_json: bool) -> None:
    """Remove a version, or a dataset with all versions and unfinished imports.

    Data of other versions, and data that no import has written, stays. This cannot be undone.
    """
    store = DatasetStore(url, **storage_options)
    versions = store.versions(target.id)
    drafts = [] if target.version else store.drafts(target.id)
    if target.version:
        versions = [name for name in versions if name == target.version]
    if not versions and not drafts:
        raise store.not_found(target)
    published, unfinished = ([str(DatasetRef(target.id, name)) for name in part] for part in (versions, drafts))
    names = [*published, *(f"the unfinished import {name}" for name in unfinished)]
    _check_meant(yes, f"{', '.join(names)} from {store.url}")
    delete(store, target.id, target.version)
    if as_json:
        click.echo(to_json({"deleted": published, "discarded": unfinished}))
        return
    for name in names:
        click.echo(f"{name}: deleted")


@dataset.command("prune")
@click.argument("target", metavar="[NAMESPACE/NAME]", required=False, callback=_dataset_only)
@_confirmed
@store_options
def prune_(url: str, storage_options: dict[str, Any], target: DatasetRef | None, yes: bool, as_json: bool) -> None:
    """Remove unfinished imports, and imported files to which no published version refers; by default for all datasets.

    An import that runs at the same time will not be published.
    """
    store = DatasetStore(url, **storage_options)
    ids = store.ids() if target is None else [target.id]
    drafts = [str(DatasetRef(name, version)) for name in ids for version in store.drafts(name)]
    files = f"the files of {target or 'all datasets'} in {store.url} that no published version refers to"
    _check_meant(yes, f"{files}, and the unfinished imports {', '.join(drafts)}" if drafts else files)
    for name in ids:
        removed = prune(store, name)
        click.echo(
            to_json({"dataset": name, "files_removed": removed}) if as_json else f"{name}: {removed} files removed"
        )


_to_option = click.option(
    "--to-option",
    "to_options",
    metavar="NAME=VALUE",
    multiple=True,
    callback=storage_options_of,
    help="Option with which fsspec opens the target; may be repeated.",
)


@dataset.command("copy")
@click.argument("target", metavar="NAMESPACE/NAME[:VERSION]", callback=_unvaried)
@click.option("--to", required=True, metavar="URL", help="The other store; created if it does not exist.")
@_to_option
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

    Data in the directory of the dataset is copied; other data stays where it is, and the copy refers to it. Repeat the
    same command to continue an interrupted copy.
    """
    store, compared = DatasetStore(url, **storage_options), Compared()
    store.load(target.id, target.version)  # first, so that no store is created for a missing version
    other = DatasetStore.create(to, **to_options)
    with copy_progress() as progress:
        copied = copy(store, target.id, target.version, other, progress=progress, compared=compared)
    if as_json:
        click.echo(to_json({"copied": f"{copied.id}:{copied.version}", "to": other.url, "compared": asdict(compared)}))
        return
    for line in copied_lines(copied, other.url, compared):
        click.echo(line)


@dataset.command("export")
@click.argument("ref", metavar="NAMESPACE/NAME[:VERSION[:VARIANT]]")
@click.argument("target")
@click.option("--format", type=click.Choice(["webdataset", "parquet"]), required=True, help="Tar shards, or Parquet.")
@click.option("--main", metavar="NAME", help="Ending of the member, or name of the column, with a sample's bytes.")
@click.option(
    "--samples-per-file", type=click.IntRange(min=1), help="Samples of a file; by default --file-size decides."
)
@click.option("--file-size", default="256MiB", show_default=True, help="Bytes of samples after which a file ends.")
@click.option("--row-group-size", default="16MiB", show_default=True, help="The same for row groups of Parquet.")
@click.option(
    "--annotations",
    type=click.Choice(["columns", "json"]),
    default="columns",
    show_default=True,
    help="For Parquet: one column for each annotation, or one column of JSON texts.",
)
@_to_option
@store_options
def export_(
    url: str,
    storage_options: dict[str, Any],
    ref: str,
    target: str,
    to_options: dict[str, Any],
    as_json: bool,
    **how: Any,
) -> None:
    """Write the samples of a variant to the directory TARGET, as WebDataset shards or as Parquet files.

    Repeat the same command to continue an interrupted export: files that are complete are kept.

    \b
    dpflow dataset export core/imagenet:v1:train /data/shards --format webdataset
    dpflow dataset export core/imagenet:v1:val s3://bucket/imagenet --format parquet --samples-per-file 5000
    """
    stored = DatasetStore(url, **storage_options).open(ref)
    try:
        with verify_progress(stored.variant_name, len(stored)) as progress:
            exported = export(stored, target, options=to_options, progress=progress, **how)
    except KeyboardInterrupt:
        click.echo("Interrupted. Run the same command again to continue.", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    click.echo(_exported_line(stored.ref, exported, as_json=as_json))


def _exported_line(ref: DatasetRef, exported: Exported, *, as_json: bool) -> str:
    if as_json:
        return to_json({"exported": str(ref), **asdict(exported)})
    kept = f", {exported.kept} of them by an earlier run" if exported.kept else ""
    files = counted(len(exported.files), "file")
    return f"{ref}: {counted(exported.samples, 'sample')} in {files} of {exported.url}{kept}"


def _check_meant(yes: bool, what: str) -> None:
    if not yes:
        raise OptionError(f"nothing was removed; with --yes this removes {what}")
