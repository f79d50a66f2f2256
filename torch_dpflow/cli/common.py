"""Parts that commands share: options and their parsing, JSON, and text that is safe for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.markup import escape

from torch_dpflow._core.checks import CONTROL, check_int, parse_bytes
from torch_dpflow.cluster.messages.coordinator import MIN_MEMORY
from torch_dpflow.errors import UsageError
from torch_dpflow.log import FORMATS, LEVELS

Command = Callable[..., Any]
#: Wider than any row, so that no line is broken.
_UNBROKEN = 2000

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def with_options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that adds these click options to a command; its help lists them in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


#: Options for the log; the command gets them as `log_format` and `log_level`.
log_options = with_options(
    click.option(
        "--log-format",
        type=click.Choice(FORMATS),
        default="text",
        envvar="DPFLOW_LOG_FORMAT",
        help="Form of the log lines on stderr.",
    ),
    click.option(
        "--log-level",
        type=click.Choice(LEVELS),
        default="info",
        envvar="DPFLOW_LOG_LEVEL",
        help="The lowest level that is logged.",
    ),
)


def name_value_pairs(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
    """Return NAME=VALUE arguments as a mapping (click's callback)."""
    found: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not (name and value):
            from torch_dpflow.datasets.storage.urls import without_login  # with all storages: 0.1 s

            raise click.BadParameter(f"{without_login(text)!r} is not of the form NAME=VALUE")
        if name in found:
            raise click.BadParameter(f"the name {name!r} is given twice")
        found[name] = value
    return found


def storage_options_of(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
    """Return NAME=VALUE options of a storage as a mapping (click's callback)."""
    pairs = [text.partition("=") for text in texts]
    if not all(name.isidentifier() and value.strip("=") for name, _, value in pairs):
        raise click.BadParameter("what was given is not of the form NAME=VALUE")  # not shown, as it may be a secret
    options = name_value_pairs(context, parameter, texts)
    taken = options.keys() & {"url", "read_options"}
    if taken:
        raise click.BadParameter(f"{sorted(taken)} is no option of a storage; the store's address goes to --store")
    return options


storage_option = click.option(
    "--storage-option",
    "storage_options",
    metavar="NAME=VALUE",
    multiple=True,
    callback=storage_options_of,
    help="Option with which fsspec opens the storage, such as key=…, secret=…, endpoint=…; may be repeated.",
)


def store_option(*, required: bool) -> Callable[[Command], Command]:
    """Return the option --store, which a command gets as `url`."""
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
    """Add --store, --storage-option and --json to a command."""
    return json_option(store_option(required=True)(storage_option(command)))


def size_of(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """Return the number of bytes in a size such as "8GiB"; None if none is given (click's callback)."""
    try:
        size = None if text is None else parse_bytes("size", text)
    except UsageError:
        raise click.BadParameter(f"{text!r} is no size; give bytes with their unit, such as 8GiB or 500MB") from None
    return None if size is None else check_int(str(parameter.opts[0]), size, minimum=MIN_MEMORY, maximum=2**53)


def seconds_of(context: click.Context, parameter: click.Parameter, value: float) -> float:
    """Return a number of seconds if it is from 0 to 86400, a day (click's callback)."""
    if not 0 <= value <= 86400:
        raise click.BadParameter(f"{value!r}: give seconds from 0 to 86400")
    return value


def to_json(value: Any) -> str:
    """Return a value as JSON; structs become objects with the names of their fields."""
    return msgspec.json.encode(_named(value)).decode()


def _named(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return {name: _named(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list):
        return [_named(one) for one in value]
    if isinstance(value, dict):
        return {name: _named(one) for name, one in value.items()}
    return value


def on_one_line(text: str) -> str:
    """Return text with control characters escaped, because names from other users may contain them."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def cell(text: str) -> str:
    """Return text for a cell of a table, with control characters and markup escaped."""
    return escape(on_one_line(text))


def stdout_console(*, highlight: bool = True) -> Console:
    """Return a console on stdout that wraps lines only on a terminal."""
    return Console(width=None if sys.stdout.isatty() else _UNBROKEN, highlight=highlight)
