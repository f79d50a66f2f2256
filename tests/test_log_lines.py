"""The lines of services: every field in every line, whatever is in it."""

from __future__ import annotations

import io
import json
import logging
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from torch_dpflow.errors import OptionError
from torch_dpflow.log import SERVICE, LogOptions, StructuredFormatter, write_lines


def line(options: LogOptions, text: str = "it is lost", error: Any = None, **subjects: Any) -> str:
    record = logging.LogRecord("torch_dpflow.service", logging.WARNING, "", 0, text, (), error)
    record.created, record.msecs = 1.5, 500.0
    vars(record).update(subjects)
    return StructuredFormatter(options, {"flow": "f:v1", "process": "f:v1/router", "pid": 7}).format(record)


def test_text_has_every_field() -> None:
    assert line(LogOptions(), job="mine") == (
        "time=1970-01-01T00:00:01.500Z level=warning logger=torch_dpflow.service flow=f:v1 shard=- worker=- "
        'job=mine process=f:v1/router pid=7 text="it is lost"'
    )


def test_json_has_every_field() -> None:
    assert json.loads(line(LogOptions(format="json"), worker=3)) == {
        "time": "1970-01-01T00:00:01.500Z",
        "level": "warning",
        "logger": "torch_dpflow.service",
        "flow": "f:v1",
        "shard": None,
        "worker": 3,
        "job": None,
        "process": "f:v1/router",
        "pid": 7,
        "text": "it is lost",
    }


@pytest.mark.parametrize("name", ["a b", 'say "x"', "one\nlevel=error flow=other", "\x1b[2J", "é", "", "x=y"])
def test_what_a_peer_has_chosen_makes_no_line_or_field_of_its_own(name: str) -> None:
    text = line(LogOptions(), job=name)
    assert text.isprintable()
    assert text.isascii()
    fields = [part.partition("=")[0] for part in shlex.split(text)]
    assert fields == ["time", "level", "logger", "flow", "shard", "worker", "job", "process", "pid", "text"]
    assert json.loads(line(LogOptions(format="json"), job=name))["job"] == name


def test_an_exception_stays_in_its_line() -> None:
    try:
        raise ArithmeticError("too much")
    except ArithmeticError as error:
        told = (type(error), error, error.__traceback__)
    text = line(LogOptions(), error=told)
    assert len(text.splitlines()) == 1
    assert "ArithmeticError: too much" in text


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The library's root logger, put back as it was."""
    logger = logging.getLogger("torch_dpflow")
    was = [*logger.handlers], logger.level, logger.propagate
    yield logger
    logger.handlers[:], logger.level, logger.propagate = was
    logger.manager._clear_cache()  # type: ignore[attr-defined]


def test_a_process_writes_from_its_level_on(root: logging.Logger) -> None:
    stream = io.StringIO()
    write_lines(LogOptions(level="warning"), {"process": "node"}, stream=stream)
    write_lines(LogOptions(level="warning"), {"process": "node"}, stream=stream)
    SERVICE.info("nothing new")
    SERVICE.warning("something is wrong", extra={"job": "mine"})
    assert stream.getvalue().count("\n") == 1
    assert "job=mine process=node" in stream.getvalue()


@pytest.mark.parametrize("wrong", [{"format": "xml"}, {"level": "loud"}])
def test_other_options_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(OptionError, match="is allowed"):
        LogOptions(**wrong)
