"""DataLoadFlow: a named, versioned description of loading (thesis, section 3.3.2), its diagram, and its file.

A flow's file is one line of JSON, followed by the pickled code.
"""

from __future__ import annotations

import copy
import os
import platform
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Protocol, TypeVar, get_args

import cloudpickle
import msgspec

from torch_dpflow._core.checks import check_int, check_type, working
from torch_dpflow._version import __version__
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.spec import DatasetRef, decode_file
from torch_dpflow.datasets.storage.base import sha256_of
from torch_dpflow.datasets.storage.credentials import refuse_keys
from torch_dpflow.datasets.storage.urls import without_login
from torch_dpflow.errors import DamagedStoreError, OptionError, OptionTypeError, UsageError
from torch_dpflow.flows.stage import (
    CacheControl,
    DataTransform,
    MapTransform,
    SampleTransform,
    Stage,
    TargetTransform,
)

Read_co = TypeVar("Read_co", covariant=True)

#: Prefix of the name of a dataset that is read from the pool.
POOL = "pool://"
#: If a sample cannot be loaded: raise its error, or skip the sample and count it.
ErrorPolicy = Literal["raise", "skip"]


@dataclass(frozen=True)
class FlowSource:
    """The source of a flow's samples: a stored dataset by name, or a named dataset in memory."""

    ref: DatasetRef
    #: A map-style dataset that replaces the stored one; None: the stored one is read.
    samples: Any = None
    #: Whether the stored dataset is read from the memory of the pool.
    in_pool: bool = False

    def is_same(self, other: FlowSource) -> bool:
        """Return whether both sources have the same samples; False if `samples` cannot be compared."""
        if (self.ref, self.in_pool) != (other.ref, other.in_pool):
            return False
        if self.samples is other.samples:
            return True
        try:
            return bool(self.samples == other.samples)
        except (TypeError, ValueError, RuntimeError):  # arrays and tensors compare element by element
            return False

    def __str__(self) -> str:
        return f"Dataset({POOL if self.in_pool else ''}{self.ref})"


class DataLoadFlow:
    """Description of how samples are loaded: from which dataset, through which stages. It loads nothing.

    The describing methods change the flow and return it, so they can be chained or called one by one::

        flow = DataLoadFlow("example/classify", version=1)
        flow.dataset("core/cifar100", "v1", "train")
        flow.map_data("image_decode", ImagePilDecode(), cache="always")
        flow.map_target("label", lambda target: target["label"], cache="always")
        flow.map_data("augment", RandomCrop(32, padding=4))

    The first stage gets `(bytes, annotations)`, or a sample of the dataset in memory.

    Args:
        name: "namespace/name".
        version: whole number from 1; a changed flow needs a higher version.
        on_error: "raise" the error of a sample that cannot be loaded, or "skip" the sample: its batch is then smaller,
            and the sample is counted.

    Raises:
        OptionError, OptionTypeError: an argument is not allowed.
    """

    def __init__(self, name: str, version: int, *, on_error: ErrorPolicy = "raise") -> None:
        self.version = check_int("version", version, minimum=1)
        if on_error not in get_args(ErrorPolicy):
            raise OptionError(f"on_error={on_error!r} is not one of {get_args(ErrorPolicy)}")
        if DatasetRef.parse(name).version is not None:
            raise OptionError(f"name={name!r} has more than two parts; give namespace/name")
        self.name = name
        self.on_error: ErrorPolicy = on_error
        self._source: FlowSource | None = None
        self._stages: list[Stage] = []

    def dataset(
        self, name: str, version: str | None = None, variant: str | None = None, *, samples: Any = None
    ) -> DataLoadFlow:
        """Set the source of the samples.

        Args:
            name: "namespace/name" of a stored dataset; version and variant may follow, as in "core/cifar100:v1:train".
                With the prefix pool://, samples come from the pool; see `PooledDataset`.
            version: the dataset's version, such as "v1"; None: the latest version when the flow is read.
            variant: the dataset's variant, such as "train"; None: the only variant.
            samples: a map-style dataset to read instead of a stored one.

        Raises:
            OptionError, OptionTypeError: the name is not allowed, or contradicts another argument; `samples` is not a
                map-style dataset.
        """
        if samples is not None and not all(working(samples, name) for name in ("__getitem__", "__len__")):
            raise OptionTypeError(
                f"samples is a {type(samples).__name__}, which has no length or cannot be indexed; give a "
                "map-style dataset"
            )
        in_pool = isinstance(name, str) and name.startswith(POOL)
        if in_pool and samples is not None:
            raise OptionError(f"{name!r} with samples: the pool holds stored datasets; leave out one of the two")
        ref = _named(name.removeprefix(POOL) if in_pool else name, version=version, variant=variant)
        self._source = FlowSource(ref, samples, in_pool)
        return self

    def map(
        self,
        name: str,
        function: Callable[[Any], Any],
        *,
        transform: MapTransform | None = None,
        cache: CacheControl = "never",
    ) -> DataLoadFlow:
        """Add a stage.

        Args:
            name: name of the stage in logs and errors; unique in the flow.
            function: gets the part of a sample that `transform` selects.
            transform: selects the function's argument; None: the function gets the whole sample and returns the next
                stage's sample.
            cache: "always" if the output depends only on the input, so that it may be kept; "never" if it is random.
                The output of all stages after a "never" is not kept either.

        Raises:
            OptionError, OptionTypeError: an argument is not allowed, or another stage has the name.
        """
        if any(stage.name == name for stage in self._stages):
            raise OptionError(f"{self.name}:{self.version} has a stage {name!r} already; give another name")
        transform = SampleTransform() if transform is None else transform
        self._stages.append(Stage(name, function, transform, cache))
        return self

    def map_data(self, name: str, function: Callable[[Any], Any], *, cache: CacheControl = "never") -> DataLoadFlow:
        """Add a stage for the data of `(data, target)` samples. See `map`."""
        return self.map(name, function, transform=DataTransform(), cache=cache)

    def map_target(self, name: str, function: Callable[[Any], Any], *, cache: CacheControl = "never") -> DataLoadFlow:
        """Add a stage for the target of `(data, target)` samples. See `map`."""
        return self.map(name, function, transform=TargetTransform(), cache=cache)

    def clone(self) -> DataLoadFlow:
        """Return an independent flow with the same name, version, dataset and stages; functions are shared."""
        clone = copy.copy(self)
        clone._stages = list(self._stages)
        return clone

    @property
    def source(self) -> FlowSource:
        """The source of the samples. Raises UsageError if `dataset()` was not called."""
        if self._source is None:
            raise UsageError(f"{self.name}:{self.version} has no dataset; call .dataset(name, version, variant)")
        return self._source

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Stages of the flow, in order."""
        return tuple(self._stages)

    @property
    def cacheable(self) -> int:
        """Number of leading stages whose output may be cached."""
        kept = [stage.cache == "always" for stage in self._stages]
        return kept.index(False) if False in kept else len(kept)

    def prepare_read(self, reader: DataLoadFlowReader[Read_co]) -> Read_co:
        """Return `reader.read(self)`. Raises OptionTypeError if `reader` is a class, or has no method `read`."""
        if isinstance(reader, type) or not callable(working(reader, "read")):
            raise OptionTypeError(
                f"reader={reader!r:.80} cannot build a flow; give a reader, such as LocalDataLoadFlowReader(store)"
            )
        return reader.read(self)

    def __str__(self) -> str:
        return " -> ".join(str(part) for part in (self._source or _NO_SOURCE, *self._stages))

    def format(self, width: int = 60) -> str:
        """Return `str(self)` on lines of `width` characters; the dataset and longer stages are not broken.

        Raises OptionError or OptionTypeError unless `width` is an int of at least 5.
        """
        width = check_int("width", width, minimum=_INDENT + 1)
        stages = " ".join(f"->\N{NO-BREAK SPACE}{str(stage).replace(' ', _HARD)}" for stage in self._stages)
        lines = textwrap.wrap(stages, width - _INDENT, break_long_words=False, break_on_hyphens=False)
        return f"\n{' ' * _INDENT}".join([str(self._source or _NO_SOURCE), *lines]).replace(_HARD, " ")

    def __repr__(self) -> str:
        return f"DataLoadFlow({self.name!r}, version={self.version}: {self})"


def _named(name: str, **labels: str | None) -> DatasetRef:
    """Return the reference to a dataset with this name and the given labels, such as `version`."""
    ref = DatasetRef.parse(name)
    for part, label in labels.items():
        if label is not None and not isinstance(label, str):
            raise OptionTypeError(
                f"{part}={label!r} of {name!r} is of type {type(label).__name__}; give its name as a string, such "
                "as 'v1' or 'train'"
            )
        in_name = getattr(ref, part)
        if None not in (label, in_name) and label != in_name:
            raise OptionError(f"{name!r} contradicts {part}={label!r}; give the {part} once")
    given = {part: label for part, label in labels.items() if label is not None}
    return replace(ref, **given)


class DataLoadFlowReader(Protocol[Read_co]):
    """Interface of readers: objects that build a flow, in this process or elsewhere, to read its samples."""

    def read(self, flow: DataLoadFlow) -> Read_co:
        """Build `flow` as it is now, and return an object that reads it. Later changes of `flow` have no effect."""


_HARD = "\N{NO-BREAK SPACE}"
_INDENT = 4
#: Placeholder until a dataset is set.
_NO_SOURCE = "no dataset"


def to_mermaid(flow: DataLoadFlow) -> str:
    """Return a Mermaid flowchart of the flow; stages whose output may be kept have the class `kept`.

    Raises OptionTypeError if `flow` is not a DataLoadFlow, UsageError if it has no dataset.
    """
    check_type("flow", flow, DataLoadFlow, "a DataLoadFlow")
    lines = ["flowchart LR", f"  n0[({_mermaid(str(flow.source.ref))})]"]
    for number, stage in enumerate(flow.stages, 1):
        kept = ":::kept" if number <= flow.cacheable else ""
        lines.append(f"  n{number - 1} --> n{number}[{_mermaid(stage.name)}]{kept}")
    return "\n".join([*lines, "  classDef kept fill:#d9ead3", ""])


def _mermaid(text: str) -> str:
    escaped = text.replace("#", "#35;").replace('"', "#quot;")
    return f'"{escaped}"'


class FlowRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="data-load-flow"):
    """The first line of a flow's file: the flow's description, and a checksum."""

    format: Literal[2]
    name: str
    version: Annotated[int, msgspec.Meta(ge=1)]
    #: The text of the flow: `str(flow)`.
    shown: str
    #: The minor version of Python, which must be the same to load the code: "3.11".
    python: str
    #: Digest of this line with an empty `sha256`, and of the code.
    sha256: str


def save_flow(flow: DataLoadFlow, url: str | os.PathLike[str], **storage_options: Any) -> None:
    """Write a flow to a file; an existing file is replaced.

    The flow's functions are saved as code, except functions of importable modules, which are saved by name.

    Args:
        url: path or URL of the file.
        storage_options: fsspec's options for the URL.

    Raises:
        OptionTypeError: `flow` is not a DataLoadFlow.
        UsageError: a part of it cannot be pickled, or contains keys of a storage.
        StorageError: the file cannot be written.
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
    sealed = msgspec.structs.replace(record, sha256=_digest(record, code))
    files, name = _place(url, storage_options)
    files.write(name, msgspec.json.encode(sealed) + b"\n" + code)


def describe_flow(url: str | os.PathLike[str], **storage_options: Any) -> FlowRecord:
    """Return a saved flow's description; runs no code of it. Raises DatasetError and StorageError as `load_flow`."""
    return _read(url, storage_options)[0]


def load_flow(url: str | os.PathLike[str], **storage_options: Any) -> DataLoadFlow:
    """Read a flow from a file. This runs code of the file's author: load only files that you trust.

    Raises:
        DamagedStoreError: the file is damaged, or is not a flow's file.
        NewerFormatError: a later release wrote it.
        UsageError: a different version of Python wrote the file, or the flow needs modules that are not installed.
        StorageError: the file cannot be read.
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
    """Return (first line, code) of a flow's file, both checked against the digest."""
    files, name = _place(url, storage_options)
    line, _, code = files.read(name).partition(b"\n")
    printed = without_login(str(url))
    record = decode_file(line, FlowRecord, printed)
    # Encoding it again must give the same line, so that unknown fields are refused.
    if msgspec.json.encode(record) != line or _digest(record, code) != record.sha256:
        raise DamagedStoreError(f"{printed} does not match its SHA-256; it was damaged: restore it from a copy")
    return record, code


def _digest(record: FlowRecord, code: bytes) -> str:
    return sha256_of(msgspec.json.encode(msgspec.structs.replace(record, sha256="")) + b"\n" + code)


def _unpickled(code: bytes, url: str) -> Any:
    try:
        return cloudpickle.loads(code)
    except (ImportError, AttributeError) as error:
        advice = "install the packages that its stages come from, in the versions that it was saved with"
        if (getattr(error, "name", None) or "").startswith("torch_dpflow."):
            advice = f"a release other than {__version__} saved it: save it again with this one"
        raise UsageError(f"{url} cannot be loaded here: {type(error).__name__}: {error}; {advice}") from error
    except Exception as error:
        raise DamagedStoreError(f"{url} holds no flow: {type(error).__name__}: {error}") from error


def _place(url: str | os.PathLike[str], options: dict[str, Any]) -> tuple[Files, str]:
    folder, _, name = str(url).rpartition("/")
    return Files(folder or ".", options), name


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])
