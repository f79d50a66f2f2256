"""The storage specification: names of datasets, checksums, and every file of a store (thesis, section 3.3.1).

::

    <store>/store.json                                            StoreRecord
    <store>/<namespace>/<name>/versions/<version>.json            Dataset: one published version
    <store>/<namespace>/<name>/meta/<version>/<variant>/ms-<n>.json   DatasetShardMeta: metadata of samples
    <store>/<namespace>/<name>/data/...                           the data, if it is in the store
    <store>/<namespace>/<name>/drafts/<version>/<variant>/...     progress of an unfinished import

A version is published by writing its `Dataset` file, once and last. No shard that it refers to changes afterwards.
Every shard but the last of a variant has `shard_size` samples, so a sample's number determines its shard. A later
version can refer to shards of an earlier one: appending writes only new samples.

Every file but the data contains its kind and the number of its format. Readers refuse unknown fields and later formats,
with an error that names the file.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_type_hints

import msgspec

from torch_dpflow._core.checks import TOO_DEEP, check_json, is_too_deep, may_be_too_deep
from torch_dpflow._core.decoding import json_decoder
from torch_dpflow.datasets.storage.base import CHECKSUM_PATTERN, STATE_PATTERN, sha256_of
from torch_dpflow.datasets.storage.urls import join_url
from torch_dpflow.errors import (
    DamagedStoreError,
    DatasetNotFoundError,
    NewerFormatError,
    OptionError,
    OptionTypeError,
)

#: Pattern of a namespace, and of a name in it. Without dots, an id cannot lead out of the store or be one of its files.
NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}"
#: Pattern of the name of a version or variant.
LABEL = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}"
#: End of a pattern. In Python, `$` alone also matches before a newline at the end.
END = r"$(?!\n)"
ID_PATTERN = f"^{NAME}/{NAME}{END}"
LABEL_PATTERN = f"^{LABEL}{END}"
_REFERENCE = re.compile(f"(?P<id>{NAME}/{NAME})(:(?P<version>{LABEL})(:(?P<variant>{LABEL}))?)?")


_REVISION_OF_FORMAT_2 = '"[!#-~]+"|[A-Z][a-z]{2}, .* GMT'

#: Errors of decoding bytes that are not the expected JSON.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_FIELDS: msgspec.json.Decoder[dict[str, Any]] = json_decoder(dict[str, Any])

WholeNumber = Annotated[int, msgspec.Meta(ge=0)]
DatasetId = Annotated[str, msgspec.Meta(pattern=ID_PATTERN, description="namespace/name")]
Label = Annotated[str, msgspec.Meta(pattern=LABEL_PATTERN)]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Checksum = Annotated[str, msgspec.Meta(pattern=CHECKSUM_PATTERN, description="algorithm:hexadecimal digest")]
Revision = Annotated[str, msgspec.Meta(pattern=STATE_PATTERN, description="ETag, HTTP date, or a field of the storage")]
# Encoded in memory: only the annotations of samples that are read are decoded.
EncodedObject = Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "object"})]
Location = Annotated[str, msgspec.Meta(min_length=1, description="relative to the data's root, or a URL")]


@dataclass(frozen=True)
class DatasetRef:
    """The name of a dataset, a version or a variant, as in `core/mscoco:v1:train2017`.

    Raises:
        OptionError: a part has characters that are not allowed; a variant is named without a version.
        OptionTypeError: a part is not a string.
    """

    id: str
    version: str | None = None
    variant: str | None = None

    def __post_init__(self) -> None:
        parts = (self.id, self.version, self.variant)
        if not isinstance(self.id, str) or not all(isinstance(part, str | None) for part in parts[1:]):
            raise OptionTypeError(f"the parts of a dataset's name are strings, not {parts!r}")
        if self.variant is not None and self.version is None:
            raise OptionError(f"variant={self.variant!r} of {self.id!r} needs a version too")
        found = _REFERENCE.fullmatch(str(self))
        if found is None or found.group("id", "version", "variant") != parts:
            if found is not None:
                given = ", ".join(repr(part) for part in parts if part is not None)
                raise OptionError(f"{given} is no name of a dataset; give id, version and variant apart, without ':'")
            raise OptionError(
                f"{str(self)!r} is no name of a dataset; give namespace/name, namespace/name:version or "
                "namespace/name:version:variant, of letters, digits, '_' and '-' (versions and variants also "
                "'.' and '+'), each beginning with a letter or a digit"
            )

    @classmethod
    def parse(cls, text: str) -> DatasetRef:
        """Parse a name as `str()` returns it. Raises OptionError if malformed, OptionTypeError if it is no string."""
        if not isinstance(text, str):
            raise OptionTypeError(f"a dataset is named by a string such as 'core/x:v1:train', not by {text!r}")
        identity, *labels = text.split(":")
        if len(labels) > 2:
            raise OptionError(f"{text!r} has {len(labels) + 1} parts; give at most namespace/name:version:variant")
        return cls(identity, *labels)

    def __str__(self) -> str:
        return ":".join(part for part in (self.id, self.version, self.variant) if part is not None)


def version_order(version: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sorting key that puts v2 before v10: runs of digits compare as numbers."""
    parts = re.split(r"(\d+)", version)
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in parts if part)


def next_version(version: str) -> str:
    """Return the next version's name: the last run of digits incremented (v9 → v10), or `.2` appended."""
    found = re.search(r"\d+(?=\D*$)", version)
    if found is None:
        return f"{version}.2"
    return f"{version[: found.start()]}{int(found.group()) + 1}{version[found.end() :]}"


class SpecStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all structs of the specification. `kw_only` is not inherited."""


class StoreRecord(SpecStruct, frozen=True, kw_only=True, tag_field="kind", tag="dataset-store"):
    """`store.json`: the file that marks a directory as a dataset store. Datasets are found by listing the directory."""

    #: Number of the file's format, which readers check first.
    format: Literal[1]
    #: When the store was made, ISO 8601, UTC.
    created: str


class SampleMeta(SpecStruct, frozen=True, kw_only=True, gc=False):
    """Metadata of one sample: where its bytes are, and its annotations."""

    #: Relative to the variant's data root, or a URL.
    path: Location
    #: Where the sample begins in the object, bytes; None: the sample is the whole object.
    offset: WholeNumber | None = None
    #: Bytes of the sample; None: unknown (then `offset` is None too).
    length: WholeNumber | None = None
    checksum: Checksum | None = None
    #: State of the object when it was imported (see `storage.base`), which reads compare; None: not compared.
    revision: Revision | None = None
    #: The annotations as a JSON object, still encoded: a shard costs little more in memory than on disk.
    meta: EncodedObject

    def __post_init__(self) -> None:
        if self.offset is not None and self.length is None:
            raise ValueError("a sample with an offset needs a length")

    def fields(self) -> dict[str, Any]:
        """Decode the annotations. Each call returns a new dict, which the caller may change.

        Raises DamagedStoreError: they are not a JSON object.
        """
        return decode_fields(self.meta, self.path)


def decode_fields(meta: bytes | msgspec.Raw, name: str) -> dict[str, Any]:
    """Decode annotations; `name` names the sample in errors. Raises DamagedStoreError if they are not a JSON object."""
    try:
        fields = _FIELDS.decode(meta)
        if may_be_too_deep(memoryview(meta)) and is_too_deep(fields):
            raise RecursionError(TOO_DEEP)
        return fields
    except _UNREADABLE as error:
        raise DamagedStoreError(f"the annotations of {name} are no JSON object: {error}") from error


class DatasetShardMeta(SpecStruct, frozen=True, kw_only=True, tag_field="kind", tag="dataset-shard"):
    """`ms-<n>.json`: the metadata of consecutive samples of one variant."""

    #: 2: samples have revisions. 3: some revisions are neither strong ETags nor dates. Releases refuse unknown numbers.
    format: Literal[1, 2, 3]
    dataset: DatasetId
    #: The version that wrote this shard. Later versions can refer to the shard too.
    version: Label
    variant: Label
    shard: WholeNumber
    samples: list[SampleMeta]


def shard_format(samples: Sequence[SampleMeta]) -> Literal[1, 2, 3]:
    """Return the lowest format number that a shard with these samples can have, so that most releases can read it."""
    revisions = {sample.revision for sample in samples if sample.revision is not None}
    if not revisions:
        return 1
    return 2 if all(re.fullmatch(_REVISION_OF_FORMAT_2, revision) for revision in revisions) else 3


class ShardEntry(SpecStruct, frozen=True, kw_only=True, gc=False):
    """A version's reference to a shard, by which the shard is found and checked."""

    #: The version whose directory has the shard.
    version: Label
    #: Size of the file, bytes.
    bytes: WholeNumber
    sha256: Sha256


class Variant(SpecStruct, frozen=True, kw_only=True):
    """A named part of a version, such as "train"."""

    #: The root of the samples' data: a path relative to the dataset's directory, or a URL.
    data: Location
    samples: WholeNumber
    #: Samples in every shard but the last.
    shard_size: Annotated[int, msgspec.Meta(ge=1)]
    shards: list[ShardEntry]
    #: Information for all samples, such as the names of classes.
    info: dict[str, Any] = {}
    #: The source of the samples: the importer and its arguments.
    source: dict[str, Any] = {}

    def shard_samples(self, number: int) -> int:
        """Return the number of samples in shard `number`."""
        return min(self.shard_size, self.samples - number * self.shard_size)


class Dataset(SpecStruct, frozen=True, kw_only=True, tag_field="kind", tag="dataset"):
    """`versions/<version>.json`: one published version of a dataset. Never changes."""

    format: Literal[1]
    id: DatasetId
    version: Label
    #: When it was published, ISO 8601, UTC.
    created: str
    variants: dict[Label, Variant]
    #: The version that this one was appended to.
    parent: Label | None = None
    description: str = ""
    #: SHA-256 of this file with `digest` left out.
    digest: Sha256 | Literal[""] = ""

    def variant(self, name: str | None = None) -> Variant:
        """Return the variant `name`; None: the only one. Raises DatasetNotFoundError if there is no such variant."""
        if name is None and len(self.variants) == 1:
            return next(iter(self.variants.values()))
        if name is None or name not in self.variants:
            wanted = "no variant is named" if name is None else f"there is no variant {name!r}"
            raise DatasetNotFoundError(f"{wanted} of {self.id}:{self.version}; it has {sorted(self.variants)}")
        return self.variants[name]

    def shard_path(self, variant: str, number: int) -> str:
        """Return the path of a shard, relative to the dataset's directory."""
        return shard_path(self.variants[variant].shards[number].version, variant, number)

    def decode_shard(self, variant: str, number: int, data: bytes, *, url: str | None = None) -> DatasetShardMeta:
        """Decode `data`, a shard, and check that this version refers to it; `url` names it in errors.

        Raises the errors of the function `decode_shard`.
        """
        entry = self.variants[variant].shards[number]
        samples = self.variants[variant].shard_samples(number)
        identity = ShardIdentity(self.id, entry.version, variant, number, samples)
        return decode_shard(data, url or f"{self.id}/{self.shard_path(variant, number)}", entry, identity)


class ShardIdentity(NamedTuple):
    """The fields of a shard that identify it, and its number of samples."""

    dataset: str
    version: str
    variant: str
    shard: int
    samples: int


def decode_shard(data: bytes, name: str, entry: ShardEntry, identity: ShardIdentity) -> DatasetShardMeta:
    """Decode a shard, and compare it with its entry and identity; `name` names it in errors.

    Raises DamagedStoreError: the shard is damaged, or is a different shard. NewerFormatError: a later release wrote it.
    """
    if len(data) != entry.bytes:
        raise DamagedStoreError(
            f"{name} has {len(data)} bytes instead of {entry.bytes}; it was cut short or overwritten: "
            "restore it from a copy"
        )
    if sha256_of(data) != entry.sha256:
        raise DamagedStoreError(f"{name} does not match its SHA-256; it was damaged: restore it from a copy")
    shard = decode_file(data, DatasetShardMeta, name)
    found = ShardIdentity(shard.dataset, shard.version, shard.variant, shard.shard, len(shard.samples))
    if found != identity:
        raise DamagedStoreError(f"{name} is {found} instead of {identity}; restore it from a copy")
    return shard


def shard_path(version: str, variant: str, number: int) -> str:
    """Return the path of a shard that `version` wrote, relative to the dataset's directory."""
    return f"meta/{version}/{variant}/ms-{number}.json"


def data_url(dataset_url: str, root: str, path: str) -> str:
    """Return the URL of a sample's object: `path` below the data's `root`, which is below the dataset's directory.

    `root` and `path` may be URLs; a URL replaces everything before it.

    Raises DamagedStoreError: a path that is not a URL is absolute, or leads out of its root.
    """
    return url_below(url_below(dataset_url, root), path)


def url_below(url: str, path: str) -> str:
    """Return the URL of `path` below `url`, or `path` itself if it is a URL.

    Raises DamagedStoreError: `path` is absolute, or leads out of `url`.
    """
    if "://" in path:
        return path
    if path.startswith("/") or (".." in path and ".." in path.split("/")):
        raise DamagedStoreError(
            f"the path {path!r} leads out of {url}; only a URL may do so, or give a root that it is below"
        )
    return join_url(url, path)


class _FileHeader(msgspec.Struct):
    kind: str
    format: int


_Kind = TypeVar("_Kind", bound=msgspec.Struct)


def decode_file(data: bytes, kind: type[_Kind], name: str) -> _Kind:
    """Decode a file of the store, or of a flow, as a struct of this `kind`; `name` names the file in errors.

    Raises:
        NewerFormatError: a later release of the library wrote it.
        DamagedStoreError: the file is not JSON, or violates the schema.
    """
    try:
        if kind is not DatasetShardMeta:  # whose samples are decoded one by one
            check_json(data)
        header = json_decoder(_FileHeader).decode(data)
        newest = _newest_format(kind)
        if header.format > newest:
            raise NewerFormatError(
                f"{name} has format {header.format}; this release reads up to {newest}: update torch_dpflow"
            )
        found: _Kind = json_decoder(kind).decode(data)
        return found
    except _UNREADABLE as error:
        raise DamagedStoreError(f"{name} is no {kind.__struct_config__.tag} file: {error}") from error


@functools.cache
def _newest_format(kind: type[msgspec.Struct]) -> int:
    newest: int = max(get_args(get_type_hints(kind)["format"]))
    return newest


def encode_file(record: SpecStruct) -> bytes:
    """Return a record as the bytes of a file of the store, the same bytes for equal records."""
    return msgspec.json.encode(record, order="deterministic")


def sealed(dataset: Dataset) -> Dataset:
    """Return a copy of the version with its digest filled in."""
    return msgspec.structs.replace(dataset, digest=_digest(dataset))


def decode_dataset(data: bytes, name: str) -> Dataset:
    """Decode a version's file, and check its digest and its numbers of samples and shards.

    Raises:
        NewerFormatError: a later release of the library wrote it.
        DamagedStoreError: the file is damaged, or its counts contradict each other.
    """
    dataset = decode_file(data, Dataset, name)
    if dataset.digest != _digest(dataset):
        raise DamagedStoreError(f"{name} does not match its digest; it was damaged: restore it from a copy")
    for label, variant in dataset.variants.items():
        if len(variant.shards) != -(-variant.samples // variant.shard_size):
            raise DamagedStoreError(
                f"{name} names {len(variant.shards)} shards of {variant.shard_size} samples "
                f"for the {variant.samples} samples of {label!r}"
            )
    return dataset


def _digest(dataset: Dataset) -> str:
    return sha256_of(encode_file(msgspec.structs.replace(dataset, digest="")))
