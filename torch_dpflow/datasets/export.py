"""Export of a stored dataset to files of other libraries: WebDataset shards, and Parquet."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch_dpflow._core.checks import check_int, check_type, parse_bytes
from torch_dpflow.datasets.export_formats import ENDING, ExportSample, FileFormat, ParquetFiles, TarFiles
from torch_dpflow.datasets.files import Files
from torch_dpflow.datasets.importers.webdataset import KEY, MAIN, PARTS
from torch_dpflow.datasets.sample_reader import SampleReader
from torch_dpflow.datasets.spec import SampleMeta
from torch_dpflow.datasets.storage.base import ReadOptions
from torch_dpflow.datasets.store import StoredDataset
from torch_dpflow.errors import DPFlowError, OptionError, SourceError, StorageError

Format = Literal["webdataset", "parquet"]
Annotations = Literal["columns", "json"]

#: The number of the layout. A release that writes other bytes for the same options increments it.
_LAYOUT = 1
#: Maximum bytes of a file. It is in memory until it is written, and object stores accept at most 5 GB at once.
MAX_FILE_SIZE = 4 << 30
_MAX_ROW_GROUP = 1 << 30
#: Importers whose samples are records in the encoding of a library. As bytes of a member or a column, no other
#: library could read them.
_ENCODED = frozenset({"tfrecord", "mds", "litdata"})
#: Samples, and bytes as far as they are known, that are read at a time.
_READ_SAMPLES, _READ_BYTES = 64, 64 << 20
#: Bytes by which a sample in a file is longer than its parts: headers and padding of tar.
_OVERHEAD = 2048


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    url: str
    #: The names of all files, in order.
    files: list[str]
    #: The number of files that an earlier run wrote and this run kept.
    kept: int
    samples: int


def export(
    stored: StoredDataset,
    target: str | os.PathLike[str],
    *,
    format: Format,
    main: str | None = None,
    samples_per_file: int | None = None,
    file_size: str = "256MiB",
    row_group_size: str = "16MiB",
    annotations: Annotations = "columns",
    options: Mapping[str, Any] | None = None,
    read_options: ReadOptions | None = None,
    progress: Callable[[int], None] = lambda samples: None,
) -> Exported:
    """Write all samples of a variant, in order, as files that other libraries read.

    Runs with the same arguments and version of pyarrow write equal files. To continue an export that was killed, call
    `export` again: existing files are kept. On a storage without atomic writes, all files are written again, as a kill
    can leave part of one. Several variants can be exported to one directory. One file is in memory at a time.

    Args:
        stored: a variant from `DatasetStore.open`.
        target: the directory, a path or a URL.
        format: "webdataset": `train-000000.tar`, … Samples that came from WebDataset keep keys and members. Others get
            their number as key, a member with their bytes, and a member `json` with the annotations. "parquet":
            `train-00000-of-00042.parquet`, …, with a column of structs (bytes, path) as HuggingFace has for images, and
            a column for each annotation. Fields that a sample lacks are null. Parquet needs pyarrow.
        main: extension of the member, or name of the column, with the samples' bytes. None: for WebDataset the path's
            extension, or one that fits the first bytes, else "bin"; for Parquet "image" or "data".
        samples_per_file: maximum number of samples in a file, in place of `file_size`; None: `file_size` is the limit.
        file_size: maximum bytes of samples in a file, such as "256MiB", unless one sample is larger; at most 4 GiB.
        row_group_size: maximum bytes of samples in a row group of Parquet, unless one sample is larger; at most 1 GiB.
        annotations: for Parquet, "columns": a column for each annotation; "json": one column of JSON texts, for
            annotations without a common type. Samples that came from WebDataset always get columns.
        options: fsspec's options for the target.
        read_options: timeouts and retries of reading samples and writing files.
        progress: called with the number of samples that were written or kept so far.

    Raises:
        OptionError, OptionTypeError: an option is not allowed; the target has other files of these names; sizes of
            samples are unknown, so that `samples_per_file` is needed; samples are records of TFRecord, MDS or LitData.
        SourceError: a sample has values or a size that the format cannot hold. The message names the sample.
        DatasetError, StorageError: a sample cannot be read, or a file cannot be written.
        MissingExtraError: pyarrow is not installed.
    """
    check_type("stored", stored, StoredDataset, "the result of DatasetStore.open")
    check_type("progress", progress, Callable, "a function of a number of samples")
    settings = checked_settings(format, main, samples_per_file, file_size, row_group_size, annotations)
    if not len(stored):
        raise OptionError(f"{stored.ref} has no samples, and nothing to export")
    if stored.variant.source.get("importer") in _ENCODED:
        raise OptionError(
            f"{stored.ref} has records of {stored.variant.source['importer']}, which other libraries cannot read; "
            "import what open_dataset reads of them with an IterableImporter, and export that"
        )
    files = Files(target, options, read_options)
    source = _Samples(stored, read_options)
    try:
        kind = format_of(settings, name=str(stored.ref), is_webdataset=source.is_webdataset)
        plan = _plan(stored, source, kind, settings)
        kind.begin(next(source.read(range(1))))
        names = [kind.name(stored.variant_name, number, len(plan)) for number in range(len(plan))]
        made_from: dict[str, Any] = {"dataset": str(stored.ref), "digest": stored.dataset.digest, "settings": settings}
        made_from |= {"files": len(names), "info": stored.variant.info}
        directory = ExportTarget(files, stored.variant_name, made_from, names)
        for name, numbers in zip(names, plan, strict=True):
            if name not in directory.present:
                directory.write(name, kind.content(source.read(numbers)))
            progress(numbers.stop)
    finally:
        source.close()
    return Exported(files.url, names, len(directory.present), len(stored))


def checked_settings(
    format: object, main: object, samples_per_file: int | None, file_size: str, row_group_size: str, annotations: object
) -> dict[str, Any]:
    """Check options of `export`. Return the options that determine the files' bytes, by name.

    Raises OptionError, OptionTypeError: an option is not allowed.
    """
    for name, value, allowed in (("format", format, Format), ("annotations", annotations, Annotations)):
        if value not in get_args(allowed):
            raise OptionError(f"{name}={value!r}: give one of {get_args(allowed)}")
    if main is not None and not (isinstance(main, str) and re.fullmatch(ENDING, main)):
        raise OptionError(f"main={main!r}: give a name of lower case letters, digits, '.', '_' and '-', such as 'jpg'")
    if samples_per_file is not None:
        samples_per_file = check_int("samples_per_file", samples_per_file, minimum=1)
    sizes = {}
    for name, text in (("file_size", file_size), ("row_group_size", row_group_size)):
        check_type(name, text, str, 'a size such as "256MiB"')
        maximum = MAX_FILE_SIZE if name == "file_size" else _MAX_ROW_GROUP
        sizes[name] = check_int(name, parse_bytes(name, text), minimum=1, maximum=maximum)
    return {
        "layout": _LAYOUT,
        "format": format,
        "main": main,
        "samples_per_file": samples_per_file,
        **sizes,
        "annotations": annotations,
    }


def format_of(settings: Mapping[str, Any], *, name: str, is_webdataset: bool = False) -> FileFormat:
    """Return the encoder of an export's files.

    Args:
        settings: a result of `checked_settings`.
        name: name of the dataset in errors.
        is_webdataset: whether the samples came from WebDataset. Parquet then has a column for each of their members.

    Raises MissingExtraError if pyarrow is needed and not installed.
    """
    if settings["format"] == "webdataset":
        return TarFiles(settings["main"])
    return ParquetFiles(
        settings["main"],
        settings["row_group_size"],
        as_json=settings["annotations"] == "json" and not is_webdataset,
        name=name,
    )


def _plan(stored: StoredDataset, source: _Samples, kind: FileFormat, settings: Mapping[str, Any]) -> list[range]:
    """Return the samples of each file, by metadata alone, so that the files of every run are equal."""
    count, limit = settings["samples_per_file"], settings["file_size"]
    plan: list[range] = []
    first = size = 0
    keys: set[str] = set()
    for number, meta in enumerate(stored.samples()):
        fields = meta.fields()
        length = _size_of(number, meta, fields, is_needed=count is None)
        # WebDataset takes neighbours with one key for one sample, and keys often begin again in each shard.
        key = None
        if source.is_webdataset:
            key, fields = fields.get(KEY), _members(number, fields)
        is_full = size + length > (limit if count is None else MAX_FILE_SIZE) or number - first == count
        if number > first and (is_full or key in keys):
            plan.append(range(first, number))
            first, size = number, 0
            keys.clear()
        if key is not None:
            keys.add(key)
        size += length
        kind.observe(number, fields)
    return [*plan, range(first, len(stored))]


def _members(number: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a sample from WebDataset as `FileFormat.observe` takes them. Raises SourceError."""
    rest = {name: value for name, value in fields.items() if name not in (MAIN, PARTS)}
    parts = fields.get(PARTS, {})
    texts = all(isinstance(value, str) for value in rest.values())
    if not (texts and KEY in rest and isinstance(fields.get(MAIN), str) and isinstance(parts, dict)):
        raise SourceError(
            f"sample {number} has not the annotations that the importer webdataset writes: {dict(fields)!r:.300}"
        )
    return {**rest, **dict.fromkeys(parts, b"")}


def _size_of(number: int, meta: SampleMeta, fields: Mapping[str, Any], *, is_needed: bool) -> int:
    """Estimate the bytes of a sample in a file. If the size of its data is unknown, only the annotations count."""
    if meta.length is None and is_needed:
        raise OptionError(
            f"the dataset has no length of sample {number} ({meta.path}), so files cannot be divided by size; give "
            "samples_per_file (--samples-per-file)"
        )
    parts = fields.get(PARTS)
    rest = sum(length for _, length in parts.values()) if isinstance(parts, dict) else 0
    size = (meta.length or 0) + len(meta.meta) + rest + _OVERHEAD
    if size > MAX_FILE_SIZE:
        raise SourceError(f"sample {number} ({meta.path}) has {size} bytes; a file has at most {MAX_FILE_SIZE}")
    return size


class ExportTarget:
    """Directory that an export writes to. Before the first file, `made_from` is recorded there to identify the export.

    Args:
        files: the directory.
        variant: the beginning of the files' names.
        made_from: everything that determines the bytes of the files.
        names: the names of all files of the export.
        resumes: whether to keep the files that an earlier run of the same export has written.

    Raises OptionError if the directory has files of a different export; without `resumes`, also of the same export.
    """

    def __init__(
        self, files: Files, variant: str, made_from: Mapping[str, Any], names: list[str], *, resumes: bool = True
    ) -> None:
        self._files = files
        self._record = json.dumps(made_from, indent=1, sort_keys=True).encode()
        ending = names[0].rpartition(".")[2]
        self._path = f".{variant}.{ending}.export.json"
        ours = re.compile(rf"{re.escape(variant)}-\d+(-of-\d+)?\.{ending}")
        present = {child.name for child in files.children() if ours.fullmatch(child.name)}
        if present:
            self._check(variant, present, names, resumes=resumes)
        files.sweep("")
        self._is_begun = bool(present)
        #: Names of files that an earlier run has written; empty on a storage where a kill can leave part of a file.
        self.present = present if files.writes_whole else set()

    def _check(self, variant: str, present: set[str], names: list[str], *, resumes: bool) -> None:
        url, path = self._files.url, self._path
        if not resumes:
            raise OptionError(
                f"{url} has {min(present)}; give an empty directory or, if it is of this export of the same dataset, "
                "resume=True to continue"
            )
        if not self._files.exists(path):
            raise OptionError(
                f"{url} has {min(present)}, which no export has written that can be continued; give an empty directory"
            )
        if self._files.read(path) != self._record:
            raise OptionError(
                f"{url} has another export of {variant!r}, of another dataset or with other options; give an empty "
                f"directory, or remove those files and {path}"
            )
        if not present <= {*names}:
            raise OptionError(f"{url} has {min(present - {*names})} next to the export; remove it")

    def write(self, name: str, content: bytes) -> None:
        """Write a file. If writing the export's first file fails, removes what was written, if possible."""
        if self._is_begun:
            self._files.write(name, content)
            return
        with self._files.undone_directories():
            try:
                self._files.write(self._path, self._record)
                self._files.write(name, content)
            except (Exception, KeyboardInterrupt):
                with suppress(OSError, StorageError):  # the failure itself counts
                    self._files.sweep("")
                    for path in (name, self._path):
                        self._files.remove(path)
                raise
        self._is_begun = True


class _Samples:
    """Reader of the samples of an export."""

    def __init__(self, stored: StoredDataset, read_options: ReadOptions | None) -> None:
        self._stored = stored
        self.is_webdataset = stored.variant.source.get("importer") == "webdataset"
        self._reader: Any
        if self.is_webdataset:
            from torch_dpflow.datasets.reader import OpenedDataset  # it needs torch

            self._reader = OpenedDataset(stored, read_options=read_options)
        else:
            self._reader = SampleReader(stored, read_options=read_options)

    def read(self, numbers: range) -> Iterator[ExportSample]:
        batch: list[tuple[int, SampleMeta]] = []
        size = 0
        for number, meta in enumerate(self._stored.part(numbers.start, numbers.stop), numbers.start):
            batch.append((number, meta))
            size += meta.length or 0
            if len(batch) == _READ_SAMPLES or size >= _READ_BYTES:
                yield from self._read(batch)
                batch, size = [], 0
        if batch:
            yield from self._read(batch)

    def _read(self, batch: list[tuple[int, SampleMeta]]) -> Iterator[ExportSample]:
        contents = self._reader.read_each([number for number, _ in batch])
        for (number, meta), content in zip(batch, contents, strict=True):
            if isinstance(content, DPFlowError):
                raise content
            if self.is_webdataset:
                yield ExportSample(number, content, content.pop(KEY), b"", meta.path)
            else:
                yield ExportSample(number, {_ending_of(meta): content[0]}, None, bytes(meta.meta), meta.path)

    def close(self) -> None:
        self._reader.close()


def _ending_of(meta: SampleMeta) -> str:
    """Return the path's extension if the sample is a whole object; "" if it is not, or has no extension."""
    name = meta.path.rpartition("/")[2]
    return name.rpartition(".")[2].lower() if meta.offset is None and "." in name else ""
