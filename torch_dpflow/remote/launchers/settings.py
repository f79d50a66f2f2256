"""Settings from files and the environment: of platforms that are given by name, the network, and autoscaling.

The first of these sources that contains a setting decides:

1. environment variables: `DPFLOW_PLATFORM_RAY_CPUS` is `cpus` of the table `platform.ray`, `DPFLOW_NETWORK_LISTEN` is
   `listen` of `network`, `DPFLOW_AUTOSCALE_MAX` is `max` of `autoscale`
2. `dpflow.toml`, or else the table `tool.dpflow` of `pyproject.toml`, in the current directory or the nearest above it
   that contains one of them
3. `~/.config/dpflow/config.toml`

If `DPFLOW_CONFIG` names a file, only that file is read, in place of 2 and 3.

No setting is a secret: files may be committed. Credentials are looked up where the platform's own library does.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import msgspec

from torch_dpflow._core.checks import check_int, check_tcp_address, parse_duration
from torch_dpflow._core.decoding import converted
from torch_dpflow.errors import MissingExtraError, OptionError, UsageError

#: Environment variable with the path of the only settings file to read.
CONFIG_VARIABLE = "DPFLOW_CONFIG"
_VARIABLE = "DPFLOW_"
#: Maximum of `Autoscale.min` and `max`; equals `messages.coordinator.MAX_WORKERS`, which this layer cannot import.
MAX_WORKERS = 4096
_HEADING, _KEY = re.compile(r"\s*\[+\s*([^\]]*?)\s*\]"), re.compile(r"\s*[\"']?([\w.-]+)[\"']?\s*=")


@dataclass(frozen=True, kw_only=True)
class Network:
    """Settings table `network`. listen: address at which a loader listens for workers; empty: the platform decides."""

    listen: str = ""

    def __post_init__(self) -> None:
        if self.listen != "":
            check_tcp_address("listen", self.listen)


@dataclass(frozen=True, kw_only=True)
class Autoscale:
    """Settings table `autoscale`: limits of a cluster's number of workers, as in `dpflow up --autoscale`.

    Args:
        min, max: limits for all flows together. max=None: no autoscaling.
        hold: time for which a paused job, as during a validation, keeps its workers: "2m", or a number of seconds.
    """

    min: int = 0
    max: int | None = None
    hold: float | str = 120.0

    def __post_init__(self) -> None:
        check_int("min", self.min, minimum=0, maximum=MAX_WORKERS)
        if self.max is not None:
            check_int("max", self.max, minimum=1, maximum=MAX_WORKERS)
        parse_duration("hold", self.hold, maximum=86400.0)

    @property
    def hold_s(self) -> float:
        """`hold` in seconds."""
        return parse_duration("hold", self.hold)


@dataclass(frozen=True)
class Setting:
    """Value of a setting, and where it was found, for display."""

    value: Any
    place: str


@dataclass(frozen=True)
class _Source:
    """Source of settings: a file, or the environment."""

    values: Mapping[str, Any]
    #: Its name in messages, and its lines if it is a file.
    name: str
    lines: tuple[str, ...] = ()

    def place(self, table: str, key: str) -> str:
        """Return the file and line, or the variable, that sets a key. table: empty for keys outside tables."""
        wanted, current = f"{table}.{key}".strip("."), ""
        if not self.lines:
            variable = _variable(wanted)
            return f"the variable {next((one for one in _variables() if one.startswith(variable)), variable)}"
        for number, line in enumerate(self.lines, 1):
            if heading := _HEADING.match(line):
                name = current = heading[1].removeprefix("tool.dpflow").strip(".")
            elif assigned := _KEY.match(line):
                name = f"{current}.{assigned[1]}".strip(".")
            else:
                continue
            if f"{name}.".startswith(f"{wanted}."):
                return f"{self.name}:{number}"
        return self.name


def read(kinds: Mapping[str, Callable[[], type[Any]]]) -> dict[str, dict[str, Setting]]:
    """Return the settings in the environment and settings files: {table, such as `platform.ray`: {name: setting}}.

    kinds: for each table, a function that returns the dataclass of its settings. All tables are checked.

    Raises:
        OptionError: for example, a file cannot be read, or a file or variable has an unknown name or invalid value.
        MissingExtraError: there is TOML to parse, and on Python 3.10 the package for that is not installed.
    """
    found: dict[str, dict[str, Setting]] = {table: {} for table in kinds}
    for source in [*_files(), _environment()]:  # from the last to decide to the first
        for table, part in _tables_of(source, kinds):
            for key, value in part.items():
                found[table][key] = _setting(source, table, key, value, kinds[table]())
    return found


def _setting(source: _Source, table: str, key: str, value: Any, kind: type[Any]) -> Setting:
    place = source.place(table, key)
    types = get_type_hints(kind)
    names = [one.name for one in fields(kind)]
    if key not in names:
        raise OptionError(f"{place}: {table} has no {key!r}{_hint(key, names)}")
    try:
        # Variables are text, whatever the setting is.
        value = converted(value, types[key], strict=bool(source.lines))
        kind(**{key: value})
    except msgspec.ValidationError as error:
        is_text = isinstance(value, str) and not source.lines and "`object`" in str(error)
        remedy = "; write it as TOML has it: { loader = 0.5 }" if is_text else ""
        raise OptionError(f"{place}: {table}.{key}: {error}{remedy}") from error
    except UsageError as error:
        raise OptionError(f"{place}: {table}.{error}") from error
    return Setting(value, place)


def _tables_of(source: _Source, kinds: Collection[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (full name, table) for each table of a source. Raises OptionError for an unknown table."""
    tops = {table.partition(".")[0] for table in kinds}
    for name, inner in source.values.items():
        if name not in tops:
            raise OptionError(f"{source.place('', name)}: there is no table {name!r}{_hint(name, tops)}")
        inside = {table.partition(".")[2] for table in kinds if table.startswith(f"{name}.")}
        _check_table(source, "", name, inner, f"{name}.{min(inside)}" if inside else name)
        if not inside:
            yield name, inner
        for key in inner if inside else ():
            if key not in inside:
                raise OptionError(f"{source.place(name, key)}: {name} has no {key!r}{_hint(key, inside)}")
            _check_table(source, name, key, inner[key], f"{name}.{key}")
            yield f"{name}.{key}", inner[key]


def _check_table(source: _Source, parent: str, name: str, values: Any, allowed: str) -> None:
    if not isinstance(values, Mapping):
        raise OptionError(f"{source.place(parent, name)}: {name} is no table; write [{allowed}]")


def _files() -> Iterator[_Source]:
    """Yield the files that exist; a later file takes precedence."""
    named = os.environ.get(CONFIG_VARIABLE)
    if named:
        yield _read(os.path.expanduser(named), f"{CONFIG_VARIABLE} names it")
        return
    home = os.path.expanduser(os.environ.get("XDG_CONFIG_HOME") or "~/.config")
    # Also if it is not a file: a directory of this name was meant for settings.
    if os.path.lexists(path := os.path.join(home, "dpflow", "config.toml")):
        yield _read(path)
    here = Path.cwd()
    for directory in (here, *here.parents):
        if os.path.lexists(directory / "dpflow.toml"):
            yield _read(str(directory / "dpflow.toml"))
            return
        path = str(directory / "pyproject.toml")
        if os.path.isfile(path) and _is_of_ours(_text_of(path)):
            yield _read(path)
            return


def _is_of_ours(text: str) -> bool:
    """Return whether the text of a pyproject.toml has a table of this package."""
    if "[tool.dpflow" in text or "dpflow" not in text:
        return "[tool.dpflow" in text  # also if it is invalid TOML, which is reported then
    with suppress(ValueError, TypeError, RecursionError, MissingExtraError):
        return "dpflow" in _toml().loads(text).get("tool", {})
    return False


def _read(path: str, why: str = "") -> _Source:
    toml = _toml()
    text = _text_of(path, why)
    try:
        values: Any = toml.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path} is no TOML: {error}") from error
    if os.path.basename(path) == "pyproject.toml":
        for name in ("tool", "dpflow"):
            values = values.get(name, {}) if isinstance(values, Mapping) else values
    source = _Source(values, path, (*text.splitlines(), ""))
    _check_table(source, "", "tool.dpflow", values, "tool.dpflow.network")
    return source


def _text_of(path: str, why: str = "") -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        remedy = why or "make it a file that can be read, or remove it"
        raise OptionError(f"{path} cannot be read: {error.strerror}; {remedy}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is no TOML: {error}") from error


def _environment() -> _Source:
    values: dict[str, Any] = {}
    for variable in _variables():
        table, _, key = variable.removeprefix(_VARIABLE).lower().partition("_")
        if not key:
            raise OptionError(
                f"the variable {variable} is no setting: name one, as {_variable('platform.ray.cpus')} or "
                f"{_variable('network.listen')}; the platform is chosen by platform= or --platform"
            )
        inner = values.setdefault(table, {})
        if table == "platform":
            name, _, key = key.partition("_")
            inner = inner.setdefault(name, {})
        inner[key] = _value(variable)
    return _Source(values, "the environment")


def _variables() -> list[str]:
    """Return the names of environment variables that begin like those of settings, sorted."""
    tables = tuple(f"{_variable(table)}_" for table in ("platform", "network", "autoscale"))
    return sorted(name for name, text in os.environ.items() if text and f"{name}_".startswith(tables))


def _variable(name: str) -> str:
    return f"{_VARIABLE}{name.replace('.', '_').upper()}"


def _value(variable: str) -> Any:
    """Return the value of a variable: a table if its text is a TOML table, else the text."""
    text = os.environ[variable]
    if not text.lstrip().startswith("{"):
        return text
    try:
        return _toml().loads(f"value = {text}")["value"]
    except (ValueError, RecursionError) as error:
        raise OptionError(
            f"the variable {variable} is no table of TOML: {error}; write it as {{ loader = 0.5 }}"
        ) from error


def _hint(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else f"; it is one of {sorted(known)}"


def _toml() -> ModuleType:
    for name in ("tomllib", "tomli"):
        with suppress(ModuleNotFoundError):
            return import_module(name)
    raise MissingExtraError("settings from a file need tomli on Python 3.10; install it with: pip install tomli")
