"""`dpflow dataset`: import, list, show, verify and extend datasets; the rest is in `dataset_upkeep`."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from torch_dpflow.cli.dataset_options import Command, name_value_pairs, store_options, version_ref
from torch_dpflow.cli.dataset_printing import (
    checked_line,
    import_progress,
    print_datasets,
    print_json,
    print_version,
    problem_line,
    verify_progress,
)
from torch_dpflow.cli.dataset_upkeep import copy_, delete_, discard, prune_
from torch_dpflow.cli.exit_status import INTERRUPTED
from torch_dpflow.datasets.draft import MAX_SHARD_SIZE, SHARD_SIZE, Draft
from torch_dpflow.datasets.importers import IMPORTERS, make_importer
from torch_dpflow.datasets.spec import Dataset, DatasetRef, next_version
from torch_dpflow.datasets.storage.urls import without_login
from torch_dpflow.datasets.store import DatasetStore
from torch_dpflow.datasets.verify import Compared, verify
from torch_dpflow.errors import DatasetError, DatasetNotFoundError, OptionError


def _kind(context: click.Context, parameter: click.Parameter, text: str) -> str:
    """The name of an importer."""
    if text in IMPORTERS:
        return text
    raise click.BadParameter(
        f"{without_login(text)!r} is no kind of source; give one of {', '.join(sorted(IMPORTERS))} first, then the "
        "dataset, then its sources, as in imagefolder core/pets:v1 train=/data/pets"
    )


def _import_options(command: Command) -> Command:
    options = [
        click.argument("kind", metavar=f"[{'|'.join(sorted(IMPORTERS))}]", callback=_kind),
        click.argument("target", metavar="NAMESPACE/NAME:VERSION", callback=version_ref),
        click.argument(
            "sources", metavar="VARIANT=SOURCE...", nargs=-1, required=True, callback=name_value_pairs
        ),
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
            help="Read all data and keep its checksums; data that is copied into the store has them always.",
        ),
        click.option("--description", default="", help="A line for people."),
        click.option("--restart", is_flag=True, help="Discard what an interrupted run has written."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.group()
def dataset() -> None:
    """Import, list, show, verify, extend, copy and delete datasets."""


for _command in (discard, delete_, prune_, copy_):
    dataset.add_command(_command)


@dataset.command("import")
@_import_options
@click.option("--shard-size", type=click.IntRange(1, MAX_SHARD_SIZE), default=SHARD_SIZE, show_default=True)
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
    """Publish a version of a dataset from one source for each variant. The data stays where it is.

    Running the same command again continues an interrupted import.

    \b
    dpflow dataset import imagefolder core/imagenet:v1 train=/data/train val=/data/val
    dpflow dataset import coco core/mscoco:v1 train2017=/coco/instances_train2017.json \\
        -s images=/coco/{variant}
    dpflow dataset import speech core/libri-speech:v1 train-clean-100=/libri/train-clean-100
    dpflow dataset import listing core/clicks:v1 train=s3://bucket/clicks.parquet -s path_column=key
    dpflow dataset import iterable core/digits:v1 train=my_package.digits:samples
    """
    store = DatasetStore.create(url, **storage_options)
    draft = Draft(store, target.id, str(target.version), description=description)
    _run(draft, kind, sources, restart=restart, options=storage_options, **how)


@dataset.command()
@_import_options
@click.option("--as", "version", help="The new version's name; the next number by default.")
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
    """Publish a further version that has all samples of an older one, followed by new ones.

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
    """Show a version, the last one by default: variants, counts, checksums, source, and where its data is.

    With --json, print the version's file as it is; with --sample too, the metadata of the sample.
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
@click.option("--data", is_flag=True, help="Check every sample's object too, not only its metadata.")
@store_options
def verify_(url: str, storage_options: dict[str, Any], ref: str, data: bool, as_json: bool) -> None:
    """Check that a version is complete: the metadata of its samples, and with --data the samples themselves.

    With --data, samples that have checksums are read; of others, the existence and size are checked. Prints one line
    for each problem; the exit status is 1 if there was any. With --json, each line is an object.
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
        raise click.ClickException(f"{bad} of {total} samples cannot be read as they should be")


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
    """Import every source and publish."""
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
        raise DatasetNotFoundError(
            f"{version.id}:{version.version} has variants {sorted(version.variants)}; name one"
        )
    return next(iter(version.variants))
