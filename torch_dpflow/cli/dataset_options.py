"""What commands of `dpflow dataset` are given alike: a store, a version, names with values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from torch_dpflow.datasets.names import DatasetRef
from torch_dpflow.errors import OptionError

Command = Callable[..., Any]


def name_value_pairs(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[str, str]:
    """NAME=VALUE arguments as a mapping."""
    pairs = [text.partition("=") for text in texts]
    for text, (name, equals, value) in zip(texts, pairs):
        if not (name and equals and value):
            raise click.BadParameter(f"{text!r} is not of the form NAME=VALUE")
    found = {name: value for name, _, value in pairs}
    if len(found) < len(pairs):
        raise click.BadParameter(f"a name is given twice in {' '.join(texts)}")
    return found


def storage_options_of(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[str, str]:
    """NAME=VALUE options of a storage."""
    options = name_value_pairs(context, parameter, texts)
    taken = options.keys() & {"url", "read_options"}
    if taken:
        raise click.BadParameter(
            f"{sorted(taken)} is no option of a storage; the store's address goes to --store"
        )
    return options


def version_ref(context: click.Context, parameter: click.Parameter, text: str) -> DatasetRef:
    """A dataset with a version, without a variant."""
    if "=" in text:
        raise click.BadParameter(
            f"{text!r} stands where the dataset's name belongs; give NAMESPACE/NAME:VERSION before the sources, as "
            f"in core/pets:v1 {text}"
        )
    target = DatasetRef.parse(text)
    if target.version is None or target.variant is not None:
        raise OptionError(
            f"{text!r} should name a version, such as {target.id}:v1; variants go before sources"
        )
    return target


def store_options(command: Command) -> Command:
    storage = click.option(
        "--storage-option",
        "storage_options",
        metavar="NAME=VALUE",
        multiple=True,
        callback=storage_options_of,
        help="What fsspec needs to open the store, such as key=…, secret=…, endpoint=…; may be repeated.",
    )
    store = click.option(
        "--store",
        "url",
        metavar="URL",
        envvar="DPFLOW_STORE",
        required=True,
        show_envvar=True,
        help="The directory of the store: a path, s3://…, oss://…",
    )
    return store(storage(command))
