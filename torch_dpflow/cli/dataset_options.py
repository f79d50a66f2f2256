"""Options that commands of `dpflow dataset` share: a store, a version, names with values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from torch_dpflow.cli.cluster_calls import json_option
from torch_dpflow.datasets.spec import DatasetRef
from torch_dpflow.datasets.storage.urls import without_login
from torch_dpflow.errors import OptionError

Command = Callable[..., Any]


def name_value_pairs(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[str, str]:
    """NAME=VALUE arguments as a mapping."""
    found: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not (name and value):
            raise click.BadParameter(f"{without_login(text)!r} is not of the form NAME=VALUE")
        if name in found:
            raise click.BadParameter(f"the name {name!r} is given twice")
        found[name] = value
    return found


def storage_options_of(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[str, str]:
    """NAME=VALUE options of a storage."""
    if not all("=" in text[1:] for text in texts):
        raise click.BadParameter("what was given is not of the form NAME=VALUE")  # and may be a secret
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
        text = without_login(text)
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


storage_option = click.option(
    "--storage-option",
    "storage_options",
    metavar="NAME=VALUE",
    multiple=True,
    callback=storage_options_of,
    help="What fsspec needs to open the storage, such as key=…, secret=…, endpoint=…; may be repeated.",
)


def store_option(*, required: bool) -> Callable[[Command], Command]:
    """The option that names a store; the command gets it as `url`."""
    return click.option(
        "--store",
        "url",
        metavar="URL",
        envvar="DPFLOW_STORE",
        required=required,
        show_envvar=True,
        help="The directory of the store: a path, s3://…, oss://…",
    )


def store_options(command: Command) -> Command:
    """The options of a command on a store: what opens the store, and --json."""
    return json_option(store_option(required=True)(storage_option(command)))
