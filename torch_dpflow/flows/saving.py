"""Keeps flows in files: a line of JSON that anybody can read, and behind it the code."""

from __future__ import annotations

import platform
from typing import Annotated, Any, Literal

import cloudpickle
import msgspec

from torch_dpflow.datasets.checksums import sha256_of
from torch_dpflow.datasets.files import Files
from torch_dpflow.errors import DamagedStoreError, NewerFormatError, OptionTypeError, UsageError
from torch_dpflow.flows.flow import DataLoadFlow

_FORMAT = 1


class FlowRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="data-load-flow"):
    """The first line of a flow's file."""

    format: Literal[1]
    name: str
    version: Annotated[int, msgspec.Meta(ge=1)]
    #: As `str()` shows it.
    shown: str
    #: Code travels between equal minor versions of Python only: "3.11".
    python: str
    #: Of the bytes behind this line.
    sha256: str


class _Format(msgspec.Struct):
    format: int


def save_flow(flow: DataLoadFlow, url: str, **storage_options: Any) -> None:
    """Write a flow to a file, over whatever is there; atomically, as all files of a dataset store.

    Its functions are kept as code, those of installed modules by name.

    Raises:
        UsageError: something of it cannot be pickled.
    """
    try:
        code = cloudpickle.dumps(flow)
    except Exception as error:
        raise UsageError(
            f"{flow!r} cannot be saved: {type(error).__name__}: {error}; its stages and its dataset "
            "must pickle"
        ) from error
    record = FlowRecord(
        format=1,
        name=flow.name,
        version=flow.version,
        shown=str(flow),
        python=_python(),
        sha256=sha256_of(code),
    )
    files, name = _place(url, storage_options)
    files.write(name, msgspec.json.encode(record) + b"\n" + code)


def describe_flow(url: str, **storage_options: Any) -> FlowRecord:
    """What a flow's file says of itself. Runs none of its code."""
    files, name = _place(url, storage_options)
    return _record(files.read(name).partition(b"\n")[0], url)


def load_flow(url: str, **storage_options: Any) -> DataLoadFlow:
    """Read a flow from a file. Runs code of its author: load only what you trust.

    Raises:
        DamagedStoreError: the file was damaged or is none of a flow.
        NewerFormatError: a later release wrote it.
        UsageError: another version of Python wrote it.
    """
    files, name = _place(url, storage_options)
    line, _, code = files.read(name).partition(b"\n")
    record = _record(line, url)
    if sha256_of(code) != record.sha256:
        raise DamagedStoreError(f"{url} does not match its SHA-256; it was damaged: restore it from a copy")
    if record.python != _python():
        raise UsageError(
            f"{url} was saved by Python {record.python} and cannot be loaded by {_python()}; save it "
            "again with the Python that is to load it"
        )
    flow = cloudpickle.loads(code)
    if not isinstance(flow, DataLoadFlow):
        raise OptionTypeError(f"{url} holds a {type(flow).__name__}, no DataLoadFlow")
    return flow


def _record(line: bytes, url: str) -> FlowRecord:
    try:
        found = msgspec.json.decode(line, type=_Format).format
        if found > _FORMAT:
            raise NewerFormatError(
                f"{url} has format {found}; this release reads up to {_FORMAT}: update torch_dpflow"
            )
        return msgspec.json.decode(line, type=FlowRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedStoreError(f"{url} is no file of a flow: {error}") from error


def _place(url: str, options: dict[str, Any]) -> tuple[Files, str]:
    folder, _, name = str(url).rpartition("/")
    return Files(folder or ".", options), name


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])
