"""Loggers, and the format of services' log lines.

Users set the level of one part by its name: `logging.getLogger("torch_dpflow.worker")`. In a training process the
library configures nothing. Services write structured lines: see `StructuredFormatter`.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

from torch_dpflow.errors import OptionError

#: Events in the training process: workers that died, prefetching that grew.
LOADER = logging.getLogger("torch_dpflow.loader")

#: Events inside a worker.
WORKER = logging.getLogger("torch_dpflow.worker")

#: Events of services (of clusters, flows and the pool) and of the platforms that run workers.
SERVICE = logging.getLogger("torch_dpflow.service")

#: Samples that a flow leaves out because they cannot be loaded.
FLOWS = logging.getLogger("torch_dpflow.flows")

#: Datasets and storages: samples left out, unexpected answers.
DATASETS = logging.getLogger("torch_dpflow.datasets")

#: Connections, calls, malformed messages.
TRANSPORT = logging.getLogger("torch_dpflow.transport")

_ROOT = logging.getLogger("torch_dpflow")
#: Fields of every line, in this order. Set them by `extra={"job": name}`.
SUBJECTS = ("flow", "shard", "worker", "job")
FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
#: A value that needs no quotes.
_PLAIN = re.compile(r"[\x21\x23-\x3c\x3e-\x7e]+")


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """Format and level of the services' logs.

    Args:
        format: "text", lines of name=value; or "json", one object per line.
        level: the lowest level that is written: "debug", "info", "warning" or "error".

    Raises:
        OptionError: `format` or `level` has another value.
    """

    format: str = "text"
    level: str = "info"

    def __post_init__(self) -> None:
        for name, allowed in (("format", FORMATS), ("level", LEVELS)):
            if getattr(self, name) not in allowed:
                raise OptionError(f"log {name}={getattr(self, name)!r}: {' or '.join(allowed)} is allowed")


class StructuredFormatter(logging.Formatter):
    """Formatter of one line per record: time, level, logger, `SUBJECTS`, the process's fields, text and exception.

    A field of `SUBJECTS` that the record lacks gets the process's value; without one, `-` in text, null in JSON.
    Values are quoted where needed, so that text from another process cannot start a line or field.

    Args:
        fields: the process's fields, by name, for all lines; names in `SUBJECTS` are allowed too.
    """

    def __init__(self, options: LogOptions, fields: Mapping[str, object]) -> None:
        super().__init__()
        self._json = options.format == "json"
        self._fields = {**dict.fromkeys(SUBJECTS), **fields}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._fields,
        }
        line.update((name, getattr(record, name)) for name in SUBJECTS if hasattr(record, name))
        line["text"] = record.getMessage()
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        if self._json:
            return json.dumps(line, default=str)
        return " ".join(f"{name}={_quoted(value)}" for name, value in line.items())


def write_lines(options: LogOptions, fields: Mapping[str, object], *, stream: TextIO | None = None) -> None:
    """Write the package's log only to `stream`, by default stderr. fields: see `StructuredFormatter`. For services."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(StructuredFormatter(options, fields))
    _ROOT.handlers[:] = [handler]
    _ROOT.setLevel(options.level.upper())
    _ROOT.propagate = False


def _quoted(value: object) -> str:
    if value is None:
        return "-"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
