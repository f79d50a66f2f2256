"""Saves flows in files: a line of JSON, followed by the code."""

from __future__ import annotations

import os
import platform
from typing import Annotated, Any, Literal

import cloudpickle
import msgspec
from msgspec.structs import replace

from torch_dpflow._core.checks import check_json, check_type
from torch_dpflow._version import __version__
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.spec import sha256_of
from torch_dpflow.datasets.storage.credentials import refuse_keys
from torch_dpflow.datasets.storage.urls import without_login
from torch_dpflow.errors import DamagedStoreError, NewerFormatError, OptionTypeError, UsageError
from torch_dpflow.flows.flow import DataLoadFlow

_FORMAT = 2


class FlowRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="data-load-flow"):
    """The first line of a flow's file."""

    format: Literal[2]
    name: str
    version: Annotated[int, msgspec.Meta(ge=1)]
    #: As `str()` shows it.
    shown: str
    #: The minor version of Python, which must be the same to load the code: "3.11".
    python: str
    #: Of this line with an empty `sha256`, and of the code.
    sha256: str


class _Format(msgspec.Struct):
    format: int


def save_flow(flow: DataLoadFlow, url: str | os.PathLike[str], **storage_options: Any) -> None:
    """Write a flow to a file, replacing one that exists; atomically, as all files of a dataset store.

    Its functions are saved as code, those of installed modules by name.

    Raises:
        UsageError: it is no flow, or a part of it cannot be pickled or has keys of a storage.
    """
    check_type("flow", flow, DataLoadFlow, "a DataLoadFlow")
    try:
        with refuse_keys():
            code = cloudpickle.dumps(flow)
    except UsageError as error:
        raise UsageError(f"{flow!r} cannot be saved: {error}") from error
    except Exception as error:
        raise UsageError(
            f"{flow!r} cannot be saved: {type(error).__name__}: {error}; its stages and its dataset must pickle"
        ) from error
    record = FlowRecord(format=2, name=flow.name, version=flow.version, shown=str(flow), python=_python(), sha256="")
    sealed = replace(record, sha256=_digest(record, code))
    files, name = _place(url, storage_options)
    files.write(name, msgspec.json.encode(sealed) + b"\n" + code)


def describe_flow(url: str | os.PathLike[str], **storage_options: Any) -> FlowRecord:
    """Return the description in a flow's file. Runs none of its code. Raises DamagedStoreError, NewerFormatError."""
    return _read(url, storage_options)[0]


def load_flow(url: str | os.PathLike[str], **storage_options: Any) -> DataLoadFlow:
    """Read a flow from a file. Runs code of its author: load only what you trust.

    Raises:
        DamagedStoreError: the file is damaged or no file of a flow.
        NewerFormatError: a later release wrote it.
        UsageError: another version of Python wrote it, or it needs modules that are not installed.
    """
    record, code = _read(url, storage_options)
    printed = without_login(str(url))
    if record.python != _python():
        raise UsageError(
            f"{printed} was saved by Python {record.python} and cannot be loaded by {_python()}; save it "
            "again with the Python that is to load it"
        )
    flow = _unpickled(code, printed)
    if not isinstance(flow, DataLoadFlow):
        raise OptionTypeError(f"{printed} holds a {type(flow).__name__}, no DataLoadFlow")
    return flow


def _read(url: str | os.PathLike[str], storage_options: dict[str, Any]) -> tuple[FlowRecord, bytes]:
    """Return the first line of a flow's file and the code after it, both checked against the digest."""
    files, name = _place(url, storage_options)
    line, _, code = files.read(name).partition(b"\n")
    printed = without_login(str(url))
    record = _record(line, printed)
    # Encoding it again must give the same line, so that unknown fields are refused.
    if msgspec.json.encode(record) != line or _digest(record, code) != record.sha256:
        raise DamagedStoreError(f"{printed} does not match its SHA-256; it was damaged: restore it from a copy")
    return record, code


def _digest(record: FlowRecord, code: bytes) -> str:
    return sha256_of(msgspec.json.encode(replace(record, sha256="")) + b"\n" + code)


def _unpickled(code: bytes, url: str) -> Any:
    try:
        return cloudpickle.loads(code)
    except (ImportError, AttributeError) as error:
        advice = "install the packages that its stages come from, in the versions that it was saved with"
        if (getattr(error, "name", None) or "").startswith("torch_dpflow."):
            advice = f"another release than {__version__} saved it: save it again with this one"
        raise UsageError(f"{url} cannot be loaded here: {type(error).__name__}: {error}; {advice}") from error
    except Exception as error:
        raise DamagedStoreError(f"{url} holds no flow: {type(error).__name__}: {error}") from error


def _record(line: bytes, url: str) -> FlowRecord:
    try:
        check_json(line)
        found = msgspec.json.decode(line, type=_Format).format
        if found > _FORMAT:
            raise NewerFormatError(f"{url} has format {found}; this release reads up to {_FORMAT}: update torch_dpflow")
        return msgspec.json.decode(line, type=FlowRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedStoreError(f"{url} is no file of a flow: {error}") from error


def _place(url: str | os.PathLike[str], options: dict[str, Any]) -> tuple[Files, str]:
    folder, _, name = str(url).rpartition("/")
    return Files(folder or ".", options), name


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])
