"""Settings of platforms from files and the environment, for a platform that is given by its name.

Files, of which the first one that has a setting decides: `dpflow.toml`, or else the table `tool.dpflow` of
`pyproject.toml`, of the nearest directory from the current one upwards that has one; `~/.config/dpflow/config.toml`.
`DPFLOW_CONFIG` names one file that is read in place of all of these. A variable goes before files:
`DPFLOW_PLATFORM_RAY_CPUS` is `cpus` of the table `platform.ray`, `DPFLOW_NETWORK_LISTEN` is `listen` of `network`.

No setting is a secret: files may be committed. Credentials are looked up where the platform's own library does.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import msgspec

from torch_dpflow.errors import MissingExtraError, OptionError

#: The variable that names the one file to read.
CONFIG_VARIABLE = "DPFLOW_CONFIG"
_VARIABLE = "DPFLOW_"
_HEADING, _KEY = re.compile(r"\s*\[+\s*([^\]]*?)\s*\]"), re.compile(r"\s*[\"']?([\w.-]+)[\"']?\s*=")


@dataclass(frozen=True, kw_only=True)
class Network:
    """The table `network`: where a loader listens for workers, as `LoaderOptions(listen=)`; empty: it decides."""

    listen: str = ""


@dataclass(frozen=True)
class _Table:
    """One table as one source has it."""

    values: Mapping[str, Any]
    #: What it is called in messages, and the file's lines, if it is one.
    source: str
    lines: tuple[str, ...] = ()

    def place(self, table: str, key: str) -> str:
        """Where a key of a table stands, for people. table: empty for the file's own."""
        wanted, current = f"{table}.{key}".strip("."), ""
        for number, line in enumerate(self.lines, 1):
            if heading := _HEADING.match(line):
                name = current = heading[1].removeprefix("tool.dpflow").strip(".")
            elif assigned := _KEY.match(line):
                name = f"{current}.{assigned[1]}".strip(".")
            else:
                continue
            if f"{name}.".startswith(f"{wanted}."):
                return f"{self.source}:{number}"
        return self.source


def of_table(table: str, kind: type[Any], tables: Mapping[str, Any]) -> dict[str, Any]:
    """What files and the environment say of the table `platform.ray` or `network`, as arguments of its class.

    kind: the dataclass of its settings. tables: all that there may be.

    Raises:
        OptionError: a file cannot be read, or it or a variable has an unknown key or a value of another type.
        MissingExtraError: there is a file, and Python 3.10 has no reader of it.
    """
    types = get_type_hints(kind)
    fields = {name: types[name] for name in kind.__dataclass_fields__}
    found: dict[str, Any] = {}
    for source in [*_files(tables), _environment(tables)]:  # from the last to decide to the first
        part = _table_of(source, table)
        for key, value in part.items():
            if key not in fields:
                raise OptionError(f"{source.place(table, key)}: {table} has no {key!r}{_hint(key, fields)}")
            try:
                # Variables are text, whatever the setting is.
                found[key] = msgspec.convert(value, fields[key], strict=bool(source.lines))
            except msgspec.ValidationError as error:
                raise OptionError(f"{source.place(table, key)}: {table}.{key}: {error}") from error
    return found


def _table_of(source: _Table, table: str) -> Mapping[str, Any]:
    values: Any = source.values
    parent = ""
    for name in table.split("."):
        values = values.get(name, {})
        if not isinstance(values, Mapping):
            raise OptionError(f"{source.place(parent, name)}: {name} is no table; write [{table}]")
        parent = f"{parent}.{name}".strip(".")
    return dict(values)


def _files(tables: Mapping[str, Any]) -> Iterator[_Table]:
    """What is in files; the last one decides."""
    named = os.environ.get(CONFIG_VARIABLE)
    if named:
        yield _read(Path(named).expanduser(), tables)
        return
    home = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "dpflow" / "config.toml"
    if home.is_file():
        yield _read(home, tables)
    here = Path.cwd()
    for directory in (here, *here.parents):
        for name in ("dpflow.toml", "pyproject.toml"):
            path = directory / name
            if path.is_file() and (
                name == "dpflow.toml" or "[tool.dpflow" in path.read_text(errors="replace")
            ):
                yield _read(path, tables)
                return


def _read(path: Path, tables: Mapping[str, Any]) -> _Table:
    toml = _toml()
    try:
        text = path.read_text()
        values = toml.loads(text)
    except OSError as error:
        raise OptionError(
            f"{path} cannot be read: {error.strerror}; {CONFIG_VARIABLE} names the file"
        ) from error
    except ValueError as error:  # of TOML or its encoding
        raise OptionError(f"{path} is no TOML: {error}") from error
    if path.name == "pyproject.toml":
        values = values.get("tool", {}).get("dpflow", {})
    source = _Table(values, str(path), (*text.splitlines(), ""))
    _check_names(source, values, tables)
    return source


def _check_names(source: _Table, values: Mapping[str, Any], tables: Mapping[str, Any]) -> None:
    """Raise OptionError for tables that there are not."""
    known = {name.partition(".")[0] for name in tables}
    for name, inner in values.items():
        if name not in known:
            raise OptionError(f"{source.place('', name)}: there is no table {name!r}{_hint(name, known)}")
        inside = {table.partition(".")[2] for table in tables if table.startswith(f"{name}.")}
        for key in inner if inside and isinstance(inner, Mapping) else ():
            if key not in inside:
                raise OptionError(f"{source.place(name, key)}: {name} has no {key!r}{_hint(key, inside)}")


def _environment(tables: Mapping[str, Any]) -> _Table:
    values: dict[str, Any] = {}
    source = _Table(values, "the environment")
    for table, fields in tables.items():
        prefix = f"{_VARIABLE}{table.replace('.', '_').upper()}_"
        for variable, text in os.environ.items():
            if variable.startswith(prefix) and text:
                key = variable.removeprefix(prefix).lower()
                if key not in fields:
                    raise OptionError(f"the variable {variable}: {table} has no {key!r}{_hint(key, fields)}")
                inner = values
                for name in table.split("."):
                    inner = inner.setdefault(name, {})
                inner[key] = _value(text)
    return source


def _value(text: str) -> Any:
    """The text of a variable, as TOML has it where that is a table."""
    return _toml().loads(f"value = {text}")["value"] if text.lstrip().startswith("{") else text


def _hint(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else f"; it is one of {sorted(known)}"


def _toml() -> ModuleType:
    for name in ("tomllib", "tomli"):
        with suppress(ModuleNotFoundError):
            return import_module(name)
    raise MissingExtraError(
        "settings from a file need tomli on Python 3.10; install it with: pip install tomli"
    )
